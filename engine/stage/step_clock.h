// Where the time of a step goes. Times never reach the run's state or metrics.
#pragma once

#include <array>
#include <chrono>
#include <cstdint>
#include <string>

#include "engine/comm/comm.h"
#include "kernels/base/queue.h"

namespace fp4t {

enum class StepPhase : uint8_t { kRefit, kSample, kReward, kScore, kForward, kBackward, kStep };
constexpr size_t kNumStepPhases = 7;

// By phase, of reinforcement learning. Only of some steps: ends of phases wait for the device, which costs a
// little and changes no bit.
class StepClock {
 public:
  // A step begins; `timed`: it is one of those.
  void begin(Queue& queue, bool timed);
  // The time since the last call was that of this phase.
  void end(Queue& queue, StepPhase phase);
  bool timed() const { return timed_; }
  // "refit 0.004, sample 1.250, ..." in seconds.
  std::string text() const;

 private:
  std::array<double, kNumStepPhases> seconds_{};
  std::chrono::steady_clock::time_point last_;
  bool timed_ = false;
};

struct StepTime {
  double seconds = 0;
  double exposed = 0;  // of these: that this rank stood still for others
};

// All of a step. Both times are counted from the object's beginning, so what a run does between two steps
// (evaluations, checkpoints) is in neither.
class StepTimer {
 public:
  StepTimer(const Communicator& comm, const Queue& queue);
  // Up to now.
  StepTime read() const;
  // " exposed=12.5%" of the time; "" on one rank.
  std::string exposed_text(const StepTime& time) const;

 private:
  const Communicator& comm_;
  const Queue& queue_;
  std::chrono::steady_clock::time_point begin_;
  double waited_, held_;  // seconds of the process before
};

}  // namespace fp4t

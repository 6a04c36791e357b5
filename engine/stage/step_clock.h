// Where the time of a step of reinforcement learning goes. Only of some steps: ends of phases wait for the
// device, which costs a little and changes no bit. Times never reach the run's state or metrics.
#pragma once

#include <array>
#include <chrono>
#include <cstdint>
#include <string>

#include "kernels/base/queue.h"

namespace fp4t {

enum class StepPhase : uint8_t { kRefit, kSample, kReward, kScore, kForward, kBackward, kStep };
constexpr size_t kNumStepPhases = 7;

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

}  // namespace fp4t

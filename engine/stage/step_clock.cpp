#include "engine/stage/step_clock.h"

#include <algorithm>
#include <cstdio>

namespace fp4t {

void StepClock::begin(Queue& queue, bool timed) {
  timed_ = timed;
  if (!timed) return;
  seconds_ = {};
  queue.synchronize();
  last_ = std::chrono::steady_clock::now();
}

void StepClock::end(Queue& queue, StepPhase phase) {
  if (!timed_) return;
  queue.synchronize();
  const auto now = std::chrono::steady_clock::now();
  seconds_[static_cast<size_t>(phase)] += std::chrono::duration<double>(now - last_).count();
  last_ = now;
}

std::string StepClock::text() const {
  static constexpr const char* kNames[kNumStepPhases] = {"refit",   "sample",   "reward", "score",
                                                         "forward", "backward", "step"};
  std::string text;
  for (size_t i = 0; i < kNumStepPhases; ++i) {
    char part[48];
    std::snprintf(part, sizeof(part), "%s%s %.4f", i > 0 ? ", " : "", kNames[i], seconds_[i]);
    text += part;
  }
  return text;
}

StepTimer::StepTimer(const Communicator& comm, const Queue& queue)
    : comm_(comm),
      queue_(queue),
      begin_(std::chrono::steady_clock::now()),
      waited_(comm.waited_seconds()),
      held_(queue.counts().held_seconds) {}

StepTime StepTimer::read() const {
  StepTime time;
  const double waited = comm_.waited_seconds() - waited_;
  const double held = queue_.counts().held_seconds - held_;
  time.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin_).count();
  // A call of the host begins and ends inside the step. A GPU's queue counts a wait when it is over: one that
  // ends in this step may have begun before it, or have passed while the host waited.
  time.exposed = waited + std::min(held, std::max(0.0, time.seconds - waited));
  return time;
}

std::string StepTimer::exposed_text(const StepTime& time) const {
  if (comm_.size() == 1) return "";
  char text[64];
  std::snprintf(text, sizeof(text), " exposed=%.1f%%", 100 * time.exposed / std::max(time.seconds, 1e-9));
  return text;
}

}  // namespace fp4t

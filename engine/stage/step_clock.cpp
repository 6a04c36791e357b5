#include "engine/stage/step_clock.h"

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

}  // namespace fp4t

#include <algorithm>
#include <cmath>
#include <numbers>

#include "engine/optim/optimizer.h"
#include "kernels/base/check.h"

namespace fp4t {

// Warm-up: (update + 1) / warmup, so 1 at update warmup - 1, the last of the warm-up. From there x, the
// share of the way down, grows by equal steps and is 1 at the last update.
double schedule_factor(const ScheduleSpec& spec, int64_t update, int64_t total) {
  if (update < spec.warmup) return static_cast<double>(update + 1) / static_cast<double>(spec.warmup);
  if (spec.kind == "constant") return 1.0;
  int64_t down = total - spec.warmup;  // updates on the way down
  if (spec.kind == "wsd") {
    down = std::min(down, static_cast<int64_t>(std::ceil(spec.decay_fraction * static_cast<double>(total))));
  }
  const int64_t done = update + 1 - (total - down);
  if (down <= 0 || done <= 0) return 1.0;
  const double x = std::min(1.0, static_cast<double>(done) / static_cast<double>(down));
  const double f = spec.final_fraction;
  if (spec.kind == "cosine") return f + (1.0 - f) * 0.5 * (1.0 + std::cos(std::numbers::pi * x));
  FP4T_CHECK(spec.kind == "linear" || spec.kind == "wsd", "schedule ", spec.kind);
  return f + (1.0 - f) * (1.0 - x);
}

}  // namespace fp4t

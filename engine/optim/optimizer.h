// Optimizer: global norm, clip, AdamW or Muon, BF16 copies. State is named tensors.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "engine/comm/comm.h"
#include "engine/model/transformer.h"
#include "engine/recipe/recipe.h"

namespace fp4t {

// Learning rate at update `update` (0-based) of `total`; a pure function. Multiplier of the base rate.
double schedule_factor(const ScheduleSpec& spec, int64_t update, int64_t total);

struct StepReport {
  double gradient_norm = 0;  // before clipping, FP64 sum over fixed chunks
  double clip_factor = 1;
  bool applied = false;  // false: non-finite, weights untouched
  double nonfinite = 0;  // elements of gradients, plus what quantisers counted
};

class Optimizer {
 public:
  // Takes its state from the run arena as the plan priced it (bytes for all parameters).
  Optimizer(Transformer& model, Communicator& comm, Arena& arena);
  ~Optimizer();

  // Zeroes moments and the applied-update count: the start of a stage with state: fresh.
  void reset();

  // One update from the accumulated gradients, summed over ranks. `attempted` keys the random bits;
  // `extra_nonfinite` is what quantisers of all ranks saw. Decides apply or skip, on all ranks alike, before
  // any weight changes; calls model.weights_changed().
  StepReport step(const OptimizerSpec& spec, double learning_rate_factor, uint32_t attempted,
                  double extra_nonfinite);

  int64_t applied_updates() const;
  void set_applied_updates(int64_t n);

  // Moments of the owned elements by name ("optimizer.m.<parameter>", "optimizer.v.<parameter>").
  std::vector<NamedTensor> state();

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace fp4t

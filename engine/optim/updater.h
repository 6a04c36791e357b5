// The update of a list of parameters; what Optimizer does short of telling the model.
#pragma once

#include <memory>
#include <vector>

#include "engine/model/params.h"
#include "engine/model/shard_exchange.h"
#include "engine/optim/muon.h"
#include "engine/optim/optimizer.h"
#include "kernels/base/philox.h"

namespace fp4t {

class Updater {
 public:
  // State comes from `arena`; Muon's scratch only when a stage of the plan uses Muon. `exchange` with the
  // other ranks, null on one.
  Updater(Queue& queue, const Plan& plan, std::vector<Param>& params, Arena& arena,
          ShardExchange* exchange = nullptr);

  void reset();
  StepReport step(const OptimizerSpec& spec, double learning_rate_factor, uint32_t attempted,
                  double extra_nonfinite);

  int64_t applied() const { return applied_; }
  void set_applied(int64_t n) { applied_ = n; }
  std::vector<NamedTensor> state() const;

 private:
  struct Moments {
    TensorView m, v;  // of AdamW; Muon keeps its momentum in m
  };
  // Enqueues the sums over all gradients and what follows from them, clip_ and apply_; returns the sums.
  Download decide(const OptimizerSpec& spec, double extra_nonfinite);
  void sum_squares();
  // The same over several ranks: every owner's chunks to all, which add them in the order of the logical
  // tensors.
  void sum_squares_over_ranks();
  // What was decided, by the same arithmetic.
  static StepReport report_of(const std::vector<double>& sums, const OptimizerSpec& spec,
                              double extra_nonfinite);
  // Of the elements that this rank owns; `update` counts from 1.
  void update_adamw(const OptimizerSpec& spec, double factor, int64_t update, Param& param,
                    const Moments& moments, PhiloxKey key);
  void update_muon(const OptimizerSpec& spec, double factor, Param& param, const Moments& moments,
                   PhiloxKey key);

  Queue& queue_;
  const Plan& plan_;
  std::vector<Param>& params_;
  ShardExchange* exchange_;
  int rank_;
  std::vector<Moments> moments_;
  TensorView sums_;  // F64 [2]: of squares, of non-finite elements
  // With several ranks: F64 [most chunks that a rank owns, 2], the same of the chunks that this one owns; and
  // where the sums of each chunk of the logical tensors, in order, stand when those of all ranks follow one
  // another.
  TensorView chunk_sums_;
  std::vector<int64_t> chunk_places_;
  TensorView clip_;         // F32 [1]
  TensorView apply_;        // I32 [1]
  TensorView muon_update_;  // F32, elements of the largest Muon parameter
  std::unique_ptr<NewtonSchulz> newton_schulz_;
  int64_t applied_ = 0;
};

}  // namespace fp4t

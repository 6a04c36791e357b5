// What the model counts while it computes: quantiser monitors of every operand, router statistics and
// expert load. Everything is summed on the device and read by whoever asks.
#pragma once

#include <vector>

#include "engine/model/transformer.h"
#include "engine/plan/operands.h"
#include "engine/plan/run_layout.h"

namespace fp4t {

class Monitors {
 public:
  Monitors(Queue& queue, const Plan& plan, const StateBlocks& state);

  // F64 [6, kNumQuantStats] of a site, by its index in gemm_sites().
  TensorView site_stats(size_t site) const;
  // I64 [E] of a MoE layer, by its index among them.
  TensorView layer_load(int64_t moe_layer) const {
    return state_.load.rows(moe_layer, 1).reshape({experts_});
  }
  // F64 [kNumQuantStats] of the rows that go to experts.
  TensorView dispatch_stats() const {
    return state_.operand_stats.rows(state_.operand_stats.dim(0) - 1, 1).reshape({kNumQuantStats});
  }
  TensorView router_sums() const { return state_.router_sums; }

  // Something that counts was enqueued.
  void touch() { touched_ = true; }
  // Drops everything, without reading it.
  void reset();
  double take_nonfinite();
  std::vector<OperandStats> take_operand_stats();
  RouterDownload take_router_sums();

 private:
  std::vector<double> read_stats();
  double nonfinite_of(const std::vector<double>& stats) const;

  Queue& queue_;
  std::vector<GemmSite> sites_;
  int64_t experts_;
  StateBlocks state_;
  // Non-finite counts are taken by the step, monitors by the metrics, each in its own rhythm: what was
  // taken already, and what a reset of the monitors left untaken.
  double nonfinite_taken_ = 0, nonfinite_carried_ = 0;
  bool touched_ = false;  // since the operands' monitors were last zero
};

}  // namespace fp4t

#include "engine/model/monitors.h"

#include "engine/model/linear.h"

namespace fp4t {

namespace {
void clear(Queue& queue, const TensorView& v) { queue.fill_bytes(v.data, 0, v.bytes()); }
}  // namespace

Monitors::Monitors(Queue& queue, const Plan& plan, const StateBlocks& state)
    : queue_(queue), sites_(gemm_sites(plan)), experts_(plan.model.moe.experts), state_(state) {
  clear(queue_, state_.operand_stats);
  clear(queue_, state_.router_sums);
  clear(queue_, state_.load);
}

TensorView Monitors::site_stats(size_t site) const {
  return state_.operand_stats.rows(static_cast<int64_t>(site) * kOperandsPerSite, kOperandsPerSite);
}

std::vector<double> Monitors::read_stats() {
  std::vector<double> stats(static_cast<size_t>(state_.operand_stats.elements()));
  queue_.copy_to_host(stats.data(), state_.operand_stats.data, state_.operand_stats.bytes());
  return stats;
}

double Monitors::nonfinite_of(const std::vector<double>& stats) const {
  double sum = 0;
  for (size_t i = kStatNonFinite; i < stats.size(); i += kNumQuantStats) sum += stats[i];
  return sum;
}

double Monitors::take_nonfinite() {
  const double now = nonfinite_of(read_stats());
  const double count = nonfinite_carried_ + now - nonfinite_taken_;
  nonfinite_taken_ = now;
  nonfinite_carried_ = 0;
  return count;
}

std::vector<OperandStats> Monitors::take_operand_stats() {
  const std::vector<double> stats = read_stats();
  nonfinite_carried_ += nonfinite_of(stats) - nonfinite_taken_;
  nonfinite_taken_ = 0;
  clear(queue_, state_.operand_stats);

  static constexpr struct {
    GemmRole gemm;
    OperandRole operand;
  } kOperands[kOperandsPerSite] = {
      {GemmRole::kFprop, OperandRole::kAct},  {GemmRole::kFprop, OperandRole::kWeight},
      {GemmRole::kDgrad, OperandRole::kGrad}, {GemmRole::kDgrad, OperandRole::kWeight},
      {GemmRole::kWgrad, OperandRole::kGrad}, {GemmRole::kWgrad, OperandRole::kAct},
  };
  std::vector<OperandStats> list;
  for (size_t site = 0; site < sites_.size(); ++site) {
    for (const auto& o : kOperands) {
      const size_t row = site * kOperandsPerSite + static_cast<size_t>(stats_row(o.gemm, o.operand));
      const double* values = stats.data() + row * kNumQuantStats;
      if (values[kStatElements] == 0) continue;  // not quantised
      OperandStats entry{sites_[site].layer, sites_[site].module, o.gemm, o.operand, {}};
      std::copy(values, values + kNumQuantStats, entry.stat);
      list.push_back(entry);
    }
  }
  return list;
}

RouterSums Monitors::take_router_sums() {
  RouterSums sums;
  double pair[2];
  queue_.copy_to_host(pair, state_.router_sums.data, sizeof(pair));
  sums.z = pair[0];
  sums.aux = pair[1];
  for (int64_t l = 0; l < state_.load.dim(0); ++l) {
    const TensorView load = layer_load(l);
    std::vector<int64_t>& host = sums.load.emplace_back(static_cast<size_t>(experts_));
    queue_.copy_to_host(host.data(), load.data, load.bytes());
  }
  clear(queue_, state_.router_sums);
  clear(queue_, state_.load);
  return sums;
}

}  // namespace fp4t

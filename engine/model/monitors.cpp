#include "engine/model/monitors.h"

#include "engine/model/linear.h"

namespace fp4t {

namespace {
void clear(Queue& queue, const TensorView& v) { queue.fill_bytes(v.data, 0, v.bytes()); }
}  // namespace

Monitors::Monitors(Queue& queue, const Plan& plan, const StateBlocks& state)
    : queue_(queue), sites_(gemm_sites(plan)), experts_(plan.model.moe.experts), state_(state) {
  reset();
}

void Monitors::reset() {
  clear(queue_, state_.operand_stats);
  clear(queue_, state_.router_sums);
  clear(queue_, state_.load);
  nonfinite_taken_ = nonfinite_carried_ = 0;
  touched_ = false;
}

TensorView Monitors::site_stats(size_t site) const {
  return state_.operand_stats.rows(static_cast<int64_t>(site) * kOperandsPerSite, kOperandsPerSite);
}

std::vector<double> Monitors::read_stats() {
  if (!touched_) return std::vector<double>(static_cast<size_t>(state_.operand_stats.elements()), 0.0);
  return queue_.download(state_.operand_stats.data, state_.operand_stats.bytes()).values<double>();
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
  touched_ = false;

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

RouterDownload Monitors::take_router_sums() {
  RouterDownload d;
  d.experts_ = static_cast<size_t>(experts_);
  d.sums_ = queue_.download(state_.router_sums.data, state_.router_sums.bytes());
  d.load_ = queue_.download(state_.load.data, state_.load.bytes());
  clear(queue_, state_.router_sums);
  clear(queue_, state_.load);
  return d;
}

RouterSums RouterDownload::get() {
  RouterSums sums;
  const std::vector<double> pair = sums_.values<double>();
  sums.z = pair[0];
  sums.aux = pair[1];
  const std::vector<int64_t> load = load_.values<int64_t>();
  for (size_t begin = 0; begin < load.size(); begin += experts_) {
    const auto first = load.begin() + static_cast<int64_t>(begin);
    sums.load.emplace_back(first, first + static_cast<int64_t>(experts_));
  }
  return sums;
}

}  // namespace fp4t

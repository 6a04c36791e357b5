// The step's monitors that come from the model: expert load, router losses, quantisation errors. They are
// kept in the run's counters between updates, so a checkpoint inside a step loses none of them.
#include <algorithm>
#include <cstdio>

#include "engine/stage/context.h"

namespace fp4t {

namespace {

std::string load_name(size_t layer, size_t expert) {
  char text[48];
  std::snprintf(text, sizeof(text), "load.%04zu.%05zu", layer, expert);
  return text;
}

std::string operand_name(const OperandStats& s) {
  char layer[16];
  std::snprintf(layer, sizeof(layer), "%04ld", static_cast<long>(s.layer));
  return std::string("quant.") + layer + "." + name_of(s.module) + "." + name_of(s.gemm) + "." +
         name_of(s.operand);
}

constexpr std::pair<const char*, int> kOperandFigures[] = {
    {"error", kStatErrorEnergy},    {"signal", kStatSignalEnergy}, {"elements", kStatElements},
    {"flushed", kStatFlushed},      {"clipped", kStatClipped},     {"blocks", kStatBlocks},
    {"chose_four", kStatChoseFour}, {"inexact", kStatInexact},     {"error_signal", kStatErrorSignal}};

}  // namespace

void Run::begin_counting() {
  model.reset_monitors();
  model.weights_changed();
}

void Run::begin_router_sums() { router_sums_.push_back(model.begin_router_sums()); }

void Run::add_router_sums() {
  for (RouterDownload& download : router_sums_) {
    const RouterSums sums = download.get();
    add("router_z", sums.z);
    add("router_aux", sums.aux);
    for (size_t l = 0; l < sums.load.size(); ++l) {
      for (size_t e = 0; e < sums.load[l].size(); ++e)
        add(load_name(l, e), static_cast<double>(sums.load[l][e]));
    }
  }
  router_sums_.clear();
}

namespace {

std::vector<std::vector<int64_t>> step_load(const Run& run) {
  std::vector<std::vector<int64_t>> load;
  const ModelSpec& m = run.plan.model;
  for (int64_t l = 0; l < m.layers; ++l) {
    if (!is_moe_layer(m, l)) continue;
    const size_t row = load.size();
    load.emplace_back();
    for (int64_t e = 0; e < m.moe.experts; ++e) {
      load[row].push_back(static_cast<int64_t>(run.sum(load_name(row, static_cast<size_t>(e)))));
    }
  }
  return load;
}

}  // namespace

void Run::balance_experts() {
  if (plan.model.moe.balance.bias_rate > 0) model.update_expert_bias(step_load(*this));
}

void Run::report_router(MetricsRecord& record, double trained_tokens) const {
  const auto load = step_load(*this);
  if (load.empty()) return;
  double worst = 0;
  for (size_t l = 0; l < load.size(); ++l) {
    std::vector<double> row(load[l].begin(), load[l].end());
    double total = 0, most = 0;
    for (double x : row) {
      total += x;
      most = std::max(most, x);
    }
    if (total > 0) worst = std::max(worst, most * static_cast<double>(row.size()) / total);
    record.lists.emplace_back("expert_load." + std::to_string(l), std::move(row));
  }
  const double scale = trained_tokens > 0 ? 1.0 / (trained_tokens * static_cast<double>(load.size())) : 0.0;
  record.numbers.emplace_back("max_vio", worst);
  record.numbers.emplace_back("router_z", sum("router_z") * scale);
  record.numbers.emplace_back("router_aux", sum("router_aux") * scale);
}

void Run::add_operand_stats() {
  for (const OperandStats& s : model.take_operand_stats()) {
    for (const auto& [name, index] : kOperandFigures) add(operand_name(s) + "/" + name, s.stat[index]);
  }
}

void Run::report_operand_stats(MetricsRecord& record) const {
  const std::string prefix = "step.quant.";
  double inexact = 0;  // values that BF16 cannot hold: the exceptions from "operands are exact"
  for (auto it = state.counters.lower_bound(prefix);
       it != state.counters.end() && it->first.rfind(prefix, 0) == 0; ++it) {
    const size_t slash = it->first.rfind('/');
    if (it->first.substr(slash) == "/inexact") inexact += it->second;
    if (it->first.substr(slash) != "/signal" || it->second <= 0) continue;
    const std::string operand = it->first.substr(5, slash - 5);
    const double elements = std::max(1.0, sum(operand + "/elements"));
    const double blocks = std::max(1.0, sum(operand + "/blocks"));
    record.lists.emplace_back(
        operand,
        std::vector<double>{sum(operand + "/error") / it->second, sum(operand + "/flushed") / elements,
                            sum(operand + "/clipped") / elements, sum(operand + "/chose_four") / blocks,
                            sum(operand + "/error_signal") / it->second});
  }
  record.numbers.emplace_back("inexact", inexact);
}

}  // namespace fp4t

// What differs between layers: expert load; quantisation error, bias, clipped and flushed values.
#include <algorithm>
#include <cmath>
#include <cstdio>

#include "engine/metrics/report.h"

namespace fp4t {

namespace {

constexpr size_t kMostExpertColumns = 64;

// Shares of the even load: of every expert, or of many their quantiles.
void add_load_row(HeatMap& map, const std::vector<double>& load) {
  double total = 0;
  for (const double x : load) total += std::isfinite(x) ? x : 0;
  std::vector<double> row;
  for (const double x : load) row.push_back(total > 0 ? x / total * static_cast<double>(load.size()) : 0.0);
  if (load.size() > kMostExpertColumns) {
    std::erase_if(row, [](double x) { return !std::isfinite(x); });
    std::sort(row.begin(), row.end());
    std::vector<double> quantiles;
    for (const double q : {0.0, 0.1, 0.25, 0.5, 0.75, 0.9, 1.0}) {
      const auto last = static_cast<double>(std::max<size_t>(row.size(), 1) - 1);
      quantiles.push_back(row.empty() ? std::nan("") : row[static_cast<size_t>(std::lround(q * last))]);
    }
    row = std::move(quantiles);
  }
  map.values.push_back(std::move(row));
}

std::string load_map(const std::string& of, const ExpertLoad& load) {
  HeatMap map;
  map.title = "expert load" + of + " at step " + step_text(load.step) + ", even load = 1";
  map.high = 2;
  map.format = "%.2f";
  size_t most = 0;
  for (const std::vector<double>& layer : load.layers) {
    map.rows.push_back("MoE layer " + std::to_string(map.rows.size()));
    add_load_row(map, layer);
    most = std::max(most, layer.size());
  }
  if (most > kMostExpertColumns) {
    map.corner = std::to_string(most) + " experts";
    map.columns = {"least", "10 %", "25 %", "median", "75 %", "90 %", "most"};
  } else {
    map.corner = "expert";
    for (size_t e = 0; e < most; ++e) map.columns.push_back(std::to_string(e));
  }
  return heat_map(map);
}

struct FigureMap {
  int figure;
  const char* title;
  double least_high;  // percent of the deepest colour, unless a run has more
  const char* format;
};
constexpr FigureMap kFigureMaps[] = {
    {OperandFigures::kError, "error energy over signal energy, percent", 2, "%.3g"},
    {OperandFigures::kBias, "bias, percent of the signal: below 0 values shrink", 0.5, "%+.3f"},
    {OperandFigures::kFlushed, "flushed to zero, percent of elements", 10, "%.2g"},
    {OperandFigures::kClipped, "clipped, percent of elements", 1, "%.2g"},
};

std::vector<int64_t> layers_of(const StageData& stage) {
  std::vector<int64_t> layers;
  for (const auto& [operand, cells] : stage.operands) {
    for (const auto& [layer, cell] : cells) layers.push_back(layer);
  }
  std::sort(layers.begin(), layers.end());
  layers.erase(std::unique(layers.begin(), layers.end()), layers.end());
  return layers;
}

HeatMap figure_map(const StageData& stage, const FigureMap& what, const std::string& of) {
  HeatMap map;
  map.title = what.title + of;
  map.corner = "layer";
  map.format = what.format;
  map.high = what.least_high;
  const std::vector<int64_t> layers = layers_of(stage);
  for (const int64_t layer : layers) map.columns.push_back(std::to_string(layer));
  bool any = false;
  for (const auto& [operand, cells] : stage.operands) {
    std::vector<double> values;
    for (const int64_t layer : layers) {
      const auto it = cells.find(layer);
      values.push_back(it == cells.end() ? std::nan("") : 100 * it->second.mean(what.figure));
      any = any || std::isfinite(values.back());
    }
    map.rows.push_back(operand);
    map.values.push_back(std::move(values));
  }
  if (!any) map.rows.clear();  // older runs did not measure it
  return map;
}

double deepest(const HeatMap& map) {
  double most = map.high;
  for (const auto& row : map.values) {
    for (const double v : row) most = std::isfinite(v) ? std::max(most, std::abs(v)) : most;
  }
  return most;
}

std::string of_run(const Runs& runs, size_t run) { return runs.size() > 1 ? ", " + runs[run].label : ""; }

}  // namespace

std::string expert_load(const Runs& runs, const std::string& stage) {
  std::string maps;
  for (size_t r = 0; r < runs.size(); ++r) {
    const StageData* s = runs[r].stage(stage);
    if (!s || s->first_load.layers.empty()) continue;
    if (runs.size() == 1 && s->last_load.step != s->first_load.step) maps += load_map("", s->first_load);
    maps += load_map(of_run(runs, r), s->last_load);
  }
  if (maps.empty()) return "";
  return "<h3>Expert load by layer</h3><div class=\"heats\">" + maps + "</div>";
}

// One figure's maps of all runs have the same colours.
std::string quantisation_by_layer(const Runs& runs, const std::string& stage) {
  std::string out;
  for (const FigureMap& what : kFigureMaps) {
    std::vector<HeatMap> maps;
    double high = what.least_high;
    for (size_t r = 0; r < runs.size(); ++r) {
      const StageData* s = runs[r].stage(stage);
      if (!s || s->operands.empty()) continue;
      maps.push_back(figure_map(*s, what, of_run(runs, r)));
      high = std::max(high, deepest(maps.back()));
    }
    for (HeatMap& map : maps) {
      map.high = high;
      out += heat_map(map);
    }
  }
  if (out.empty()) return "";
  return "<h3>Quantisation by layer and operand</h3><p class=\"note\">Means over the stage's measurements "
         "(every tenth step, first micro-batch); an empty place is not quantised.</p><div class=\"heats\">" +
         out + "</div>";
}

}  // namespace fp4t

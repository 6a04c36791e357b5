// What differs between layers: expert load and quantisation error.
#include <algorithm>
#include <cmath>
#include <map>

#include "engine/metrics/report.h"
#include "engine/metrics/svg.h"

namespace fp4t {

namespace {

using Json = nlohmann::ordered_json;

std::string load_map(const Json& line) {
  HeatMap map;
  map.title = "expert load at step " + std::to_string(line.at("step").get<int64_t>()) + ", even load = 1";
  map.high = 2;
  map.format = "%.2f";
  for (int64_t l = 0; line.contains("expert_load." + std::to_string(l)); ++l) {
    const auto load = line["expert_load." + std::to_string(l)].get<std::vector<double>>();
    double total = 0;
    for (double x : load) total += x;
    std::vector<double> row;
    for (double x : load) row.push_back(total > 0 ? x / total * static_cast<double>(load.size()) : 0.0);
    map.rows.push_back("MoE layer " + std::to_string(l));
    map.values.push_back(std::move(row));
  }
  for (size_t e = 0; e < map.values[0].size(); ++e) map.columns.push_back("expert " + std::to_string(e));
  return heat_map(map);
}

// Figures of one operand in one layer, summed over the lines that measured it.
struct Cell {
  static constexpr size_t kFigures =
      3;  // error energy over signal energy; shares flushed to zero and clipped
  double sum[kFigures] = {};
  double count = 0;
};
using Cells = std::map<std::string, std::map<int64_t, Cell>>;  // by operand, then layer

// "quant.0002.experts.down.fprop.act": [error, flushed, clipped, chose four]
void add_line(const Json& line, Cells& cells) {
  constexpr size_t kPrefix = 6, kDigits = 4;
  for (const auto& [key, value] : line.items()) {
    if (key.rfind("quant.", 0) != 0 || key.size() < kPrefix + kDigits + 2) continue;
    if (!value.is_array() || value.size() < Cell::kFigures || !value[0].is_number()) continue;
    Cell& cell = cells[key.substr(kPrefix + kDigits + 1)][std::stoll(key.substr(kPrefix, kDigits))];
    for (size_t f = 0; f < Cell::kFigures; ++f) {
      if (value[f].is_number()) cell.sum[f] += value[f].get<double>();
    }
    cell.count += 1;
  }
}

std::string figure_map(const Cells& cells, const std::vector<int64_t>& layers, size_t figure,
                       const std::string& title, double high, const char* format) {
  HeatMap map;
  map.title = title;
  map.high = high;
  map.format = format;
  for (const int64_t layer : layers) map.columns.push_back("layer " + std::to_string(layer));
  for (const auto& [operand, row] : cells) {
    std::vector<double> values;
    for (const int64_t layer : layers) {
      const auto it = row.find(layer);
      values.push_back(it == row.end() ? std::nan("") : 100 * it->second.sum[figure] / it->second.count);
    }
    map.rows.push_back(operand);
    map.values.push_back(std::move(values));
  }
  return heat_map(map);
}

// The error of each activation over the steps, mean over the layers: whether training drifts away from what
// the formats can hold.
std::string error_curves(const RunFiles& files, const std::string& stage) {
  std::map<std::string, Series> series;
  for (const Json& line : files.lines) {
    if (line.value("stage", "") != stage) continue;
    Cells cells;
    add_line(line, cells);
    for (const auto& [operand, row] : cells) {
      constexpr const char* kForward = ".fprop.act";
      if (!operand.ends_with(kForward)) continue;
      double sum = 0;
      for (const auto& [layer, cell] : row) sum += 100 * cell.sum[0] / cell.count;
      Series& s = series[operand];
      s.name = operand.substr(0, operand.size() - std::string(kForward).size());
      s.points.emplace_back(number_of(line, "step"), sum / static_cast<double>(row.size()));
    }
  }
  std::vector<Series> list;
  for (auto& [operand, s] : series) list.push_back(std::move(s));
  return line_chart("quantisation error of forward activations, percent of energy", "step", list);
}

}  // namespace

std::string expert_load(const RunFiles& files, const std::string& stage) {
  const Json *first = nullptr, *last = nullptr;
  for (const Json& line : files.lines) {
    if (line.value("stage", "") != stage || !line.contains("expert_load.0")) continue;
    if (!first) first = &line;
    last = &line;
  }
  if (!first) return "";
  return "<h3>Expert load by layer</h3><div class=\"charts\">" + load_map(*first) +
         (last == first ? "" : load_map(*last)) + "</div>";
}

std::string quantisation_error(const RunFiles& files, const std::string& stage) {
  Cells cells;
  for (const Json& line : files.lines) {
    if (line.value("stage", "") == stage) add_line(line, cells);
  }
  if (cells.empty()) return "";
  std::vector<int64_t> layers;
  for (const auto& [operand, row] : cells) {
    for (const auto& [layer, cell] : row) layers.push_back(layer);
  }
  std::sort(layers.begin(), layers.end());
  layers.erase(std::unique(layers.begin(), layers.end()), layers.end());
  return "<h3>Quantisation by layer and operand</h3><p class=\"note\">Means over the stage's measurements "
         "(every "
         "tenth step, first micro-batch); an empty place is not quantised.</p><div class=\"charts\">" +
         figure_map(cells, layers, 0, "error energy over signal energy, percent", 2.0, "%.3g") +
         error_curves(files, stage) +
         figure_map(cells, layers, 1, "flushed to zero, percent of elements", 50.0, "%.2g") +
         figure_map(cells, layers, 2, "clipped, percent of elements", 5.0, "%.2g") + "</div>";
}

}  // namespace fp4t

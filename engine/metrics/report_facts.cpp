// What was run, what came out, what the model wrote, and every cell of the precision tables.
#include <algorithm>
#include <cmath>
#include <map>

#include "engine/metrics/report.h"
#include "engine/metrics/svg.h"

namespace fp4t {

namespace {

using Json = nlohmann::ordered_json;

// Figures of summary.json that a reader looks for first.
struct Figure {
  const char *key, *name;
};
constexpr Figure kFigures[] = {
    {"text_loss_start", "held-out text loss at the start, nats"},
    {"text_loss_after_pretraining", "after pretraining"},
    {"text_loss_end", "at the end"},
    {"accuracy_before_rl", "accuracy before RL, sampled"},
    {"accuracy_after_rl", "after RL, sampled"},
    {"greedy_accuracy_before_rl", "accuracy before RL, greedy"},
    {"greedy_accuracy_after_rl", "after RL, greedy"},
    {"logprob_equal_fraction_min", "equal log-probabilities, worst step"},
};

std::string figures(const Json& summary) {
  std::string out;
  for (const Figure& f : kFigures) {
    if (!summary.contains(f.key)) continue;
    out += "<div><b>" + html_escape(short_number(number_of(summary, f.key))) + "</b><span>" + f.name +
           "</span></div>";
  }
  return out.empty() ? "" : "<div class=\"figures\">" + out + "</div>";
}

std::string row(const std::string& name, const std::string& value) {
  return "<tr><th>" + html_escape(name) + "</th><td>" + html_escape(value) + "</td></tr>";
}

std::string value_text(const Json& value) {
  if (value.is_string()) return value.get<std::string>();
  if (value.is_number_integer()) return grouped(value.get<int64_t>());
  if (value.is_number()) {
    const auto v = value.get<double>();
    const bool whole = std::abs(v) < 1e15 && v == std::floor(v);
    return whole ? grouped(static_cast<int64_t>(v)) : short_number(v);
  }
  return value.dump();
}

std::string shape_rows(const Json& plan) {
  const Json &m = plan.at("model"), &p = plan.at("parameters");
  const auto size = [&](const char* key) { return grouped(m.at(key).get<int64_t>()); };
  std::string shape = size("layers") + " layers, hidden " + size("hidden") + ", " + size("heads") +
                      " heads and " + size("kv_heads") + " key-value heads of " + size("head_dim") +
                      ", vocabulary " + size("vocabulary");
  if (m.at("experts").get<int64_t>() > 0) {
    shape += "; " + size("experts") + " experts of " + size("expert_hidden") + ", top " + size("top_k");
  }
  std::string out =
      row("model", shape) + row("parameters", grouped(p.at("total").get<int64_t>()) + ", active a token " +
                                                  grouped(p.at("active").get<int64_t>()));
  out += row("device", plan.value("device", ""));
  return out;
}

// How far a stage has come, from the last of its step lines.
std::string progress(const RunFiles& files, const Json& stage) {
  const std::string name = stage.value("name", "");
  int64_t last = 0;
  for (const Json& line : files.lines) {
    if (line.value("stage", "") == name) last = std::max(last, line.value("step", int64_t{0}));
  }
  std::string text = grouped(last) + " of " + grouped(stage.value("steps", int64_t{0})) + " steps";
  if (stage.contains("tokens")) text += ", " + grouped(stage["tokens"].get<int64_t>()) + " tokens in all";
  if (stage.contains("equal_bits")) {
    const std::string obstacle = stage.value("equality_obstacle", "");
    text += stage["equal_bits"].get<bool>() ? "; sampler and trainer agree bit for bit"
                                            : "; sampler and trainer do not agree bit for bit: " + obstacle;
  }
  return text;
}

using Columns =
    std::vector<std::pair<int64_t, int64_t>>;  // spans of layers, ends included; -1: the model's own

std::string cell_name(const Json& cell) {
  std::string name = cell.at("module").get<std::string>();
  for (const char* part : {"gemm", "operand"}) {
    if (cell.contains(part) && cell[part].is_string()) name += " " + cell[part].get<std::string>();
  }
  return name;
}

// Neighbouring layers with the same cells share a column.
class PrecisionTable {
 public:
  explicit PrecisionTable(const Json& table) : table_(table) {
    for (const Json& cell : table.at("cells")) {
      const std::string name = cell_name(cell);
      if (std::find(rows_.begin(), rows_.end(), name) == rows_.end()) rows_.push_back(name);
      const int64_t layer = cell.at("layer").is_number() ? cell["layer"].get<int64_t>() : -1;
      layers_[layer][name] = &cell;
    }
    for (const auto& [layer, cells] : layers_) {
      const bool joins = !columns_.empty() && columns_.back().second >= 0 &&
                         layer == columns_.back().second + 1 &&
                         same(cells, layers_.at(columns_.back().second));
      if (joins) {
        columns_.back().second = layer;
      } else {
        columns_.emplace_back(layer, layer);
      }
    }
  }

  std::string html(const std::string& stage) const {
    std::string out = "<h3>" + html_escape(stage + ": " + table_.at("table").get<std::string>()) +
                      ", steps " + grouped(table_.at("begin").get<int64_t>()) + " to " +
                      grouped(table_.at("end").get<int64_t>()) +
                      "</h3><div class=\"scroll\"><table><thead><tr><th></th>";
    for (const auto& [first, last] : columns_) {
      if (first < 0) {
        out += "<th>model</th>";
      } else if (first == last) {
        out += "<th>layer " + std::to_string(first) + "</th>";
      } else {
        out += "<th>layers " + std::to_string(first) + " to " + std::to_string(last) + "</th>";
      }
    }
    out += "</tr></thead>";
    for (const std::string& name : rows_) {
      out += "<tr><th>" + html_escape(name) + "</th>";
      for (const auto& [first, last] : columns_) out += cell_html(layers_.at(first), name);
      out += "</tr>";
    }
    return out + "</table></div>";
  }

 private:
  using Cells = std::map<std::string, const Json*>;

  static std::string text_of(const Json& cell) {
    return cell.value("cell", cell.at("format").get<std::string>());
  }
  static bool same(const Cells& a, const Cells& b) {
    return a.size() == b.size() &&
           std::equal(a.begin(), a.end(), b.begin(), [](const auto& x, const auto& y) {
             return x.first == y.first && text_of(*x.second) == text_of(*y.second);
           });
  }
  static std::string cell_html(const Cells& cells, const std::string& name) {
    const auto it = cells.find(name);
    if (it == cells.end()) return "<td></td>";
    return "<td class=\"" + html_escape(it->second->at("format").get<std::string>()) + "\">" +
           html_escape(text_of(*it->second)) + "</td>";
  }

  const Json& table_;
  std::vector<std::string> rows_;
  std::map<int64_t, Cells> layers_;
  Columns columns_;
};

}  // namespace

std::string run_facts(const RunFiles& files) {
  std::string out, rows;
  if (files.summary.is_object()) {
    out = figures(files.summary);
  } else {
    out = "<p>The run has not finished.</p>";
  }
  if (files.plan.is_object()) {
    rows += shape_rows(files.plan);
    for (const Json& stage : files.plan.value("stages", Json::array())) {
      rows += row("stage " + stage.value("name", ""), progress(files, stage));
    }
  }
  if (files.summary.is_object()) {
    for (const auto& [key, value] : files.summary.items()) {
      const auto* figure = std::find_if(std::begin(kFigures), std::end(kFigures),
                                        [&key = key](const Figure& f) { return key == f.key; });
      if (figure == std::end(kFigures)) rows += row(key, value_text(value));
    }
  }
  return out + "<table>" + rows + "</table>";
}

std::string text_samples(const RunFiles& files, const std::string& stage) {
  std::string rows;
  for (const Json& line : files.lines) {
    if (line.value("stage", "") != stage) continue;
    for (const auto& [key, value] : line.items()) {
      if (key.rfind("sample.", 0) != 0 || !value.is_string()) continue;
      rows += "<tr><td>" + std::to_string(line.at("step").get<int64_t>()) + "</td><td><pre>" +
              html_escape(value.get<std::string>()) + "</pre></td></tr>";
    }
  }
  if (rows.empty()) return "";
  return "<h3>Samples</h3><table><thead><tr><th>step</th><th>prompt and completion</th></tr></thead>" + rows +
         "</table>";
}

std::string precision_tables(const RunFiles& files) {
  if (!files.plan.is_object() || !files.plan.contains("stages")) return "";
  std::string out = "<h2>Precision</h2>";
  for (const Json& stage : files.plan["stages"]) {
    for (const Json& table : stage.value("precision", Json::array())) {
      out += PrecisionTable(table).html(stage.value("name", ""));
    }
  }
  return out;
}

}  // namespace fp4t

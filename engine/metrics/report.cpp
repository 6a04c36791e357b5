// report.html: drawn from the run folder's JSON alone.
#include <algorithm>
#include <cmath>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <sstream>

#include "engine/metrics/metrics.h"
#include "engine/metrics/svg.h"
#include "kernels/base/check.h"

namespace fp4t {

namespace {

using Json = nlohmann::ordered_json;

constexpr const char* kStyle =
    "body{font:15px/1.5 system-ui,sans-serif;max-width:1080px;margin:2em auto;padding:0 1em;color:#222}"
    "h1{font-size:1.6em}h2{font-size:1.2em;margin-top:2em;border-bottom:1px solid #ddd}"
    "svg{width:100%;max-width:760px;height:auto;display:block;margin:1em 0}svg text{font:11px "
    "system-ui,sans-serif;fill:#333}"
    "svg .t{font-size:13px;font-weight:600}svg .g{stroke:#e4e4e4}"
    "table{border-collapse:collapse;margin:.6em 0;font-size:13px}td,th{border:1px solid #ddd;padding:2px "
    "7px;text-align:left}"
    "td.bf16{background:#eee}td.mxfp8{background:#cfe3f7}td.nvfp4{background:#c9efcf}td.fp32{background:#fff}"
    ".scroll{overflow-x:auto}";

struct RunFiles {
  Json header, summary, plan;
  std::vector<Json> lines;
};

Json parse_file(const std::string& path) {
  std::ifstream in(path);
  if (!in) return Json();
  try {
    return Json::parse(in);
  } catch (const nlohmann::json::exception& e) {
    throw BadDataError(path + ": " + e.what());
  }
}

RunFiles read_run(const std::string& dir) {
  RunFiles files;
  files.summary = parse_file(dir + "/summary.json");
  files.plan = parse_file(dir + "/plan.json");
  const std::string path = dir + "/metrics.jsonl";
  std::ifstream in(path);
  if (!in) throw MissingInputError("cannot open " + path);
  std::string line;
  for (int64_t number = 1; std::getline(in, line); ++number) {
    Json object;
    try {
      object = Json::parse(line);
    } catch (const nlohmann::json::exception& e) {
      throw BadDataError(detail::concat(path, ":", number, ": ", e.what()));
    }
    const std::string kind = object.value("kind", "");
    if (kind == "header") files.header = object;
    if (kind == "step" || kind == "eval") files.lines.push_back(std::move(object));
  }
  return files;
}

double number_of(const Json& line, const std::string& key) {
  return line.contains(key) && line[key].is_number() ? line[key].get<double>() : std::nan("");
}

Series series_of(const RunFiles& files, const std::string& stage, const std::string& kind,
                 const std::string& key, const std::string& name) {
  Series s;
  s.name = name;
  s.dots = kind == "eval";
  for (const Json& line : files.lines) {
    if (line.value("stage", "") == stage && line.value("kind", "") == kind && line.contains(key)) {
      s.points.emplace_back(number_of(line, "step"), number_of(line, key));
    }
  }
  return s;
}

// Means over runs of steps, so that a long noisy curve can be read.
Series smoothed(Series s) {
  constexpr size_t kPoints = 400;
  if (s.points.size() <= kPoints) return s;
  std::vector<std::pair<double, double>> out;
  for (size_t i = 0; i < kPoints; ++i) {
    const size_t begin = s.points.size() * i / kPoints, end = s.points.size() * (i + 1) / kPoints;
    double x = 0, y = 0;
    for (size_t k = begin; k < end; ++k) {
      x += s.points[k].first;
      y += s.points[k].second;
    }
    out.emplace_back(x / static_cast<double>(end - begin), y / static_cast<double>(end - begin));
  }
  s.points = std::move(out);
  return s;
}

std::vector<Series> drawn(std::vector<Series> all) {
  std::erase_if(all, [](const Series& s) { return s.points.empty(); });
  return all;
}

std::string curves(const RunFiles& files, const std::string& stage) {
  auto step = [&](const char* key, const char* name) {
    return smoothed(series_of(files, stage, "step", key, name));
  };
  auto eval = [&](const char* key, const char* name) { return series_of(files, stage, "eval", key, name); };
  auto chart = [&](const char* title, std::vector<Series> s) {
    return line_chart(title, "step", drawn(std::move(s)));
  };
  const bool rl = !series_of(files, stage, "step", "reward", "").points.empty();
  std::string out = "<h2>" + html_escape(stage) + "</h2>";
  if (rl) {
    out += chart("reward and accuracy", {step("reward", "mean reward"), eval("accuracy", "held-out, sampled"),
                                         eval("accuracy_greedy", "held-out, greedy")});
    out += chart("held-out loss, nats a token", {eval("text_loss", "text")});
    out += chart("sampler against trainer: fraction of equal log-probabilities",
                 {step("logprob_equal_fraction", "equal bits")});
    out += chart("groups without signal, cut completions",
                 {step("zero_variance_groups", "equal rewards"), step("truncated", "cut"),
                  step("clip_fraction", "clipped")});
    out += chart("entropy, nats", {step("entropy", "policy entropy")});
  } else {
    out += chart("loss, nats a token", {step("loss", "training"), eval("text_loss", "held-out text")});
    out += chart("held-out accuracy", {eval("accuracy", "sampled"), eval("accuracy_greedy", "greedy")});
  }
  out += chart("gradient norm before clipping", {step("grad_norm", "norm")});
  out += chart("learning rate", {step("learning_rate", "rate")});
  out += chart("largest expert load over the mean", {step("max_vio", "worst layer")});
  return out;
}

// Expert load of the last step of a stage, as shares.
std::string expert_load(const RunFiles& files, const std::string& stage) {
  const Json* last = nullptr;
  for (const Json& line : files.lines) {
    if (line.value("stage", "") == stage && line.contains("expert_load.0")) last = &line;
  }
  if (!last) return "";
  HeatMap map;
  map.title =
      "expert load at step " + std::to_string((*last)["step"].get<int64_t>()) + ": share of the even load";
  map.low = 0;
  map.high = 2;
  map.format = "%.2f";
  for (int64_t l = 0; last->contains("expert_load." + std::to_string(l)); ++l) {
    const auto load = (*last)["expert_load." + std::to_string(l)].get<std::vector<double>>();
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

// Quantisation error energy by layer and operand ("quant.0002.experts.down.fprop.act"), mean over the stage.
std::string quantisation_error(const RunFiles& files, const std::string& stage) {
  std::map<std::string, std::map<std::string, std::pair<double, double>>> cells;
  std::set<std::string> operands;
  for (const Json& line : files.lines) {
    if (line.value("stage", "") != stage) continue;
    for (const auto& [key, value] : line.items()) {
      if (key.rfind("quant.", 0) != 0 || !value.is_array() || value.empty() || !value[0].is_number())
        continue;
      const std::string layer = key.substr(6, 4), operand = key.substr(11);
      operands.insert(operand);
      auto& [sum, count] = cells[layer][operand];
      sum += value[0].get<double>();
      count += 1;
    }
  }
  if (cells.empty()) return "";
  HeatMap map;
  map.title = "quantisation error energy over signal energy, percent, mean over the stage";
  map.high = 1.0;
  map.format = "%.3f";
  map.columns.assign(operands.begin(), operands.end());
  for (const auto& [layer, row] : cells) {
    map.rows.push_back("layer " + std::to_string(std::stoi(layer)));
    std::vector<double> values;
    for (const std::string& operand : operands) {
      const auto it = row.find(operand);
      values.push_back(it == row.end() ? std::nan("") : 100 * it->second.first / it->second.second);
    }
    map.values.push_back(std::move(values));
  }
  return "<div class=\"scroll\">" + heat_map(map) + "</div>";
}

// One table of a stage: rows are layers, columns are module, GEMM and operand.
std::string precision_table(const Json& table) {
  std::vector<std::string> columns, rows;
  std::map<std::pair<std::string, std::string>, const Json*> cells;
  for (const Json& cell : table.at("cells")) {
    std::string column = cell.at("module").get<std::string>();
    if (cell.contains("gemm") && cell["gemm"].is_string()) column += " " + cell["gemm"].get<std::string>();
    if (cell.contains("operand") && cell["operand"].is_string())
      column += " " + cell["operand"].get<std::string>();
    const std::string row =
        cell.at("layer").is_number() ? "layer " + std::to_string(cell["layer"].get<int64_t>()) : "model";
    if (std::find(columns.begin(), columns.end(), column) == columns.end()) columns.push_back(column);
    if (std::find(rows.begin(), rows.end(), row) == rows.end()) rows.push_back(row);
    cells[{row, column}] = &cell;
  }
  std::string out = "<h3>" + html_escape(table.at("table").get<std::string>()) + ", steps " +
                    std::to_string(table.at("begin").get<int64_t>()) + " to " +
                    std::to_string(table.at("end").get<int64_t>()) +
                    "</h3><div class=\"scroll\"><table><tr><th></th>";
  for (const std::string& column : columns) out += "<th>" + html_escape(column) + "</th>";
  out += "</tr>";
  for (const std::string& row : rows) {
    out += "<tr><th>" + html_escape(row) + "</th>";
    for (const std::string& column : columns) {
      const auto it = cells.find({row, column});
      if (it == cells.end()) {
        out += "<td></td>";
        continue;
      }
      const std::string format = (*it->second).at("format").get<std::string>();
      const std::string text = (*it->second).value("cell", format);
      out += "<td class=\"" + html_escape(format) + "\" title=\"" + html_escape(text) + "\">" +
             html_escape(text) + "</td>";
    }
    out += "</tr>";
  }
  return out + "</table></div>";
}

std::string summary_table(const Json& summary) {
  if (!summary.is_object()) return "<p>The run has not finished.</p>";
  std::string out = "<table>";
  for (const auto& [key, value] : summary.items()) {
    const std::string text = value.is_string() ? value.get<std::string>() : value.dump();
    out += "<tr><th>" + html_escape(key) + "</th><td>" + html_escape(text) + "</td></tr>";
  }
  return out + "</table>";
}

std::string render(const RunFiles& files) {
  const std::string name = files.header.is_object() ? files.header.value("name", "run") : "run";
  std::string out = "<!doctype html><html lang=\"en\"><meta charset=\"utf-8\"><title>" + html_escape(name) +
                    "</title><style>" + kStyle + "</style><body><h1>" + html_escape(name) + "</h1>" +
                    summary_table(files.summary);
  std::vector<std::string> stages;
  for (const Json& line : files.lines) {
    const std::string stage = line.value("stage", "");
    if (std::find(stages.begin(), stages.end(), stage) == stages.end()) stages.push_back(stage);
  }
  for (const std::string& stage : stages) {
    out += curves(files, stage) + expert_load(files, stage) + quantisation_error(files, stage);
  }
  if (files.plan.is_object() && files.plan.contains("stages")) {
    out += "<h2>Precision</h2>";
    for (const Json& stage : files.plan["stages"]) {
      out += "<h3>stage " + html_escape(stage.value("name", "")) + "</h3>";
      for (const Json& table : stage.value("precision", Json::array())) out += precision_table(table);
    }
  }
  return out + "</body></html>\n";
}

}  // namespace

void write_report(const std::string& run_dir) {
  const RunFiles files = read_run(run_dir);
  std::string html;
  try {
    html = render(files);
  } catch (const nlohmann::json::exception& e) {
    throw BadDataError(run_dir + ": the run's files do not have the expected form: " + e.what());
  }
  write_text_file(run_dir + "/report.html", html);
}

}  // namespace fp4t

#include "engine/metrics/run_data.h"

#include <algorithm>
#include <cmath>
#include <set>
#include <sstream>

#include "engine/metrics/json_line.h"
#include "engine/metrics/metrics.h"
#include "kernels/base/check.h"
#include "kernels/base/text.h"
#include "kernels/base/text_file.h"

namespace fp4t {

namespace {

using Json = nlohmann::ordered_json;

constexpr size_t kMostSamples = 120;     // a stage
constexpr double kLargest = 1e300;       // beyond it a chart's arithmetic would leave the doubles
constexpr int64_t kMostLayers = 100000;  // no model has more
constexpr int64_t kMostNames = 4000;     // columns of one stage

double finite_or_nan(const Json& value) {
  const double v = value.is_number() ? value.get<double>() : std::nan("");
  return std::abs(v) < kLargest ? v : std::nan("");
}

// Whether the writer puts numbers under this kind of value: NaN and infinities are texts.
bool is_figure(const Json& value) {
  return value.is_number() || value == "nan" || value == "inf" || value == "-inf";
}

// Null when the file is not there.
Json parse_object_file(const std::string& path) {
  const auto text = read_text_file_if_there(path);
  if (!text) return Json();
  Json object = parse_json<Json>(*text, printable(path));
  if (!object.is_object()) throw BadDataError(printable(path) + ": no JSON object");
  return object;
}

// "quant.0002.experts.down.fprop.act" as layer 2 of "experts.down.fprop.act"; false for other names.
bool operand_of(const std::string& key, int64_t& layer, std::string& operand) {
  if (key.rfind("quant.", 0) != 0) return false;
  const size_t begin = 6, dot = key.find('.', begin);
  if (dot == std::string::npos || dot == begin || dot - begin > 6) return false;
  const std::string digits = key.substr(begin, dot - begin);
  if (digits.find_first_not_of("0123456789") != std::string::npos) return false;
  layer = std::stoll(digits);
  operand = key.substr(dot + 1);
  return layer < kMostLayers && !operand.empty();
}

class Reader {
 public:
  explicit Reader(RunData& run) : run_(run), times_(read_times(run.dir + "/times.jsonl")) {}

  void read() {
    const std::string path = run_.dir + "/metrics.jsonl";
    std::istringstream in(read_text_file(path));
    std::string line;
    for (int64_t number = 1; std::getline(in, line); ++number) {
      if (in.eof() && !Json::accept(line)) {
        run_.notes.push_back(
            "the last line of metrics.jsonl is cut, as when a process is killed; it is left out");
        break;
      }
      add_line(parse_metrics_line(line, path, number), number);
    }
    for (StageData& s : run_.stages) {
      if (counts_tokens_.count(s.name)) continue;
      for (MetricRows* rows : {&s.steps, &s.evals}) rows->tokens.assign(rows->step.size(), std::nan(""));
    }
  }

 private:
  // Seconds of the run by line of metrics.jsonl.
  static std::vector<double> read_times(const std::string& path) {
    std::vector<double> times;
    std::istringstream in(read_text_file_if_there(path).value_or(""));
    for (std::string line; std::getline(in, line);) {
      const Json object = Json::parse(line, nullptr, false);
      if (!object.is_object() || !object.contains("line") || !object["line"].is_number_unsigned()) continue;
      const auto at = object["line"].get<uint64_t>();
      if (at > times.size() + (uint64_t{1} << 20) || !object.contains("seconds")) continue;
      if (times.size() <= at) times.resize(at + 1, std::nan(""));
      times[at] = finite_or_nan(object["seconds"]);
    }
    return times;
  }

  StageData& stage(const std::string& name) {
    for (StageData& s : run_.stages) {
      if (s.name == name) return s;
    }
    run_.stages.emplace_back();
    run_.stages.back().name = name;
    return run_.stages.back();
  }

  void add_line(const Json& line, int64_t number) {
    const std::string kind = line["kind"];
    if (kind == "header") run_.header = line;
    if (kind != "step" && kind != "eval") return;
    StageData& s = stage(line["stage"].get<std::string>());
    MetricRows& rows = kind == "eval" ? s.evals : s.steps;
    add_axes(s, rows, line, number);
    add_figures(s, rows, line);
    add_lists(s, line);
  }

  void add_axes(StageData& s, MetricRows& rows, const Json& line, int64_t number) {
    double& tokens = tokens_[s.name];
    if (line.contains("tokens")) tokens = finite_or_nan(line["tokens"]);
    if (!line.contains("tokens") && line.contains("completion_tokens")) {
      tokens += finite_or_nan(line["completion_tokens"]);
    }
    if (line.contains("tokens") || line.contains("completion_tokens")) counts_tokens_.insert(s.name);
    const auto at = static_cast<size_t>(number);
    const double now = at < times_.size() ? times_[at] : std::nan("");
    const double begin = begins_.emplace(s.name, now).first->second;
    rows.step.push_back(finite_or_nan(line["step"]));
    rows.tokens.push_back(tokens);
    rows.seconds.push_back(now - begin);
  }

  static void add_figures(StageData& s, MetricRows& rows, const Json& line) {
    const auto row = static_cast<int32_t>(rows.step.size() - 1);
    for (const auto& [key, value] : line.items()) {
      if (key == "kind" || key == "stage" || key == "step") continue;
      if (is_figure(value)) {
        if (rows.columns.size() < kMostNames || rows.columns.count(key) > 0) {
          rows.columns[key].emplace_back(row, finite_or_nan(value));
        }
      } else if (value.is_string()) {
        add_sample(s, {rows.step.back(), key, value.get<std::string>()});
      }
    }
  }

  static void add_sample(StageData& s, TextSample sample) {
    constexpr size_t kMostBytes = 20000;
    if (sample.name.rfind("sample.", 0) != 0) return;
    if (sample.text.size() > kMostBytes) sample.text = sample.text.substr(0, kMostBytes) + " [cut]";
    s.samples.push_back(std::move(sample));
    if (s.samples.size() <= kMostSamples) return;
    s.samples.erase(s.samples.begin() + kMostSamples / 4);
    s.samples_left_out += 1;
  }

  static void add_lists(StageData& s, const Json& line) {
    ExpertLoad load;
    load.step = finite_or_nan(line["step"]);
    std::map<std::string, OperandFigures> forward;  // of activations, over the layers
    for (const auto& [key, value] : line.items()) {
      if (!value.is_array()) continue;
      int64_t layer = 0;
      std::string operand;
      if (key == "expert_load." + std::to_string(load.layers.size())) {
        load.layers.emplace_back();
        for (const Json& x : value) load.layers.back().push_back(finite_or_nan(x));
      } else if (operand_of(key, layer, operand)) {
        constexpr const char* kForward = ".fprop.act";
        const size_t end = operand.rfind(kForward);
        const bool is_forward = end != std::string::npos && operand.ends_with(kForward);
        add_operand(s.operands[operand][layer], value);
        if (is_forward) add_operand(forward[operand.substr(0, end)], value);
      }
    }
    for (const auto& [module, figures] : forward) {
      const auto row = static_cast<int32_t>(s.steps.step.size() - 1);
      if (row < 0) continue;
      s.steps.columns["quant_error." + module].emplace_back(row, 100 * figures.mean(OperandFigures::kError));
      if (figures.count[OperandFigures::kBias] == 0) continue;
      s.steps.columns["quant_bias." + module].emplace_back(row, 100 * figures.mean(OperandFigures::kBias));
    }
    if (load.layers.empty()) return;
    if (s.first_load.layers.empty()) s.first_load = load;
    s.last_load = std::move(load);
  }

  static void add_operand(OperandFigures& cell, const Json& values) {
    for (size_t f = 0; f < std::min<size_t>(values.size(), OperandFigures::kNumFigures); ++f) {
      const double v = finite_or_nan(values[f]);
      if (!std::isfinite(v)) continue;
      cell.sum[f] += v;
      cell.count[f] += 1;
    }
  }

  RunData& run_;
  std::vector<double> times_;
  std::map<std::string, double> tokens_, begins_;  // by stage
  std::set<std::string> counts_tokens_;            // stages
};

}  // namespace

const StageData* RunData::stage(const std::string& name) const {
  for (const StageData& s : stages) {
    if (s.name == name) return &s;
  }
  return nullptr;
}

RunData read_run(const std::string& dir) {
  RunData run;
  run.dir = dir;
  run.summary = parse_object_file(dir + "/summary.json");
  run.plan = parse_object_file(dir + "/plan.json");
  Reader(run).read();
  read_rollouts(run);
  if (run.summary.is_null()) run.notes.push_back("The run has not finished: there is no summary.json.");
  if (run.plan.is_null()) {
    run.notes.push_back("There is no plan.json: model, recipe and precision tables are not known.");
  }
  if (run.stages.empty()) run.notes.push_back("metrics.jsonl holds no step and no evaluation yet.");
  if (run.header.is_object() && run.header.contains("name") && run.header["name"].is_string()) {
    run.label = run.header["name"].get<std::string>();
  }
  if (run.label.empty()) run.label = "run";
  return run;
}

}  // namespace fp4t

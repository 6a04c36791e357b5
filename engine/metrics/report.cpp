// report.html: drawn from the run folder's JSON alone.
#include "engine/metrics/report.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <filesystem>
#include <sstream>

#include "engine/metrics/json_line.h"
#include "engine/metrics/metrics.h"
#include "engine/metrics/svg.h"
#include "kernels/base/check.h"

namespace fp4t {

namespace {

namespace fs = std::filesystem;
using Json = nlohmann::ordered_json;

constexpr const char* kStyle =
    "body{font:15px/1.5 system-ui,sans-serif;max-width:1240px;margin:2em auto;padding:0 1em;color:#222}"
    "h1{font-size:1.6em}h2{font-size:1.25em;margin-top:2em;border-bottom:1px solid #ddd}h3{font-size:1.05em}"
    ".charts{display:grid;grid-template-columns:repeat(auto-fit,minmax(460px,1fr));gap:0 1.5em}"
    "svg{width:100%;height:auto;display:block;margin:.6em 0}.charts svg{max-width:640px}"
    "svg text{font:11px system-ui,sans-serif;fill:#333}svg .t{font-size:13px;font-weight:600}"
    "svg .g{stroke:#e4e4e4}"
    "table{border-collapse:collapse;margin:.6em 0;font-size:13px}td,th{border:1px solid #ddd;padding:2px "
    "8px;text-align:left;font-weight:400}thead th{background:#f6f6f6}th{white-space:nowrap}"
    "td.bf16{background:#eee}td.mxfp8{background:#cfe3f7}td.nvfp4{background:#c9efcf}td.fp32{background:#fff}"
    ".figures{display:flex;flex-wrap:wrap;gap:.6em 1em;margin:1em 0}.figures div{border:1px solid #ddd;"
    "border-radius:6px;padding:.3em .9em}.figures b{display:block;font-size:1.35em}.figures span{color:#666;"
    "font-size:12px}"
    ".scroll{overflow-x:auto}pre{white-space:pre-wrap;margin:0;font-size:12px}.note{color:#666;font-size:"
    "13px}";

// Null when the file is not there.
Json parse_file(const std::string& path) {
  std::error_code error;
  if (!fs::exists(path, error) && !error) return Json();
  Json object;
  try {
    object = Json::parse(read_text_file(path));
  } catch (const nlohmann::json::exception& e) {
    throw BadDataError(path + ": " + e.what());
  }
  if (!object.is_object()) throw BadDataError(path + ": no JSON object");
  return object;
}

RunFiles read_run(const std::string& dir) {
  RunFiles files;
  files.summary = parse_file(dir + "/summary.json");
  files.plan = parse_file(dir + "/plan.json");
  const std::string path = dir + "/metrics.jsonl";
  std::istringstream in(read_text_file(path));
  std::string line;
  for (int64_t number = 1; std::getline(in, line); ++number) {
    if (in.eof() && !Json::accept(line)) break;  // a process that was killed tore its last line
    Json object = parse_metrics_line(line, path, number);
    const std::string kind = object["kind"];
    if (kind == "header") files.header = object;
    if (kind == "step" || kind == "eval") files.lines.push_back(std::move(object));
  }
  return files;
}

std::vector<std::string> stages_of(const RunFiles& files) {
  std::vector<std::string> stages;
  for (const Json& line : files.lines) {
    const std::string stage = line.value("stage", "");
    if (std::find(stages.begin(), stages.end(), stage) == stages.end()) stages.push_back(stage);
  }
  return stages;
}

std::string render(const RunFiles& files) {
  const std::string name = files.header.is_object() ? files.header.value("name", "run") : "run";
  std::string out =
      "<!doctype html><html lang=\"en\"><meta charset=\"utf-8\"><meta name=\"viewport\" "
      "content=\"width=device-width\"><title>" +
      html_escape(name) + "</title><style>" + kStyle + "</style><body><h1>" + html_escape(name) + "</h1>" +
      run_facts(files);
  for (const std::string& stage : stages_of(files)) {
    out += "<h2>" + html_escape(stage) + "</h2>" + stage_curves(files, stage) + text_samples(files, stage) +
           expert_load(files, stage) + quantisation_error(files, stage);
  }
  return out + precision_tables(files) + "</body></html>\n";
}

}  // namespace

double number_of(const Json& line, const std::string& key) {
  return line.contains(key) && line[key].is_number() ? line[key].get<double>() : std::nan("");
}

std::string short_number(double value) {
  char text[40];
  std::snprintf(text, sizeof(text), "%.4g", value);
  return text;
}

std::string grouped(int64_t value) {
  std::string text = std::to_string(value);
  for (size_t at = text.size(); at > 3 + (value < 0 ? 1u : 0u);) text.insert(at -= 3, ",");
  return text;
}

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

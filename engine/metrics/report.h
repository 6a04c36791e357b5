// Sections of report.html, each from the run folder's JSON alone. A section that has nothing to show is "".
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

namespace fp4t {

struct RunFiles {
  nlohmann::ordered_json header, summary, plan;  // null when the file is not there
  std::vector<nlohmann::ordered_json> lines;     // "step" and "eval" lines of metrics.jsonl
};

// report_facts.cpp
std::string run_facts(const RunFiles& files);         // what was run and what came out
std::string precision_tables(const RunFiles& files);  // every cell, by stage and span of steps
std::string text_samples(const RunFiles& files, const std::string& stage);

// report_curves.cpp
std::string stage_curves(const RunFiles& files, const std::string& stage);

// report_layers.cpp: expert load and quantisation error by layer
std::string expert_load(const RunFiles& files, const std::string& stage);
std::string quantisation_error(const RunFiles& files, const std::string& stage);

// Shared by the sections: a number, NaN where it is missing; four significant digits; thousands apart.
double number_of(const nlohmann::ordered_json& line, const std::string& key);
std::string short_number(double value);
std::string grouped(int64_t value);

}  // namespace fp4t

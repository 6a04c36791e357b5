// Sections of the report, for one run or for several beside each other, each from what read_run found. A
// section that has nothing to show is "". Texts of runs (names, samples, keys) are escaped where they enter.
#pragma once

#include <string>
#include <vector>

#include "engine/metrics/run_data.h"
#include "engine/metrics/svg.h"

namespace fp4t {

using Runs = std::vector<RunData>;

// report_page.cpp: head with style, the bar that chooses what x is, the script.
std::string page_head(const std::string& title);
std::string axis_choice();
std::string page_script();

// report_facts.cpp
std::string run_list(const Runs& runs);            // which runs, their colours, what is missing of them
std::string run_facts(const Runs& runs);           // what was run and what came out
std::string recipe_differences(const Runs& runs);  // of one run its recipe
std::string text_samples(const Runs& runs, const std::string& stage);

// report_precision.cpp: every cell, by stage, table and span of steps; what differs between runs is marked
std::string precision_tables(const Runs& runs);

// report_curves.cpp
std::string stage_curves(const Runs& runs, const std::string& stage);

// report_layers.cpp: expert load; quantisation error, bias, clipped and flushed values by layer and operand
std::string expert_load(const Runs& runs, const std::string& stage);
std::string quantisation_by_layer(const Runs& runs, const std::string& stage);

// Shared by the sections.
std::vector<std::string> stage_names(const Runs& runs);
double number_of(const nlohmann::ordered_json& object, const std::string& key);  // NaN where it is missing
std::string text_value(const nlohmann::ordered_json& object, const std::string& key);  // "" likewise
std::string short_number(double value);  // four significant digits
std::string grouped(int64_t value);      // thousands apart
std::string step_text(double step);      // grouped; "?" for no step
// A label with the colour of its run, which is the run's place in the list.
std::string run_mark(const Runs& runs, size_t run);

}  // namespace fp4t

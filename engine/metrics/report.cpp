// report.html of one run, or of several beside each other: drawn from the run folders' JSON alone.
#include "engine/metrics/report.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <set>

#include "engine/metrics/metrics.h"
#include "kernels/base/check.h"
#include "kernels/base/text.h"

namespace fp4t {

namespace {

// Runs of the same name are told apart by their folders; several runs get letters, as colours are not enough.
void label_runs(Runs& runs) {
  if (runs.size() < 2) return;
  std::map<std::string, int> uses;
  for (const RunData& run : runs) uses[run.label] += 1;
  for (size_t i = 0; i < runs.size(); ++i) {
    std::string name = runs[i].label;
    if (uses[name] > 1) name += " (" + runs[i].dir + ")";
    const std::string letter(1, static_cast<char>('A' + i % 26));
    runs[i].label = letter + (i >= 26 ? std::to_string(i / 26 + 1) : "") + " " + name;
  }
}

std::string section(const std::string& id, const std::string& title, const std::string& body) {
  if (body.empty()) return "";
  return "<section id=\"" + id + "\"><h2>" + html_escape(title) + "</h2>" + body + "</section>";
}

std::string render(const Runs& runs) {
  std::vector<std::pair<std::string, std::string>> links;  // id, title
  std::string body;
  const auto add = [&](const std::string& id, const std::string& title, const std::string& content) {
    if (content.empty()) return;
    links.emplace_back(id, title);
    body += section(id, title, content);
  };
  const std::vector<std::string> stages = stage_names(runs);
  const std::string title = runs.size() == 1 ? runs[0].label : std::to_string(runs.size()) + " runs";
  add("summary", "Summary", run_facts(runs));
  for (size_t i = 0; i < stages.size(); ++i) {
    add("stage-" + std::to_string(i), stages[i],
        stage_curves(runs, stages[i]) + text_samples(runs, stages[i]) + expert_load(runs, stages[i]) +
            quantisation_by_layer(runs, stages[i]));
  }
  add("precision", "Precision", precision_tables(runs));
  add("recipe", runs.size() == 1 ? "Recipe" : "Recipe differences", recipe_differences(runs));
  std::string nav;
  for (const auto& [id, name] : links) nav += "<a href=\"#" + id + "\">" + html_escape(name) + "</a>";
  return page_head(title) + "<body><a class=\"skip\" href=\"#main\">to the content</a><header><h1>" +
         html_escape(title) + "</h1>" + run_list(runs) +
         "</header><div class=\"bar\"><nav aria-label=\"Sections\">" + nav + "</nav>" + axis_choice() +
         "</div><main id=\"main\">" + body + "</main>" + page_script() + "</body></html>\n";
}

}  // namespace

std::vector<std::string> stage_names(const Runs& runs) {
  std::vector<std::string> names;
  for (const RunData& run : runs) {
    for (const StageData& stage : run.stages) {
      if (std::find(names.begin(), names.end(), stage.name) == names.end()) names.push_back(stage.name);
    }
  }
  return names;
}

double number_of(const nlohmann::ordered_json& object, const std::string& key) {
  if (!object.is_object() || !object.contains(key)) return std::nan("");
  return object[key].is_number() ? object[key].get<double>() : std::nan("");
}

std::string text_value(const nlohmann::ordered_json& object, const std::string& key) {
  if (!object.is_object() || !object.contains(key)) return "";
  return object[key].is_string() ? object[key].get<std::string>() : "";
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

std::string step_text(double step) {
  return std::abs(step) < 1e15 ? grouped(static_cast<int64_t>(step)) : "?";
}

std::string run_mark(const Runs& runs, size_t run) {
  if (runs.size() == 1) return html_escape(runs[run].label);
  return "<span class=\"run s" + std::to_string(run % 8) + "\">" + html_escape(runs[run].label) + "</span>";
}

void write_report(const std::string& run_dir) { write_report({run_dir}, run_dir + "/report.html"); }

void write_report(const std::vector<std::string>& run_dirs, const std::string& path) {
  Runs runs;
  std::string names;
  for (const std::string& dir : run_dirs) {
    runs.push_back(read_run(dir));
    names += (names.empty() ? "" : ", ") + dir;
  }
  label_runs(runs);
  std::string html;
  try {
    html = render(runs);
  } catch (const nlohmann::json::exception& e) {
    throw BadDataError(printable(names) + ": the run's files do not have the expected form: " + e.what());
  }
  write_text_file(path, html);
}

}  // namespace fp4t

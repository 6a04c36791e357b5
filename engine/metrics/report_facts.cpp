// What was run, what came out, what the recipes say and what the model wrote.
#include <algorithm>
#include <cmath>
#include <map>
#include <set>

#include "engine/metrics/report.h"

namespace fp4t {

namespace {

using Json = nlohmann::ordered_json;

// Figures of summary.json that a reader looks for first.
struct Figure {
  const char *key, *name;
};
constexpr Figure kFigures[] = {
    {"text_loss_start", "held-out text loss at the start, nats"},
    {"text_loss_after_pretraining", "held-out text loss after pretraining"},
    {"text_loss_end", "held-out text loss at the end"},
    {"accuracy_before_rl", "accuracy before RL, sampled"},
    {"accuracy_after_rl", "accuracy after RL, sampled"},
    {"greedy_accuracy_before_rl", "accuracy before RL, greedy"},
    {"greedy_accuracy_after_rl", "accuracy after RL, greedy"},
    {"logprob_equal_fraction_min", "equal log-probabilities, worst step"},
};

std::string figure_name(const std::string& key) {
  for (const Figure& f : kFigures) {
    if (key == f.key) return f.name;
  }
  return key;
}

std::string figure_tiles(const Json& summary) {
  std::string out;
  for (const Figure& f : kFigures) {
    if (!summary.is_object() || !summary.contains(f.key)) continue;
    out += "<div><b>" + html_escape(short_number(number_of(summary, f.key))) + "</b><span>" + f.name +
           "</span></div>";
  }
  return out.empty() ? "" : "<div class=\"figures\">" + out + "</div>";
}

std::string value_text(const Json& value) {
  if (value.is_string()) return value.get<std::string>();
  if (value.is_number()) {
    const auto v = value.get<double>();
    const bool whole = std::abs(v) < 1e15 && v == std::floor(v);
    return whole ? grouped(static_cast<int64_t>(v)) : short_number(v);
  }
  return value.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
}

// Rows of a table with a column a run, in the order in which they come.
class FactTable {
 public:
  explicit FactTable(size_t runs) : runs_(runs) {}
  void set(size_t run, const std::string& name, const std::string& value) {
    const auto [it, fresh] = values_.emplace(name, std::vector<std::string>(runs_));
    if (fresh) names_.push_back(name);
    it->second[run] = value;
  }
  bool differs(const std::string& name) const {
    const auto& v = values_.at(name);
    return std::any_of(v.begin(), v.end(), [&](const std::string& x) { return x != v[0]; });
  }
  void keep_differences() {
    std::erase_if(names_, [&](const std::string& name) { return !differs(name); });
  }
  bool empty() const { return names_.empty(); }

  std::string html(const Runs& runs, const std::string& title) const {
    if (empty()) return "";
    std::string head, body;
    for (size_t r = 0; r < runs_ && runs_ > 1; ++r)
      head += "<th scope=\"col\">" + run_mark(runs, r) + "</th>";
    for (const std::string& name : names_) {
      const bool marked = differs(name);
      body += std::string("<tr") + (marked ? " class=\"differs\"" : "") + "><th scope=\"row\">" +
              (marked ? "<span class=\"ne\">&ne;</span> " : "") + html_escape(name) + "</th>";
      for (const std::string& value : values_.at(name)) body += "<td>" + html_escape(value) + "</td>";
      body += "</tr>";
    }
    return "<div class=\"scroll\" tabindex=\"0\" role=\"region\" aria-label=\"" + html_escape(title) +
           "\"><table class=\"facts\">" +
           (head.empty() ? "" : "<thead><tr><th></th>" + head + "</tr></thead>") + "<tbody>" + body +
           "</tbody></table></div>";
  }

 private:
  size_t runs_;
  std::vector<std::string> names_;
  std::map<std::string, std::vector<std::string>> values_;
};

std::string shape_of(const Json& plan) {
  if (!plan.contains("model")) return "";
  const Json& m = plan["model"];
  const auto size = [&](const char* key) { return grouped(m.at(key).get<int64_t>()); };
  std::string shape = size("layers") + " layers, hidden " + size("hidden") + ", " + size("heads") +
                      " heads and " + size("kv_heads") + " key-value heads of " + size("head_dim") +
                      ", vocabulary " + size("vocabulary");
  if (m.at("experts").get<int64_t>() > 0) {
    shape += "; " + size("experts") + " experts of " + size("expert_hidden") + ", top " + size("top_k");
  }
  return shape;
}

// How far a stage has come, from its step lines.
std::string progress(const RunData& run, const Json& stage) {
  const StageData* data = run.stage(text_value(stage, "name"));
  double last = 0;
  for (const double step : data ? data->steps.step : std::vector<double>()) last = std::max(last, step);
  std::string text = step_text(last) + " of " + grouped(stage.value("steps", int64_t{0})) + " steps";
  if (stage.contains("tokens")) text += ", " + grouped(stage["tokens"].get<int64_t>()) + " tokens in all";
  if (stage.contains("equal_bits")) {
    text += stage["equal_bits"].get<bool>()
                ? "; sampler and trainer agree bit for bit"
                : "; sampler and trainer do not agree bit for bit: " + text_value(stage, "equality_obstacle");
  }
  return text;
}

void add_facts(FactTable& table, const RunData& run, size_t r, bool figures) {
  table.set(r, "state", run.summary.is_object() ? "finished" : "has not finished");
  if (run.plan.is_object()) {
    table.set(r, "model", shape_of(run.plan));
    if (run.plan.contains("parameters")) {
      const Json& p = run.plan["parameters"];
      table.set(r, "parameters",
                grouped(p.at("total").get<int64_t>()) + ", active a token " +
                    grouped(p.at("active").get<int64_t>()));
    }
    table.set(r, "device", text_value(run.plan, "device"));
    for (const Json& stage : run.plan.value("stages", Json::array())) {
      table.set(r, "stage " + text_value(stage, "name"), progress(run, stage));
    }
  }
  if (!run.summary.is_object()) return;
  for (const auto& [key, value] : run.summary.items()) {
    if (key == "name" || (!figures && figure_name(key) != key)) continue;
    table.set(r, figure_name(key), value_text(value));
  }
}

// The newest evaluation's samples stand open, earlier ones behind a line.
std::string sample_rows(const std::vector<TextSample>& samples, bool newest, double last) {
  std::string rows;
  for (const TextSample& s : samples) {
    if ((s.step == last) != newest) continue;
    rows += "<tr><td>" + step_text(s.step) + "</td><td><pre>" + html_escape(s.text) + "</pre></td></tr>";
  }
  return rows;
}

std::string samples_of(const StageData& stage) {
  constexpr const char* kHead =
      "<div class=\"scroll\"><table><thead><tr><th scope=\"col\">step</th><th scope=\"col\">prompt and "
      "completion</th>"
      "</tr></thead><tbody>";
  constexpr const char* kEnd = "</tbody></table></div>";
  const double last = stage.samples.back().step;
  const std::string earlier = sample_rows(stage.samples, false, last);
  std::string out = kHead + sample_rows(stage.samples, true, last) + kEnd;
  if (!earlier.empty())
    out += std::string("<details><summary>earlier samples</summary>") + kHead + earlier + kEnd + "</details>";
  if (stage.samples_left_out > 0) {
    out += "<p class=\"note\">" + grouped(stage.samples_left_out) + " samples in between are left out.</p>";
  }
  return out;
}

// The newest file's completions stand open, the first one's behind a line.
std::string rollout_table(const std::vector<RolloutSample>& samples, double step) {
  std::string rows;
  for (const RolloutSample& s : samples) {
    if (s.step != step) continue;
    rows += "<tr><td>" + step_text(s.step) + "</td><td>" + short_number(s.reward) + "</td><td>" +
            html_escape(s.verdict) + "</td><td><pre>" + html_escape(s.prompt) + "</pre></td><td><pre>" +
            html_escape(s.completion) + "</pre></td><td><pre>" + html_escape(s.answer) + "</pre></td></tr>";
  }
  std::string head;
  for (const char* name : {"step", "reward", "verdict", "prompt", "completion", "answer"}) {
    head += std::string("<th scope=\"col\">") + name + "</th>";
  }
  return "<div class=\"scroll\" tabindex=\"0\" role=\"region\" "
         "aria-label=\"completions\"><table><thead><tr>" +
         head + "</tr></thead><tbody>" + rows + "</tbody></table></div>";
}

std::string rollouts_of(const StageData& stage) {
  const double first = stage.rollouts.front().step, last = stage.rollouts.back().step;
  std::string out = rollout_table(stage.rollouts, last);
  if (first != last) {
    out += "<details><summary>completions of the first of the files</summary>" +
           rollout_table(stage.rollouts, first) + "</details>";
  }
  return out;
}

}  // namespace

std::string run_list(const Runs& runs) {
  std::string out;
  for (size_t r = 0; r < runs.size(); ++r) {
    out += "<li>" +
           (runs.size() > 1 ? run_mark(runs, r) + " <code>" + html_escape(runs[r].dir) + "</code>" : "");
    for (const std::string& note : runs[r].notes) out += "<p class=\"missing\">" + html_escape(note) + "</p>";
    out += "</li>";
  }
  return "<ul class=\"runs\">" + out + "</ul>";
}

std::string run_facts(const Runs& runs) {
  FactTable table(runs.size());
  for (size_t r = 0; r < runs.size(); ++r) add_facts(table, runs[r], r, runs.size() > 1);
  return (runs.size() == 1 ? figure_tiles(runs[0].summary) : "") + table.html(runs, "summary");
}

std::string recipe_differences(const Runs& runs) {
  FactTable table(runs.size());
  std::string out;
  bool complete = true;
  for (size_t r = 0; r < runs.size(); ++r) {
    const Json& plan = runs[r].plan;
    if (!plan.is_object() || !plan.contains("recipe") || !plan["recipe"].is_object()) {
      complete = false;
      if (runs.size() > 1) {
        out += "<p class=\"missing\">The recipe of " + run_mark(runs, r) + " is not in its plan.json.</p>";
      }
      continue;
    }
    for (const auto& [key, value] : plan["recipe"].items()) table.set(r, key, value_text(value));
  }
  if (runs.size() == 1) {
    if (table.empty()) return "";
    return "<details><summary>every key, as resolved</summary>" + table.html(runs, "recipe") + "</details>";
  }
  if (!complete) return out;
  table.keep_differences();
  return table.empty() ? "<p>No key differs.</p>" : table.html(runs, "recipe differences");
}

std::string text_samples(const Runs& runs, const std::string& stage) {
  std::string samples, rollouts;
  for (size_t r = 0; r < runs.size(); ++r) {
    const StageData* s = runs[r].stage(stage);
    const std::string name = runs.size() > 1 ? "<p>" + run_mark(runs, r) + "</p>" : "";
    if (s && !s->samples.empty()) samples += name + samples_of(*s);
    if (s && !s->rollouts.empty()) rollouts += name + rollouts_of(*s);
  }
  return (samples.empty() ? "" : "<h3>Samples</h3>" + samples) +
         (rollouts.empty()
              ? ""
              : "<h3>Completions of the rollouts</h3><p class=\"note\">Those with the largest and the "
                "smallest rewards.</p>" +
                    rollouts);
}

}  // namespace fp4t

// Curves of a stage over its steps, its tokens or its time. Of one run, figures that belong together share a
// chart; of several, every figure has its own, in which the runs are compared.
#include <algorithm>
#include <cmath>
#include <set>

#include "engine/metrics/report.h"

namespace fp4t {

namespace {

struct Curve {
  std::string kind, key, name;
};
struct CurveGroup {
  std::string title;
  std::vector<Curve> curves;
};

enum class Axis { kStep, kTokens, kTime };
constexpr std::pair<Axis, const char*> kAxes[] = {
    {Axis::kStep, "ax-step"}, {Axis::kTokens, "ax-tokens"}, {Axis::kTime, "ax-time"}};

const std::vector<double>& values_of(const MetricRows& rows, Axis axis) {
  return axis == Axis::kStep ? rows.step : axis == Axis::kTokens ? rows.tokens : rows.seconds;
}

class StageCurves {
 public:
  StageCurves(const Runs& runs, const std::string& stage) : runs_(runs), stage_(stage) {}

  bool has(const std::string& kind, const std::string& key) const {
    return std::any_of(runs_.begin(), runs_.end(), [&](const RunData& run) {
      const StageData* s = run.stage(stage_);
      return s && s->has(kind, key);
    });
  }

  std::vector<std::string> keys(const std::string& kind, const std::string& prefix) const {
    std::set<std::string> keys;
    for (const RunData& run : runs_) {
      const StageData* s = run.stage(stage_);
      if (!s) continue;
      for (const auto& [key, column] : (kind == "eval" ? s->evals : s->steps).columns) {
        if (key.rfind(prefix, 0) == 0) keys.insert(key);
      }
    }
    return {keys.begin(), keys.end()};
  }

  void add(const CurveGroup& group) {
    for (const Curve& c : group.curves) drawn_.insert(c.kind + " " + c.key);
    if (runs_.size() == 1) {
      html_ += chart(group.title, group.curves);
      return;
    }
    for (const Curve& c : group.curves) {
      html_ += chart(group.curves.size() == 1 ? group.title : group.title + ": " + c.name, {c});
    }
  }

  // Figures that no group names, one a chart: what later versions log is seen without a change here.
  std::string others() const {
    std::string charts;
    for (const char* kind : {"step", "eval"}) {
      for (const std::string& key : keys(kind, "")) {
        if (drawn_.count(std::string(kind) + " " + key)) continue;
        charts += chart(kind == std::string("eval") ? "evaluation: " + key : key, {{kind, key, key}});
      }
    }
    if (charts.empty()) return "";
    return "<details><summary>All other figures</summary><div class=\"charts\">" + charts +
           "</div></details>";
  }
  std::string html() const { return html_.empty() ? "" : "<div class=\"charts\">" + html_ + "</div>"; }

 private:
  std::vector<Series> series(const std::vector<Curve>& curves, Axis axis) const {
    std::vector<Series> list;
    for (size_t r = 0; r < runs_.size(); ++r) {
      const StageData* stage = runs_[r].stage(stage_);
      for (size_t c = 0; stage && c < curves.size(); ++c) {
        const MetricRows& rows = curves[c].kind == "eval" ? stage->evals : stage->steps;
        const auto column = rows.columns.find(curves[c].key);
        if (column == rows.columns.end()) continue;
        Series s;
        s.name = runs_.size() > 1 ? runs_[r].label : curves[c].name;
        s.dots = curves[c].kind == "eval" || column->second.size() == 1;
        s.style = static_cast<int>(runs_.size() > 1 ? r : c);
        const std::vector<double>& x = values_of(rows, axis);
        for (const auto& [row, value] : column->second)
          s.points.emplace_back(x[static_cast<size_t>(row)], value);
        list.push_back(std::move(s));
      }
    }
    return list;
  }

  // Seconds as what a reader counts in.
  static const char* scale_time(std::vector<Series>& list) {
    double most = 0;
    for (const Series& s : list) {
      for (const auto& [x, y] : s.points) most = std::isfinite(x) ? std::max(most, x) : most;
    }
    const double unit = most < 180 ? 1 : most < 3 * 3600 ? 60 : 3600;
    for (Series& s : list) {
      for (auto& [x, y] : s.points) x /= unit;
    }
    return unit == 1 ? "seconds" : unit == 60 ? "minutes" : "hours";
  }

  std::string chart(const std::string& title, const std::vector<Curve>& curves) const {
    const std::vector<Series> by_step = series(curves, Axis::kStep);
    std::string drawings;
    for (const auto& [axis, css_class] : kAxes) {
      std::vector<Series> list = axis == Axis::kStep ? by_step : series(curves, axis);
      const char* label = axis == Axis::kStep ? "step" : axis == Axis::kTokens ? "tokens" : scale_time(list);
      std::string svg = line_chart(title, label, list, css_class);
      if (svg.empty() && axis == Axis::kStep) return "";
      if (svg.empty()) {
        svg = std::string("<p class=\"note ") + css_class + "\">" + label + " were not recorded.</p>";
      }
      drawings += svg;
    }
    return "<figure><figcaption>" + html_escape(title) + "</figcaption>" + drawings + chart_legend(by_step) +
           "<p class=\"readout\" aria-live=\"polite\"></p></figure>";
  }

  const Runs& runs_;
  const std::string stage_;
  std::set<std::string> drawn_;
  std::string html_;
};

void add_losses(StageCurves& c, bool rl) {
  CurveGroup losses{rl ? "held-out loss, nats a token" : "loss, nats a token", {}};
  if (!rl) losses.curves.push_back({"step", "loss", "training"});
  for (const std::string& key : c.keys("eval", "loss.")) {
    losses.curves.push_back({"eval", key, "held-out " + key.substr(5)});
  }
  losses.curves.push_back({"eval", "text_loss", "held-out text together"});
  std::erase_if(losses.curves, [&](const Curve& curve) { return !c.has(curve.kind, curve.key); });
  c.add(losses);
}

void add_rl(StageCurves& c) {
  c.add({"reward and accuracy",
         {{"step", "reward", "mean reward"},
          {"step", "right", "right answers"},
          {"eval", "accuracy", "held-out, sampled"},
          {"eval", "accuracy_greedy", "held-out, greedy"}}});
  CurveGroup parts{"parts of the reward", {}};
  for (const std::string& key : c.keys("step", "reward."))
    parts.curves.push_back({"step", key, key.substr(7)});
  if (!parts.curves.empty()) c.add(parts);
  add_losses(c, true);
  c.add({"log-probabilities of sampler and trainer with equal bits, as a share",
         {{"step", "logprob_equal_fraction", "equal bits"}}});
  c.add({"difference of sampler's and trainer's log-probabilities, nats",
         {{"step", "logprob_difference_max", "largest"}, {"step", "logprob_difference_mean", "mean"}}});
  c.add({"divergence of trainer and sampler, nats a token",
         {{"step", "generation_kl", "KL"},
          {"step", "generation_js", "Jensen-Shannon"},
          {"step", "policy_kl", "KL of the updates"}}});
  c.add({"importance weights of sampler and trainer",
         {{"step", "rho_mean", "mean"}, {"step", "effective_share", "effective share of the tokens"}}});
  c.add({"weights cut or left out, as shares",
         {{"step", "rho_truncated", "tokens truncated"},
          {"step", "rho_masked", "tokens masked"},
          {"step", "sequences_masked", "sequences masked"},
          {"step", "sequences_vetoed", "sequences vetoed"}}});
  c.add({"router choices that differ, as a share", {{"step", "router_disagreement", "mean over layers"}}});
  c.add({"entropy of the policy, nats", {{"step", "entropy", "entropy"}}});
  c.add({"tokens a completion",
         {{"step", "length_finished_mean", "finished"},
          {"step", "length_finished_max", "longest finished"},
          {"step", "length_truncated_mean", "cut"}}});
  c.add({"completions without use, as shares",
         {{"step", "zero_variance_groups", "equal rewards"},
          {"step", "truncated", "cut"},
          {"step", "unverifiable", "no answer"},
          {"step", "clip_fraction", "ratio clipped"}}});
  c.add({"objective", {{"step", "loss", "mean over the updates"}}});
}

}  // namespace

std::string stage_curves(const Runs& runs, const std::string& stage) {
  StageCurves c(runs, stage);
  if (c.has("step", "reward")) {
    add_rl(c);
  } else {
    add_losses(c, false);
    c.add({"held-out accuracy", {{"eval", "accuracy", "sampled"}, {"eval", "accuracy_greedy", "greedy"}}});
  }
  c.add({"gradient norm before clipping", {{"step", "grad_norm", "norm"}}});
  c.add({"learning rate", {{"step", "learning_rate", "rate"}}});
  c.add({"largest expert load over the mean", {{"step", "max_vio", "worst layer"}}});
  for (const auto& [prefix, title] :
       {std::pair{"quant_error.", "quantisation error of forward activations, percent of energy"},
        {"quant_bias.", "quantisation bias of forward activations, percent of signal"}}) {
    CurveGroup group{title, {}};
    for (const std::string& key : c.keys("step", prefix)) {
      group.curves.push_back({"step", key, key.substr(std::string(prefix).size())});
    }
    if (!group.curves.empty()) c.add(group);
  }
  return c.html() + c.others();
}

}  // namespace fp4t

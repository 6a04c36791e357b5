// Curves of a stage over its steps.
#include <algorithm>
#include <set>

#include "engine/metrics/report.h"
#include "engine/metrics/svg.h"

namespace fp4t {

namespace {

using Json = nlohmann::ordered_json;

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

class Curves {
 public:
  Curves(const RunFiles& files, const std::string& stage) : files_(files), stage_(stage) {}

  Series of(const std::string& kind, const std::string& key, const std::string& name) const {
    Series s;
    s.name = name;
    s.dots = kind == "eval";
    for (const Json& line : files_.lines) {
      if (line.value("stage", "") == stage_ && line.value("kind", "") == kind && line.contains(key)) {
        s.points.emplace_back(number_of(line, "step"), number_of(line, key));
      }
    }
    return s;
  }
  Series step(const std::string& key, const std::string& name) const {
    return smoothed(of("step", key, name));
  }
  Series eval(const std::string& key, const std::string& name) const { return of("eval", key, name); }

  // Held-out losses, one a source.
  void add_losses(std::vector<Series>& series) const {
    std::set<std::string> keys;
    for (const Json& line : files_.lines) {
      if (line.value("stage", "") != stage_ || line.value("kind", "") != "eval") continue;
      for (const auto& [key, value] : line.items()) {
        if (key.rfind("loss.", 0) == 0) keys.insert(key);
      }
    }
    for (const std::string& key : keys) series.push_back(eval(key, "held-out " + key.substr(5)));
  }

  void chart(const std::string& title, std::vector<Series> series) {
    std::erase_if(series, [](const Series& s) { return s.points.empty(); });
    html_ += line_chart(title, "step", series);
  }
  std::string html() const { return "<div class=\"charts\">" + html_ + "</div>"; }

 private:
  const RunFiles& files_;
  const std::string stage_;
  std::string html_;
};

}  // namespace

std::string stage_curves(const RunFiles& files, const std::string& stage) {
  Curves c(files, stage);
  std::vector<Series> losses;
  if (!c.of("step", "reward", "").points.empty()) {
    c.chart("reward and accuracy", {c.step("reward", "mean reward"), c.eval("accuracy", "held-out, sampled"),
                                    c.eval("accuracy_greedy", "held-out, greedy")});
    c.add_losses(losses);
    c.chart("held-out loss, nats a token", losses);
    c.chart("completions without use, as shares",
            {c.step("zero_variance_groups", "equal rewards"), c.step("truncated", "cut"),
             c.step("unverifiable", "no answer"), c.step("clip_fraction", "ratio clipped")});
    c.chart("entropy of the policy, nats", {c.step("entropy", "entropy")});
    c.chart("log-probabilities of sampler and trainer with equal bits, as a share",
            {c.step("logprob_equal_fraction", "equal bits")});
    c.chart("tokens a completion",
            {c.step("length_finished_mean", "finished"), c.step("length_finished_max", "longest finished")});
  } else {
    losses.push_back(c.step("loss", "training"));
    c.add_losses(losses);
    c.chart("loss, nats a token", losses);
    c.chart("held-out accuracy", {c.eval("accuracy", "sampled"), c.eval("accuracy_greedy", "greedy")});
  }
  c.chart("gradient norm before clipping", {c.step("grad_norm", "norm")});
  c.chart("learning rate", {c.step("learning_rate", "rate")});
  c.chart("largest expert load over the mean", {c.step("max_vio", "worst layer")});
  return c.html();
}

}  // namespace fp4t

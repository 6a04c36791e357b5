// A prediction as a user and as programs read it.
#include <nlohmann/json.hpp>

#include <algorithm>
#include <cstdio>

#include "engine/plan/step_time.h"

namespace fp4t {

namespace {

using Json = nlohmann::ordered_json;

std::string whole(double v) {
  std::string digits = std::to_string(static_cast<int64_t>(v + 0.5)), text;
  for (size_t i = 0; i < digits.size(); ++i) {
    if (i > 0 && (digits.size() - i) % 3 == 0) text += ',';
    text += digits[i];
  }
  return text;
}

// Three digits that count.
std::string short_number(double v) {
  if (v >= 1000) return whole(v);
  char text[64];
  const int decimals = v >= 100 ? 0 : v >= 10 ? 1 : v >= 1 ? 2 : 3;
  std::snprintf(text, sizeof(text), "%.*f", decimals, v);
  return text;
}

std::string padded(std::string text, size_t width) {
  text.resize(std::max(text.size() + 1, width), ' ');
  return text;
}
std::string right(const std::string& text, size_t width) {
  return std::string(width > text.size() ? width - text.size() : 1, ' ') + text;
}

std::string phases_text(const StagePrediction& s) {
  std::string text = padded("    milliseconds", 20);
  for (int k = 0; k < kNumWorkKinds; ++k) text += right(name_of(static_cast<WorkKind>(k)), 11);
  text += right("all", 11) + "\n";
  for (size_t i = 0; i < kNumPhases; ++i) {
    const PhaseTime& phase = s.phases[i];
    if (phase.total() == 0) continue;
    text += padded(std::string("    ") + name_of(static_cast<Phase>(i)), 20);
    for (const double seconds : phase.seconds) text += right(short_number(seconds * 1e3), 11);
    text += right(short_number(phase.total() * 1e3), 11) + "\n";
  }
  return text;
}

std::string wire_text(const StagePrediction& s, const MachineSpec& machine) {
  if (s.wire.empty()) return "";
  std::string text = padded("    sent by a rank", 32) + right("MB inside", 12) + right("MB beyond", 12) +
                     right("calls", 9) + right("ms", 9) + "\n";
  for (const WireLine& line : s.wire) {
    text += padded("    " + line.name, 32) + right(short_number(line.inside_bytes / 1e6), 12) +
            right(short_number(line.outside_bytes / 1e6), 12) + right(whole(line.calls), 9) +
            right(short_number(seconds_of(line, machine) * 1e3), 9) + "\n";
  }
  return text;
}

std::string stage_text(const StagePrediction& s, const Prediction& p, const Plan& plan) {
  const auto ranks = static_cast<double>(p.ranks);
  const double rate = static_cast<double>(s.tokens) / s.step_seconds();
  const double mfu = model_flops_utilisation(plan, *p.machine, rate / ranks);
  std::string text = "  " + s.name + ": a step takes " + short_number(s.step_seconds() * 1e3) + " ms, " +
                     whole(rate) + " tok/s";
  if (p.ranks > 1) text += ", " + whole(rate / ranks) + " a rank";
  if (!s.is_rl) text += ", " + short_number(mfu * 100) + "% of the BF16 peak";
  text += "\n" + phases_text(s) + wire_text(s, *p.machine);
  if (s.communication_seconds > 0) {
    text += "    communication " + short_number(s.communication_seconds * 1e3) + " ms, " +
            short_number(s.exposed_seconds() * 1e3) + " of it exposed\n";
  }
  if (s.is_rl) text += "    a decode call " + short_number(s.decode_ms) + " ms\n";
  return text;
}

Json stage_json(const StagePrediction& s, const Prediction& p, const Plan& plan) {
  const auto ranks = static_cast<double>(p.ranks);
  const double rate = static_cast<double>(s.tokens) / s.step_seconds();
  Json phases = Json::object();
  for (size_t i = 0; i < kNumPhases; ++i) {
    if (s.phases[i].total() == 0) continue;
    Json& phase = phases[name_of(static_cast<Phase>(i))];
    for (int k = 0; k < kNumWorkKinds; ++k) {
      phase[name_of(static_cast<WorkKind>(k))] = s.phases[i].seconds[static_cast<size_t>(k)] * 1e3;
    }
  }
  Json wire = Json::array();
  for (const WireLine& line : s.wire) {
    wire.push_back({{"name", line.name},
                    {"inside_bytes", line.inside_bytes},
                    {"outside_bytes", line.outside_bytes},
                    {"calls", line.calls},
                    {"ms", seconds_of(line, *p.machine) * 1e3}});
  }
  Json j = {{"name", s.name},
            {"tokens", s.tokens},
            {"step_ms", s.step_seconds() * 1e3},
            {"communication_ms", s.communication_seconds * 1e3},
            {"exposed_ms", s.exposed_seconds() * 1e3},
            {"tokens_per_s", rate},
            {"tokens_per_s_rank", rate / ranks},
            {"phases_ms", phases},
            {"wire", wire}};
  if (s.is_rl) {
    j["decode_ms"] = s.decode_ms;
  } else {
    j["mfu"] = model_flops_utilisation(plan, *p.machine, rate / ranks);
  }
  return j;
}

}  // namespace

std::string describe(const Prediction& p, const Plan& plan) {
  std::string text = "prediction for " + std::to_string(p.ranks) + " x " + p.machine->name + "\n";
  text += p.memory_obstacle.empty() ? "  it fits\n" : "  it does not fit: " + p.memory_obstacle + "\n";
  for (const StagePrediction& s : p.stages) text += stage_text(s, p, plan);
  return text;
}

std::string plan_json(const Plan& plan, const Prediction& p) {
  Json j = Json::parse(plan_json(plan));
  Json stages = Json::array();
  for (const StagePrediction& s : p.stages) stages.push_back(stage_json(s, p, plan));
  j["prediction"] = {{"machine", p.machine->name},
                     {"ranks", p.ranks},
                     {"fits", p.memory_obstacle.empty()},
                     {"memory_obstacle", p.memory_obstacle},
                     {"stages", stages}};
  return j.dump(1) + "\n";
}

}  // namespace fp4t

// Will the sampler's log-probabilities equal the trainer's bit for bit? (NUMERICS.md 0.0, "Row-invariant")
#include <set>

#include "engine/plan/modules.h"
#include "engine/plan/precision.h"
#include "kernels/base/check.h"

namespace fp4t {

std::string row_variance(const ForwardCell& cell) {
  if (cell.act.format == Format::kNvfp4) {
    if (cell.act.scale_scope != ScaleScope::kRow) return "act has one scale for the whole micro-batch";
    if (cell.act.rounding != Rounding::kNearest) return "act is rounded at random";
    if (cell.act.block != BlockShape::k1x16) return "act has blocks over 16 rows";
  }
  if (cell.weight.format == Format::kNvfp4 && cell.weight.rounding != Rounding::kNearest) {
    return "weight is rounded at random";
  }
  // Fresh signs are drawn anew for every micro-batch.
  for (const QuantSpec* s : {&cell.act, &cell.weight}) {
    if (s->hadamard != 0 && s->signs == Signs::kFresh) return "hadamard signs are fresh in every micro-batch";
  }
  return "";
}

bool row_invariant(const ForwardCell& cell) { return row_variance(cell).empty(); }

namespace {

std::string obstacle_of_cell(const ForwardCell& sampler, const ForwardCell& trainer) {
  const auto differ = [](const char* operand, const QuantSpec& a, const QuantSpec& b) {
    return detail::concat(" ", operand, " differs: rl.sampler has ", describe(a), ", rl.trainer.forward has ",
                          describe(b));
  };
  if (sampler.act != trainer.act) return differ("act", sampler.act, trainer.act);
  if (sampler.weight != trainer.weight) return differ("weight", sampler.weight, trainer.weight);
  const std::string why = row_variance(trainer);
  return why.empty() ? "" : " is not row-invariant: " + why;
}

std::string obstacle_of_formats(const ForwardTable& sampler, const ForwardTable& trainer) {
  const auto differ = [](Module m, Format a, Format b) {
    return a == b ? std::string()
                  : detail::concat(name_of(m), " differs: rl.sampler has ", name_of(a),
                                   ", rl.trainer.forward has ", name_of(b));
  };
  std::string why = differ(Module::kEmbed, sampler.embed, trainer.embed);
  if (why.empty()) why = differ(Module::kKvCache, sampler.kv_cache, trainer.kv_cache);
  if (why.empty()) why = differ(Module::kDispatch, sampler.dispatch, trainer.dispatch);
  return why;
}

std::string obstacle_of_tables(const ForwardTable& sampler, const ForwardTable& trainer,
                               const ModelSpec& model) {
  for (int64_t layer = 0; layer < model.layers; ++layer) {
    for (int i = 0; i < kNumGemmModules; ++i) {
      const Module m = static_cast<Module>(i);
      if (!in_layers(m) || !layer_has(model, layer, m)) continue;
      const std::string why = obstacle_of_cell(sampler.cell(layer, m), trainer.cell(layer, m));
      if (!why.empty()) return detail::concat("layers.", layer, " ", name_of(m), why);
    }
  }
  const std::string why = obstacle_of_cell(sampler.head, trainer.head);
  if (!why.empty()) return name_of(Module::kHead) + why;
  return obstacle_of_formats(sampler, trainer);
}

}  // namespace

std::string equality_obstacle(const StagePrecision& p, const ModelSpec& model) {
  std::set<int64_t> begins;
  for (const auto& span : p.sampler.spans) begins.insert(span.begin);
  for (const auto& span : p.forward.spans) begins.insert(span.begin);
  for (const int64_t step : begins) {
    const std::string why = obstacle_of_tables(p.sampler.at(step), p.forward.at(step), model);
    if (why.empty()) continue;
    return step == 0 ? why : detail::concat(why, " (from step ", step, ")");
  }
  return "";
}

}  // namespace fp4t

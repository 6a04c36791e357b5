// Checks of an RL stage's objective.
#include "engine/recipe/validate.h"
#include "kernels/base/check.h"

namespace fp4t {

namespace {

using detail::concat;

// What makes up a kind cannot be set to something else beside its name; the rest are its defaults.
void kind_means_what_it_says(Check& c, const std::string& path, const RlSpec& s) {
  const ObjectiveSpec& o = s.objective;
  const ObjectiveSpec meant = objective_defaults(o.kind, s.sampling.max_tokens);
  const bool dr_grpo = o.kind == "dr_grpo", rloo = o.kind == "rloo", dapo = o.kind == "dapo";
  const auto text = [](bool b) { return std::string(b ? "true" : "false"); };
  const struct {
    const char* key;
    bool fixed;
    std::string found, meant;
  } rows[] = {{"baseline", true, o.baseline, meant.baseline},
              {"ratio", true, o.ratio, meant.ratio},
              {"clip_form", !rloo, o.clip_form, meant.clip_form},
              {"normalise_std", dr_grpo || rloo, text(o.normalise_std), text(meant.normalise_std)},
              {"average", dr_grpo || dapo, o.average, meant.average}};
  for (const auto& row : rows) {
    if (!row.fixed || row.found == row.meant) continue;
    c.fail(path + "." + row.key,
           "found " + row.found + "; allowed: " + row.meant + ", which is what kind " + o.kind + " means",
           {path + ".kind"});
  }
}

void samples_form_groups(Check& c, const std::string& path, const RlSpec& s) {
  if (s.sampling.samples >= 2) return;
  c.fail(path + ".sampling.samples",
         concat("found ", s.sampling.samples, "; allowed: at least 2, ", s.objective.kind,
                " compares completions of one problem"),
         {path + ".objective.kind"});
}

void mini_batches_are_not_empty(Check& c, const std::string& path, const RlSpec& s) {
  const int64_t completions = s.sampling.prompts * s.sampling.samples;
  if (s.objective.mini_batches <= completions) return;
  c.fail(
      path + ".objective.mini_batches",
      concat("found ", s.objective.mini_batches, "; allowed: at most prompts * samples (", completions, ")"),
      {path + ".sampling"});
}

void dual_clip_is_outside(Check& c, const std::string& path, const ObjectiveSpec& o) {
  if (o.clip_dual == 0 || o.clip_dual > 1) return;
  c.fail(path + ".clip_dual", concat("found ", o.clip_dual, "; allowed: 0 (off), or above 1"));
}

void penalty_lies_before_the_limit(Check& c, const std::string& path, const RlSpec& s) {
  if (s.objective.overlong_tokens <= s.sampling.max_tokens) return;
  c.fail(path + ".objective.overlong_tokens",
         concat("found ", s.objective.overlong_tokens, "; allowed: at most sampling.max_tokens (",
                s.sampling.max_tokens, ")"),
         {path + ".sampling.max_tokens"});
}

void bounds_are_ordered(Check& c, const std::string& path, const char* name, double low, double high) {
  // Where sampler and trainer agree rho is 1: masking that would leave nothing to train on.
  if (high > 0 && high < 1) {
    c.fail(path + ".mismatch." + name + "_high",
           concat("found ", high, "; allowed: 0 (no such mask), or 1 and above, so that rho = 1 is inside"));
    return;
  }
  if (high == 0 || low < high) return;
  c.fail(path + ".mismatch." + name + "_low",
         concat("found ", low, "; allowed: below ", name, "_high (", high, ")"),
         {path + ".mismatch." + name + "_high"});
}

void replay_has_routers(Check& c, const std::string& path, const ObjectiveSpec& o) {
  const ModelSpec& m = c.recipe().model;
  if (o.router_replay == "off" || (m.moe.experts > 0 && m.moe.dense_layers < m.layers)) return;
  c.fail(path + ".router_replay", "found " + o.router_replay + " for a model without experts; allowed: off",
         {"model"});
}

}  // namespace

void validate_objective(Check& c, const std::string& path, const RlSpec& s) {
  const std::string objective = path + ".objective";
  samples_form_groups(c, path, s);
  mini_batches_are_not_empty(c, path, s);
  kind_means_what_it_says(c, objective, s);
  dual_clip_is_outside(c, objective, s.objective);
  penalty_lies_before_the_limit(c, path, s);
  bounds_are_ordered(c, objective, "token", s.objective.mismatch.token_low, s.objective.mismatch.token_high);
  bounds_are_ordered(c, objective, "sequence", s.objective.mismatch.sequence_low,
                     s.objective.mismatch.sequence_high);
  replay_has_routers(c, objective, s.objective);
}

}  // namespace fp4t

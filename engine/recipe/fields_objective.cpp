// Keys of an RL stage's objective.
#include "engine/recipe/fields.h"

namespace fp4t {

namespace {

void visit_bounds(FieldVisitor& v, const char* low_key, const char* high_key, const char* what,
                  const char* condition, double& low, double& high) {
  v.value(course(low_key, what).at_least(0).at_most(1).only_if(high > 0, condition), low);
  v.value(course(high_key, "the upper end of that; 0: no such mask").at_least(0).at_most(kMostFactor), high);
}

void visit_mismatch(FieldVisitor& v, MismatchSpec& s) {
  v.value(course("importance", "weight of a token's policy term: rho, min(rho, cap), or none")
              .one_of({"off", "truncated", "raw"}),
          s.importance);
  v.value(course("cap", "largest weight")
              .at_least(1)
              .at_most(kMostFactor)
              .only_if(s.importance == "truncated", "importance is truncated"),
          s.cap);
  visit_bounds(v, "token_low", "token_high", "tokens with rho below are masked", "token_high is above 0",
               s.token_low, s.token_high);
  visit_bounds(v, "sequence_low", "sequence_high",
               "completions with a geometric mean of rho below are masked", "sequence_high is above 0",
               s.sequence_low, s.sequence_high);
  v.value(course("veto", "completions with any rho below are masked; 0: none").at_least(0).at_most(1),
          s.veto);
}

void visit_shaping(FieldVisitor& v, ObjectiveSpec& s) {
  v.value(course("resample", "most times that groups of equal rewards are replaced by new problems")
              .at_least(0)
              .at_most(1000),
          s.resample);
  v.value(course("overlong_tokens", "last tokens before max_tokens, over which a penalty rises; 0: none")
              .at_least(0)
              .at_most(kMostWidth),
          s.overlong_tokens);
  v.value(course("overlong_penalty", "taken off the reward at max_tokens")
              .at_least(0)
              .at_most(kMostFactor)
              .only_if(s.overlong_tokens > 0, "overlong_tokens is above 0"),
          s.overlong_penalty);
}

void visit_penalties(FieldVisitor& v, ObjectiveSpec& s) {
  v.value(course("kl", "coefficient of the penalty to the policy at the start of the stage")
              .at_least(0)
              .at_most(kMostFactor),
          s.kl);
  v.value(course("kl_estimator", "with d = log p_ref - log p: k1 is -d, k2 is d^2 / 2, k3 is exp(d) - d - 1")
              .one_of({"k1", "k2", "k3"})
              .only_if(s.kl > 0, "kl is above 0"),
          s.kl_estimator);
  v.value(course("kl_in", "added to the loss, or taken off the reward, summed over the completion")
              .one_of({"loss", "reward"})
              .only_if(s.kl > 0, "kl is above 0"),
          s.kl_in);
  v.value(course("entropy", "coefficient of the entropy bonus").at_least(0).at_most(kMostFactor), s.entropy);
}

}  // namespace

ObjectiveSpec objective_defaults(const std::string& kind, int64_t max_tokens) {
  ObjectiveSpec s;
  s.kind = kind;
  if (kind == "dr_grpo") {
    s.normalise_std = false;
    s.average = "constant";
    s.average_tokens = max_tokens;
  } else if (kind == "dapo") {
    s.clip_high = 0.28;
    s.resample = 3;
    s.average = "token";
    s.overlong_tokens = max_tokens > 5 ? max_tokens / 5 : 1;
  } else if (kind == "gspo") {
    s.ratio = "sequence";
    s.clip_low = 3e-4;
    s.clip_high = 4e-4;
    s.average = "sequence";
  } else if (kind == "cispo") {
    s.clip_form = "cispo";
    s.average = "token";
    s.clip_low = 1;
    s.clip_high = 5;
  } else if (kind == "rloo") {
    s.baseline = "leave_one_out";
    s.normalise_std = false;
    s.clip_form = "none";
    s.average = "constant";
    s.average_tokens = 1;
  }
  return s;
}

void visit_objective(FieldVisitor& v, ObjectiveSpec& s, int64_t max_tokens) {
  const std::string before = s.kind;
  v.value(course("kind", "what is maximised: sets the defaults of the other keys")
              .one_of({"grpo", "dr_grpo", "dapo", "gspo", "cispo", "rloo"}),
          s.kind);
  // Binding has read another kind: the keys after this one begin with what it means.
  if (s.kind != before) s = objective_defaults(s.kind, max_tokens);
  v.value(course("baseline", "what is taken off a reward: the group's mean, or that of the group's others")
              .one_of({"group_mean", "leave_one_out"}),
          s.baseline);
  v.value(course("normalise_std", "divide advantages by the group's standard deviation"), s.normalise_std);
  v.value(course("ratio", "new to old probability of a token, or its geometric mean over the completion")
              .one_of({"token", "sequence"}),
          s.ratio);
  v.value(
      course("clip_form", "ppo: min(r A, clip(r) A); cispo: clip(r) A log p, the weight constant; none: r A")
          .one_of({"ppo", "cispo", "none"}),
      s.clip_form);
  const bool clips = s.clip_form != "none";
  v.value(course("clip_low", "the ratio is clipped below at 1 minus this")
              .at_least(0)
              .at_most(1)
              .only_if(clips, "clip_form is ppo or cispo"),
          s.clip_low);
  v.value(course("clip_high", "the ratio is clipped above at 1 plus this")
              .at_least(0)
              .at_most(kMostFactor)
              .only_if(clips, "clip_form is ppo or cispo"),
          s.clip_high);
  v.value(course("clip_dual", "for A < 0 the term stays above this times A; above 1, 0: off")
              .at_least(0)
              .at_most(kMostFactor)
              .only_if(s.clip_form == "ppo", "clip_form is ppo"),
          s.clip_dual);
  v.value(course("drop_zero_advantage", "leave completions without advantage out"), s.drop_zero_advantage);
  v.value(course("mask_truncated", "leave completions that were cut at max_tokens out"), s.mask_truncated);
  visit_shaping(v, s);
  visit_penalties(v, s);
  v.value(course("epochs", "passes over a rollout").at_least(1).at_most(kMostSequences), s.epochs);
  v.value(course("mini_batches", "optimizer updates an epoch").at_least(1).at_most(kMostSequences),
          s.mini_batches);
  v.value(layout("micro_tokens", "tokens a forward-backward, at most").at_least(1).at_most(kMostCount),
          s.micro_tokens);
  v.value(
      course(
          "average",
          "mean over all tokens, over completions of their means, or over completions of sums by a constant")
          .one_of({"token", "sequence", "constant"}),
      s.average);
  v.value(course("average_tokens", "the constant's tokens a completion; 0: max_tokens")
              .at_least(0)
              .at_most(kMostWidth)
              .only_if(s.average == "constant", "average is constant"),
          s.average_tokens);
  if (v.enter(course("mismatch", "what the ratio of trainer to sampler does to a token's policy term"))) {
    visit_mismatch(v, s.mismatch);
    v.leave();
  }
  v.value(
      course("router_replay",
             "sampler: the trainer routes to the experts that the sampler chose; measure: it only logs where "
             "its own choice is another")
          .one_of({"off", "measure", "sampler"}),
      s.router_replay);
}

}  // namespace fp4t

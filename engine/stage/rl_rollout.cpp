#include "engine/stage/rl_rollout.h"

#include <utility>

#include "engine/rl/policy.h"
#include "engine/stage/evaluate.h"
#include "engine/stage/rl_score.h"
#include "engine/stage/spread.h"

namespace fp4t {

namespace {

void permute(std::vector<float>& rewards, uint64_t seed, int64_t step) {
  const PhiloxKey key = site_key(seed, Purpose::kRewardPermutation, 0, 0, static_cast<uint32_t>(step), 0);
  for (size_t i = rewards.size(); i > 1; --i) {
    const PhiloxBits bits = site_draw(key, i);
    std::swap(rewards[i - 1], rewards[(uint64_t{bits.word[0]} << 32 | bits.word[1]) % i]);
  }
}

// Verifies and rewards this rank's completions, the first of which answers problem `first`, and gathers those
// of all ranks.
void gather_completions(Run& run, const RlSpec& spec, const Task& task, Rewards& rewards, int64_t first,
                        std::vector<Completion> completions, Rollout& r) {
  std::vector<std::vector<int32_t>> tokens;
  std::vector<std::vector<float>> log_probs;
  std::vector<uint8_t> finished, verdicts;
  std::vector<Judged> judged;
  for (size_t i = 0; i < completions.size(); ++i) {
    Completion& c = completions[i];
    const auto problem = static_cast<size_t>(first) + i / static_cast<size_t>(r.samples_per_prompt);
    const Problem& p = r.problems[problem];
    std::string text = answer_text(*run.tokenizer, c);
    const Verdict verdict = task.verify(p, text, c.finished);
    judged.push_back({.id = run.state.next_sample + first * r.samples_per_prompt + static_cast<int64_t>(i),
                      .prompt = prompt_text(spec.task, p),
                      .completion = std::move(text),
                      .answer = p.answer,
                      .tokens = static_cast<int64_t>(c.tokens.size()),
                      .finished = c.finished,
                      .verdict = verdict});
    verdicts.push_back(static_cast<uint8_t>(verdict));
    finished.push_back(c.finished);
    tokens.push_back(std::move(c.tokens));
    log_probs.push_back(std::move(c.log_probs));
  }
  r.completions = gather_lists(run.comm, std::move(tokens));
  r.log_probs = gather_lists(run.comm, std::move(log_probs));
  r.finished = gather_list(run.comm, finished);
  r.verdicts = gather_list(run.comm, verdicts);
  r.reward_parts = gather_lists(run.comm, rewards.parts(judged));
  for (const auto& parts : r.reward_parts) r.rewards.push_back(rewards.total(parts));
}

}  // namespace

Rewards make_rewards(Run& run, const RlSpec& spec) {
  Rewards::Outlets outlets;
  outlets.log = [&run](const std::string& line) { run.console.line(line); };
  // Ranks answer a stop request together, so only one alone can do so here.
  if (run.comm.size() == 1) outlets.wait = [&run] { run.stop_if_requested(); };
  return {spec.rewards, spec.sampling.max_tokens, outlets};
}

Rollout sample_rollout(Run& run, const RlSpec& spec, const Task& task, Rewards& rewards) {
  Rollout r;
  r.samples_per_prompt = spec.sampling.samples;
  GenerateOptions options;
  options.temperature = spec.sampling.temperature;
  options.top_p = spec.sampling.top_p;
  options.max_tokens = spec.sampling.max_tokens;
  options.max_batch = spec.sampling.max_batch;
  for (const std::string& text : spec.sampling.end_tokens) {
    options.end_tokens.push_back(run.tokenizer->single_token(text));
  }
  options.key = site_key(run.plan.run.seed, Purpose::kSampling, 0, 0,
                         static_cast<uint32_t>(run.state.attempted_updates), 0);
  const PhiloxKey problems =
      site_key(run.plan.run.seed, Purpose::kTask, 0, static_cast<uint32_t>(run.state.stage), 0, 0);
  const Span mine = run.part(spec.sampling.prompts);  // groups stay whole
  std::vector<GenerateRequest> requests;
  for (int64_t p = 0; p < spec.sampling.prompts; ++p) {
    r.problems.push_back(task.training(problems, run.state.step * spec.sampling.prompts + p));
    r.prompts.push_back(prompt_tokens(spec.task, *run.tokenizer, r.problems.back()));
    if (p < mine.begin || p >= mine.end) continue;
    for (int64_t s = 0; s < spec.sampling.samples; ++s) {
      requests.push_back({r.prompts.back(), run.state.next_sample + p * spec.sampling.samples + s,
                          r.problems.back().max_tokens});
    }
  }
  std::vector<Completion> completions =
      generate_together(run, run.pass_for_sampling(), requests, options, "sampling");
  run.begin_counting();
  gather_completions(run, spec, task, rewards, mine.begin, std::move(completions), r);
  if (spec.task.permute_rewards) permute(r.rewards, run.plan.run.seed, run.state.step);
  r.advantages = group_advantages(r.rewards, r.samples_per_prompt, spec.objective.normalise_std);
  r.old_log_probs = score_rollout(run, spec, r, true);
  if (spec.objective.kl > 0) r.reference_log_probs = score_reference(run, spec, r);
  r.check();
  return r;
}

}  // namespace fp4t

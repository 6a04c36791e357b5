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
// of all ranks. `first_sample`: number of the rollout's first completion within the step.
void gather_completions(Run& run, const RlSpec& spec, const Task& task, Rewards& rewards, int64_t first,
                        int64_t first_sample, std::vector<Completion> completions, bool records, Rollout& r) {
  std::vector<std::vector<int32_t>> tokens;
  std::vector<std::vector<float>> log_probs;
  std::vector<std::vector<uint8_t>> router;
  std::vector<uint8_t> finished, verdicts;
  std::vector<Judged> judged;
  for (size_t i = 0; i < completions.size(); ++i) {
    Completion& c = completions[i];
    const auto problem = static_cast<size_t>(first) + i / static_cast<size_t>(r.samples_per_prompt);
    const Problem& p = r.problems[problem];
    std::string text = answer_text(*run.tokenizer, c);
    const Verdict verdict = task.verify(p, text, c.finished);
    judged.push_back(
        {.id = run.state.next_sample + first_sample + first * r.samples_per_prompt + static_cast<int64_t>(i),
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
    router.push_back(std::move(c.router));
  }
  r.completions = gather_lists(run.comm, std::move(tokens));
  r.log_probs = gather_lists(run.comm, std::move(log_probs));
  if (records) r.router = gather_lists(run.comm, std::move(router));
  r.finished = gather_list(run.comm, finished);
  r.verdicts = gather_list(run.comm, verdicts);
  r.reward_parts = gather_lists(run.comm, rewards.parts(judged));
  for (const auto& parts : r.reward_parts) r.rewards.push_back(rewards.total(parts));
}

GenerateOptions generation_of(const Run& run, const RlSpec& spec) {
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
  return options;
}

// Asks `count` problems of the stage's stream, from `first_problem` on, and rewards what comes back.
// `first_sample`: number of the first completion within the step.
Rollout ask(Run& run, const RlSpec& spec, const Task& task, Rewards& rewards, int64_t first_problem,
            int64_t count, int64_t first_sample) {
  Rollout r;
  r.samples_per_prompt = spec.sampling.samples;
  const PhiloxKey problems =
      site_key(run.plan.run.seed, Purpose::kTask, 0, static_cast<uint32_t>(run.state.stage), 0, 0);
  const Span mine = run.part(count);  // groups stay whole
  std::vector<GenerateRequest> requests;
  for (int64_t p = 0; p < count; ++p) {
    r.problems.push_back(task.training(problems, first_problem + p));
    r.prompts.push_back(prompt_tokens(spec.task, *run.tokenizer, r.problems.back()));
    if (p < mine.begin || p >= mine.end) continue;
    for (int64_t s = 0; s < spec.sampling.samples; ++s) {
      requests.push_back({r.prompts.back(),
                          run.state.next_sample + first_sample + p * spec.sampling.samples + s,
                          r.problems.back().max_tokens});
    }
  }
  Pass pass = run.pass_for_sampling();
  pass.record_router = spec.objective.router_replay != "off";
  std::vector<Completion> completions =
      generate_together(run, pass, requests, generation_of(run, spec), "sampling");
  run.clock.end(run.queue, StepPhase::kSample);
  gather_completions(run, spec, task, rewards, mine.begin, first_sample, std::move(completions),
                     pass.record_router, r);
  run.clock.end(run.queue, StepPhase::kReward);
  return r;
}

// Puts the groups of `from` in the place of `groups`.
void replace_groups(Rollout& r, const std::vector<int64_t>& groups, Rollout from) {
  const auto n = static_cast<size_t>(r.samples_per_prompt);
  for (size_t k = 0; k < groups.size(); ++k) {
    const auto g = static_cast<size_t>(groups[k]);
    r.problems[g] = std::move(from.problems[k]);
    r.prompts[g] = std::move(from.prompts[k]);
    for (size_t s = 0; s < n; ++s) {
      const size_t to = g * n + s, at = k * n + s;
      r.completions[to] = std::move(from.completions[at]);
      r.log_probs[to] = std::move(from.log_probs[at]);
      if (!r.router.empty()) r.router[to] = std::move(from.router[at]);
      r.finished[to] = from.finished[at];
      r.verdicts[to] = from.verdicts[at];
      r.reward_parts[to] = std::move(from.reward_parts[at]);
      r.rewards[to] = from.rewards[at];
    }
  }
}

// Dynamic sampling (DAPO, arXiv 2503.14476 section 3.2): groups of equal rewards give way to new problems, a
// bounded number of times. Returns how many problems were asked besides.
int64_t resample(Run& run, const RlSpec& spec, const Task& task, Rewards& rewards, int64_t next_problem,
                 Rollout& r) {
  int64_t extra = 0;
  for (int64_t tries = 0; tries < spec.objective.resample; ++tries) {
    const std::vector<int64_t> groups = equal_groups(r.rewards, r.samples_per_prompt);
    if (groups.empty()) break;
    const auto count = static_cast<int64_t>(groups.size());
    replace_groups(
        r, groups,
        ask(run, spec, task, rewards, next_problem + extra, count, r.size() + extra * r.samples_per_prompt));
    extra += count;
  }
  return extra;
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
  // Every tenth step, but not those that sum quantisation errors besides.
  run.clock.begin(run.queue, run.state.step % 10 == 1);
  if (run.clock.timed()) run.model.prepare(run.pass_for_sampling());
  run.clock.end(run.queue, StepPhase::kRefit);
  const int64_t prompts = spec.sampling.prompts;
  const auto known = run.state.counters.find(kExtraProblems);
  const int64_t before = known == run.state.counters.end() ? 0 : static_cast<int64_t>(known->second);
  const int64_t first = run.state.step * prompts + before;
  Rollout r = ask(run, spec, task, rewards, first, prompts, 0);
  const int64_t extra = resample(run, spec, task, rewards, first + prompts, r);
  run.begin_counting();
  if (spec.task.permute_rewards) permute(r.rewards, run.plan.run.seed, run.state.step);
  r.old_log_probs = score_rollout(run, spec, r);
  if (spec.objective.router_replay == "measure") r.router.clear();  // the updates do not ask for it
  if (spec.objective.kl > 0) r.reference_log_probs = score_reference(run, spec, r);
  run.clock.end(run.queue, StepPhase::kScore);
  r.advantages =
      advantages_of(shaped_rewards(r, spec.sampling.max_tokens, run.plan.model.max_positions, spec.objective),
                    r.samples_per_prompt, spec.objective);
  r.check();
  // Nothing stops the run from here on: a rollout that is made again on resume asks the same problems.
  if (spec.objective.resample > 0) {
    run.state.counters[kExtraProblems] = static_cast<double>(before + extra);
    run.add_common("resampled", static_cast<double>(extra));
  }
  return r;
}

}  // namespace fp4t

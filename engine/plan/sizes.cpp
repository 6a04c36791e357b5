#include "engine/plan/sizes.h"

#include <algorithm>

#include "engine/plan/cache_layout.h"
#include "kernels/base/numeric.h"

namespace fp4t {

namespace {

// Problems that an evaluation decodes together where the recipe has no batch of its own for it.
constexpr int64_t kEvalSlots = 256;
// Spaces, operators and brackets around the numbers of a prompt.
constexpr int64_t kPromptFrame = 16;

int64_t digits(int64_t value) { return static_cast<int64_t>(std::to_string(value).size()); }

int64_t number_width(const TaskSpec& task) { return std::max(digits(task.low), digits(task.high)); }

// What generation inside a stage needs; joined over all stages.
struct DecodeNeeds {
  int64_t slots = 0;
  int64_t prompt = 0;  // tokens of the longest
  int64_t length = 0;  // prompt and completion
  int64_t pages = 0;   // of the cache

  // `samples` of each prompt: they share the pages that the prompt fills, and a shorter prompt fills fewer
  // but leaves its completions no more than a page more.
  void add(int64_t sequences, int64_t prompt_tokens, int64_t new_tokens, int64_t samples,
           int64_t max_positions) {
    slots = std::max(slots, sequences);
    prompt = std::max(prompt, prompt_tokens);
    length = std::max(length, prompt_tokens + new_tokens);
    const int64_t all = ceil_div(std::min(prompt_tokens + new_tokens, max_positions), kKvPage);
    const int64_t own = std::min(all, ceil_div(new_tokens, kKvPage) + 1);
    const int64_t prompts = ceil_div(sequences, samples) + 1;  // in flight: the first and the last in part
    const int64_t shared = prompts * ceil_div(prompt_tokens, kKvPage);
    pages = std::max({pages, all + 1, std::min(sequences * all, sequences * own + shared)});
  }
};

// What a tokenizer with a file may put around a prompt: a begin token and a space, or a message's marks and
// its role (of the forms in engine/tokens/chat.h Llama 3's take most: 23).
int64_t tokens_in_front(const Plan& plan) {
  if (plan.tokenizer.path.empty()) return 0;
  return plan.tokenizer.chat.empty() ? 2 : 25;
}

// Rows say how long a prompt may be with all that stands around it.
int64_t longest_prompt_with_frame(const Plan& plan, const TaskSpec& task) {
  return longest_prompt(task) + (task.kind == "jsonl" ? 0 : tokens_in_front(plan));
}

// Tokens of a prompt, at most: its bytes bound them, but normalisation may make more of characters beyond
// ASCII (NFC three times as many; SentencePiece's NFKC eleven times, of U+FDFA).
int64_t most_tokens(const Plan& plan, const std::string& prompt) {
  const int64_t growth = plan.tokenizer.path.empty() ? 1 : plan.tokenizer.kind == "json" ? 3 : 11;
  int64_t tokens = tokens_in_front(plan);
  for (const char c : prompt) tokens += static_cast<uint8_t>(c) < 0x80 ? 1 : growth;
  return std::max<int64_t>(tokens, 1);
}

// A prompt must leave room for one new token; longer completions are cut at the last position.
void check_prompt(const Plan& plan, const std::string& path, int64_t prompt, ProblemList& problems) {
  if (prompt < plan.model.max_positions) return;
  problems.at(path, detail::concat("prompts of up to ", prompt,
                                   " tokens leave no position for an answer: model.max_positions is ",
                                   plan.model.max_positions));
}

void add_eval(const Plan& plan, const EvalSpec& eval, const std::string& path, DecodeNeeds& needs,
              ProblemList& problems) {
  if (eval.task) {
    const int64_t prompt = longest_prompt_with_frame(plan, *eval.task);
    check_prompt(plan, path + "eval.task", prompt, problems);
    const int64_t sequences =
        eval.task_problems > 0 ? eval.task_problems * std::max<int64_t>(eval.task_samples, 1) : kEvalSlots;
    needs.add(std::min(sequences, kEvalSlots), prompt, eval.max_tokens,
              std::max<int64_t>(eval.task_samples, 1), plan.model.max_positions);
  }
  for (size_t i = 0; i < eval.prompts.size(); ++i) {
    const int64_t prompt = most_tokens(plan, eval.prompts[i]);
    check_prompt(plan, detail::concat(path, "eval.prompts[", i, "]"), prompt, problems);
    needs.add(1, prompt, eval.max_tokens, 1, plan.model.max_positions);
  }
}

void size_pretrain(Plan& plan, StagePlan& stage, const PretrainSpec& spec, const std::string& path,
                   DecodeNeeds& needs, ProblemList& problems) {
  const int64_t micro = spec.batch.micro_sequences * spec.batch.length;
  if (micro <= 0 || spec.batch.tokens <= 0 || spec.batch.tokens % micro != 0) {
    problems.at(
        path + "batch.tokens",
        detail::concat(spec.batch.tokens, " is not a whole number of micro-batches of micro_sequences ",
                       spec.batch.micro_sequences, " x length ", spec.batch.length));
  } else {
    const int64_t sequences = spec.batch.tokens / spec.batch.length;
    if (sequences < plan.axes.ranks()) {
      problems.at(path + "batch.tokens", detail::concat(sequences, " sequences a step leave some of the ",
                                                        plan.axes.ranks(), " ranks without any"));
    }
    const int64_t most = largest_part(sequences, plan.axes.ranks());
    stage.accumulation = ceil_div(most, spec.batch.micro_sequences);
    plan.max_tokens = std::max(plan.max_tokens, std::min(micro, most * spec.batch.length));
  }
  if (spec.batch.length > plan.model.max_positions) {
    problems.at(path + "batch.length", detail::concat(spec.batch.length, " is more than model.max_positions ",
                                                      plan.model.max_positions));
  }
  add_eval(plan, spec.eval, path, needs, problems);
}

int64_t rl_sequence_length(const Plan& plan, const RlSpec& spec) {
  return std::min(longest_prompt_with_frame(plan, spec.task) + spec.sampling.max_tokens,
                  plan.model.max_positions);
}

void size_rl(Plan& plan, const RlSpec& spec, const std::string& path, DecodeNeeds& needs,
             ProblemList& problems) {
  const int64_t prompt = longest_prompt_with_frame(plan, spec.task);
  check_prompt(plan, path + "task", prompt, problems);
  const int64_t prompts = largest_part(spec.sampling.prompts, plan.axes.ranks());
  const int64_t sequences = prompts * spec.sampling.samples;  // of one rank
  const int64_t length = rl_sequence_length(plan, spec);
  if (spec.objective.micro_tokens < length) {
    problems.at(path + "objective.micro_tokens",
                detail::concat(spec.objective.micro_tokens, " does not hold one sequence, which has up to ",
                               length, " tokens (prompt and sampling.max_tokens)"));
  }
  needs.add(std::min(sequences, spec.sampling.max_batch), prompt, spec.sampling.max_tokens,
            spec.sampling.samples, plan.model.max_positions);
  plan.max_tokens = std::max(plan.max_tokens, std::min(spec.objective.micro_tokens, sequences * length));
  add_eval(plan, spec.eval, path, needs, problems);
}

}  // namespace

int64_t longest_prompt(const TaskSpec& task) {
  if (task.kind == "jsonl") return task.max_prompt_tokens;
  if (task.kind == "countdown") {
    // The target is made of the numbers, so their product bounds it.
    return task.numbers * (number_width(task) + 2) + task.numbers * number_width(task) + kPromptFrame;
  }
  return 2 * number_width(task) + 2;  // "37+58="
}

void size_plan(Plan& plan, ProblemList& problems) {
  DecodeNeeds needs;
  for (size_t i = 0; i < plan.stages.size(); ++i) {
    StagePlan& stage = plan.stages[i];
    const std::string path = detail::concat("stages[", i, stage.is_rl ? "].rl." : "].pretrain.");
    if (const auto* pretrain = std::get_if<PretrainSpec>(&stage.spec)) {
      size_pretrain(plan, stage, *pretrain, path, needs, problems);
    } else {
      const RlSpec& rl = std::get<RlSpec>(stage.spec);
      stage.updates_per_step = rl.objective.epochs * rl.objective.mini_batches;
      size_rl(plan, rl, path, needs, problems);
    }
  }
  plan.max_cache_slots = needs.slots;
  plan.max_cache_length = std::min(needs.length, plan.model.max_positions);
  plan.max_cache_pages = needs.pages;
  // Prefill in calls as large as a training forward: the two phases share their memory.
  plan.max_decode_tokens =
      std::max({needs.slots, needs.prompt, std::min(needs.slots * needs.prompt, plan.max_tokens)});
}

int64_t head_chunk(int64_t vocabulary) {
  constexpr int64_t kBytes = int64_t{1} << 30, kRows = 256;  // whole tiles of every product
  return std::max<int64_t>(kBytes / (vocabulary * 4) / kRows, 1) * kRows;
}

bool accumulates(const Plan& plan) {
  if (plan.axes.ranks() > 1) return true;
  for (const StagePlan& stage : plan.stages) {
    if (stage.accumulation > 1) return true;
    if (!stage.is_rl) continue;
    const RlSpec& spec = std::get<RlSpec>(stage.spec);
    const int64_t largest = ceil_div(spec.sampling.prompts * spec.sampling.samples,
                                     std::max<int64_t>(spec.objective.mini_batches, 1));
    if (largest * rl_sequence_length(plan, spec) > spec.objective.micro_tokens) return true;
  }
  return false;
}

double model_flops_per_token(const Plan& plan) {
  const ModelSpec& m = plan.model;
  int64_t weights = 0;
  for (const ParamInfo& p : plan.parameters) {
    const int64_t n = p.shape.elements();
    if (p.role == ParamRole::kExpertWeight) weights += n / m.moe.experts * m.moe.top_k;
    if (p.role == ParamRole::kGemmWeight || p.role == ParamRole::kRouter) weights += n;
    if (p.role == ParamRole::kEmbedding && m.tied_head) weights += n;
  }
  int64_t length = 0;
  for (const StagePlan& stage : plan.stages) {
    if (const auto* spec = std::get_if<PretrainSpec>(&stage.spec))
      length = std::max(length, spec->batch.length);
  }
  if (length == 0) length = plan.max_cache_length;
  // QK^T and PV: 2 products of 2 FLOPs, causal half, three times for forward and backward.
  const double attention = 6.0 * static_cast<double>(m.layers) * static_cast<double>(length) *
                           static_cast<double>(m.heads * m.head_dim);
  return 6.0 * static_cast<double>(weights) + attention;
}

}  // namespace fp4t

// Checks of stages.
#include <set>

#include "engine/recipe/validate.h"
#include "kernels/base/check.h"

namespace fp4t {

namespace {

using detail::concat;

int64_t digits(int64_t v) { return static_cast<int64_t>(std::to_string(v).size()); }

// A lower bound of a prompt's tokens; the exact text is the task's.
int64_t shortest_prompt(const TaskSpec& task) {
  if (task.kind == "jsonl") return 1;
  return task.kind == "sums" ? 2 * digits(task.low) + 2 : task.numbers * digits(task.low);
}

void batch_is_whole_micro_batches(Check& c, const std::string& path, const BatchSpec& b) {
  if (b.micro_sequences > 0 && b.length > 0 && b.tokens % (b.micro_sequences * b.length) != 0) {
    c.fail(path + ".batch.tokens",
           concat("found ", b.tokens, "; allowed: a multiple of micro_sequences * length (",
                  b.micro_sequences, " * ", b.length, " = ", b.micro_sequences * b.length, ")"),
           {path + ".batch.micro_sequences", path + ".batch.length"});
  }
}

void length_fits_positions(Check& c, const std::string& path, const BatchSpec& b) {
  const int64_t positions = c.recipe().model.max_positions;
  if (b.length > positions) {
    c.fail(path + ".batch.length",
           concat("found ", b.length, "; allowed: at most model.max_positions (", positions, ")"),
           {"model.max_positions"});
  }
}

// Sources take turns in a table of a thousand slots (engine/tokens/corpus.cpp).
void source_has_an_effect(Check& c, const std::string& path, const DataSourceSpec& s, double sum) {
  constexpr double kLeastShare = 0.001;
  if (s.weight == 0 && s.held_out.fraction == 0) {
    c.fail(path + ".weight",
           "found 0 for a source that holds nothing out, so nothing is ever read from it; allowed: above 0",
           {path + ".held_out"});
  } else if (s.weight > 0 && s.weight < kLeastShare * sum) {
    c.fail(path + ".weight", concat("found ", s.weight, ", ", s.weight / sum,
                                    " of all weights; allowed: 0, or a share of at least ", kLeastShare));
  }
}

void sources_have_weight_and_names(Check& c, const std::string& path,
                                   const std::vector<DataSourceSpec>& data) {
  double sum = 0;
  std::set<std::string> names;
  for (size_t i = 0; i < data.size(); ++i) {
    sum += data[i].weight;
    if (!names.insert(data[i].name).second) {
      c.fail(concat(path, ".data[", i, "].name"),
             "found " + data[i].name + " a second time; sources need names of their own");
    }
  }
  if (data.empty() && c.gave(path + ".data"))
    c.fail(path + ".data", "found an empty list; allowed: one source or more");
  if (!data.empty() && sum <= 0) {
    c.fail(path + ".data", "the weights sum to 0; allowed: at least one above 0");
    return;
  }
  for (size_t i = 0; i < data.size(); ++i)
    source_has_an_effect(c, concat(path, ".data[", i, "]"), data[i], sum);
}

// The split of sums lists its universe, the unordered pairs.
void pairs_are_listable(Check& c, const std::string& path, int64_t low, int64_t high) {
  constexpr int64_t kMostPairs = 10'000'000;
  const int64_t n = high - low + 1;
  if (n > 0 && n * (n + 1) / 2 > kMostPairs) {
    c.fail(path + ".high",
           concat("found ", high, ", which with low ", low, " makes ", n * (n + 1) / 2,
                  " pairs to split; allowed: at most ", kMostPairs),
           {path + ".low"});
  }
}

void hash_is_hexadecimal(Check& c, const std::string& path, const HeldOutSpec& s) {
  const bool good = s.hash.size() == 16 && s.hash.find_first_not_of("0123456789abcdef") == std::string::npos;
  if (!s.hash.empty() && !good) {
    c.fail(path + ".held_out.hash", "found " + s.hash + "; allowed: 16 hexadecimal digits in lower case");
  }
}

// Problems are texts, which need a tokenizer that spells them.
void problems_are_spelt(Check& c, const std::string& path) {
  if (c.recipe().tokenizer.kind != "ids") return;
  c.fail(path,
         "found problems in words; tokenizer.kind ids has no tokens for them, allowed with tokenizer.kind "
         "bytes, json or sentencepiece",
         {"tokenizer"});
}

void source_is_complete(Check& c, const std::string& path, const DataSourceSpec& s) {
  const bool files = s.kind != "sums" && s.kind != "countdown" && s.kind != "random";
  if (files && c.gave(path + ".paths") && s.paths.empty()) {
    c.fail(path + ".paths", "found an empty list; allowed: files or folders");
  }
  const bool problems = s.kind == "sums" || s.kind == "countdown";
  if (problems && s.low > s.high) {
    c.fail(path + ".low", concat("found ", s.low, "; allowed: at most high (", s.high, ")"),
           {path + ".high"});
  }
  if (s.held_out.fraction >= 1 && (problems || s.weight > 0)) {
    c.fail(path + ".held_out.fraction",
           std::string("found 1, which leaves nothing to train on; allowed: less") +
               (problems ? "" : ", or with weight 0, for files that are only measured"));
  }
  if (s.separator.find_first_of("\r\n") != std::string::npos) {
    c.fail(path + ".separator",
           "found a text of more than one line; allowed: the line that separates documents");
  }
  if (problems) problems_are_spelt(c, path + ".kind");
  if (s.kind == "sums") pairs_are_listable(c, path, s.low, s.high);
  hash_is_hexadecimal(c, path, s.held_out);
}

void rows_are_readable(Check& c, const std::string& path, const TaskSpec& t) {
  if (c.gave(path + ".paths") && t.paths.empty()) {
    c.fail(path + ".paths", "found an empty list; allowed: files or folders");
  }
  if (t.prompt_template.find("{prompt}") == std::string::npos) {
    c.fail(path + ".template", "found a text without {prompt}; allowed: a text with {prompt} in it");
  }
  const int64_t positions = c.recipe().model.max_positions;
  if (t.max_prompt_tokens >= positions) {
    c.fail(
        path + ".max_prompt_tokens",
        concat("found ", t.max_prompt_tokens, "; allowed: less than model.max_positions (", positions, ")"),
        {"model.max_positions"});
  }
}

void task_is_complete(Check& c, const std::string& path, const TaskSpec& t, bool trains) {
  problems_are_spelt(c, path);
  if (t.kind == "jsonl") rows_are_readable(c, path, t);
  if (t.low > t.high) {
    c.fail(path + ".low", concat("found ", t.low, "; allowed: at most high (", t.high, ")"),
           {path + ".high"});
  }
  if (trains && t.held_out.fraction >= 1) {
    c.fail(path + ".held_out.fraction", "found 1, which leaves nothing to train on; allowed: less");
  }
  if (!trains && t.held_out.fraction <= 0) {
    c.fail(path + ".held_out.fraction",
           "found 0; accuracy is measured on held-out problems, allowed: above 0");
  }
  if (t.kind == "sums") pairs_are_listable(c, path, t.low, t.high);
  hash_is_hexadecimal(c, path, t.held_out);
}

void two_checkpoints_are_kept(Check& c, const std::string& path, const CheckpointSpec& s) {
  if (s.keep < 2 && c.recipe().run.resume == "auto") {
    c.fail(path + ".checkpoint.keep",
           concat("found ", s.keep,
                  "; allowed: at least 2 with run.resume auto, so that one stays when the newest "
                  "turns out damaged"),
           {"run.resume"});
  }
}

void completions_fit_positions(Check& c, const std::string& path, const std::string& key,
                               const TaskSpec& task, int64_t max_tokens) {
  const int64_t positions = c.recipe().model.max_positions;
  const int64_t prompt = shortest_prompt(task);
  if (max_tokens > positions - prompt) {
    c.fail(path + key,
           concat("found ", max_tokens, "; with a prompt of ", prompt,
                  " or more, allowed: prompt and completion within model.max_positions (", positions, ")"),
           {"model.max_positions", path + ".task"});
  }
}

void end_tokens_are_single(Check& c, const std::string& path, const std::vector<std::string>& texts) {
  for (const std::string& text : texts) {
    // Tokens of a file are known when it is read (engine/tokens/inputs.h).
    if (text == "<eod>" || text.size() == 1 || c.recipe().tokenizer.kind != "bytes") continue;
    c.fail(path,
           "found \"" + text +
               "\", which is not one token of tokenizer.kind bytes; allowed: one byte, or \"<eod>\"",
           {"tokenizer"});
  }
}

void eval_is_complete(Check& c, const std::string& path, const EvalSpec& e) {
  end_tokens_are_single(c, path + ".eval.end_tokens", e.end_tokens);
  if (!e.task) return;
  task_is_complete(c, path + ".eval.task", *e.task, false);
  completions_fit_positions(c, path + ".eval", ".max_tokens", *e.task, e.max_tokens);
}

// Completions lie in host memory, which the plan does not price.
void completions_are_countable(Check& c, const std::string& path, const RlSpec& s) {
  constexpr int64_t kMostCompletions = 10'000'000;
  const int64_t completions = s.sampling.prompts * s.sampling.samples;
  if (completions > kMostCompletions) {
    c.fail(path + ".sampling.prompts",
           concat("found ", s.sampling.prompts, ", which with samples ", s.sampling.samples, " makes ",
                  completions, " completions a step; allowed: at most ", kMostCompletions),
           {path + ".sampling.samples"});
  }
}

void micro_tokens_hold_a_completion(Check& c, const std::string& path, const RlSpec& s) {
  const int64_t longest = shortest_prompt(s.task) + s.sampling.max_tokens;
  if (s.objective.micro_tokens < longest) {
    c.fail(path + ".objective.micro_tokens",
           concat("found ", s.objective.micro_tokens, "; allowed: room for one prompt and completion (",
                  longest, " or more)"),
           {path + ".sampling", path + ".task"});
  }
}

void rewards_are_complete(Check& c, const std::string& path, const RlSpec& s) {
  std::set<std::string> names;
  bool any = s.rewards.empty();
  if (any && c.gave(path + ".rewards")) {
    c.fail(path + ".rewards", "found an empty list; allowed: one part or more, or leave the key out");
  }
  for (size_t i = 0; i < s.rewards.size(); ++i) {
    const RewardSpec& r = s.rewards[i];
    const std::string at = concat(path, ".rewards[", i, "]");
    any = any || r.weight != 0;
    if (!names.insert(r.name).second) {
      c.fail(at + ".name", "found " + r.name + " a second time; parts need names of their own");
    }
    if (r.kind == "length" && r.free_tokens >= s.sampling.max_tokens) {
      c.fail(at + ".free_tokens",
             concat("found ", r.free_tokens, "; allowed: less than sampling.max_tokens (",
                    s.sampling.max_tokens, ")"),
             {path + ".sampling.max_tokens"});
    }
    const bool named = !r.command.empty() && !r.command[0].empty();
    if (r.kind == "process" && c.gave(at + ".command") && !named) {
      c.fail(at + ".command", "found no program; allowed: a program and its arguments");
    }
  }
  if (!any)
    c.fail(path + ".rewards", "found only parts of weight 0; allowed: at least one of another weight");
}

const OptimizerSpec& optimizer_of(const StageSpec& stage) {
  return std::visit([](const auto& s) -> const OptimizerSpec& { return s.optimizer; }, stage);
}

void kept_state_is_there(Check& c, const std::string& path, size_t index) {
  const OptimizerSpec& optimizer = optimizer_of(c.recipe().stages[index]);
  if (optimizer.state != "keep") return;
  const std::string key = path + ".optimizer.state";
  if (index == 0 && c.recipe().run.branch_from.empty()) {
    c.fail(key,
           "found keep in the first stage of a run that does not branch from a checkpoint; allowed: fresh",
           {"run.branch_from"});
  } else if (index > 0 && optimizer_of(c.recipe().stages[index - 1]).kind != optimizer.kind) {
    c.fail(key,
           "found keep, but the stage before has optimizer.kind " +
               optimizer_of(c.recipe().stages[index - 1]).kind + "; allowed: fresh, or the same kind",
           {path + ".optimizer.kind"});
  }
}

double updates_of(const StageSpec& stage) {
  const auto* rl = std::get_if<RlSpec>(&stage);
  if (!rl) return static_cast<double>(std::get<PretrainSpec>(stage).steps);
  return static_cast<double>(rl->steps) * static_cast<double>(rl->objective.epochs) *
         static_cast<double>(rl->objective.mini_batches);
}

// Updates of a run are numbered by one 32-bit word of the random keys (NUMERICS.md section 0.0).
void updates_are_numbered(Check& c) {
  double total = 0;
  for (const StageSpec& stage : c.recipe().stages) total += updates_of(stage);
  if (total >= 0x1p32) {
    c.fail("stages", concat("found ", total,
                            " updates in all (steps, times epochs and mini_batches in rl); "
                            "allowed: less than 4294967296"));
  }
}

void check_pretrain(Check& c, const std::string& path, const PretrainSpec& s) {
  batch_is_whole_micro_batches(c, path, s.batch);
  length_fits_positions(c, path, s.batch);
  sources_have_weight_and_names(c, path, s.data);
  for (size_t i = 0; i < s.data.size(); ++i) source_is_complete(c, concat(path, ".data[", i, "]"), s.data[i]);
}

void check_rl(Check& c, const std::string& path, const RlSpec& s) {
  task_is_complete(c, path + ".task", s.task, true);
  rewards_are_complete(c, path, s);
  completions_are_countable(c, path, s);
  validate_objective(c, path, s);
  micro_tokens_hold_a_completion(c, path, s);
  if (s.sampling.end_tokens.empty()) {
    c.fail(path + ".sampling.end_tokens",
           "found an empty list; allowed: one text or more, such as \"<eod>\"");
  }
  end_tokens_are_single(c, path + ".sampling.end_tokens", s.sampling.end_tokens);
  completions_fit_positions(c, path, ".sampling.max_tokens", s.task, s.sampling.max_tokens);
}

}  // namespace

void validate_stages(Check& c) {
  const std::vector<StageSpec>& stages = c.recipe().stages;
  if (stages.empty() && c.gave("stages")) c.fail("stages", "found an empty list; allowed: one stage or more");
  updates_are_numbered(c);
  std::set<std::string> names;
  for (size_t i = 0; i < stages.size(); ++i) {
    const bool rl = stages[i].index() == 1;
    const std::string path = concat("stages[", i, rl ? "].rl" : "].pretrain");
    std::visit(
        [&](const auto& s) {
          if (!names.insert(s.name).second) {
            c.fail(path + ".name", "found " + s.name + " a second time; stages need names of their own");
          }
          eval_is_complete(c, path, s.eval);
          two_checkpoints_are_kept(c, path, s.checkpoint);
        },
        stages[i]);
    kept_state_is_there(c, path, i);
    if (rl) {
      check_rl(c, path, std::get<RlSpec>(stages[i]));
    } else {
      check_pretrain(c, path, std::get<PretrainSpec>(stages[i]));
    }
  }
}

}  // namespace fp4t

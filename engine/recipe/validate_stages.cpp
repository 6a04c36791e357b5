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
  return task.kind == "sums" ? 2 * digits(task.low) + 2 : task.numbers * digits(task.low);
}

void batch_is_whole_micro_batches(Check& c, const std::string& path, const BatchSpec& b) {
  if (b.micro_sequences > 0 && b.length > 0 && b.length <= (int64_t{1} << 40) / b.micro_sequences &&
      b.tokens % (b.micro_sequences * b.length) != 0) {
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
  if (!data.empty() && sum <= 0)
    c.fail(path + ".data", "the weights sum to 0; allowed: at least one above 0");
}

void source_is_complete(Check& c, const std::string& path, const DataSourceSpec& s) {
  const bool files = s.kind == "text" || s.kind == "jsonl";
  if (files && c.gave(path + ".paths") && s.paths.empty()) {
    c.fail(path + ".paths", "found an empty list; allowed: files or folders");
  }
  if (!files && s.low > s.high) {
    c.fail(path + ".low", concat("found ", s.low, "; allowed: at most high (", s.high, ")"),
           {path + ".high"});
  }
  if (s.held_out.fraction >= 1) {
    c.fail(path + ".held_out.fraction", "found 1, which leaves nothing to train on; allowed: less");
  }
}

void task_is_complete(Check& c, const std::string& path, const TaskSpec& t, bool trains) {
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

void eval_is_complete(Check& c, const std::string& path, const EvalSpec& e) {
  if (!e.task) return;
  task_is_complete(c, path + ".eval.task", *e.task, false);
  completions_fit_positions(c, path + ".eval", ".max_tokens", *e.task, e.max_tokens);
}

void samples_form_groups(Check& c, const std::string& path, const RlSpec& s) {
  if (s.objective.kind == "grpo" && s.sampling.samples < 2) {
    c.fail(path + ".sampling.samples",
           concat("found ", s.sampling.samples,
                  "; allowed: at least 2, grpo compares completions of one problem"),
           {path + ".objective.kind"});
  }
}

void mini_batches_are_not_empty(Check& c, const std::string& path, const RlSpec& s) {
  const int64_t completions = s.sampling.prompts * s.sampling.samples;
  if (s.objective.mini_batches > completions) {
    c.fail(path + ".objective.mini_batches",
           concat("found ", s.objective.mini_batches, "; allowed: at most prompts * samples (", completions,
                  ")"),
           {path + ".sampling"});
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

void end_tokens_are_single(Check& c, const std::string& path, const SamplingSpec& s) {
  if (s.end_tokens.empty()) {
    c.fail(path + ".sampling.end_tokens",
           "found an empty list; allowed: one text or more, such as \"<eod>\"");
  }
  for (const std::string& text : s.end_tokens) {
    if (text == "<eod>" || text.size() == 1) continue;
    c.fail(path + ".sampling.end_tokens",
           "found \"" + text +
               "\", which is not one token of tokenizer.kind bytes; allowed: one byte, or \"<eod>\"",
           {"tokenizer"});
  }
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

void check_pretrain(Check& c, const std::string& path, const PretrainSpec& s) {
  batch_is_whole_micro_batches(c, path, s.batch);
  length_fits_positions(c, path, s.batch);
  sources_have_weight_and_names(c, path, s.data);
  for (size_t i = 0; i < s.data.size(); ++i) source_is_complete(c, concat(path, ".data[", i, "]"), s.data[i]);
}

void check_rl(Check& c, const std::string& path, const RlSpec& s) {
  task_is_complete(c, path + ".task", s.task, true);
  samples_form_groups(c, path, s);
  mini_batches_are_not_empty(c, path, s);
  micro_tokens_hold_a_completion(c, path, s);
  end_tokens_are_single(c, path, s.sampling);
  completions_fit_positions(c, path, ".sampling.max_tokens", s.task, s.sampling.max_tokens);
}

}  // namespace

void validate_stages(Check& c) {
  const std::vector<StageSpec>& stages = c.recipe().stages;
  if (stages.empty() && c.gave("stages")) c.fail("stages", "found an empty list; allowed: one stage or more");
  std::set<std::string> names;
  for (size_t i = 0; i < stages.size(); ++i) {
    const bool rl = stages[i].index() == 1;
    const std::string path = concat("stages[", i, rl ? "].rl" : "].pretrain");
    std::visit(
        [&](const auto& s) {
          if (s.name.empty()) c.fail(path + ".name", "found an empty text; allowed: a name");
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

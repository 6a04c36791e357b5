// Keys of the stages.
#include "engine/recipe/fields.h"

namespace fp4t {

namespace {

// `generated`: the documents are problems that a seed enumerates, so their held-out list has a hash.
// `endless`: there is no list of documents that could be split.
void visit_held_out(FieldVisitor& v, HeldOutSpec& s, ResumeClass c, bool generated, bool endless = false) {
  const bool on = s.fraction > 0;
  v.value(Field("fraction", "share of documents or problems kept out of training", c)
              .at_least(0)
              .at_most(1)
              .only_if(!endless, "kind is not random"),
          s.fraction);
  v.value(Field("seed", "seed of the split", c).only_if(on, "fraction is above 0"), s.seed);
  v.value(Field("hash", "XXH3 of the held-out list, in hex; checked at start", c)
              .or_empty("it is not checked")
              .only_if(on, "fraction is above 0")
              .only_if(generated, "kind is sums or countdown"),
          s.hash);
}

void visit_source(FieldVisitor& v, DataSourceSpec& s) {
  const bool text = s.kind == "text", jsonl = s.kind == "jsonl";
  const bool countdown = s.kind == "countdown", problems = s.kind == "sums" || countdown;
  const bool nanogpt = s.kind == "nanogpt", tokens = s.kind == "megatron" || s.kind == "llmc" || nanogpt;
  const bool files = text || jsonl || tokens;
  v.value(course("name", "in metrics; default: kind").one_line(), s.name);
  v.value(
      course("kind",
             "where documents come from; megatron, llmc, nanogpt: files of tokens in those programs' forms; "
             "random: tokens drawn evenly, for benchmarks")
          .one_of({"text", "jsonl", "megatron", "llmc", "nanogpt", "sums", "countdown", "random"}),
      s.kind);
  v.value(course("paths", "files or folders, globs allowed")
              .only_if(files, "kind is text, jsonl, megatron, llmc or nanogpt")
              .required(),
          s.paths);
  v.value(course("separator", "line that separates documents")
              .or_empty("one document a file")
              .only_if(text, "kind is text"),
          s.separator);
  v.value(course("field",
                 "key that holds the text of a line, or with tokenizer.chat a conversation: a list of "
                 "{role, content}")
              .only_if(jsonl, "kind is jsonl"),
          s.field);
  v.value(course("loss_on",
                 "tokens of conversations that are trained: assistant (what its messages say, and what ends "
                 "them) or all")
              .one_of({"assistant", "all"})
              .only_if(jsonl, "kind is jsonl"),
          s.loss_on);
  v.value(course("weight", "share of the tokens").at_least(0).at_most(kMostFactor), s.weight);
  v.value(course("end_of_document", "append <eod> to each document")
              .only_if(!tokens, "kind is not megatron, llmc or nanogpt"),
          s.end_of_document);
  v.value(course("special_tokens", "texts of the vocabulary's special tokens are those tokens, not text")
              .only_if(text || jsonl, "kind is text or jsonl"),
          s.special_tokens);
  v.value(course("dtype", "of the tokens in the files")
              .one_of({"uint16", "uint32"})
              .only_if(nanogpt, "kind is nanogpt"),
          s.dtype);
  v.value(course("low", "smallest number")
              .at_least(0)
              .at_most(kMostCount)
              .only_if(problems, "kind is sums or countdown"),
          s.low);
  v.value(course("high", "largest number")
              .at_least(0)
              .at_most(kMostCount)
              .only_if(problems, "kind is sums or countdown"),
          s.high);
  v.value(course("wrong_fraction",
                 "share of documents whose answer is wrong on purpose: off by one in sums, "
                 "another expression of the same numbers in countdown")
              .at_least(0)
              .at_most(1)
              .only_if(problems, "kind is sums or countdown"),
          s.wrong_fraction);
  v.value(course("numbers", "numbers a problem")
              .at_least(2)
              .at_most(kMostNumbers)
              .only_if(countdown, "kind is countdown"),
          s.numbers);
  if (v.enter(course("held_out", "what training never sees"))) {
    visit_held_out(v, s.held_out, ResumeClass::kCourse, problems, s.kind == "random");
    v.leave();
  }
}

enum class TaskUse { kTrain, kEval };

// Keys of a task whose problems are rows of JSON lines.
void visit_rows(FieldVisitor& v, TaskSpec& s, ResumeClass c) {
  const bool rows = s.kind == "jsonl";
  const char* const when = "kind is jsonl";
  v.value(Field("paths", "files or folders, globs allowed", c).only_if(rows, when).required(), s.paths);
  v.value(Field("prompt_field",
                "key that holds a row's prompt: a text, or with tokenizer.chat a list of {role, content}", c)
              .only_if(rows, when),
          s.prompt_field);
  v.value(Field("answer_field", "key that holds a row's answer: a text or a number", c).only_if(rows, when),
          s.answer_field);
  v.value(Field("limit_field", "key that may hold a row's own max_tokens", c)
              .or_empty("rows have none")
              .only_if(rows, when),
          s.limit_field);
  v.value(Field("template", "what the model reads, {prompt} standing for the prompt", c).only_if(rows, when),
          s.prompt_template);
  v.value(Field("max_prompt_tokens", "the longest prompt, template included", c)
              .at_least(1)
              .at_most(kMostWidth)
              .only_if(rows, when),
          s.max_prompt_tokens);
  if (!v.enter(Field("answer", "where answers stand and how they are compared", c).only_if(rows, when)))
    return;
  AnswerSpec& a = s.answer;
  v.value(Field("form",
                "in a completion: all of it; behind the last ####; in the last \\boxed{}; the last match", c)
              .one_of({"exact", "hash", "boxed", "regex"})
              .only_if(rows, when),
          a.form);
  v.value(Field("gold", "in the files: all of it; behind the last ####; in the last \\boxed{}", c)
              .one_of({"exact", "hash", "boxed"})
              .only_if(rows, when),
          a.gold);
  v.value(Field("pattern", "PCRE2 expression; its first group, if it has one, is the answer", c)
              .only_if(rows, when)
              .only_if(a.form == "regex", "form is regex")
              .required(),
          a.pattern);
  v.value(Field("compare", "number: exactly, as rationals; text: byte by byte without white space around", c)
              .one_of({"number", "text"})
              .only_if(rows, when),
          a.compare);
  v.leave();
}

void visit_task(FieldVisitor& v, TaskSpec& s, TaskUse use) {
  // What is asked in training changes the course; what is only measured does not.
  const ResumeClass c = use == TaskUse::kTrain ? ResumeClass::kCourse : ResumeClass::kOutput;
  const bool rows = s.kind == "jsonl";
  const char* const generated = "kind is sums or countdown";
  v.value(Field("kind", "what is asked; jsonl: rows of files", c).one_of({"sums", "countdown", "jsonl"}),
          s.kind);
  v.value(Field("low", "smallest number", c).at_least(0).at_most(kMostCount).only_if(!rows, generated),
          s.low);
  v.value(Field("high", "largest number", c).at_least(0).at_most(kMostCount).only_if(!rows, generated),
          s.high);
  v.value(Field("numbers", "numbers a problem", c)
              .at_least(2)
              .at_most(kMostNumbers)
              .only_if(s.kind == "countdown", "kind is countdown"),
          s.numbers);
  visit_rows(v, s, c);
  if (v.enter(Field("held_out", "problems that training never sees", c))) {
    visit_held_out(v, s.held_out, c, true);
    v.leave();
  }
  if (use == TaskUse::kTrain) {
    v.value(course("permute_rewards", "control experiment: rewards shuffled over all completions of a step"),
            s.permute_rewards);
  }
}

void visit_optimizer(FieldVisitor& v, OptimizerSpec& s) {
  const bool muon = s.kind == "muon";
  v.value(course("kind", "muon: matrices by Muon, the rest by AdamW").one_of({"adamw", "muon"}), s.kind);
  v.value(course("learning_rate", "of AdamW, at the top of the schedule").at_least(0).at_most(1e3),
          s.learning_rate);
  v.value(course("beta1", "decay of the first moment").at_least(0).at_most(0.999999), s.beta1);
  v.value(course("beta2", "decay of the second moment").at_least(0).at_most(0.999999), s.beta2);
  v.value(course("eps", "added to the root of the second moment").at_least(1e-30).at_most(1), s.eps);
  v.value(course("weight_decay", "decoupled, on matrices only").at_least(0).at_most(1e3), s.weight_decay);
  v.value(course("clip_norm", "largest global gradient norm; 0: no clipping").at_least(0).at_most(kMostReal),
          s.clip_norm);
  v.value(course("muon_learning_rate", "of Muon, at the top of the schedule")
              .at_least(0)
              .at_most(1e3)
              .only_if(muon, "kind is muon"),
          s.muon_learning_rate);
  v.value(course("muon_momentum", "of Muon").at_least(0).at_most(0.999999).only_if(muon, "kind is muon"),
          s.muon_momentum);
  v.value(course("muon_iterations", "Newton-Schulz iterations")
              .at_least(1)
              .at_most(100)
              .only_if(muon, "kind is muon"),
          s.muon_iterations);
  v.value(course("state", "moments at the start of the stage").one_of({"fresh", "keep"}), s.state);
}

void visit_schedule(FieldVisitor& v, ScheduleSpec& s) {
  v.value(course("kind", "how the learning rate falls").one_of({"constant", "cosine", "linear", "wsd"}),
          s.kind);
  v.value(course("warmup", "updates of linear rise").at_least(0).at_most(kMostCount), s.warmup);
  v.value(course("final_fraction", "of the learning rate, reached at the last update")
              .at_least(0)
              .at_most(1)
              .only_if(s.kind != "constant", "kind is cosine, linear or wsd"),
          s.final_fraction);
  v.value(course("decay_fraction", "the last part of the updates, which decays")
              .above(0)
              .at_most(1)
              .only_if(s.kind == "wsd", "kind is wsd"),
          s.decay_fraction);
}

void visit_eval(FieldVisitor& v, EvalSpec& s) {
  const bool task = s.task.has_value();
  v.value(output("every", "steps between evaluations; 0: only at the start and the end of the stage")
              .at_least(0)
              .at_most(kMostCount),
          s.every);
  v.value(output("tokens", "held-out tokens a source, at most").at_least(1).at_most(kMostCount), s.tokens);
  bool present = task;
  if (v.enter_optional(output("task", "accuracy on its held-out problems"), present)) {
    if (!s.task) s.task.emplace();
    visit_task(v, *s.task, TaskUse::kEval);
    v.leave();
  }
  v.value(output("task_samples", "completions a problem at temperature 1, besides one greedy")
              .at_least(0)
              .at_most(kMostSequences)
              .only_if(task, "task is given"),
          s.task_samples);
  v.value(output("task_problems", "0: all of the held-out problems")
              .at_least(0)
              .at_most(kMostCount)
              .only_if(task, "task is given"),
          s.task_problems);
  v.value(output("max_tokens", "longest completion")
              .at_least(1)
              .at_most(kMostWidth)
              .only_if(task || !s.prompts.empty(), "task or prompts is given"),
          s.max_tokens);
  v.value(output("end_tokens",
                 "texts of one token that end a completion; default: in rl sampling.end_tokens, else "
                 "the tokenizer's line ends, of answers with tokenizer.chat what ends a message")
              .only_if(task || !s.prompts.empty(), "task or prompts is given"),
          s.end_tokens);
  v.value(output("prompts", "texts whose completions are shown"), s.prompts);
}

void visit_checkpoint(FieldVisitor& v, CheckpointSpec& s, bool is_rl) {
  v.value(output("every", "steps between checkpoints; 0: only at the end of the stage")
              .at_least(0)
              .at_most(kMostCount),
          s.every);
  if (is_rl) {
    v.value(output("every_updates", "updates between checkpoints inside a rollout; 0: off")
                .at_least(0)
                .at_most(kMostCount),
            s.every_updates);
  }
  v.value(output("keep", "checkpoints that stay on disk, those of earlier stages counted and removed, too")
              .at_least(1)
              .at_most(kMostSequences),
          s.keep);
}

void visit_batch(FieldVisitor& v, BatchSpec& s) {
  v.value(course("tokens", "tokens a step: micro_sequences * length * a whole number")
              .at_least(1)
              .at_most(kMostCount)
              .required(),
          s.tokens);
  v.value(layout("micro_sequences", "sequences a micro-batch").at_least(1).at_most(kMostSequences),
          s.micro_sequences);
  v.value(course("length", "tokens a sequence").at_least(1).at_most(kMostWidth).required(), s.length);
}

void visit_sampling(FieldVisitor& v, SamplingSpec& s) {
  v.value(course("prompts", "problems a step").at_least(1).at_most(kMostSequences), s.prompts);
  v.value(course("samples", "completions a problem").at_least(1).at_most(kMostSequences), s.samples);
  v.value(course("temperature", "of the sampled distribution").at_least(1e-3).at_most(1e3), s.temperature);
  v.value(course("top_p", "smallest set of tokens with this probability is sampled from")
              .at_least(1e-6)
              .at_most(1),
          s.top_p);
  v.value(course("max_tokens", "longest completion").at_least(1).at_most(kMostWidth), s.max_tokens);
  v.value(layout("max_batch", "sequences decoded together").at_least(1).at_most(kMostSequences), s.max_batch);
  v.value(course("end_tokens",
                 "texts of one token, or <eod>, that end a completion; default: \\n, with tokenizer.chat "
                 "what ends a message"),
          s.end_tokens);
}

void visit_reward(FieldVisitor& v, RewardSpec& s) {
  const bool process = s.kind == "process";
  const char* const of_process = "kind is process";
  v.value(course("kind",
                 "verifier: 1 when right; length: 0 to -1 near max_tokens; format: 1 when a pattern occurs; "
                 "process: a program's answer")
              .one_of({"verifier", "length", "format", "process"}),
          s.kind);
  v.value(course("name", "in metrics and rollouts; default: kind").one_line(), s.name);
  v.value(course("weight", "of this part in the sum").at_least(-kMostFactor).at_most(kMostFactor), s.weight);
  v.value(course("free_tokens",
                 "tokens that cost nothing; from there the part falls in a line to -1 at "
                 "sampling.max_tokens")
              .at_least(0)
              .at_most(kMostWidth)
              .only_if(s.kind == "length", "kind is length"),
          s.free_tokens);
  v.value(course("pattern", "PCRE2 expression that is searched for in a completion")
              .only_if(s.kind == "format", "kind is format")
              .required(),
          s.pattern);
  v.value(course("command", "program and arguments, run without a shell; JSON lines in and out")
              .only_if(process, of_process)
              .required(),
          s.command);
  v.value(output("timeout_seconds", "longest wait for the next answer")
              .above(0)
              .at_most(kMostCount)
              .only_if(process, of_process),
          s.timeout_seconds);
  v.value(output("restarts", "of the program in a row, before the run stops")
              .at_least(0)
              .at_most(kMostCount)
              .only_if(process, of_process),
          s.restarts);
  v.value(output("cpu_seconds", "CPU time of one process; 0: no limit")
              .at_least(0)
              .at_most(kMostCount)
              .only_if(process, of_process),
          s.cpu_seconds);
  v.value(output("memory_mib", "address space of one process, in MiB; 0: no limit")
              .at_least(0)
              .at_most(kMostCount)
              .only_if(process, of_process),
          s.memory_mib);
  v.value(output("file_mib", "largest file that it may write, in MiB; 0: no limit")
              .at_least(0)
              .at_most(kMostCount)
              .only_if(process, of_process),
          s.file_mib);
}

void visit_rollouts(FieldVisitor& v, RolloutsSpec& s) {
  v.value(output("every", "steps between files of completions; 0: off").at_least(0).at_most(kMostCount),
          s.every);
  v.value(output("keep", "files that stay on disk; 0: all")
              .at_least(0)
              .at_most(kMostCount)
              .only_if(s.every > 0, "every is above 0"),
          s.keep);
}

template <class Stage>
void visit_training(FieldVisitor& v, Stage& s, bool is_rl) {
  if (v.enter(course("optimizer", "how gradients become updates"))) {
    visit_optimizer(v, s.optimizer);
    v.leave();
  }
  if (v.enter(course("schedule", "learning rate over the stage's updates"))) {
    visit_schedule(v, s.schedule);
    v.leave();
  }
  if (v.enter(output("eval", "what is measured"))) {
    visit_eval(v, s.eval);
    v.leave();
  }
  if (v.enter(output("checkpoint", "what is saved when"))) {
    visit_checkpoint(v, s.checkpoint, is_rl);
    v.leave();
  }
  v.value(course("on_nonfinite", "at NaN or Inf: skip the update, or stop").one_of({"skip", "stop"}),
          s.on_nonfinite);
  v.value(course("max_skips", "consecutive skips before the run stops")
              .at_least(0)
              .at_most(kMostCount)
              .only_if(s.on_nonfinite == "skip", "on_nonfinite is skip"),
          s.max_skips);
}

}  // namespace

void visit_pretrain(FieldVisitor& v, PretrainSpec& s) {
  v.value(output("name", "in metrics; unique in the recipe").one_line(), s.name);
  v.value(course("steps", "optimizer updates").at_least(1).at_most(kMostCount).required(), s.steps);
  if (v.enter(course("batch", "what one step sees").required())) {
    visit_batch(v, s.batch);
    v.leave();
  }
  const size_t size =
      v.enter_list(course("data", "sources that are mixed by weight").required(), s.data.size());
  s.data.resize(size);
  for (size_t i = 0; i < size; ++i) {
    if (!v.enter_item(i)) continue;
    visit_source(v, s.data[i]);
    v.leave();
  }
  v.leave();
  visit_training(v, s, false);
  v.value(course("z_loss", "coefficient on the square of the logits' log-sum-exp; 0: off")
              .at_least(0)
              .at_most(kMostFactor),
          s.z_loss);
}

void visit_rl(FieldVisitor& v, RlSpec& s) {
  v.value(output("name", "in metrics; unique in the recipe").one_line(), s.name);
  v.value(course("steps", "rollouts, each with all its updates").at_least(1).at_most(kMostCount).required(),
          s.steps);
  if (v.enter(course("task", "what is asked and rewarded").required())) {
    visit_task(v, s.task, TaskUse::kTrain);
    v.leave();
  }
  const size_t rewards = v.enter_list(
      course("rewards", "parts of the reward, summed by weight; default: the verifier"), s.rewards.size());
  s.rewards.resize(rewards);
  for (size_t i = 0; i < rewards; ++i) {
    if (!v.enter_item(i)) continue;
    visit_reward(v, s.rewards[i]);
    v.leave();
  }
  v.leave();
  if (v.enter(output("rollouts", "completions written as JSON lines"))) {
    visit_rollouts(v, s.rollouts);
    v.leave();
  }
  if (v.enter(course("sampling", "how completions are drawn"))) {
    visit_sampling(v, s.sampling);
    v.leave();
  }
  if (v.enter(course("objective", "what updates maximise"))) {
    visit_objective(v, s.objective, s.sampling.max_tokens);
    v.leave();
  }
  visit_training(v, s, true);
  v.value(
      course(
          "stop_without_signal",
          "steps in a row in which all groups have equal rewards, all completions are cut or all tokens are "
          "masked, before the run stops; 0: it only warns")
          .at_least(0)
          .at_most(kMostCount),
      s.stop_without_signal);
}

}  // namespace fp4t

// Evaluation: held-out loss by source, accuracy on held-out problems, samples to look at. Forward passes
// use pretrain.forward (in RL stages rl.trainer.forward), generation uses rl.sampler.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "engine/stage/context.h"
#include "engine/tokens/corpus.h"
#include "engine/tokens/tasks.h"

namespace fp4t {

struct HeldOutLoss {
  std::map<std::string, double> by_source;  // nats a token
  double text = 0;                          // over text and jsonl sources together
  bool has_text = false;
};
HeldOutLoss held_out_loss(Run& run, const Corpus& corpus, const std::vector<DataSourceSpec>& sources,
                          int64_t max_tokens);

struct TaskAccuracy {
  double sampled = 0;  // temperature 1
  double greedy = 0;
  double unverifiable = 0;  // share of the sampled completions that hold no answer that can be checked
  int64_t problems = 0, samples = 0;
};
TaskAccuracy task_accuracy(Run& run, const EvalSpec& spec);

// Continuations of spec.prompts at temperature 1, one line each.
std::vector<std::string> text_samples(Run& run, const EvalSpec& spec);

// A stop request is answered in the middle: the state that is saved lacks the evaluation, which is made anew.
// All of the above at the current step: logs, writes a metrics line of kind "eval", and keeps the figures
// in the run's counters under "eval.<moment>." (moment: start, end, or "" for in between).
void evaluate(Run& run, const Corpus* corpus, const std::vector<DataSourceSpec>& sources,
              const EvalSpec& spec, const std::string& moment);
// The one in between, when the stage's present step asks for it and its state has not got it yet.
void evaluate_if_due(Run& run, const Corpus* corpus, const std::vector<DataSourceSpec>& sources,
                     const EvalSpec& spec);

}  // namespace fp4t

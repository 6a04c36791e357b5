// Completions of a step as a file of JSON lines for people and other programs:
// <run>/rollouts/stage-<i>-step-<n>.jsonl, i as in stages[i], n as in metrics.jsonl. A file is there whole or
// not at all (temporary name, then rename). On resume the files of later steps go away, as lines of metrics
// do.
//
// A line: stage, step, problem (within the step), sample (of the run), prompt (what the model read),
// answer, completion (its text; bytes that are no UTF-8 stand as U+FFFD, the token numbers are exact),
// finished, verdict (right, wrong, unverifiable), reward, rewards (by part, before weights), advantage,
// prompt_tokens, completion_tokens (end token included), sampler_log_probs, trainer_log_probs (before the
// first update) and, with a reference policy, reference_log_probs: one a completion token, each the shortest
// text that reads back as the same FP32 value; NaN and infinities are texts.
#pragma once

#include <string>

#include "engine/stage/context.h"

namespace fp4t {

// Of the rollout in the run's state, where spec.rollouts asks for it; rank 0's, others do nothing. A file
// that cannot be written is a warning.
void write_rollouts(Run& run, const RlSpec& spec);

// Removes the files of later stages, and of later steps of that stage. Throws SaveError when one stays, and
// MissingInputError when that cannot be told.
void cut_rollouts(const std::string& run_dir, int64_t stage, int64_t step);

}  // namespace fp4t

// Completions as rows of micro-batches, and their log-probabilities under a policy.
#pragma once

#include <vector>

#include "engine/stage/context.h"

namespace fp4t {

// A micro-batch of completions: which rows of the batch score which completion token.
struct ScoredBatch {
  TokenBatch batch;
  std::vector<int64_t> completions;  // indices into the rollout
  std::vector<int64_t> first_row;    // of each completion's first scored row
};

// Cuts a list of completions into micro-batches of at most `max_tokens` rows.
std::vector<ScoredBatch> micro_batches(const Rollout& rollout, const std::vector<int64_t>& list,
                                       int64_t max_tokens);

// Gives the batch the routing that the sampler recorded, where it did.
void route_as_sampled(const Run& run, const Rollout& rollout, ScoredBatch& batch);

// The distribution that completions are drawn from.
Scoring scoring_of(const RlSpec& spec, bool entropy);

// Log-probabilities of every completion token under the present weights and the trainer's table: each rank
// scores what it sampled, and all are gathered. The host waits once for all micro-batches. Entropies,
// disagreements with recorded routing and, every so many steps, operand errors are counted as well.
std::vector<std::vector<float>> score_rollout(Run& run, const RlSpec& spec, const Rollout& rollout);
// The same under the reference policy, which routes by itself; nothing is counted.
std::vector<std::vector<float>> score_reference(Run& run, const RlSpec& spec, const Rollout& rollout);
// The present policy becomes the reference policy, where the run has one.
void keep_reference(Run& run);

}  // namespace fp4t

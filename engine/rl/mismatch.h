// Sampler and trainer: what rho = p_old / mu, the trainer's probability of a token before the first update
// over the sampler's, says of their difference, and what it does to the policy's term. NUMERICS.md
// sections 3.1 and 3.4. Kept apart from the ratio of new to old, which the clip acts on: the loss is
// sg(f(rho)) * PPO(r, A).
#pragma once

#include <cstdint>
#include <vector>

#include "engine/recipe/recipe.h"

namespace fp4t {

// Tokens and completions that f changed.
struct MismatchCounts {
  int64_t truncated = 0, masked = 0;         // tokens: above the cap, outside the token's bounds
  int64_t sequences_masked = 0, vetoed = 0;  // completions
  int64_t left_out = 0;                      // tokens whose f is 0, for whatever reason
};

// f(rho) of a completion's tokens. A difference of log-probabilities counts as at most 20, so every f is
// finite. A masked or vetoed completion has 0 throughout; its tokens count as neither truncated nor masked.
std::vector<float> importance_of(const std::vector<float>& old_log_probs, const std::vector<float>& log_probs,
                                 const MismatchSpec& spec, MismatchCounts& counts);

// Sums over tokens drawn from mu, d = log p_old - log mu; means of them estimate the figures' names.
struct MismatchSums {
  double tokens = 0, equal = 0;        // equal: bit for bit
  double difference = 0, largest = 0;  // |d|
  double generation_kl = 0;            // KL(mu | p_old): rho - log rho - 1
  double policy_kl = 0;                // KL(p_old | mu): rho log rho - rho + 1
  double js = 0;                       // Jensen-Shannon
  double error = 0;                    // exp|d| - 1
  double rho = 0, rho_square = 0;

  void add(const std::vector<float>& old_log_probs, const std::vector<float>& log_probs);
  double mean(double sum) const { return tokens > 0 ? sum / tokens : 0.0; }
  // E[rho^2] - 1.
  double chi_square() const { return tokens > 0 ? rho_square / tokens - 1 : 0.0; }
  // (sum of rho)^2 / (n * sum of rho^2): the share of the tokens that they are worth; 1 without any.
  double effective_share() const { return tokens > 0 ? rho * rho / (tokens * rho_square) : 1.0; }
};

}  // namespace fp4t

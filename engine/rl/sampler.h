// Batched generation with a key-value cache. A completion depends on the weights, the key, its prompt
// and its sample id alone: not on its neighbours, the batch size or the order.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "engine/model/transformer.h"
#include "kernels/base/philox.h"

namespace fp4t {

struct GenerateRequest {
  std::vector<int32_t> prompt;  // at least one token
  int64_t sample_id = 0;        // keys the draws
  int64_t max_tokens = 0;       // of this completion, within the options'; 0: the options'
};

struct GenerateOptions {
  double temperature = 1.0;  // 0: greedy
  double top_p = 1.0;
  int64_t max_tokens = 16;
  int64_t max_batch = 512;  // sequences decoded together
  std::vector<int32_t> end_tokens;
  PhiloxKey key;  // of the draws
  // Called after each decode call with (finished, total) sequences; may throw to stop.
  std::function<void(int64_t, int64_t)> progress;
  // Called with every token that is drawn, and the place of its request in the list; true: the completion
  // ends there, unfinished. Of one request in order, of several in any.
  std::function<bool(size_t request, int32_t token)> watch;
  // Where experts are spread over ranks, every rank takes part in every decode call: called before each, with
  // true, and by a rank that is done, with false, until it returns that nobody is at work. May throw to stop.
  std::function<bool(bool)> meet;
};

struct Completion {
  std::vector<int32_t> tokens;   // end token included
  std::vector<float> log_probs;  // of each token, under the distribution it was drawn from
  std::vector<uint8_t> router;   // where the pass records routing (engine/rl/routing.h)
  bool finished = false;         // false: cut at its limit or at the model's last position
};

std::vector<Completion> generate(Transformer& model, const Pass& pass,
                                 const std::vector<GenerateRequest>& requests,
                                 const GenerateOptions& options);

}  // namespace fp4t

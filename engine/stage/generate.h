// Text from a checkpoint: the recipe inside it, its rl.sampler table, its weights.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace fp4t {

struct TextRequest {
  std::string checkpoint;
  std::string prompt;
  bool chat = false;   // the prompt is a user's message, in the form of tokenizer.chat, or if the recipe has
                       // none of the template beside the tokenizer's file
  std::string system;  // message in front of it
  std::string tokenizer;   // its file, where it does not lie any more where the recipe says; "": there
  int64_t max_tokens = 0;  // 0: 128, or what the model's positions have room for
  double temperature = 1.0;
  double top_p = 1.0;
  uint64_t seed = 1;
  int64_t samples = 1;
  // Gets the first sample piece by piece while it is drawn, each of whole characters; together they are what
  // is returned of it.
  std::function<void(const std::string& text)> stream;
};

// Continuations, the prompt left out; they end at <eod> or max_tokens.
std::vector<std::string> generate_text(const TextRequest& request);

}  // namespace fp4t

#include <cstdio>

#include "app/command.h"
#include "engine/stage/generate.h"

namespace fp4t {

int cmd_generate(const AppOptions& options) {
  TextRequest request;
  request.checkpoint = options.checkpoint;
  request.prompt = options.prompt;
  request.max_tokens = options.max_tokens;
  request.temperature = options.temperature;
  request.top_p = options.top_p;
  request.seed = options.seed;
  request.samples = options.samples;
  for (const std::string& text : generate_text(request))
    std::printf("%s%s\n", options.prompt.c_str(), text.c_str());
  return 0;
}

}  // namespace fp4t

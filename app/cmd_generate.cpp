#include <unistd.h>

#include <cstdio>

#include "app/command.h"
#include "engine/stage/generate.h"
#include "kernels/base/text.h"

namespace fp4t {

int cmd_generate(const AppOptions& options) {
  TextRequest request;
  request.checkpoint = options.checkpoint;
  request.prompt = options.prompt;
  request.tokenizer = options.tokenizer;
  request.chat = options.chat;
  request.system = options.system;
  request.max_tokens = options.max_tokens;
  request.temperature = options.temperature;
  request.top_p = options.top_p;
  request.seed = options.seed;
  request.samples = options.samples;
  // A model of bytes writes any of them: files and pipes get them as they are, a terminal does not obey them.
  const bool is_terminal = ::isatty(STDOUT_FILENO) != 0;
  for (const std::string& text : generate_text(request)) {
    const std::string whole = (options.chat ? "" : options.prompt) + text;
    const std::string shown = (is_terminal ? printable_lines(whole) : whole) + "\n";
    std::fwrite(shown.data(), 1, shown.size(), stdout);
  }
  return 0;
}

}  // namespace fp4t

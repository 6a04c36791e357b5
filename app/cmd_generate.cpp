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
  // Files and pipes get a text as it is, a terminal does not obey its control characters.
  const bool is_terminal = ::isatty(STDOUT_FILENO) != 0;
  const auto put = [&](const std::string& text) {
    const std::string shown = is_terminal ? printable_lines(text) : text;
    std::fwrite(shown.data(), 1, shown.size(), stdout);
    std::fflush(stdout);
  };
  const std::string before = options.chat ? "" : options.prompt;
  bool begun = false;
  request.stream = [&](const std::string& text) {
    put(begun ? text : before + text);
    begun = true;
  };
  for (const std::string& text : generate_text(request)) {
    put(begun ? "\n" : before + text + "\n");
    begun = false;
  }
  return 0;
}

}  // namespace fp4t

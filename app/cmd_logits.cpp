#include "app/command.h"
#include "engine/stage/convert.h"

namespace fp4t {

int cmd_logits(const AppOptions& options) {
  write_logits(options.checkpoint, options.tokens, options.to);
  return 0;
}

}  // namespace fp4t

#include <cstdio>

#include "app/command.h"
#include "engine/store/checkpoint.h"

namespace fp4t {

int cmd_inspect(const AppOptions& options) {
  std::fputs(describe_checkpoint(find_checkpoint(options.checkpoint), options.verify).c_str(), stdout);
  return 0;
}

}  // namespace fp4t

#include <cstdio>

#include "app/command.h"
#include "engine/stage/convert.h"

namespace fp4t {

int cmd_import(const AppOptions& options) {
  std::fputs(import_checkpoint({options.from, options.to, options.replace, options.no_tokenizer}).c_str(),
             stdout);
  return 0;
}

}  // namespace fp4t

#include "kernels/base/check.h"

namespace fp4t::detail {

void throw_check(const char* file, int line, const char* expression, const std::string& message) {
  throw InternalError(
      concat(file, ":", line, ": check failed: ", expression, message.empty() ? "" : ": ", message));
}

}  // namespace fp4t::detail

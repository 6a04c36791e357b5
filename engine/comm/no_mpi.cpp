#include <cstdio>

#include "engine/comm/ending.h"
#include "engine/comm/mpi.h"
#include "kernels/base/text.h"

namespace fp4t {

bool built_with_mpi() { return false; }

std::unique_ptr<Communicator> make_mpi(const MpiOptions&) {
  throw RecipeError("this program was built without MPI");
}

int end_after_error(int code, const std::string& message) {
  std::fprintf(stderr, "fp4train: %s\n", printable_lines(message).c_str());
  return code;
}

}  // namespace fp4t

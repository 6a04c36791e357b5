// How a rank ends that has caught an exception. When all ranks decided together (a signal, a skip too many, a
// recipe that all have read), each leaves by itself with the common exit code; when one fails alone, it ends
// the others, and the launcher passes its exit code on.
#pragma once

#include <string>

namespace fp4t {

// Prints "fp4train: message" to stderr, once for all ranks that end with the same code, and returns `code`. A
// rank that ends alone does not return while there are others. Does no more than print where MPI was never
// initialised.
int end_after_error(int code, const std::string& message);

}  // namespace fp4t

// The ranks that MPI connects. Linked from mpi.cpp, or in a build without MPI from no_mpi.cpp.
#pragma once

#include <cstdint>
#include <memory>

#include "engine/comm/comm.h"

namespace fp4t {

bool built_with_mpi();

struct MpiOptions {
  int64_t largest_message = int64_t{1} << 30;  // bytes; larger ones go in pieces: MPI counts in 32 bits
};

// Initialises MPI. The communicator of all ranks; the ones split from it must go before it does. Its end
// finalises MPI, unless an exception is on its way (engine/comm/ending.h).
std::unique_ptr<Communicator> make_mpi(const MpiOptions& options = {});

}  // namespace fp4t

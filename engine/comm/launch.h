// What a rank gets of the host that it shares with others.
#pragma once

#include <cstdint>
#include <string>

#include "engine/comm/comm.h"
#include "kernels/base/queue.h"

namespace fp4t {

// probe_machine() for this rank: on a CPU its share of the host's cores (unless `threads` says how many) and
// memory.
Machine probe_machine_of_rank(const std::string& device, int64_t threads, const Communicator& comm);

}  // namespace fp4t

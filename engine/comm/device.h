// Communicators whose buffers are a GPU's: the collectives of comm.h, enqueued on the queue that they are
// made with. What a call reads is what was enqueued there before it, what it writes is there for what comes
// after it; begin_exchange() ends in the queue's order, too, so overlap is a second queue (Queue::beside).
// The small reductions go through host memory and wait for the queue.
//
// Two ways: NCCL from GPU to GPU, one GPU a rank; or staged through host memory, over the host's
// communicator: slow, but it needs no NCCL, and several ranks may share a GPU. Sums are ours, in rank order,
// on both.
//
// A communicator takes ranks of its own from `host` (split), which must outlive it. The time-out of `host`
// holds.
#pragma once

#include <memory>

#include "engine/comm/comm.h"
#include "kernels/base/queue.h"

namespace fp4t {

enum class Transport : uint8_t { kHost, kNccl };

// On a queue of a GPU; the queue must outlive it.
std::unique_ptr<Communicator> make_on_device(Communicator& host, Queue& queue, Transport transport);

// Staged through host memory; also on a queue of the CPU, where tests use it.
std::unique_ptr<Communicator> make_staged(Communicator& host, Queue& queue);

// Linked from nccl.cpp, or in a build without NCCL from no_nccl.cpp. A failed call, another rank's death, or
// one that does not come within the time-out, gives the communicator up: the queue goes on without what was
// to come, and CommunicationError or WatchdogError is thrown by the next call, and by check().
bool built_with_nccl();
// Whether ranks may have one GPU together over NCCL, too: from NCCL 2.30 on, where NCCL_MULTI_RANK_GPU_ENABLE
// is 1.
bool nccl_shares_gpus();
std::unique_ptr<Communicator> make_nccl(Communicator& host, Queue& queue);

}  // namespace fp4t

// Collectives over the ranks of a run: the one virtual interface (DESIGN.md section 6). Coarse calls. Every
// rank makes the same calls in the same order. One rank: every call is the identity.
//
// Buffers are host pointers, but for the communicators of device.h: their buffers are a GPU's, and a call
// takes its place in the work of the queue that they were made with.
//
// Sums are taken in rank order, so that they depend on the values and the number of ranks alone, and every
// rank gets the same bits. A maximum with a NaN in it is NaN.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "kernels/base/check.h"

namespace fp4t {

enum class ReduceOp : uint8_t { kSum, kMax };

// A collective failed: a message of another size than expected, a broken connection. Another rank's death is
// the launcher's business, which ends the rest.
struct CommunicationError : Error {
  explicit CommunicationError(const std::string& m) : Error(ExitCode::kInternal, m) {}
};

// Another rank did not come to a collective within the time-out.
struct WatchdogError : Error {
  explicit WatchdogError(const std::string& m) : Error(ExitCode::kWatchdog, m) {}
};

// A call that has waited so long.
WatchdogError late(const std::string& call, int ranks, double seconds, double timeout);

// Bytes that go to a rank, or come from it.
struct Part {
  int rank;
  void* data;
  int64_t bytes;
};

// A call on its way while its rank does other things. wait() ends it; whoever has begun it calls that before
// anything of the call's goes away.
class PendingCall {
 public:
  virtual ~PendingCall() = default;
  virtual void wait() = 0;
};

class Communicator {
 public:
  virtual ~Communicator() = default;
  virtual int rank() const = 0;
  virtual int size() const = 0;
  // Among the ranks of the whole run that share this host.
  virtual int local_rank() const = 0;
  virtual int local_size() const = 0;
  // How long a call waits for the others before it throws WatchdogError; 0: for ever, as at first. Holds for
  // all communicators that were split from the same one.
  virtual void set_timeout(double seconds) = 0;
  virtual double timeout() const = 0;
  // Seconds that this rank has stood still in calls, those of communicators split from the same one included.
  // Of a device's queue it is the queue that knows (Queue::counts).
  virtual double waited_seconds() const = 0;
  // Throws what has gone wrong with calls that are on their way in a device's queue.
  virtual void check() {}
  virtual void barrier() = 0;
  virtual void all_reduce(double* values, int64_t n, ReduceOp op) = 0;
  virtual void all_reduce(float* values, int64_t n, ReduceOp op) = 0;
  // out[r * n .. ) gets rank r's in[0 .. n).
  virtual void all_gather(const void* in, void* out, int64_t bytes_per_rank) = 0;
  // Parts from rank to rank, begun: the buffers are the call's until it has ended. What one rank has for
  // another is matched with what that one expects in order, part by part, of the same sizes; a rank may have
  // parts for itself. Other calls may come in between, in the same order on every rank.
  virtual std::unique_ptr<PendingCall> begin_exchange(const std::vector<Part>& send,
                                                      const std::vector<Part>& receive) = 0;
  void exchange(const std::vector<Part>& send, const std::vector<Part>& receive) {
    begin_exchange(send, receive)->wait();
  }
  // out[0 .. n) is the sum over ranks of their in[rank() * n .. ).
  virtual void reduce_scatter(const float* in, float* out, int64_t n_per_rank) = 0;
  // Part r of `in` goes to rank r; part r of `out` comes from rank r. What one sends, the other must expect:
  // CommunicationError names both sizes otherwise.
  virtual void all_to_all(const void* in, const std::vector<int64_t>& send_bytes, void* out,
                          const std::vector<int64_t>& receive_bytes) = 0;
  virtual void broadcast(void* data, int64_t bytes, int root) = 0;
  // Ranks of equal colour form a new communicator, ordered by key.
  virtual std::unique_ptr<Communicator> split(int colour, int key) = 0;
};

// Copies the parts that rank `rank` has for itself, in order, by copy(to, from, bytes).
void copy_own_parts(int rank, const std::vector<Part>& send, const std::vector<Part>& receive,
                    const std::function<void(void*, const void*, int64_t)>& copy);

std::unique_ptr<Communicator> make_single();

// All ranks that the launcher started, or the only one. Throws RecipeError when several processes were
// started and are not connected (no MPI in this build, or a launcher that does not speak its protocol): each
// would run the same job. Called once a process; the communicator's end is MPI's.
std::unique_ptr<Communicator> make_communicator();

// Number of processes that a launcher says it started, or the least that there must be, and 1 without one;
// `variable` gets the name of what says so in the environment.
int launched_processes(std::string* variable);

// Threads for this rank: what was asked for, or with 0 its share of the host's cores.
int threads_of_rank(int64_t requested, const Communicator& comm);

}  // namespace fp4t

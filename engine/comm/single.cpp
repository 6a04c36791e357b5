#include <algorithm>
#include <cstring>

#include "engine/comm/comm.h"

namespace fp4t {

namespace {

class Ended : public PendingCall {
 public:
  void wait() override {}
};

class Single : public Communicator {
 public:
  int rank() const override { return 0; }
  int size() const override { return 1; }
  int local_rank() const override { return 0; }
  int local_size() const override { return 1; }
  void set_timeout(double seconds) override { timeout_ = seconds; }
  double timeout() const override { return timeout_; }
  double waited_seconds() const override { return 0; }
  void barrier() override {}
  void all_reduce(double*, int64_t, ReduceOp) override {}
  void all_reduce(float*, int64_t, ReduceOp) override {}
  void all_gather(const void* in, void* out, int64_t bytes) override { copy(in, out, bytes); }
  std::unique_ptr<PendingCall> begin_exchange(const std::vector<Part>& send,
                                              const std::vector<Part>& receive) override {
    copy_own_parts(0, send, receive,
                   [](void* to, const void* from, int64_t bytes) { copy(from, to, bytes); });
    return std::make_unique<Ended>();
  }
  void reduce_scatter(const float* in, float* out, int64_t n) override {
    copy(in, out, n * static_cast<int64_t>(sizeof(float)));
  }
  void all_to_all(const void* in, const std::vector<int64_t>& send, void* out,
                  const std::vector<int64_t>& receive) override {
    FP4T_CHECK(send.size() == 1 && receive.size() == 1, "counts for ", send.size(), " ranks");
    FP4T_CHECK_EQ(send[0], receive[0], "bytes sent to and received from the only rank");
    copy(in, out, send[0]);
  }
  void broadcast(void*, int64_t, int root) override { FP4T_CHECK_EQ(root, 0); }
  std::unique_ptr<Communicator> split(int, int) override { return make_single(); }

 private:
  static void copy(const void* in, void* out, int64_t bytes) {
    if (in != out && bytes > 0) std::memcpy(out, in, static_cast<size_t>(bytes));
  }

  double timeout_ = 0;
};

}  // namespace

WatchdogError late(const std::string& call, int ranks, double seconds, double timeout) {
  const char* const where = " s for another rank (run.watchdog_seconds is ";
  return WatchdogError(
      detail::concat("the ", call, " among ", ranks, " ranks has waited ", seconds, where, timeout, ")"));
}

void copy_own_parts(int rank, const std::vector<Part>& send, const std::vector<Part>& receive,
                    const std::function<void(void*, const void*, int64_t)>& copy) {
  auto to = receive.begin();
  for (const Part& from : send) {
    if (from.rank != rank) continue;
    to = std::find_if(to, receive.end(), [rank](const Part& p) { return p.rank == rank; });
    FP4T_CHECK(to != receive.end(), "rank ", rank, " sends itself more than it expects");
    FP4T_CHECK_EQ(from.bytes, to->bytes, "bytes that rank ", rank, " sends itself, that it expects");
    copy(to->data, from.data, from.bytes);
    ++to;
  }
}

std::unique_ptr<Communicator> make_single() { return std::make_unique<Single>(); }

}  // namespace fp4t

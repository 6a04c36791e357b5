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
  void set_timeout(double) override {}
  void barrier() override {}
  void all_reduce(double*, int64_t, ReduceOp) override {}
  void all_reduce(float*, int64_t, ReduceOp) override {}
  void all_gather(const void* in, void* out, int64_t bytes) override { copy(in, out, bytes); }
  std::unique_ptr<PendingCall> begin_all_gather(const void* in, void* out, int64_t bytes) override {
    copy(in, out, bytes);
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
};

}  // namespace

std::unique_ptr<Communicator> make_single() { return std::make_unique<Single>(); }

}  // namespace fp4t

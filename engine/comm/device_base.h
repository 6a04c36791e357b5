// What communicators over device buffers have in common: who the ranks are, and sums in rank order.
#pragma once

#include <memory>
#include <utility>
#include <vector>

#include "engine/comm/device.h"

namespace fp4t {

class DeviceCommunicator : public Communicator {
 public:
  DeviceCommunicator(std::unique_ptr<Communicator> host, Queue& queue);
  ~DeviceCommunicator() override;
  DeviceCommunicator(const DeviceCommunicator&) = delete;

  int rank() const override { return host_->rank(); }
  int size() const override { return host_->size(); }
  int local_rank() const override { return host_->local_rank(); }
  int local_size() const override { return host_->local_size(); }
  void set_timeout(double seconds) override { host_->set_timeout(seconds); }
  double timeout() const override { return host_->timeout(); }
  double waited_seconds() const override { return host_->waited_seconds(); }
  void barrier() override;
  void all_reduce(double* values, int64_t n, ReduceOp op) override;
  void all_reduce(float* values, int64_t n, ReduceOp op) override;
  void reduce_scatter(const float* in, float* out, int64_t n_per_rank) override;
  void all_gather(const void* in, void* out, int64_t bytes_per_rank) override;
  void all_to_all(const void* in, const std::vector<int64_t>& send_bytes, void* out,
                  const std::vector<int64_t>& receive_bytes) override;

 protected:
  Communicator& host() { return *host_; }
  Queue& queue() { return queue_; }

 private:
  template <class T>
  void reduce_on_host(T* values, int64_t n, ReduceOp op);

  std::unique_ptr<Communicator> host_;
  Queue& queue_;
  // Parts of reduce_scatter: as many bytes as any call has needed.
  void* parts_ = nullptr;
  int64_t parts_bytes_ = 0;
};

}  // namespace fp4t

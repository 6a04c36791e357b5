#include "engine/comm/device_base.h"

#include "kernels/ops/elementwise.h"
#include "kernels/ops/run.h"

namespace fp4t {

DeviceCommunicator::DeviceCommunicator(std::unique_ptr<Communicator> host, Queue& queue)
    : host_(std::move(host)), queue_(queue) {}

DeviceCommunicator::~DeviceCommunicator() {
  if (parts_) queue_.release(parts_);
}

void DeviceCommunicator::barrier() {
  queue_.synchronize();
  host_->barrier();
}

template <class T>
void DeviceCommunicator::reduce_on_host(T* values, int64_t n, ReduceOp op) {
  const int64_t bytes = n * static_cast<int64_t>(sizeof(T));
  std::vector<T> here = queue_.download(values, bytes).template values<T>();
  host_->all_reduce(here.data(), n, op);
  queue_.upload(values, here.data(), bytes);
}

void DeviceCommunicator::all_reduce(double* values, int64_t n, ReduceOp op) { reduce_on_host(values, n, op); }
void DeviceCommunicator::all_reduce(float* values, int64_t n, ReduceOp op) { reduce_on_host(values, n, op); }

void DeviceCommunicator::reduce_scatter(const float* in, float* out, int64_t n) {
  const auto ranks = static_cast<int64_t>(size());
  const std::vector<int64_t> bytes(static_cast<size_t>(ranks), n * static_cast<int64_t>(sizeof(float)));
  if (n == 0) return;
  if (parts_bytes_ < ranks * bytes[0]) {
    queue_.synchronize();  // what was enqueued may still read the old ones
    if (parts_) queue_.release(parts_);
    parts_ = nullptr;
    parts_ = queue_.allocate(ranks * bytes[0]);
    parts_bytes_ = ranks * bytes[0];
  }
  all_to_all(in, bytes, parts_, bytes);
  const TensorView all = {parts_, DType::kF32, {ranks, n}}, sum = {out, DType::kF32, {1, n}};
  run(queue_, LinearCombination{1.0f, all.rows(0, 1), 0.0f, {}, sum});
  for (int64_t r = 1; r < ranks; ++r) {
    run(queue_, LinearCombination{1.0f, sum, 1.0f, all.rows(r, 1), sum});
  }
}

void DeviceCommunicator::all_gather(const void* in, void* out, int64_t bytes) {
  std::vector<Part> send, receive;
  for (int r = 0; r < size(); ++r) {
    send.push_back({r, const_cast<void*>(in), bytes});
    receive.push_back({r, static_cast<char*>(out) + r * bytes, bytes});
  }
  exchange(send, receive);
}

void DeviceCommunicator::all_to_all(const void* in, const std::vector<int64_t>& send_bytes, void* out,
                                    const std::vector<int64_t>& receive_bytes) {
  const auto ranks = static_cast<size_t>(size());
  FP4T_CHECK(send_bytes.size() == ranks && receive_bytes.size() == ranks, "counts for ", send_bytes.size(),
             " and ", receive_bytes.size(), " of ", size(), " ranks");
  std::vector<Part> send, receive;
  char *from = static_cast<char*>(const_cast<void*>(in)), *to = static_cast<char*>(out);
  for (size_t r = 0; r < ranks; ++r) {
    send.push_back({static_cast<int>(r), from, send_bytes[r]});
    receive.push_back({static_cast<int>(r), to, receive_bytes[r]});
    from += send_bytes[r];
    to += receive_bytes[r];
  }
  exchange(send, receive);
}

std::unique_ptr<Communicator> make_on_device(Communicator& host, Queue& queue, Transport transport) {
  return transport == Transport::kNccl ? make_nccl(host, queue) : make_staged(host, queue);
}

}  // namespace fp4t

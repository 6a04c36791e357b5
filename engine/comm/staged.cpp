// Device buffers that travel through host memory: down, over the host's communicator, up.
#include <cstring>

#include "engine/comm/device_base.h"

namespace fp4t {

namespace {

class Done : public PendingCall {
 public:
  void wait() override {}
};

class Staged : public DeviceCommunicator {
 public:
  using DeviceCommunicator::DeviceCommunicator;

  std::unique_ptr<PendingCall> begin_exchange(const std::vector<Part>& send,
                                              const std::vector<Part>& receive) override {
    std::vector<Part> sent = land(send, sent_), received = land(receive, received_);
    for (size_t i = 0; i < send.size(); ++i) queue().copy_to_host(sent[i].data, send[i].data, send[i].bytes);
    host().exchange(sent, received);
    for (size_t i = 0; i < receive.size(); ++i) {
      queue().copy_from_host(receive[i].data, received[i].data, received[i].bytes);
    }
    return std::make_unique<Done>();
  }

  void broadcast(void* data, int64_t bytes, int root) override {
    sent_.resize(static_cast<size_t>(bytes));
    if (rank() == root) queue().copy_to_host(sent_.data(), data, bytes);
    host().broadcast(sent_.data(), bytes, root);
    if (rank() != root) queue().copy_from_host(data, sent_.data(), bytes);
  }

  std::unique_ptr<Communicator> split(int colour, int key) override {
    return std::make_unique<Staged>(host().split(colour, key), queue());
  }

 private:
  // The same parts one after another in `memory`.
  static std::vector<Part> land(const std::vector<Part>& parts, std::vector<char>& memory) {
    int64_t bytes = 0;
    for (const Part& p : parts) bytes += p.bytes;
    if (static_cast<int64_t>(memory.size()) < bytes) memory.resize(static_cast<size_t>(bytes));
    std::vector<Part> landed = parts;
    int64_t at = 0;
    for (Part& p : landed) {
      p.data = memory.data() + at;
      at += p.bytes;
    }
    return landed;
  }

  std::vector<char> sent_, received_;  // as large as any call has needed
};

}  // namespace

std::unique_ptr<Communicator> make_staged(Communicator& host, Queue& queue) {
  return std::make_unique<Staged>(host.split(0, host.rank()), queue);
}

}  // namespace fp4t

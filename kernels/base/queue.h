// Where ops run: a backend, and what it needs (threads on the CPU; a stream on the GPU). Passed to
// every op; there is no global device state.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "kernels/base/threads.h"

namespace fp4t {

enum class Backend : uint8_t { kCpu, kCuda };

// What this machine is, found once at start; input of the plan.
struct Machine {
  Backend backend = Backend::kCpu;
  std::string device_name;   // "cpu", or the GPU's name
  int arch = 0;              // CUDA compute capability x 10 (90, 100, 103); 0 on the CPU
  int num_threads = 1;       // CPU threads
  int64_t memory_bytes = 0;  // of the device that holds the model
  bool built_with_cuda = false;
};

class Queue {
 public:
  // A queue on the CPU with its own threads.
  static Queue cpu(int num_threads);
  // A queue on GPU `device`; throws "built without CUDA" in the other flavour.
  static Queue cuda(int device);

  Queue(Queue&&) noexcept;
  Queue& operator=(Queue&&) noexcept;
  ~Queue();

  Backend backend() const { return backend_; }
  void* stream() const { return stream_; }
  ThreadPool& threads() const { return *threads_; }

  void* allocate(int64_t bytes);
  void release(void* p) noexcept;
  void fill_bytes(void* p, int value, int64_t bytes);
  void copy_to_host(void* host, const void* device, int64_t bytes);    // synchronous
  void copy_from_host(void* device, const void* host, int64_t bytes);  // synchronous
  void synchronize();

 private:
  Queue() = default;
  Backend backend_ = Backend::kCpu;
  std::unique_ptr<ThreadPool> threads_;
  void* stream_ = nullptr;
};

// This machine as seen by a process: `device` is "auto", "cpu" or "cuda"; `threads` 0 means all cores.
Machine probe_machine(const std::string& device, int threads);

// CPU loops: body(begin, end) over [0, n) in fixed chunks.
template <class Body>
void parallel_for(Queue& queue, int64_t n, int64_t chunk, const Body& body) {
  queue.threads().run(n, chunk, body);
}

// Bodies of the GPU side of this class, linked from kernels/cuda or kernels/no_cuda.
namespace cuda {
void* create_stream(int device);
void destroy_stream(void* stream) noexcept;
void* allocate(int64_t bytes);
void release(void* p) noexcept;
void fill_bytes(void* stream, void* p, int value, int64_t bytes);
void copy_to_host(void* stream, void* host, const void* device, int64_t bytes);
void copy_from_host(void* stream, void* device, const void* host, int64_t bytes);
void synchronize(void* stream);
// Number of usable GPUs; 0 when the flavour has none.
int device_count();
void describe_device(int device, Machine& machine);
bool built_with_cuda();
}  // namespace cuda

}  // namespace fp4t

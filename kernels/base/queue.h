// Where ops run: a backend, and what it needs (threads on the CPU; a stream on the GPU). Passed to
// every op; there is no global device state.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "kernels/base/threads.h"

namespace fp4t {

enum class Backend : uint8_t { kCpu, kCuda };

// What this machine is, found once at start; input of the plan.
struct Machine {
  Backend backend = Backend::kCpu;
  std::string device_name;   // "cpu", or the GPU's name
  int device = 0;            // index of the GPU among those that this process sees
  int arch = 0;              // CUDA compute capability x 10 (90, 100, 103); 0 on the CPU
  int sm_count = 0;          // multiprocessors of the GPU
  int num_threads = 1;       // CPU threads
  int64_t memory_bytes = 0;  // of the device that holds the model
  int64_t free_bytes = 0;    // of these, what nobody else has; 0: unknown
  bool built_with_cuda = false;
  std::string gpu_obstacle;  // why no GPU is used though one was wanted; "" otherwise
};

// What a queue on a GPU has done since it was made; all zero on the CPU.
struct QueueCounts {
  int64_t waits = 0;                  // times that the host waited for the device
  int64_t workspace_bytes = 0;        // memory that the ops' scratch has
  int64_t workspace_allocations = 0;  // times that it was enlarged
  double held_seconds = 0;            // that its work stood still for another queue's (wait_for)
};

class Queue;

// Bytes on their way to the host, as they were when the queue came to them.
class Download {
 public:
  Download() = default;
  Download(Download&& other) noexcept;
  Download& operator=(Download&& other) noexcept;
  ~Download();

  // Waits until they are here, but not for what was enqueued after the download.
  const void* data();
  template <class T>
  std::vector<T> values() {
    const auto* p = static_cast<const T*>(data());
    return std::vector<T>(p, p + bytes_ / static_cast<int64_t>(sizeof(T)));
  }

 private:
  friend class Queue;
  void* stream_ = nullptr;   // null: on the CPU, the bytes are in `copy_`
  void* staging_ = nullptr;  // of kernels/cuda
  std::vector<char> copy_;
  int64_t bytes_ = 0;
};

// Work of a queue recorded once, to be run again and again over the same memory.
class Recording {
 public:
  Recording() = default;
  Recording(Recording&& other) noexcept : graph_(std::exchange(other.graph_, nullptr)) {}
  Recording& operator=(Recording&& other) noexcept {
    std::swap(graph_, other.graph_);
    return *this;
  }
  ~Recording();
  bool empty() const { return graph_ == nullptr; }

 private:
  friend class Queue;
  void* graph_ = nullptr;
};

// A place in a queue's work, for another queue to wait for. Empty on the CPU, where calls do their work at
// once.
class Mark {
 public:
  Mark() = default;
  Mark(Mark&& other) noexcept : event_(std::exchange(other.event_, nullptr)) {}
  Mark& operator=(Mark&& other) noexcept {
    std::swap(event_, other.event_);
    return *this;
  }
  ~Mark();

 private:
  friend class Queue;
  void* event_ = nullptr;
};

class Queue {
 public:
  // A queue on the CPU with its own threads.
  static Queue cpu(int num_threads);
  // A queue on GPU `device`; throws "built without CUDA" in the other flavour. The threads do what is left
  // to the host.
  static Queue cuda(int device, int num_threads = 1);
  // Where a plan for this machine runs.
  static Queue on(const Machine& machine);
  // Another queue on the same GPU: what is enqueued on it runs beside the work of this one, but for marks,
  // and goes first where there is room for one of them. This one's long kernels make room sooner from now on.
  Queue beside() const;

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

  // The same without waiting: `host` is the caller's again at once; the device reads a copy of it in its
  // turn. For what is small, since the copy is staged.
  void upload(void* device, const void* host, int64_t bytes);
  Download download(const void* device, int64_t bytes);
  // From one place on the device to another.
  void copy(void* to, const void* from, int64_t bytes);

  // Makes room for the scratch of ops, so that they need not ask for it one by one.
  void reserve_workspace(int64_t bytes);
  QueueCounts counts() const;
  // The kernel that the last matrix product ran as, a name that lives for ever.
  const char* product_kernel() const;

  // The end of what has been enqueued so far.
  Mark mark();
  // What is enqueued from now on runs after another queue's work up to the mark.
  void wait_for(const Mark& mark);
  // Called whenever the host has waited for the device, before anything is made of what it computed: whoever
  // watches work that may be given up throws there. Empty: nobody.
  void after_waits(std::function<void()> check);
  // CUDA's own stream, of a queue on a GPU.
  void* native_stream() const;

  // Records what `body` enqueues instead of running it. It may neither wait nor allocate: run it once before.
  // Only on a GPU.
  Recording record(const std::function<void()>& body);
  void replay(const Recording& recording);

 private:
  Queue() = default;
  Backend backend_ = Backend::kCpu;
  std::unique_ptr<ThreadPool> threads_;
  void* stream_ = nullptr;
};

// This machine as seen by a process: `device` is "auto", "cpu" or "cuda"; `threads` 0 means all cores;
// `index` is the GPU that this process shall use. Without a usable GPU the machine is the CPU, and says why.
Machine probe_machine(const std::string& device, int threads, int index = 0);

// CPU loops: body(begin, end) over [0, n) in fixed chunks.
template <class Body>
void parallel_for(Queue& queue, int64_t n, int64_t chunk, const Body& body) {
  queue.threads().run(n, chunk, body);
}

// Bodies of the GPU side of this class, linked from kernels/cuda or kernels/no_cuda.
namespace cuda {
void* create_stream(int device);
void* create_stream_beside(void* stream);
void destroy_stream(void* stream) noexcept;
void* allocate(int64_t bytes);
void release(void* p) noexcept;
void fill_bytes(void* stream, void* p, int value, int64_t bytes);
void copy_to_host(void* stream, void* host, const void* device, int64_t bytes);
void copy_from_host(void* stream, void* device, const void* host, int64_t bytes);
void synchronize(void* stream);
void upload(void* stream, void* device, const void* host, int64_t bytes);
void* begin_download(void* stream, const void* device, int64_t bytes);
const void* finish_download(void* stream, void* staging);
void release_download(void* stream, void* staging) noexcept;
void copy(void* stream, void* to, const void* from, int64_t bytes);
void reserve_workspace(void* stream, int64_t bytes);
QueueCounts counts(void* stream);
void* mark(void* stream);
void wait_for(void* stream, void* mark);
void release_mark(void* mark) noexcept;
void after_waits(void* stream, std::function<void()> check);
void* native_stream(const void* stream);
int device_of(const void* stream);
const char* product_kernel(const void* stream);
void begin_recording(void* stream);
void* end_recording(void* stream);
void replay(void* stream, void* graph);
void release_recording(void* graph) noexcept;
// Number of usable GPUs; 0 when the flavour has none.
int device_count();
// What tells a GPU from all others, on any host.
std::string device_id(int device);
// Fills what is known of a GPU; gpu_obstacle when this program's kernels do not run on it.
void describe_device(int device, Machine& machine);
bool built_with_cuda();
}  // namespace cuda

}  // namespace fp4t

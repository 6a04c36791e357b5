#include "kernels/base/queue.h"

#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <utility>

#include "kernels/base/check.h"
#include "kernels/base/numeric.h"

namespace fp4t {

Queue Queue::cpu(int num_threads) {
  Queue q;
  q.threads_ = std::make_unique<ThreadPool>(num_threads);
  return q;
}

Queue Queue::cuda(int device) {
  Queue q;
  q.backend_ = Backend::kCuda;
  q.stream_ = cuda::create_stream(device);
  q.threads_ = std::make_unique<ThreadPool>(1);
  return q;
}

Queue::Queue(Queue&& other) noexcept
    : backend_(other.backend_),
      threads_(std::move(other.threads_)),
      stream_(std::exchange(other.stream_, nullptr)) {}

Queue& Queue::operator=(Queue&& other) noexcept {
  std::swap(backend_, other.backend_);
  std::swap(threads_, other.threads_);
  std::swap(stream_, other.stream_);
  return *this;
}

Queue::~Queue() {
  if (stream_) cuda::destroy_stream(stream_);
}

void* Queue::allocate(int64_t bytes) {
  if (backend_ == Backend::kCuda) return cuda::allocate(bytes);
  void* p = std::aligned_alloc(256, static_cast<size_t>(align_up(std::max<int64_t>(bytes, 1), 256)));
  if (!p) throw Error(ExitCode::kInternal, detail::concat("cannot allocate ", bytes, " bytes"));
  return p;
}

void Queue::release(void* p) noexcept {
  if (backend_ == Backend::kCuda) {
    cuda::release(p);
  } else {
    std::free(p);
  }
}

void Queue::fill_bytes(void* p, int value, int64_t bytes) {
  if (bytes == 0) return;
  if (backend_ == Backend::kCuda) {
    cuda::fill_bytes(stream_, p, value, bytes);
  } else {
    std::memset(p, value, static_cast<size_t>(bytes));
  }
}

void Queue::copy_to_host(void* host, const void* device, int64_t bytes) {
  if (bytes == 0) return;
  if (backend_ == Backend::kCuda) {
    cuda::copy_to_host(stream_, host, device, bytes);
  } else {
    std::memcpy(host, device, static_cast<size_t>(bytes));
  }
}

void Queue::copy_from_host(void* device, const void* host, int64_t bytes) {
  if (bytes == 0) return;
  if (backend_ == Backend::kCuda) {
    cuda::copy_from_host(stream_, device, host, bytes);
  } else {
    std::memcpy(device, host, static_cast<size_t>(bytes));
  }
}

void Queue::synchronize() {
  if (backend_ == Backend::kCuda) cuda::synchronize(stream_);
}

Machine probe_machine(const std::string& device, int threads) {
  Machine m;
  m.built_with_cuda = cuda::built_with_cuda();
  cpu_set_t set;
  CPU_ZERO(&set);
  const int cores = sched_getaffinity(0, sizeof(set), &set) == 0 ? CPU_COUNT(&set) : 1;
  m.num_threads = threads > 0 ? threads : std::max(1, cores);
  const bool want_gpu = device == "cuda" || (device == "auto" && cuda::device_count() > 0);
  if (want_gpu) {
    cuda::describe_device(0, m);
    m.backend = Backend::kCuda;
  } else {
    m.device_name = "cpu";
    m.memory_bytes = int64_t{sysconf(_SC_PHYS_PAGES)} * sysconf(_SC_PAGE_SIZE);
  }
  return m;
}

}  // namespace fp4t

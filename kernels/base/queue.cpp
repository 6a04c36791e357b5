#include "kernels/base/queue.h"

#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <utility>

#include "kernels/base/check.h"
#include "kernels/base/memory_limit.h"
#include "kernels/base/numeric.h"

namespace fp4t {

Queue Queue::cpu(int num_threads) {
  Queue q;
  q.threads_ = std::make_unique<ThreadPool>(num_threads);
  return q;
}

Queue Queue::cuda(int device, int num_threads) {
  Queue q;
  q.backend_ = Backend::kCuda;
  q.stream_ = cuda::create_stream(device);
  q.threads_ = std::make_unique<ThreadPool>(num_threads);
  return q;
}

Queue Queue::on(const Machine& machine) {
  return machine.backend == Backend::kCuda ? cuda(machine.device, machine.num_threads)
                                           : cpu(machine.num_threads);
}

Queue Queue::beside() const {
  FP4T_CHECK(backend_ == Backend::kCuda, "a queue beside another on the CPU");
  Queue q;
  q.backend_ = Backend::kCuda;
  q.stream_ = cuda::create_stream_beside(stream_);
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
  if (!p) throw MemoryError(detail::concat("cannot allocate ", bytes, " bytes"));
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

void Queue::upload(void* device, const void* host, int64_t bytes) {
  if (bytes == 0) return;
  if (backend_ == Backend::kCuda) {
    cuda::upload(stream_, device, host, bytes);
  } else {
    std::memcpy(device, host, static_cast<size_t>(bytes));
  }
}

Download Queue::download(const void* device, int64_t bytes) {
  Download d;
  d.bytes_ = bytes;
  if (bytes == 0) return d;
  if (backend_ == Backend::kCuda) {
    d.stream_ = stream_;
    d.staging_ = cuda::begin_download(stream_, device, bytes);
  } else {
    const auto* p = static_cast<const char*>(device);
    d.copy_.assign(p, p + bytes);
  }
  return d;
}

void Queue::copy(void* to, const void* from, int64_t bytes) {
  if (bytes == 0) return;
  if (backend_ == Backend::kCuda) {
    cuda::copy(stream_, to, from, bytes);
  } else {
    std::memcpy(to, from, static_cast<size_t>(bytes));
  }
}

void Queue::reserve_workspace(int64_t bytes) {
  if (backend_ == Backend::kCuda) cuda::reserve_workspace(stream_, bytes);
}

QueueCounts Queue::counts() const {
  return backend_ == Backend::kCuda ? cuda::counts(stream_) : QueueCounts{};
}

const char* Queue::product_kernel() const {
  return backend_ == Backend::kCuda ? cuda::product_kernel(stream_) : "cpu fp32 fma";
}

Mark Queue::mark() {
  Mark m;
  if (backend_ == Backend::kCuda) m.event_ = cuda::mark(stream_);
  return m;
}

void Queue::wait_for(const Mark& mark) {
  if (mark.event_) cuda::wait_for(stream_, mark.event_);
}

Mark::~Mark() {
  if (event_) cuda::release_mark(event_);
}

void Queue::after_waits(std::function<void()> check) {
  if (backend_ == Backend::kCuda) cuda::after_waits(stream_, std::move(check));
}

void* Queue::native_stream() const {
  FP4T_CHECK(backend_ == Backend::kCuda, "the stream of a queue on the CPU");
  return cuda::native_stream(stream_);
}

Recording Queue::record(const std::function<void()>& body) {
  FP4T_CHECK(backend_ == Backend::kCuda, "recording on the CPU");
  cuda::begin_recording(stream_);
  Recording recording;
  try {
    body();
  } catch (...) {
    try {
      recording.graph_ = cuda::end_recording(stream_);  // the stream must leave the recording state
    } catch (const Error&) {  // of a recording that the first error has spoilt, which is the one to report
    }
    throw;
  }
  recording.graph_ = cuda::end_recording(stream_);
  return recording;
}

void Queue::replay(const Recording& recording) {
  FP4T_CHECK(!recording.empty(), "nothing was recorded");
  cuda::replay(stream_, recording.graph_);
}

Recording::~Recording() {
  if (graph_) cuda::release_recording(graph_);
}

Download::Download(Download&& other) noexcept
    : stream_(std::exchange(other.stream_, nullptr)),
      staging_(std::exchange(other.staging_, nullptr)),
      copy_(std::move(other.copy_)),
      bytes_(std::exchange(other.bytes_, 0)) {}

Download& Download::operator=(Download&& other) noexcept {
  std::swap(stream_, other.stream_);
  std::swap(staging_, other.staging_);
  std::swap(copy_, other.copy_);
  std::swap(bytes_, other.bytes_);
  return *this;
}

Download::~Download() {
  if (staging_) cuda::release_download(stream_, staging_);
}

const void* Download::data() {
  return staging_ ? cuda::finish_download(stream_, staging_) : static_cast<const void*>(copy_.data());
}

Machine probe_machine(const std::string& device, int threads, int index) {
  Machine m;
  m.built_with_cuda = cuda::built_with_cuda();
  cpu_set_t set;
  CPU_ZERO(&set);
  const int cores = sched_getaffinity(0, sizeof(set), &set) == 0 ? CPU_COUNT(&set) : 1;
  m.num_threads = threads > 0 ? threads : std::max(1, cores);
  if (device != "cpu" && index < cuda::device_count()) {
    cuda::describe_device(index, m);
    if (m.gpu_obstacle.empty()) {
      m.backend = Backend::kCuda;
      return m;
    }
  }
  m.arch = m.sm_count = 0;
  m.free_bytes = 0;
  m.device_name = "cpu";
  m.memory_bytes = int64_t{sysconf(_SC_PHYS_PAGES)} * sysconf(_SC_PAGE_SIZE);
  const int64_t limit = control_group_limit();
  if (limit > 0) m.memory_bytes = std::min(m.memory_bytes, limit);
  return m;
}

}  // namespace fp4t

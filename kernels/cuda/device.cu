// The device side of Queue (kernels/base/queue.h) and the context behind it.
#include <algorithm>
#include <cstring>

#include "kernels/base/numeric.h"
#include "kernels/cuda/context.h"

namespace fp4t::cuda {

void check_cuda(cudaError_t status, const char* what) {
  if (status == cudaSuccess) return;
  throw Error(ExitCode::kInternal, fp4t::detail::concat(what, ": ", cudaGetErrorString(status)));
}

namespace {

Context& context(void* stream) { return *static_cast<Context*>(stream); }

// Waits for the stream and throws what its kernels reported.
void wait(Context& c) {
  FP4T_CUDA(cudaStreamSynchronize(c.stream));
  const Fault fault = *c.fault;
  if (static_cast<FaultKind>(fault.kind) == FaultKind::kNone) return;
  std::memset(c.fault, 0, sizeof(Fault));
  const std::string where =
      fp4t::detail::concat(fault.op, ": position ", fault.position, " holds ", fault.value);
  if (static_cast<FaultKind>(fault.kind) == FaultKind::kNonFinite) throw NonFiniteError(where);
  throw InternalError(where + ", out of range");
}

}  // namespace

Context& context_of(const Queue& queue) { return context(queue.stream()); }

Workspace::Workspace(Queue& queue) : context_(context_of(queue)) {
  for (const Context::Block& b : context_.blocks) marks_.push_back(b.used);
}

Workspace::~Workspace() {
  marks_.resize(context_.blocks.size(), 0);
  for (size_t i = 0; i < marks_.size(); ++i) context_.blocks[i].used = marks_[i];
}

void* Workspace::bytes(int64_t count) {
  constexpr int64_t kSmallest = int64_t{32} << 20;
  const int64_t size = align_up(std::max<int64_t>(count, 1), 256);
  for (Context::Block& b : context_.blocks) {
    if (b.capacity - b.used < size) continue;
    char* out = b.data + b.used;
    b.used += size;
    return out;
  }
  const int64_t capacity = std::max(size, kSmallest);
  char* data = static_cast<char*>(allocate(capacity));
  context_.blocks.push_back({data, capacity, size});
  context_.workspace_bytes += capacity;
  ++context_.workspace_allocations;
  return data;
}

void* create_stream(int device) {
  FP4T_CUDA(cudaSetDevice(device));
  auto c = std::make_unique<Context>();
  c->device = device;
  FP4T_CUDA(cudaStreamCreateWithFlags(&c->stream, cudaStreamNonBlocking));
  FP4T_CUDA(cudaDeviceGetAttribute(&c->sm_count, cudaDevAttrMultiProcessorCount, device));
  int shared = 0;
  FP4T_CUDA(cudaDeviceGetAttribute(&shared, cudaDevAttrMaxSharedMemoryPerBlockOptin, device));
  c->shared_bytes_per_block = shared;
  void* fault = nullptr;
  FP4T_CUDA(cudaHostAlloc(&fault, sizeof(Fault), cudaHostAllocMapped));
  std::memset(fault, 0, sizeof(Fault));
  c->fault = static_cast<Fault*>(fault);
  return c.release();
}

void destroy_stream(void* stream) noexcept {
  Context* c = static_cast<Context*>(stream);
  cudaStreamSynchronize(c->stream);
  for (const Context::Block& b : c->blocks) cudaFree(b.data);
  cudaFreeHost(c->fault);
  cudaStreamDestroy(c->stream);
  delete c;
}

void* allocate(int64_t bytes) {
  void* p = nullptr;
  const cudaError_t status = cudaMalloc(&p, static_cast<size_t>(std::max<int64_t>(bytes, 1)));
  if (status == cudaErrorMemoryAllocation) {
    cudaGetLastError();  // it is not sticky: the next call must not find it
    size_t free_bytes = 0, total = 0;
    FP4T_CUDA(cudaMemGetInfo(&free_bytes, &total));
    throw Error(ExitCode::kInternal, fp4t::detail::concat("cannot allocate ", bytes, " bytes on the GPU: ",
                                                          free_bytes, " of ", total, " are free"));
  }
  check_cuda(status, "cudaMalloc");
  return p;
}

void release(void* p) noexcept { cudaFree(p); }

void fill_bytes(void* stream, void* p, int value, int64_t bytes) {
  FP4T_CUDA(cudaMemsetAsync(p, value, static_cast<size_t>(bytes), context(stream).stream));
}

void copy_to_host(void* stream, void* host, const void* device, int64_t bytes) {
  Context& c = context(stream);
  FP4T_CUDA(cudaMemcpyAsync(host, device, static_cast<size_t>(bytes), cudaMemcpyDeviceToHost, c.stream));
  wait(c);
}

void copy_from_host(void* stream, void* device, const void* host, int64_t bytes) {
  Context& c = context(stream);
  FP4T_CUDA(cudaMemcpyAsync(device, host, static_cast<size_t>(bytes), cudaMemcpyHostToDevice, c.stream));
  FP4T_CUDA(cudaStreamSynchronize(c.stream));  // `host` is the caller's again
}

void synchronize(void* stream) { wait(context(stream)); }

int device_count() {
  int count = 0;
  if (cudaGetDeviceCount(&count) != cudaSuccess) {
    cudaGetLastError();  // no driver or no device: the CPU it is
    return 0;
  }
  return count;
}

void describe_device(int device, Machine& machine) {
  cudaDeviceProp p;
  FP4T_CUDA(cudaGetDeviceProperties(&p, device));
  machine.device_name = p.name;
  machine.arch = p.major * 10 + p.minor;
  machine.memory_bytes = static_cast<int64_t>(p.totalGlobalMem);
}

bool built_with_cuda() { return true; }

}  // namespace fp4t::cuda

// The device side of Queue (kernels/base/queue.h) and the context behind it.
#include <algorithm>
#include <cstring>

#include "kernels/base/numeric.h"
#include "kernels/cuda/context.h"

namespace fp4t::cuda {

void check_cuda(cudaError_t status, const char* what) {
  if (status == cudaSuccess) return;
  cudaGetLastError();  // told here: the next launch must not find it
  throw Error(ExitCode::kInternal, fp4t::detail::concat(what, ": ", cudaGetErrorString(status)));
}

namespace {

Context& context(void* stream) { return *static_cast<Context*>(stream); }

// Waits for the stream and throws what its kernels reported.
void wait(Context& c) {
  ++c.waits;
  FP4T_CUDA(cudaStreamSynchronize(c.stream));
  c.downloads_arrived = c.downloads;
  if (c.after_waits) c.after_waits();
  const Fault fault = *c.fault;
  if (static_cast<FaultKind>(fault.kind) == FaultKind::kNone) return;
  std::memset(c.fault, 0, sizeof(Fault));
  const std::string where =
      fp4t::detail::concat(fault.op, ": position ", fault.position, " holds ", fault.value);
  if (static_cast<FaultKind>(fault.kind) == FaultKind::kNonFinite) throw NonFiniteError(where);
  throw InternalError(where + ", out of range");
}

void release_block(DownloadBlock* block) {
  cudaFreeHost(block->data);
  cudaEventDestroy(block->arrived);
  delete block;
}

void* page_locked(int64_t bytes) {
  void* p = nullptr;
  FP4T_CUDA(cudaHostAlloc(&p, static_cast<size_t>(bytes), cudaHostAllocDefault));
  return p;
}

// The block that uploads fill now, with room for at least one byte.
UploadBlock& open_upload_block(Context& c) {
  if (c.upload_used == kUploadBlockBytes) {
    UploadBlock& full = c.uploads[c.upload_block];
    FP4T_CUDA(cudaEventRecord(full.passed, c.stream));
    full.in_flight = true;
    c.upload_block = (c.upload_block + 1) % kUploadBlocks;
    c.upload_used = 0;
    UploadBlock& next = c.uploads[c.upload_block];
    // The host is a whole ring ahead of the device: the only place where an upload may wait.
    if (next.in_flight) FP4T_CUDA(cudaEventSynchronize(next.passed));
    next.in_flight = false;
  }
  UploadBlock& block = c.uploads[c.upload_block];
  if (!block.data) {
    block.data = static_cast<char*>(page_locked(kUploadBlockBytes));
    FP4T_CUDA(cudaEventCreateWithFlags(&block.passed, cudaEventDisableTiming));
  }
  return block;
}

// Does nothing; whether it is there tells whether this program has code for a GPU.
__global__ void probe_kernel() {}

}  // namespace

Context& context_of(const Queue& queue) { return context(queue.stream()); }

namespace {
Context::Block& add_block(Context& c, int64_t capacity) {
  c.blocks.push_back({static_cast<char*>(allocate(capacity)), capacity, 0});
  c.workspace_bytes += capacity;
  ++c.workspace_allocations;
  return c.blocks.back();
}
}  // namespace

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
  Context::Block& block = add_block(context_, std::max(size, kSmallest));
  block.used = size;
  return block.data;
}

namespace {
void* create_context(int device, int priority) {
  FP4T_CUDA(cudaSetDevice(device));
  auto c = std::make_unique<Context>();
  c->device = device;
  FP4T_CUDA(cudaStreamCreateWithPriority(&c->stream, cudaStreamNonBlocking, priority));
  int major = 0, minor = 0;
  FP4T_CUDA(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device));
  FP4T_CUDA(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device));
  c->arch = 10 * major + minor;
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
}  // namespace

void* create_stream(int device) { return create_context(device, 0); }

void* create_stream_beside(void* stream) {
  Context& main = context(stream);
  int least = 0, greatest = 0;
  FP4T_CUDA(cudaDeviceGetStreamPriorityRange(&least, &greatest));
  void* const made = create_context(main.device, greatest);
  main.shares_device = true;
  return made;
}

void destroy_stream(void* stream) noexcept {
  Context* c = static_cast<Context*>(stream);
  cudaStreamSynchronize(c->stream);
  for (const Context::Block& b : c->blocks) cudaFree(b.data);
  for (const UploadBlock& b : c->uploads) {
    if (b.data) cudaFreeHost(b.data);
    if (b.passed) cudaEventDestroy(b.passed);
  }
  for (DownloadBlock* b : c->download_blocks) release_block(b);
  c->spare_held.insert(c->spare_held.end(), c->held.begin(), c->held.end());
  for (const HeldSpan& span : c->spare_held) {
    cudaEventDestroy(span.begin);
    cudaEventDestroy(span.end);
  }
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
    throw MemoryError(fp4t::detail::concat("cannot allocate ", bytes, " bytes on the GPU: ", free_bytes,
                                           " of ", total, " are free"));
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
  wait(c);  // `host` is the caller's again
}

void synchronize(void* stream) { wait(context(stream)); }

void upload(void* stream, void* device, const void* host, int64_t bytes) {
  Context& c = context(stream);
  for (int64_t done = 0; done < bytes;) {
    UploadBlock& block = open_upload_block(c);
    const int64_t part = std::min(bytes - done, kUploadBlockBytes - c.upload_used);
    char* staged = block.data + c.upload_used;
    std::memcpy(staged, static_cast<const char*>(host) + done, static_cast<size_t>(part));
    FP4T_CUDA(cudaMemcpyAsync(static_cast<char*>(device) + done, staged, static_cast<size_t>(part),
                              cudaMemcpyHostToDevice, c.stream));
    // The next piece begins on a cache line of its own.
    c.upload_used = std::min(align_up(c.upload_used + part, 64), kUploadBlockBytes);
    done += part;
  }
}

void* begin_download(void* stream, const void* device, int64_t bytes) {
  Context& c = context(stream);
  DownloadBlock* block = nullptr;
  for (size_t i = 0; i < c.download_blocks.size() && !block; ++i) {
    if (c.download_blocks[i]->capacity < bytes) continue;
    block = c.download_blocks[i];
    c.download_blocks.erase(c.download_blocks.begin() + static_cast<int64_t>(i));
  }
  if (!block) {
    const int64_t capacity = align_up(bytes, 4096);
    block = new DownloadBlock{static_cast<char*>(page_locked(capacity)), capacity, 0, nullptr};
    FP4T_CUDA(cudaEventCreateWithFlags(&block->arrived, cudaEventDisableTiming));
  }
  block->number = ++c.downloads;
  FP4T_CUDA(
      cudaMemcpyAsync(block->data, device, static_cast<size_t>(bytes), cudaMemcpyDeviceToHost, c.stream));
  FP4T_CUDA(cudaEventRecord(block->arrived, c.stream));
  return block;
}

const void* finish_download(void* stream, void* staging) {
  Context& c = context(stream);
  const DownloadBlock& block = *static_cast<DownloadBlock*>(staging);
  if (c.downloads_arrived < block.number) {
    ++c.waits;
    FP4T_CUDA(cudaEventSynchronize(block.arrived));
    c.downloads_arrived = block.number;
    if (c.after_waits) c.after_waits();
    if (static_cast<FaultKind>(c.fault->kind) != FaultKind::kNone) wait(c);
  }
  return block.data;
}

void release_download(void* stream, void* staging) noexcept {
  // Whoever takes it next enqueues its copy behind the one that may still be on its way.
  context(stream).download_blocks.push_back(static_cast<DownloadBlock*>(staging));
}

void copy(void* stream, void* to, const void* from, int64_t bytes) {
  FP4T_CUDA(cudaMemcpyAsync(to, from, static_cast<size_t>(bytes), cudaMemcpyDeviceToDevice,
                            context(stream).stream));
}

void reserve_workspace(void* stream, int64_t bytes) {
  Context& c = context(stream);
  for (const Context::Block& b : c.blocks) {
    if (b.capacity - b.used >= bytes) return;
  }
  if (bytes > 0) add_block(c, align_up(bytes, 256));
}

namespace {

// Adds up the spans that are over.
void collect_held(Context& c) {
  while (!c.held.empty() && cudaEventQuery(c.held.front().end) == cudaSuccess) {
    const HeldSpan span = c.held.front();
    c.held.pop_front();
    float ms = 0;
    FP4T_CUDA(cudaEventElapsedTime(&ms, span.begin, span.end));
    c.held_seconds += static_cast<double>(ms) * 1e-3;
    c.spare_held.push_back(span);
  }
}

HeldSpan next_held(Context& c) {
  collect_held(c);
  HeldSpan span{};
  if (!c.spare_held.empty()) {
    span = c.spare_held.back();
    c.spare_held.pop_back();
    return span;
  }
  FP4T_CUDA(cudaEventCreate(&span.begin));
  FP4T_CUDA(cudaEventCreate(&span.end));
  return span;
}

}  // namespace

QueueCounts counts(void* stream) {
  Context& c = context(stream);
  collect_held(c);
  return {c.waits, c.workspace_bytes, c.workspace_allocations, c.held_seconds};
}

void* mark(void* stream) {
  cudaEvent_t event = nullptr;
  FP4T_CUDA(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
  FP4T_CUDA(cudaEventRecord(event, context(stream).stream));
  return event;
}

void wait_for(void* stream, void* mark) {
  Context& c = context(stream);
  const HeldSpan span = next_held(c);
  FP4T_CUDA(cudaEventRecord(span.begin, c.stream));
  FP4T_CUDA(cudaStreamWaitEvent(c.stream, static_cast<cudaEvent_t>(mark)));
  FP4T_CUDA(cudaEventRecord(span.end, c.stream));
  c.held.push_back(span);
}

void release_mark(void* mark) noexcept { cudaEventDestroy(static_cast<cudaEvent_t>(mark)); }

void after_waits(void* stream, std::function<void()> check) {
  context(stream).after_waits = std::move(check);
}

void* native_stream(const void* stream) { return static_cast<const Context*>(stream)->stream; }
int device_of(const void* stream) { return static_cast<const Context*>(stream)->device; }

const char* product_kernel(const void* stream) { return static_cast<const Context*>(stream)->product_kernel; }

void begin_recording(void* stream) {
  FP4T_CUDA(cudaStreamBeginCapture(context(stream).stream, cudaStreamCaptureModeThreadLocal));
}

void* end_recording(void* stream) {
  cudaGraph_t graph = nullptr;
  FP4T_CUDA(cudaStreamEndCapture(context(stream).stream, &graph));
  cudaGraphExec_t ready = nullptr;
  const cudaError_t status = cudaGraphInstantiate(&ready, graph, 0);
  cudaGraphDestroy(graph);
  check_cuda(status, "cudaGraphInstantiate");
  return ready;
}

void replay(void* stream, void* graph) {
  FP4T_CUDA(cudaGraphLaunch(static_cast<cudaGraphExec_t>(graph), context(stream).stream));
}

void release_recording(void* graph) noexcept { cudaGraphExecDestroy(static_cast<cudaGraphExec_t>(graph)); }

int device_count() {
  int count = 0;
  if (cudaGetDeviceCount(&count) != cudaSuccess) {
    cudaGetLastError();  // no driver or no device: the CPU it is
    return 0;
  }
  return count;
}

std::string device_id(int device) {
  cudaDeviceProp p;
  FP4T_CUDA(cudaGetDeviceProperties(&p, device));
  std::string id;
  for (const char byte : p.uuid.bytes) {
    const auto value = static_cast<unsigned char>(byte);
    id += "0123456789abcdef"[value / 16];
    id += "0123456789abcdef"[value % 16];
  }
  return id;
}

void describe_device(int device, Machine& machine) {
  cudaDeviceProp p;
  FP4T_CUDA(cudaGetDeviceProperties(&p, device));
  machine.device_name = p.name;
  machine.device = device;
  machine.arch = p.major * 10 + p.minor;
  machine.sm_count = p.multiProcessorCount;
  machine.memory_bytes = static_cast<int64_t>(p.totalGlobalMem);
  FP4T_CUDA(cudaSetDevice(device));
  cudaFuncAttributes attributes;
  if (cudaFuncGetAttributes(&attributes, probe_kernel) != cudaSuccess) {
    cudaGetLastError();
    machine.gpu_obstacle = fp4t::detail::concat("this program has no code for ", p.name,
                                                " (compute capability ", p.major, ".", p.minor, ")");
    return;
  }
  size_t free_bytes = 0, total = 0;
  FP4T_CUDA(cudaMemGetInfo(&free_bytes, &total));
  machine.free_bytes = static_cast<int64_t>(free_bytes);
}

bool built_with_cuda() { return true; }

}  // namespace fp4t::cuda

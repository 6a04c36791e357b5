// What stands behind a Queue on a GPU: a stream, a stack of workspace, and a word through which kernels
// report faults. Everything that an op enqueues runs in the order of the calls.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <deque>
#include <functional>
#include <vector>

#include "kernels/base/check.h"
#include "kernels/base/queue.h"

namespace fp4t::cuda {

// Throws Error with the expression and CUDA's reason.
void check_cuda(cudaError_t status, const char* what);
#define FP4T_CUDA(expression) ::fp4t::cuda::check_cuda((expression), #expression)

// After a launch: a wrong configuration shows here; what fails while running shows at the next
// synchronising call.
inline void check_launch(const char* op) { check_cuda(cudaGetLastError(), op); }

// Faults that only the data on the device can show. A kernel writes the first one that it meets; the host
// reads it whenever it waits for the stream, and throws.
enum class FaultKind : uint32_t {
  kNone = 0,
  kIndex = 1,      // an index out of range: InternalError
  kNonFinite = 2,  // a row that nothing can be drawn from: NonFiniteError
};

struct Fault {
  uint32_t kind;
  int32_t value;     // the offending value
  int64_t position;  // where it stood
  char op[48];       // filled by the host side of the op
};

// Page-locked host memory on its way to the device: filled from the front, taken up again when the device has
// read it.
struct UploadBlock {
  char* data;
  cudaEvent_t passed;  // after the last copy from it
  bool in_flight;
};
constexpr int kUploadBlocks = 8;
constexpr int64_t kUploadBlockBytes = int64_t{1} << 20;

// Page-locked host memory that a download lands in.
struct DownloadBlock {
  char* data;
  int64_t capacity;
  int64_t number;       // of the download
  cudaEvent_t arrived;  // so that what is enqueued behind it is not waited for
};

// A time in which a queue stood still for another one.
struct HeldSpan {
  cudaEvent_t begin, end;
};

struct GemmProblem;

struct Context {
  int device = 0;
  cudaStream_t stream = nullptr;
  int arch = 0;  // compute capability x 10
  int sm_count = 0;
  bool shares_device = false;          // another queue works beside this one: its blocks wait for room
  int64_t shared_bytes_per_block = 0;  // opt-in limit of dynamic shared memory
  // In mapped host memory: the same pointer is good on both sides.
  Fault* fault = nullptr;

  // Workspace: blocks that only ever grow, so that after the first step none is allocated.
  struct Block {
    char* data;
    int64_t capacity, used;
  };
  std::vector<Block> blocks;
  int64_t workspace_bytes = 0;
  int64_t workspace_allocations = 0;

  // Where set, dense products of BF16 are offered to it before our own cores; false: not taken. For
  // benchmarks that ask what sums in one order cost.
  std::function<bool(const GemmProblem&)> dense_product;

  const char* product_kernel = "none";  // that the last product was launched as

  int64_t waits = 0;                  // times that the host waited for the stream
  std::function<void()> after_waits;  // called then
  std::deque<HeldSpan> held;          // not yet added to held_seconds, in order
  std::vector<HeldSpan> spare_held;
  double held_seconds = 0;
  UploadBlock uploads[kUploadBlocks] = {};
  int upload_block = 0;
  int64_t upload_used = 0;                      // bytes of that block
  std::vector<DownloadBlock*> download_blocks;  // those that nobody holds
  int64_t downloads = 0;                        // begun
  int64_t downloads_arrived = 0;                // of these, known to be here: they come in order
};

Context& context_of(const Queue& queue);
inline cudaStream_t stream_of(const Queue& queue) { return context_of(queue).stream; }
// Whether kernels for Hopper's tensor cores run here.
inline bool on_sm90(const Queue& queue) { return context_of(queue).arch == 90; }

// Scratch of one op, given back at its end; what the op enqueued may still use it, since whatever takes it
// next is enqueued later. Blocks are 256-byte aligned.
class Workspace {
 public:
  explicit Workspace(Queue& queue);
  ~Workspace();
  Workspace(const Workspace&) = delete;
  Workspace& operator=(const Workspace&) = delete;

  void* bytes(int64_t count);
  template <class T>
  T* take(int64_t count) {
    return static_cast<T*>(bytes(count * static_cast<int64_t>(sizeof(T))));
  }

 private:
  Context& context_;
  std::vector<int64_t> marks_;  // `used` of every block at the start
};

}  // namespace fp4t::cuda

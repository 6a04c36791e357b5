// Twin of kernels/cuda in the flavour without CUDA: every entry says so.
#include "kernels/base/check.h"
#include "kernels/ops/run.h"

namespace fp4t::cuda {

namespace {
[[noreturn]] void absent(const char* what) {
  throw RecipeError(fp4t::detail::concat(what, ": built without CUDA (run.device: cpu works)"));
}
}  // namespace

#define FP4T_OP(op, exactness) \
  void run(Queue&, const op&) { absent(op::kName); }
#include "kernels/ops/op_list.inc"
#undef FP4T_OP

void* create_stream(int) { absent("run.device: cuda"); }
void* create_stream_beside(void*) { absent("run.device: cuda"); }
void destroy_stream(void*) noexcept {}
void* allocate(int64_t) { absent("device memory"); }
void release(void*) noexcept {}
void fill_bytes(void*, void*, int, int64_t) { absent("device memory"); }
void copy_to_host(void*, void*, const void*, int64_t) { absent("device memory"); }
void copy_from_host(void*, void*, const void*, int64_t) { absent("device memory"); }
void synchronize(void*) { absent("device queue"); }
void upload(void*, void*, const void*, int64_t) { absent("device memory"); }
void* begin_download(void*, const void*, int64_t) { absent("device memory"); }
const void* finish_download(void*, void*) { absent("device memory"); }
void release_download(void*, void*) noexcept {}
void copy(void*, void*, const void*, int64_t) { absent("device memory"); }
void reserve_workspace(void*, int64_t) { absent("device memory"); }
QueueCounts counts(void*) { absent("device queue"); }
void* mark(void*) { absent("device queue"); }
void wait_for(void*, void*) { absent("device queue"); }
void release_mark(void*) noexcept {}
void after_waits(void*, std::function<void()>) { absent("device queue"); }
void* native_stream(const void*) { absent("device queue"); }
int device_of(const void*) { absent("device queue"); }
std::string device_id(int) { absent("run.device: cuda"); }
const char* product_kernel(const void*) { absent("device queue"); }
void begin_recording(void*) { absent("device queue"); }
void* end_recording(void*) { absent("device queue"); }
void replay(void*, void*) { absent("device queue"); }
void release_recording(void*) noexcept {}
int device_count() { return 0; }
void describe_device(int, Machine&) { absent("run.device: cuda"); }
bool built_with_cuda() { return false; }

}  // namespace fp4t::cuda

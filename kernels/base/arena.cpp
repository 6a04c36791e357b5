#include "kernels/base/arena.h"

#include <algorithm>
#include <utility>

#include "kernels/base/numeric.h"
#include "kernels/base/queue.h"

namespace fp4t {

namespace {
constexpr int64_t kAlignBytes = 256;
}

Arena::Arena(Queue& queue, std::string name, int64_t capacity_bytes, Poison poison)
    : queue_(queue), name_(std::move(name)), capacity_(capacity_bytes), poison_(poison) {
  base_ = static_cast<char*>(queue_.allocate(std::max<int64_t>(capacity_, kAlignBytes)));
}

Arena::~Arena() { queue_.release(base_); }

int64_t Arena::block_bytes(int64_t bytes) { return align_up(std::max<int64_t>(bytes, 1), kAlignBytes); }

void* Arena::take_bytes(const std::string& block, int64_t bytes) {
  const int64_t need = block_bytes(bytes);
  if (used_ + need > capacity_) {
    throw InternalError(detail::concat("arena '", name_, "' is full: block '", block, "' needs ", need,
                                       " bytes, ", capacity_ - used_, " of ", capacity_,
                                       " are free; the plan priced too little"));
  }
  char* p = base_ + used_;
  used_ += need;
  high_water_ = std::max(high_water_, used_);
  if (poison_ == Poison::kNan) queue_.fill_bytes(p, 0xFF, need);
  return p;
}

TensorView Arena::take(const std::string& block, DType dtype, const Shape& shape) {
  TensorView v;
  v.dtype = dtype;
  v.shape = shape;
  v.data = take_bytes(block, shape.elements() * dtype_bytes(dtype));
  return v;
}

void Arena::rewind(int64_t used_bytes) {
  // Called from destructors: a level above the fill would be a bug of the caller, and is ignored there.
  if (used_bytes <= used_) used_ = used_bytes;
}

void Arena::reclaim(int64_t used_bytes) {
  FP4T_CHECK(used_bytes >= used_ && used_bytes <= high_water_, "arena '", name_, "' was never filled to ",
             used_bytes);
  used_ = used_bytes;
}

}  // namespace fp4t

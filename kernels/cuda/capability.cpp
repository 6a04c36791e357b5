// Pure arithmetic: both flavours have it, so that a plan for a GPU can be made where there is none.
#include "kernels/ops/capability.h"

#include <algorithm>

#include "kernels/base/check.h"
#include "kernels/base/numeric.h"
#include "kernels/cuda/attention_sizes.h"

namespace fp4t::cuda {

namespace {

constexpr int64_t kAlign = 256;  // of every piece of workspace

// A side as BF16, along either axis (kernels/cuda/gemm.cu).
int64_t decoded_bytes(const QuantView& codes) {
  if (codes.empty()) return 0;
  const int64_t rows = align_up(std::max(codes.rows, codes.padded_rows), 8);
  return align_up(2 * rows * std::max(codes.cols, codes.padded_cols), kAlign);
}

}  // namespace

std::string head_dim_obstacle(int64_t head_dim) {
  if (head_dim <= kMaxHeadDim) return "";
  return detail::concat("the GPU's attention has heads of up to ", kMaxHeadDim);
}

int64_t workspace_bytes(const ProductCodes& codes) {
  constexpr int64_t kOffsets = 1 << 16;  // padded bounds of groups
  return decoded_bytes(codes.a) + decoded_bytes(codes.b) + kOffsets;
}

int64_t workspace_bytes(const CachedRows& c) {
  const int64_t rows = std::min(c.rows, kFewCachedRows), splits = ceil_div(c.max_length, kSplitKeys);
  if (splits <= 1) return 0;
  const int64_t columns = c.head_dim <= 64 ? 64 : 128;
  return std::min(rows * c.heads * splits * (columns + 2) * 4, kMaxPartialBytes) + 2 * kAlign;
}

int64_t workspace_bytes(int64_t rows, int64_t heads, int64_t vocabulary) {
  // Attention holds a pair of floats a row and head and a tile a row, the embedding's gradient lists of rows
  // and tokens; the partial sums of norms, router, loss and quantisers are bounded by the machine's size.
  constexpr int64_t kPartialSums = int64_t{48} << 20;
  return rows * (heads * 8 + 64) + vocabulary * 16 + kPartialSums;
}

}  // namespace fp4t::cuda

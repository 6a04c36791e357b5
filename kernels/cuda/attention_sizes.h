// Sizes of attention that its kernels and the questions of the plan (capability.cpp) share.
#pragma once

#include <cstdint>

namespace fp4t::cuda {

inline constexpr int kMaxHeadDim = 256;  // of the kernels without tensor cores, which take what others do not
// Cached attention.
inline constexpr int kSplitKeys = 1024;  // keys of a split; counted from the document's first token
// Up to so many rows, and so many bytes of partial sums, the splits of a row go to blocks of their own.
inline constexpr int64_t kFewCachedRows = 1024, kMaxPartialBytes = int64_t{256} << 20;

}  // namespace fp4t::cuda

#include "kernels/cuda/gemm_choose.h"

#include <algorithm>

#include "kernels/base/numeric.h"

namespace fp4t::cuda {

MmaVariant choose_mma(const GemmProblem& p, int sm_count) {
  // Rows of all groups together; a group of a few rows fills no high tile.
  const bool grouped_rows = p.mode == GemmMode::kGroupedM;
  const int64_t rows = grouped_rows ? p.m / std::max<int64_t>(1, p.groups) : p.m;
  const int64_t matrices = p.mode == GemmMode::kDense ? 1 : p.groups;
  const int64_t tiles = ceil_div(rows, 128) * ceil_div(p.n, 128) * matrices;
  return rows > 64 && tiles >= sm_count ? MmaVariant::kLarge : MmaVariant::kSmall;
}

int copy_bytes(const GemmSide& side) {
  const auto address = reinterpret_cast<uintptr_t>(side.data);
  for (const int bytes : {16, 4}) {
    const int64_t elements = bytes / 2;
    if (address % static_cast<uintptr_t>(bytes) == 0 && side.ld % elements == 0 &&
        side.group_stride % elements == 0) {
      return bytes;
    }
  }
  return 2;
}

}  // namespace fp4t::cuda

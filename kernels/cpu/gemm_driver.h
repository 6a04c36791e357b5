// Products as a list: every op of kernels/ops/gemm.h becomes problems (one a group), these are cut into
// blocks of output, and threads take blocks. How they are cut changes no bit (gemm_tile.h), so it may
// follow sizes alone.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels/base/queue.h"
#include "kernels/cpu/gemm_epilogue.h"
#include "kernels/cpu/gemm_source.h"

namespace fp4t::cpu {

// out [rows, cols] = alpha * a [rows, depth] b [cols, depth]^T. Depth 0 gives exact zeros, or leaves
// the output alone when accumulating, whatever the scales hold.
struct GemmProblem {
  int64_t rows = 0;
  int64_t cols = 0;
  int64_t depth = 0;
  GemmSource a;
  GemmSource b;
  GemmScales scales;
  GemmOutput out;
};

void multiply(Queue& queue, const std::vector<GemmProblem>& problems);

}  // namespace fp4t::cpu

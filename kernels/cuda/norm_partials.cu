#include <algorithm>

#include "kernels/base/numeric.h"
#include "kernels/cuda/context.h"
#include "kernels/cuda/norm_rows.cuh"

namespace fp4t::cuda {

namespace {

constexpr int kSide = 32;

// 32 columns a block: thread (x, y) adds rows y, y + 32, ... of column x, then a warp adds the 32 of one
// column.
__global__ void __launch_bounds__(kSide* kSide)
    sum_columns(const float* partials, int64_t chunks, int64_t columns, float* first, int64_t split,
                float* second) {
  __shared__ float tile[kSide][kSide + 1];
  const int x = static_cast<int>(threadIdx.x) % kSide, y = static_cast<int>(threadIdx.x) / kSide;
  const int64_t begin = int64_t{blockIdx.x} * kSide;
  float sum = 0.0f;
  if (begin + x < columns) {
#pragma unroll 8
    for (int64_t c = y; c < chunks; c += kSide) sum += partials[c * columns + begin + x];
  }
  tile[y][x] = sum;
  __syncthreads();
  const float total = warp_sum(tile[x][y]);
  const int64_t column = begin + y;
  if (x == 0 && column < columns) {
    float* gradient = column < split ? first + column : second + (column - split);
    *gradient = *gradient + total;
  }
}

}  // namespace

void add_partials(Queue& queue, const char* op, const float* partials, int64_t chunks, int64_t columns,
                  float* first, int64_t split, float* second) {
  if (columns == 0 || chunks == 0) return;
  sum_columns<<<static_cast<unsigned>(ceil_div(columns, kSide)), kSide * kSide, 0, stream_of(queue)>>>(
      partials, chunks, columns, first, split, second);
  check_launch(op);
}

}  // namespace fp4t::cuda

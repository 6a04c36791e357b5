// A thread a draw: four elements.
#include "kernels/ops/random.h"

#include <algorithm>

#include "kernels/base/numeric.h"
#include "kernels/cuda/context.h"
#include "kernels/formats/bf16.h"
#include "kernels/formats/normal.h"
#include "kernels/ops/run.h"

namespace fp4t::cuda {

namespace {

constexpr int kThreads = 256;

__device__ void store(float* out, float value) { *out = value; }
__device__ void store(Bf16* out, float value) { *out = f32_to_bf16(value); }

template <class T>
__global__ void __launch_bounds__(kThreads)
    fill_normal(PhiloxKey key, float scale, int64_t first, int64_t n, T* out) {
  const int64_t stride = int64_t{gridDim.x} * kThreads;
  for (int64_t draw = first / 4 + int64_t{blockIdx.x} * kThreads + threadIdx.x; 4 * draw < first + n;
       draw += stride) {
    const PhiloxBits bits = site_draw(key, static_cast<uint64_t>(draw));
    const NormalPair a = normal_pair(bits.word[0], bits.word[1]), b = normal_pair(bits.word[2], bits.word[3]);
    const float values[4] = {scale * a.even, scale * a.odd, scale * b.even, scale * b.odd};
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const int64_t i = 4 * draw + k - first;
      if (i >= 0 && i < n) store(out + i, values[k]);
    }
  }
}

}  // namespace

void run(Queue& queue, const FillNormal& op) {
  const int64_t n = op.out.elements();
  if (n == 0) return;
  const Context& c = context_of(queue);
  const auto blocks =
      static_cast<unsigned>(std::min<int64_t>(ceil_div(n + 3, 4 * kThreads), int64_t{c.sm_count} * 32));
  const int64_t first = op.first_element;
  if (op.out.dtype == DType::kF32) {
    fill_normal<<<blocks, kThreads, 0, c.stream>>>(op.key, op.scale, first, n, op.out.as<float>());
  } else {
    fill_normal<<<blocks, kThreads, 0, c.stream>>>(op.key, op.scale, first, n, op.out.as<Bf16>());
  }
  check_launch(FillNormal::kName);
}

}  // namespace fp4t::cuda

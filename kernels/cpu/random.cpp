#include "kernels/ops/random.h"

#include <algorithm>

#include "kernels/base/numeric.h"
#include "kernels/formats/bf16.h"
#include "kernels/formats/normal.h"
#include "kernels/ops/run.h"

namespace fp4t::cpu {

namespace {

// Elements [4 draw, 4 draw + 4) of the logical tensor, as far as they are out's.
template <class T>
void fill_draws(const FillNormal& op, int64_t begin, int64_t end) {
  T* out = op.out.as<T>();
  const int64_t first = op.first_element, last = first + op.out.elements();
  for (int64_t draw = begin; draw < end; ++draw) {
    const PhiloxBits bits = site_draw(op.key, static_cast<uint64_t>(draw));
    const NormalPair a = normal_pair(bits.word[0], bits.word[1]), b = normal_pair(bits.word[2], bits.word[3]);
    const float values[4] = {op.scale * a.even, op.scale * a.odd, op.scale * b.even, op.scale * b.odd};
    for (int64_t i = std::max(first, 4 * draw); i < std::min(last, 4 * draw + 4); ++i) {
      if constexpr (std::is_same_v<T, float>) {
        out[i - first] = values[i - 4 * draw];
      } else {
        out[i - first] = f32_to_bf16(values[i - 4 * draw]);
      }
    }
  }
}

}  // namespace

void run(Queue& queue, const FillNormal& op) {
  const int64_t first = op.first_element / 4;
  const int64_t draws = ceil_div(op.first_element + op.out.elements(), 4) - first;
  parallel_for(queue, draws, 4096, [&](int64_t begin, int64_t end) {
    if (op.out.dtype == DType::kF32) {
      fill_draws<float>(op, first + begin, first + end);
    } else {
      fill_draws<Bf16>(op, first + begin, first + end);
    }
  });
}

}  // namespace fp4t::cpu

// Draws one token a row. Exactness: Bitwise given the logits (exponentials from kernels/formats/math.h).
#pragma once

#include "kernels/base/philox.h"
#include "kernels/base/tensor.h"

namespace fp4t {

// 24 bits for the token at a position of a sample, below 2^44: of draw sample * 2^20 + position mod 2^20 of
// the key, with position / 2^20 in the counter's third word. No two pairs have the same counter.
FP4T_HD uint32_t token_draw(PhiloxKey key, int64_t sample, int32_t position) {
  constexpr uint32_t kLow = (uint32_t{1} << 20) - 1;
  const auto at = static_cast<uint32_t>(position);
  const uint64_t index = (static_cast<uint64_t>(sample) << 20) + (at & kLow);
  return philox4x32(key, static_cast<uint32_t>(index), static_cast<uint32_t>(index >> 32), at >> 20, 0)
             .word[0] >>
         8;
}

// Row b draws with token_draw of its sample and position: the result depends on the row's logits, the key,
// the sample and the position alone. Temperature 0 takes the largest logit, ties to the lower index. log_prob
// is that of kernels/ops/loss.h at this temperature and top_p, bit for bit (at temperature 0: of the
// distribution at temperature 1, with this top_p). The draw inverts the cumulative distribution in index
// order, in exact fixed point. Rows with NaN or +inf, or with -inf alone, throw NonFiniteError.
struct SampleTokens {
  static constexpr const char* kName = "sample_tokens";
  TensorView logits;  // F32 [B, V]
  float temperature;  // >= 0
  float top_p;        // (0, 1]
  PhiloxKey key;
  TensorView sample_ids;  // I64 [B]
  TensorView positions;   // I32 [B]
  TensorView tokens;      // I32 [B], written
  TensorView log_prob;    // F32 [B], written
  void check() const;
};

}  // namespace fp4t

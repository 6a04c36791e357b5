// Draws one token a row. Exactness: Bitwise given the logits (exponentials from kernels/formats/math.h).
#pragma once

#include "kernels/base/philox.h"
#include "kernels/base/tensor.h"

namespace fp4t {

// Row b draws with word 0 of site_draw(key, sample_ids[b] * 2^20 + positions[b]): the result depends on
// the row's logits, the key, the sample and the position alone. Temperature 0 takes the largest logit,
// ties to the lower index. log_prob is that of kernels/ops/loss.h at this temperature and top_p, bit for
// bit (at temperature 0: of the distribution at temperature 1, with this top_p). The draw inverts the
// cumulative distribution in index order, in exact fixed point. Rows with NaN or +inf, or with -inf alone,
// throw NonFiniteError.
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

#include "kernels/ops/random.h"

#include <cmath>

#include "kernels/ops/expect.h"

namespace fp4t {

void FillNormal::check() const {
  expect_float(kName, "out", out, out.shape);
  FP4T_CHECK(std::isfinite(scale), kName, ".scale ", scale);
}

}  // namespace fp4t

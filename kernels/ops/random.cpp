#include "kernels/ops/random.h"

#include <cmath>

#include "kernels/ops/expect.h"

namespace fp4t {

void FillNormal::check() const {
  expect_float(kName, "out", out, out.shape);
  FP4T_CHECK(std::isfinite(scale), kName, ".scale ", scale);
  FP4T_CHECK(first_element >= 0, kName, ".first_element ", first_element);
}

}  // namespace fp4t

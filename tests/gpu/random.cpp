// Normal numbers on the GPU against the CPU's.
#include "kernels/ops/random.h"

#include "tests/support/mirror.h"

namespace fp4t::test {
namespace {

TEST(GpuFillNormal, is_the_cpus_to_a_last_bit) {
  for (const DType dtype : {DType::kF32, DType::kBf16}) {
    for (const int64_t n : {0, 1, 2, 3, 4, 5, 1023, 3000001}) {
      Mirror m;
      for (const int64_t first : {0, 3, 4, 70001}) {
        m.check(
            FillNormal{.key = {7, 9}, .scale = 0.02f, .out = m.fresh(dtype, {n}), .first_element = first});
      }
    }
  }
}

}  // namespace
}  // namespace fp4t::test

FP4T_GPU_TEST_MAIN

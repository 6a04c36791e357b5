// The GPU quantisers against the independent oracle, through the function behind `fp4train selfcheck`.
#include <cstdlib>

#include "engine/stage/selfcheck.h"
#include "tests/support/mirror.h"

namespace fp4t::test {
namespace {

TEST(GpuGolden, every_case_is_equal_bit_for_bit) {
  const char* source = std::getenv("FP4T_TEST_SOURCE");
  Queue queue = Queue::cuda(0);
  const GoldenResult result =
      check_golden(queue, std::string(source ? source : ".") + "/tests/golden/quantise.jsonl");
  EXPECT_EQ(result.cases, 260);
  EXPECT_EQ(result.equal, result.cases);
  for (const std::string& failure : result.failures) ADD_FAILURE() << failure;
}

}  // namespace
}  // namespace fp4t::test

FP4T_GPU_TEST_MAIN

// Token embedding on the GPU against the CPU.
#include "kernels/ops/embed.h"

#include <random>

#include "kernels/base/check.h"
#include "tests/support/mirror.h"

namespace fp4t::test {
namespace {

constexpr DType kTypes[] = {DType::kBf16, DType::kF32};

std::vector<int32_t> draw(int64_t count, int64_t vocabulary, uint64_t seed) {
  std::mt19937_64 engine(seed);
  std::vector<int32_t> tokens(static_cast<size_t>(count));
  for (int32_t& t : tokens) {
    t = static_cast<int32_t>(static_cast<int64_t>(engine() >> 1) % vocabulary);
    if (engine() % 4 == 0) t = static_cast<int32_t>(vocabulary / 2);  // one token in four is the same
  }
  return tokens;
}

TEST(GpuEmbed, embeddings_and_their_gradients_are_bitwise) {
  for (DType type : kTypes) {
    for (int64_t width : {1, 90, 128, 2056}) {
      for (int64_t count : {0, 1, 300, 5000}) {
        for (int64_t vocabulary : {1, 257, 50304}) {
          if (vocabulary * width > 10'000'000) continue;
          SCOPED_TRACE(detail::concat("T=", count, " V=", vocabulary, " D=", width));
          Mirror m;
          const TensorView tokens = m.i32(draw(count, vocabulary, 5));
          m.check(EmbedForward{.table = m.normal(type, {vocabulary, width}),
                               .tokens = tokens,
                               .out = m.fresh(type, {count, width})});
          m.check(EmbedBackward{.dout = m.normal(type, {count, width}),
                                .tokens = tokens,
                                .dtable = m.normal(DType::kF32, {vocabulary, width})});
        }
      }
    }
  }
}

// A token that occurs in several windows of the sort.
TEST(GpuEmbed, frequent_tokens_sum_in_index_order) {
  Mirror m;
  m.check(EmbedBackward{.dout = m.normal(DType::kBf16, {40000, 16}),
                        .tokens = m.i32(draw(40000, 20, 9)),
                        .dtable = m.zeros(DType::kF32, {20, 16})});
}

TEST(GpuEmbed, tokens_outside_of_the_vocabulary_are_faults) {
  for (int32_t bad : {-1, 100}) {
    Mirror m;
    std::vector<int32_t> ids = draw(500, 100, 3);
    ids[321] = bad;
    const TensorView tokens = m.i32(ids), rows = m.normal(DType::kBf16, {500, 64});
    EXPECT_THROW(m.run_on_gpu(EmbedForward{m.normal(DType::kBf16, {100, 64}), tokens, rows}), InternalError);
    EXPECT_THROW(m.run_on_gpu(EmbedBackward{rows, tokens, m.zeros(DType::kF32, {100, 64})}), InternalError);
  }
}

}  // namespace
}  // namespace fp4t::test

FP4T_GPU_TEST_MAIN

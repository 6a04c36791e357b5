// What a GPU's kernels need, asked of the program alone: no GPU takes part.
#include "kernels/ops/capability.h"

#include "gtest/gtest.h"

namespace fp4t::test {
namespace {

Machine gpu() {
  Machine m;
  m.backend = Backend::kCuda;
  return m;
}

QuantView codes(Format format, int64_t rows, int64_t cols) {
  QuantSpec spec;
  spec.format = format;
  return quant_layout(spec, GroupAxis::kRows, 1, rows, cols);
}

TEST(Capability, the_cpu_needs_no_workspace_and_refuses_no_head) {
  const Machine cpu;
  EXPECT_EQ(workspace_bytes(cpu, ProductCodes{codes(Format::kMxfp8, 64, 64), {}}), 0);
  EXPECT_EQ(workspace_bytes(cpu, CachedRows{64, 8, 128, 4096}), 0);
  EXPECT_EQ(workspace_bytes(cpu, 4096, 8, 50304), 0);
  EXPECT_EQ(head_dim_obstacle(cpu, 4096), "");
}

TEST(Capability, codes_are_priced_as_the_bf16_values_that_a_product_makes_of_them) {
  const int64_t plain = workspace_bytes(gpu(), ProductCodes{});
  const auto more = [&](const ProductCodes& c) { return workspace_bytes(gpu(), c) - plain; };
  EXPECT_EQ(more({codes(Format::kMxfp8, 1024, 2048), {}}), 2 * 1024 * 2048);
  EXPECT_EQ(more({codes(Format::kNvfp4, 1024, 2048), codes(Format::kNvfp4, 512, 2048)}),
            2 * (1024 + 512) * 2048);
  // Rows go up to a multiple of 8, columns to the blocks that hold them.
  EXPECT_EQ(more({codes(Format::kMxfp8, 9, 33), {}}), 2 * 16 * 64);
}

TEST(Capability, splits_of_cached_rows_are_priced_up_to_their_limit) {
  EXPECT_EQ(workspace_bytes(gpu(), CachedRows{64, 32, 128, 1024}), 0);  // one split needs no merging
  const int64_t two = workspace_bytes(gpu(), CachedRows{64, 32, 128, 2048});
  EXPECT_GE(two, 64 * 32 * 2 * 130 * 4);
  EXPECT_LE(workspace_bytes(gpu(), CachedRows{1 << 20, 64, 128, 1 << 20}), (int64_t{256} << 20) + 512);
}

TEST(Capability, heads_beyond_the_attention_kernels_are_refused_by_size) {
  EXPECT_EQ(head_dim_obstacle(gpu(), 256), "");
  EXPECT_NE(head_dim_obstacle(gpu(), 264).find("256"), std::string::npos);
}

}  // namespace
}  // namespace fp4t::test

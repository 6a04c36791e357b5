// Which core and tile products get: needs no GPU.
#include "kernels/cuda/gemm_choose.h"

#include "gtest/gtest.h"

namespace fp4t::cuda {
namespace {

GemmProblem dense(int64_t m, int64_t n, int64_t k) {
  GemmProblem p;
  p.m = m, p.n = n, p.k = k;
  p.a.ld = p.b.ld = k;
  return p;
}

TEST(GemmChoose, large_tiles_only_where_every_multiprocessor_gets_one) {
  EXPECT_EQ(choose_mma(dense(4096, 4096, 64), 132), MmaVariant::kLarge);
  EXPECT_EQ(choose_mma(dense(1024, 1024, 4096), 132), MmaVariant::kSmall);
  EXPECT_EQ(choose_mma(dense(16, 151936, 2048), 132), MmaVariant::kSmall);
}

TEST(GemmChoose, groups_share_the_rows) {
  GemmProblem p = dense(32768, 1536, 2048);
  p.mode = GemmMode::kGroupedM;
  p.groups = 128;
  EXPECT_EQ(choose_mma(p, 132), MmaVariant::kLarge);
  p.m = 2048;  // 16 rows a group
  EXPECT_EQ(choose_mma(p, 132), MmaVariant::kSmall);
}

TEST(GemmChoose, few_rows_a_group_stream_the_weights) {
  EXPECT_TRUE(stream_takes(dense(64, 2048, 2048)));
  EXPECT_FALSE(stream_takes(dense(65, 2048, 2048)));
  EXPECT_FALSE(stream_takes(dense(64, 2048, 90)));  // rows in no whole chunks
  EXPECT_FALSE(stream_takes(dense(64, 2048, 0)));
  GemmProblem p = dense(512, 1536, 2048);  // 64 tokens, eight of 128 experts each
  p.mode = GemmMode::kGroupedM;
  p.groups = 128;
  EXPECT_TRUE(stream_takes(p));
  EXPECT_EQ(stream_tile_rows(p, 132), 16);
  EXPECT_EQ(stream_codes_height(p, 132), 1);  // 2048 deep
  p.k = 768;
  EXPECT_EQ(stream_codes_height(p, 132), 2);
  p.m = 8;  // 96 blocks of 128 columns
  EXPECT_EQ(stream_codes_height(p, 132), 1);
  p.m = 2048;  // tiles of 64 rows
  EXPECT_EQ(stream_codes_height(p, 132), 1);
  p.m = 512, p.n = 1600;
  EXPECT_EQ(stream_codes_height(p, 132), 1);
  EXPECT_EQ(stream_tile_rows(dense(64, 50304, 2048), 132), 64);
  EXPECT_EQ(stream_tile_rows(dense(64, 5120, 2048), 132), 32);  // 160 blocks in place of 80
  EXPECT_EQ(stream_tile_rows(dense(64, 2048, 2048), 132), 16);
  p.m = 32768;
  EXPECT_FALSE(stream_takes(p));
  p.mode = GemmMode::kGroupedK;
  p.m = 16;
  EXPECT_FALSE(stream_takes(p));
}

TEST(GemmChoose, a_ring_is_as_deep_as_shared_memory_allows) {
  const int64_t shared = 227 * 1024;
  EXPECT_EQ(stream_stages(128, 10240, 132, shared), 16);
  EXPECT_EQ(stream_stages(264, 10240, 132, shared), 8);
  EXPECT_EQ(stream_stages(3000, 10240, 132, shared), 4);
  EXPECT_EQ(stream_stages(1536, 14336, 132, shared, 3), 3);
}

TEST(GemmChoose, codes_stream_when_their_rows_are_whole_stages) {
  QuantSpec spec;
  spec.format = Format::kNvfp4;
  const auto takes = [&](int64_t rows, int64_t k, CodeOrder order = CodeOrder::kStream) {
    QuantView weights = quant_layout(spec, GroupAxis::kRows, 1, 256, k);
    weights.order = order;
    return stream_takes_codes(dense(rows, 256, k), weights);
  };
  EXPECT_TRUE(takes(64, 768));
  EXPECT_FALSE(takes(65, 768));
  EXPECT_FALSE(takes(64, 96));
  EXPECT_FALSE(takes(64, 90));
  EXPECT_FALSE(takes(64, 768, CodeOrder::kNatural));
  spec.format = Format::kMxfp8;
  EXPECT_FALSE(takes(64, 768));
}

TEST(GemmChoose, copies_are_as_wide_as_every_row_allows) {
  alignas(16) static Bf16 data[64];
  const auto bytes = [](const Bf16* p, int64_t ld, int64_t stride) {
    GemmSide s;
    s.data = p;
    s.ld = ld;
    s.group_stride = stride;
    return copy_bytes(s);
  };
  EXPECT_EQ(bytes(data, 96, 0), 16);
  EXPECT_EQ(bytes(data, 90, 0), 4);
  EXPECT_EQ(bytes(data, 257, 0), 2);
  EXPECT_EQ(bytes(data + 2, 96, 0), 4);
  EXPECT_EQ(bytes(data + 1, 96, 0), 2);
  EXPECT_EQ(bytes(data, 96, 100), 4);
}

}  // namespace
}  // namespace fp4t::cuda

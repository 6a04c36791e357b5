// Every set of lanes gives the bits of plain std::fma.
#include "kernels/cpu/gemm_tile.h"

#include <vector>

#include "gtest/gtest.h"
#include "tests/support/compare.h"
#include "tests/support/tensors.h"

namespace fp4t::cpu {
namespace {

using test::HostTensor;

// One tile by `kernel`, its contraction cut at `cut` (0: not cut).
HostTensor tile_of(TileKernel kernel, int64_t rows, int64_t depth, int64_t cut) {
  constexpr int64_t kStride = 100;
  HostTensor a(DType::kF32, {kTileRows, kStride}), b(DType::kF32, {depth, kTileCols});
  test::fill_normal(a, 1);
  test::fill_normal(b, 2);
  HostTensor acc(DType::kF32, {rows, kTileCols});
  const float* pa = a.as<float>();
  const float* pb = b.as<float>();
  if (cut > 0) kernel(cut, pa, kStride, pb, acc.as<float>(), true);
  kernel(depth - cut, pa + cut, kStride, pb + cut * kTileCols, acc.as<float>(), cut == 0);
  return acc;
}

TEST(GemmTile, native_lanes_equal_portable_lanes_bit_for_bit) {
  static constexpr auto kNative = tile_kernels<NativeLanes>();
  static constexpr auto kPortable = tile_kernels<PortableLanes<NativeLanes::kWidth>>();
  for (int64_t rows = 1; rows <= kTileRows; ++rows) {
    const size_t i = static_cast<size_t>(rows - 1);
    for (const int64_t depth : {0, 1, 2, 7, 33, 90}) {
      HostTensor expected = tile_of(kPortable[i], rows, depth, 0);
      HostTensor native = tile_of(kNative[i], rows, depth, 0);
      EXPECT_TRUE(test::matches(expected.view(), native.view(), Bitwise())) << rows << " rows, " << depth;
    }
  }
}

TEST(GemmTile, cutting_the_contraction_changes_no_bit) {
  static constexpr auto kNative = tile_kernels<NativeLanes>();
  HostTensor whole = tile_of(kNative[5], 6, 90, 0);
  for (const int64_t cut : {1, 32, 89}) {
    HostTensor parts = tile_of(kNative[5], 6, 90, cut);
    EXPECT_TRUE(test::matches(whole.view(), parts.view(), Bitwise())) << "cut at " << cut;
  }
}

}  // namespace
}  // namespace fp4t::cpu

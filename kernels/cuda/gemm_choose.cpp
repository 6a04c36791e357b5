#include "kernels/cuda/gemm_choose.h"

#include <algorithm>

#include "kernels/base/numeric.h"

namespace fp4t::cuda {

MmaVariant choose_mma(const GemmProblem& p, int sm_count) {
  // Rows of all groups together; a group of a few rows fills no high tile.
  const bool grouped_rows = p.mode == GemmMode::kGroupedM;
  const int64_t rows = grouped_rows ? p.m / std::max<int64_t>(1, p.groups) : p.m;
  const int64_t matrices = p.mode == GemmMode::kDense ? 1 : p.groups;
  const int64_t tiles = ceil_div(rows, 128) * ceil_div(p.n, 128) * matrices;
  return rows > 64 && tiles >= sm_count ? MmaVariant::kLarge : MmaVariant::kSmall;
}

namespace {

// Rows of a group on average; the counts are known on the device alone.
int64_t rows_a_group(const GemmProblem& p) {
  return p.mode == GemmMode::kGroupedM ? ceil_div(p.m, std::max<int64_t>(1, p.groups)) : p.m;
}

bool whole_chunks(const GemmSide& side) { return !side.mn_major && copy_bytes(side) == 16; }

}  // namespace

bool stream_takes(const GemmProblem& p) {
  // Above that the tensor cores of wider tiles win over reading weights in one go.
  const int64_t most = p.mode == GemmMode::kGroupedM ? 16 : 64;
  return p.mode != GemmMode::kGroupedK && rows_a_group(p) <= most && p.k > 0 && p.k % 64 == 0 &&
         whole_chunks(p.a) && whole_chunks(p.b);
}

bool stream_takes_codes(const GemmProblem& p, const QuantView& weights) {
  const auto aligned = [](const TensorView& v, uintptr_t bytes) {
    return reinterpret_cast<uintptr_t>(v.data) % bytes == 0;
  };
  return p.mode != GemmMode::kGroupedK && rows_a_group(p) <= 64 && p.k > 0 && p.k % 128 == 0 &&
         weights.spec.format == Format::kNvfp4 && weights.order == CodeOrder::kStream &&
         weights.padded_cols == p.k && aligned(weights.codes, 16) && aligned(weights.block_scales, 8);
}

int stream_tile_rows(const GemmProblem& p, int sm_count) {
  const int64_t rows = rows_a_group(p);
  // Groups are uneven: room for about three times the average.
  const int64_t wanted = p.mode == GemmMode::kGroupedM ? 3 * rows : rows;
  int tile = wanted <= 16 ? 16 : wanted <= 32 ? 32 : 64;
  if (p.mode == GemmMode::kDense) {
    // Weights that two blocks read come from the second-level cache the second time.
    while (tile > 16 && ceil_div(p.m, tile) * ceil_div(p.n, 64) < sm_count) tile /= 2;
  }
  return tile;
}

int stream_codes_height(const GemmProblem& p, int sm_count) {
  const int64_t tiles = p.mode == GemmMode::kGroupedM ? std::min(p.groups, p.m) : 1;
  const bool many = tiles * (p.n / 128) >= 6 * int64_t{sm_count};
  // 2048 deep, two fragments took 106 us, one 94; 768 deep 50 and 55 (128 experts, 512 rows, one H200).
  const bool shallow = p.k <= 1024;
  return many && shallow && p.n % 128 == 0 && stream_tile_rows(p, sm_count) == 16 ? 2 : 1;
}

int stream_stages(int64_t blocks, int stage_bytes, int sm_count, int64_t shared_bytes, int least) {
  const int64_t sharing = std::min<int64_t>(ceil_div(blocks, sm_count), 5);
  const int64_t fit = shared_bytes / sharing / stage_bytes;
  return fit >= 16 ? 16 : fit >= 8 ? 8 : fit >= 4 ? 4 : least;
}

int copy_bytes(const GemmSide& side) {
  const auto address = reinterpret_cast<uintptr_t>(side.data);
  for (const int bytes : {16, 4}) {
    const int64_t elements = bytes / 2;
    if (address % static_cast<uintptr_t>(bytes) == 0 && side.ld % elements == 0 &&
        side.group_stride % elements == 0) {
      return bytes;
    }
  }
  return 2;
}

}  // namespace fp4t::cuda

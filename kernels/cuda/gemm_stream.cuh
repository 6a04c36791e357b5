// The core for few rows: weights stream once through shared memory and are the m16 side of
// mma.sync m16n8k16, activations the n8 side. NVFP4 weights stay codes until they are in registers. The
// chain over K is the other cores': exchanging a product's sides, or permuting k inside a step of 16,
// changes no bit (README.md; tests compare the cores).
#pragma once

#include "kernels/cuda/gemm_codes.cuh"
#include "kernels/cuda/gemm_ptx.cuh"
#include "kernels/cuda/gemm_store.cuh"
#include "kernels/cuda/gemm_tiles.cuh"

namespace fp4t::cuda {

inline constexpr int kStreamWarps = 4, kStreamThreads = 32 * kStreamWarps;
inline constexpr int kStreamCols = 16 * kStreamWarps;  // weight rows of a block, columns of the output
inline constexpr int kStreamRows = 64;                 // most rows of a tile
inline constexpr int kStreamStages = 4;

struct StreamArgs {
  GemmGrid grid;
  const Bf16* act;  // [m, ld_act]
  int64_t ld_act;
  // BF16: rows of `ld` elements. NVFP4: rows of k / 2 bytes of codes.
  const void* weights;
  int64_t ld, group_rows;       // group_rows: stored rows from one group to the next
  const uint8_t* block_scales;  // NVFP4: [stored rows / outer, k / 16]
  int outer;
  GemmScales scales;
  GemmOut out;
  int tile_rows;  // 16, 32 or 64
};

struct StreamPlace {
  int64_t stored_row;  // of the tile's first weight row
  int rows;            // weight rows that exist
};

// BF16 weights: 64 deep a stage, rows of eight chunks.
struct StreamBf16 {
  static constexpr int kDepth = 64;
  static constexpr int kWeightBytes = kStreamCols * kDepth * 2;

  static __device__ __forceinline__ uint32_t chunk_at(int row, int chunk) {
    return static_cast<uint32_t>(row * kDepth * 2 + ((chunk ^ (row & 7)) * 16));
  }
  static __device__ __forceinline__ uint32_t act_chunk_at(int row, int chunk) { return chunk_at(row, chunk); }

  static __device__ __forceinline__ void load(uint32_t shared, const StreamArgs& args, const StreamPlace& p,
                                              int64_t k) {
    const Bf16* base = static_cast<const Bf16*>(args.weights) + p.stored_row * args.ld + k;
#pragma unroll
    for (int i = 0; i < kStreamCols * 8 / kStreamThreads; ++i) {
      const int c = i * kStreamThreads + static_cast<int>(threadIdx.x), row = c / 8, chunk = c % 8;
      const bool there = row < p.rows && k + chunk * 8 < args.grid.k;
      cp_async16(shared + chunk_at(row, chunk), there ? base + row * args.ld + chunk * 8 : base,
                 there ? 16 : 0);
    }
  }

  struct Stage {
    uint32_t weights;
    __device__ __forceinline__ Stage(uint32_t shared, int) : weights(shared) {}
  };
  // Rows [16 warp, 16 warp + 16) at depth [16 step, 16 step + 16).
  static __device__ __forceinline__ void weight_fragment(const Stage& s, int warp, int step,
                                                         uint32_t (&f)[4]) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    ldmatrix(s.weights + chunk_at(16 * warp + lane % 16, step * 2 + lane / 16), f);
  }
  // Fragments of rows [8 tile, 8 tile + 16) of the activations, two tiles.
  static __device__ __forceinline__ void act_fragments(uint32_t acts, int tile, int step, uint32_t (&f)[4]) {
    const int lane = static_cast<int>(threadIdx.x) % 32, matrix = lane / 8;
    ldmatrix(acts + chunk_at(8 * tile + lane % 8 + matrix / 2 * 8, step * 2 + matrix % 2), f);
  }
  static constexpr float kScaleBack = 1.0f;
};

// NVFP4 weights: 128 deep a stage. Activations come with every eight elements in the order of
// kStreamOrder, which is how one shift each brings codes into place.
struct StreamNvfp4 {
  static constexpr int kDepth = 128;
  static constexpr int kCodeBytes = kStreamCols * kDepth / 2;
  static constexpr int kWeightBytes = kCodeBytes + kStreamCols * kDepth / 16;

  // Rows of four chunks of codes; those that lanes read together lie in different banks.
  static __device__ __forceinline__ uint32_t chunk_at(int row, int chunk) {
    return static_cast<uint32_t>(row * (kDepth / 2) + ((chunk ^ ((row >> 1) & 3)) * 16));
  }
  static __device__ __forceinline__ uint32_t act_chunk_at(int row, int chunk) {
    return static_cast<uint32_t>(row * kDepth * 2 + ((chunk ^ ((row & 3) << 1)) * 16));
  }

  static __device__ __forceinline__ void load(uint32_t shared, const StreamArgs& args, const StreamPlace& p,
                                              int64_t k) {
    const int thread = static_cast<int>(threadIdx.x);
    const uint8_t* codes = static_cast<const uint8_t*>(args.weights) + (p.stored_row * args.grid.k + k) / 2;
#pragma unroll
    for (int i = 0; i < kStreamCols * 4 / kStreamThreads; ++i) {
      const int c = i * kStreamThreads + thread, row = c / 4, chunk = c % 4;
      const bool there = row < p.rows;
      cp_async16(shared + chunk_at(row, chunk), there ? codes + row * (args.grid.k / 2) + chunk * 16 : codes,
                 there ? 16 : 0);
    }
    if (thread < kStreamCols) {
      const bool there = thread < p.rows;
      const int64_t row = (p.stored_row + (there ? thread : 0)) / args.outer;
      cp_async8(shared + static_cast<uint32_t>(kCodeBytes + thread * 8),
                args.block_scales + (row * args.grid.k + k) / 16, there ? 8 : 0);
    }
  }

  struct Stage {
    uint32_t codes;
    uint2 low, high;  // eight block scales of rows g and g + 8 of the warp's sixteen
    __device__ __forceinline__ Stage(uint32_t shared, int warp) : codes(shared) {
      const int row = 16 * warp + static_cast<int>(threadIdx.x) % 32 / 4;
      low = load_shared8(shared + static_cast<uint32_t>(kCodeBytes + row * 8));
      high = load_shared8(shared + static_cast<uint32_t>(kCodeBytes + (row + 8) * 8));
    }
  };

  // E4M3 scales of both rows as BF16 pairs (low, low) and (high, high), times 2^119: exponent and mantissa
  // placed as in place_e2m1 are the scale times 2^-120. Scales are neither negative nor NaN.
  static __device__ __forceinline__ void factors(const Stage& s, int step, uint32_t* low, uint32_t* high) {
    const uint32_t a = step < 4 ? s.low.x : s.low.y, b = step < 4 ? s.high.x : s.high.y;
    const uint32_t byte = static_cast<uint32_t>(step % 4);
    const uint32_t both = __byte_perm(a, b, byte * 0x11u | (byte + 4) * 0x1100u);
    const uint32_t scale =
        mul_bf16x2(mul_bf16x2((both << 4) & 0x07F007F0u, 0x7B807B80u), 0x7B007B00u);  // 2^120, 2^119
    *low = __byte_perm(scale, scale, 0x1010);
    *high = __byte_perm(scale, scale, 0x3232);
  }

  static __device__ __forceinline__ uint32_t place(uint32_t top, uint32_t down) {
    return (top & 0x80008000u) | (down & 0x01C001C0u);
  }

  // Values times 2^-7: the codes' 2^-126 and the scales' 2^119.
  static __device__ __forceinline__ void weight_fragment(const Stage& s, int warp, int step,
                                                         uint32_t (&f)[4]) {
    const int lane = static_cast<int>(threadIdx.x) % 32, row = 16 * warp + lane / 4;
    const uint32_t at =
        s.codes + chunk_at(row, step / 2) + static_cast<uint32_t>(step % 2 * 8 + lane % 4 / 2 * 4);
    const int shift = lane % 2 == 0 ? 8 : 0;
    uint32_t low_factor, high_factor;
    factors(s, step, &low_factor, &high_factor);
    const uint32_t low = load_shared4(at) << shift;
    const uint32_t high = load_shared4(at + 8 * (kDepth / 2)) << shift;
    f[0] = mul_bf16x2(place(low, low >> 6), low_factor);
    f[1] = mul_bf16x2(place(high, high >> 6), high_factor);
    f[2] = mul_bf16x2(place(low << 4, low >> 2), low_factor);
    f[3] = mul_bf16x2(place(high << 4, high >> 2), high_factor);
  }
  static __device__ __forceinline__ void act_fragments(uint32_t acts, int tile, int step, uint32_t (&f)[4]) {
    const int lane = static_cast<int>(threadIdx.x) % 32, row = 8 * tile + lane / 4;
    const uint32_t at =
        acts + act_chunk_at(row, step * 2 + lane % 4 / 2) + static_cast<uint32_t>(lane % 2 * 8);
    const uint2 one = load_shared8(at), two = load_shared8(at + 8 * kDepth * 2);
    f[0] = one.x, f[1] = one.y, f[2] = two.x, f[3] = two.y;
  }
  static constexpr float kScaleBack = 128.0f;
};

template <class Weights>
struct StreamKernel {
  static constexpr int kSteps = Weights::kDepth / 16;
  static constexpr int kActChunks = Weights::kDepth / 8;

  static __host__ __device__ int stage_bytes(int tile_rows) {
    return Weights::kWeightBytes + tile_rows * Weights::kDepth * 2;
  }
  static int shared_bytes(int tile_rows) { return kStreamStages * stage_bytes(tile_rows); }

  static __device__ __forceinline__ void load(const StreamArgs& args, uint32_t shared, const GemmTile& tile,
                                              const StreamPlace& place, int rows, int64_t k) {
    Weights::load(shared, args, place, k);
    const Bf16* base = args.act + tile.row * args.ld_act + k;
    for (int c = static_cast<int>(threadIdx.x); c < args.tile_rows * kActChunks; c += kStreamThreads) {
      const int row = c / kActChunks, chunk = c % kActChunks;
      const bool there = row < rows && k + chunk * 8 < args.grid.k;
      cp_async16(shared + Weights::kWeightBytes + Weights::act_chunk_at(row, chunk),
                 there ? base + row * args.ld_act + chunk * 8 : args.act, there ? 16 : 0);
    }
  }

  // kTiles of eight rows; an odd last one is multiplied with rows of zeros beside it.
  template <int kTiles>
  static __device__ __forceinline__ void sum(const StreamArgs& args, uint32_t shared, const GemmTile& tile,
                                             const StreamPlace& place, int rows) {
    const int warp = static_cast<int>(threadIdx.x) / 32;
    const auto bytes = static_cast<uint32_t>(stage_bytes(args.tile_rows));
    float acc[kTiles][4] = {};
    int64_t next = 0;
#pragma unroll
    for (int s = 0; s < kStreamStages - 1; ++s, next += Weights::kDepth) {
      if (next < args.grid.k) {
        load(args, shared + static_cast<uint32_t>(s) * bytes, tile, place, rows, next);
      }
      cp_async_commit();
    }
    uint32_t stage = 0;
    for (int64_t k = 0; k < args.grid.k; k += Weights::kDepth, next += Weights::kDepth) {
      cp_async_wait<kStreamStages - 2>();
      __syncthreads();
      if (next < args.grid.k) {
        load(args, shared + (stage + kStreamStages - 1) % kStreamStages * bytes, tile, place, rows, next);
      }
      cp_async_commit();
      const uint32_t at = shared + stage * bytes;
      const typename Weights::Stage held(at, warp);
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        uint32_t w[4];
        Weights::weight_fragment(held, warp, step, w);
#pragma unroll
        for (int t = 0; t < kTiles; t += 2) {
          uint32_t x[4];
          Weights::act_fragments(at + Weights::kWeightBytes, t, step, x);
          mma_bf16(acc[t], w, x[0], x[1]);
          if (t + 1 < kTiles) mma_bf16(acc[t + 1], w, x[2], x[3]);
        }
      }
      stage = (stage + 1) % kStreamStages;
    }
    store<kTiles>(args, tile, warp, acc);
  }

  template <int kTiles>
  static __device__ __forceinline__ void store(const StreamArgs& args, const GemmTile& tile, int warp,
                                               const float (&acc)[kTiles][4]) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int64_t row = tile.row + 8 * t + lane % 4 * 2 + i;
        if (row >= tile.row_end || 8 * t >= args.tile_rows) continue;
        const Alpha alpha = alpha_of(args.scales, tile.group, row);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int64_t col = tile.col + 16 * warp + 8 * half + lane / 4;
          if (col >= args.grid.n) continue;
          store_one(args.out, row * args.out.ld + col,
                    scaled(acc[t][2 * half + i] * Weights::kScaleBack, alpha));
        }
      }
    }
  }

  static __device__ __forceinline__ void run(const StreamArgs& args, uint32_t shared) {
    GemmTile tile;
    if (!locate(args.grid, blockIdx.x, args.tile_rows, kStreamCols, &tile)) return;
    const int64_t left = tile.row_end - tile.row, cols = args.grid.n - tile.col;
    const int rows = left < args.tile_rows ? static_cast<int>(left) : args.tile_rows;
    const StreamPlace place{tile.group * args.group_rows + tile.col,
                            cols < kStreamCols ? static_cast<int>(cols) : kStreamCols};
    if (rows <= 8) {
      sum<1>(args, shared, tile, place, rows);
    } else if (rows <= 16) {
      sum<2>(args, shared, tile, place, rows);
    } else if (rows <= 32) {
      sum<4>(args, shared, tile, place, rows);
    } else {
      sum<8>(args, shared, tile, place, rows);
    }
  }
};

template <class Weights>
__global__ void __launch_bounds__(kStreamThreads) gemm_stream(const __grid_constant__ StreamArgs args) {
  extern __shared__ __align__(128) unsigned char shared[];
  StreamKernel<Weights>::run(args, shared_address(shared));
}

}  // namespace fp4t::cuda

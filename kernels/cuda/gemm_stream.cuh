// The core for few rows: weights stream once through shared memory and are the m16 side of
// mma.sync m16n8k16, activations the n8 side. NVFP4 weights stay codes until they are in registers. The
// chain over K is the other cores': exchanging a product's sides, or permuting k inside a step of 16,
// changes no bit (README.md; tests compare the cores).
#pragma once

#include "kernels/cuda/fault.cuh"
#include "kernels/cuda/gemm_codes.cuh"
#include "kernels/cuda/gemm_ptx.cuh"
#include "kernels/cuda/gemm_store.cuh"
#include "kernels/cuda/gemm_tiles.cuh"
#include "kernels/cuda/launch.cuh"

namespace fp4t::cuda {

inline constexpr int kStreamWarps = 4, kStreamThreads = 32 * kStreamWarps;
// Weight rows of a block whose warps hold 16 each, columns of the output.
inline constexpr int kStreamCols = 16 * kStreamWarps;

struct StreamArgs {
  GemmGrid grid;
  const Bf16* act;  // [m, ld_act], or [act_count, ld_act] with act_rows
  int64_t ld_act;
  const int32_t* act_rows;  // the row of `act` that a row of the output is made from; null: its own
  int64_t act_count;
  FaultSink sink;
  const void* weights;
  int64_t row_bytes;            // from one stored row of weights to the next
  int64_t group_rows;           // stored rows from one group to the next
  const uint8_t* block_scales;  // NVFP4: [stored rows >> outer_shift, k / 16]
  int outer_shift;
  GemmScales scales;
  GemmOut out;
  int tile_rows;  // 16, 32 or 64
  int stages;     // of the ring: 3, 4, 8 or 16
  // What the first blocks ask for while the kernel before ends: the weights' first bytes, in equal parts.
  unsigned early_blocks;
  uint32_t early_bytes;  // each
};

// Brings bytes that will be read into the second-level cache, both multiples of 16. Of all that a kernel does
// this alone may come before wait_for_previous, even where the kernel before still writes there: everybody
// meets in that cache.
__device__ __forceinline__ void prefetch(const char* from, uint32_t bytes) {
#if __CUDA_ARCH__ >= 900
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "r"(bytes) : "memory");
#endif
}

// Without a branch around it.
__device__ __forceinline__ void cp_async16_if(bool there, uint32_t shared, const void* global) {
  asm volatile(
      "{ .reg .pred p; setp.ne.b32 p, %2, 0; @p cp.async.cg.shared.global [%0], [%1], 16; }" ::"r"(shared),
      "l"(global), "r"(static_cast<int>(there))
      : "memory");
}

// What one thread copies a stage: chunks of 16 bytes of `kCount` rows, `kStep` rows apart. Rows that do not
// exist are not copied: what stands in their place meets only outputs that are not stored.
template <int kRowBytes, int kMaxRows>
struct StreamCopy {
  static constexpr int kChunks = kRowBytes / 16;
  static constexpr int kStep = kStreamThreads / kChunks;
  static constexpr int kCount = (kMaxRows + kStep - 1) / kStep;

  const char* next;  // this thread's chunk of its first row
  int64_t pitch;     // bytes over kStep rows
  int rows;          // those of this thread's rows that exist

  static __device__ __forceinline__ int row() { return static_cast<int>(threadIdx.x) / kChunks; }
  static __device__ __forceinline__ int chunk() { return static_cast<int>(threadIdx.x) % kChunks; }

  __device__ __forceinline__ StreamCopy(const void* first, int64_t row_bytes, int count)
      : next(static_cast<const char*>(first) + row() * row_bytes + chunk() * 16),
        pitch(kStep * row_bytes),
        rows(count - row() + kStep - 1 < 0 ? 0 : (count - row() + kStep - 1) / kStep) {}

  // `shared`: the place of the first chunk.
  __device__ __forceinline__ void copy(uint32_t shared) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      cp_async16_if(i < rows, shared + static_cast<uint32_t>(i * kStep * kRowBytes), next + i * pitch);
    }
    next += kRowBytes;
  }
};

// The same of activations, whose rows lie anywhere.
template <int kRowBytes, int kMaxRows>
struct StreamActCopy {
  using Layout = StreamCopy<kRowBytes, kMaxRows>;
  static constexpr int kCount = Layout::kCount;

  const char* next;        // this thread's chunk of row 0
  uint32_t place[kCount];  // of its rows, in chunks of 16 bytes
  int rows;

  __device__ __forceinline__ StreamActCopy(const StreamArgs& args, int64_t first, int count)
      : next(reinterpret_cast<const char*>(args.act) + Layout::chunk() * 16),
        rows(count - Layout::row() + Layout::kStep - 1 < 0
                 ? 0
                 : (count - Layout::row() + Layout::kStep - 1) / Layout::kStep) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      place[i] = 0;
      if (i >= rows) continue;
      int64_t row = first + Layout::row() + i * Layout::kStep;
      if (args.act_rows) {
        const int32_t from = args.act_rows[row];
        const bool good = from >= 0 && from < args.act_count;
        if (!good) report(args.sink, FaultKind::kIndex, row, from);
        row = good ? from : 0;
      }
      place[i] = static_cast<uint32_t>(row * (args.ld_act / 8));
    }
  }

  __device__ __forceinline__ void copy(uint32_t shared) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      cp_async16_if(i < rows, shared + static_cast<uint32_t>(i * Layout::kStep * kRowBytes),
                    next + int64_t{place[i]} * 16);
    }
    next += kRowBytes;
  }
};

// Places in shared memory of the chunks that one lane reads at the four (pairs of) steps of a stage: they
// differ by an exclusive or, which costs an addition a stage this way.
struct StreamPlaces {
  uint32_t at[4];
  __device__ __forceinline__ StreamPlaces from(uint32_t stage) const {
    return {{at[0] + stage, at[1] + stage, at[2] + stage, at[3] + stage}};
  }
};

// BF16 weights: 64 deep a stage, rows of eight chunks.
struct StreamBf16 {
  static constexpr int kHeight = 1;  // fragments of 16 weight rows that a warp holds
  static constexpr int kDepth = 64;
  static constexpr int kRowBytes = kDepth * 2;
  static constexpr int kWeightBytes = kStreamCols * kRowBytes;
  static constexpr float kScaleBack = 1.0f;
  static constexpr int kAhead = 0;
  static constexpr int kSteps = 1;

  static __device__ __forceinline__ uint32_t chunk_at(int row, int chunk) {
    return static_cast<uint32_t>(row * kRowBytes + ((chunk ^ (row & 7)) * 16));
  }
  static __device__ __forceinline__ uint32_t act_chunk_at(int row, int chunk) { return chunk_at(row, chunk); }

  struct Scales {
    __device__ __forceinline__ Scales(const StreamArgs&, int64_t, int) {}
    __device__ __forceinline__ void copy(uint32_t) {}
    __device__ __forceinline__ void prepare(uint32_t) {}
  };

  // Rows [16 warp, 16 warp + 16) of the weights, step by step.
  static __device__ __forceinline__ StreamPlaces weight_places(int warp) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    StreamPlaces p;
#pragma unroll
    for (int s = 0; s < 4; ++s) p.at[s] = chunk_at(16 * warp + lane % 16, 2 * s + lane / 16);
    return p;
  }
  // Sixteen rows of the activations.
  static __device__ __forceinline__ StreamPlaces act_places() {
    const int lane = static_cast<int>(threadIdx.x) % 32, matrix = lane / 8;
    StreamPlaces p;
#pragma unroll
    for (int s = 0; s < 4; ++s) p.at[s] = chunk_at(lane % 8 + matrix / 2 * 8, 2 * s + matrix % 2);
    return p;
  }

  struct Stage {
    StreamPlaces weights;
    __device__ __forceinline__ Stage(const StreamPlaces& places, uint32_t shared, int)
        : weights(places.from(shared)) {}
  };
  static __device__ __forceinline__ void weight_fragments(const Stage& s, int step,
                                                          uint32_t (&f)[1][kHeight][4]) {
    ldmatrix(s.weights.at[step], f[0][0]);
  }
  // Fragments of the activations' rows [8 tile, 8 tile + 16).
  template <bool kTwo>
  static __device__ __forceinline__ void act_fragments(const StreamPlaces& acts, int tile, int step,
                                                       uint32_t (&f)[4]) {
    ldmatrix(acts.at[step] + static_cast<uint32_t>(8 * tile * kRowBytes), f);
  }
};

// NVFP4 weights: 128 deep a stage, rows of four chunks of codes in CodeOrder::kStream. A word holds what a
// lane multiplies of a row in two steps; it takes neighbours 4t .. 4t+3 of a step, the same of the
// activations. Two fragments of weights a warp make two chains of products, for the same reads of
// activations.
template <int kFragments>
struct StreamNvfp4 {
  static constexpr int kHeight = kFragments;
  static constexpr int kCols = kHeight * kStreamCols;
  static constexpr int kDepth = 128;
  static constexpr int kRowBytes = kDepth / 2;
  static constexpr int kFactors = kCols * kRowBytes;  // block scales as BF16, 16 bytes a row
  static constexpr int kWeightBytes = kFactors + kCols * kDepth / 8;
  // Fragments hold values times 2^-7: codes are placed times 2^-126, scales times 2^119.
  static constexpr float kScaleBack = 128.0f;
  static constexpr int kAhead = 1;  // stages that must have landed beyond the one in hand
  static constexpr int kSteps = 2;  // of a fragment

  static __device__ __forceinline__ uint32_t chunk_at(int row, int chunk) {
    return static_cast<uint32_t>(row * kRowBytes + ((chunk ^ ((row >> 1) & 3)) * 16));
  }
  static __device__ __forceinline__ uint32_t act_chunk_at(int row, int chunk) {
    return static_cast<uint32_t>(row * kDepth * 2 + ((chunk ^ ((row & 3) << 1)) * 16));
  }

  // The block scales of a thread, half a row's or a row's eight; it also turns them into factors, a stage
  // ahead, in the place where they arrived.
  struct Scales {
    static constexpr int kCount = kCols * (kDepth / 16) / kStreamThreads, kParts = kDepth / 16 / kCount;
    static_assert(kCount == 4 || kCount == 8);
    const uint8_t* next;
    bool there;
    __device__ __forceinline__ Scales(const StreamArgs& args, int64_t stored_row, int rows) {
      const int row = static_cast<int>(threadIdx.x) / kParts, part = static_cast<int>(threadIdx.x) % kParts;
      there = row < rows;
      const int64_t scale_row = (stored_row + (there ? row : 0)) >> args.outer_shift;
      next = args.block_scales + scale_row * (args.grid.k / 16) + part * kCount;
    }
    __device__ __forceinline__ void copy(uint32_t stage) {
      const uint32_t to = place(stage);
      if (there && kCount == 4) cp_async4(to, next, 4);
      if (there && kCount == 8) cp_async8(to, next, 8);
      next += kDepth / 16;
    }
    __device__ __forceinline__ void prepare(uint32_t stage) {
      if constexpr (kCount == 4) {
        store_shared8(place(stage), factors_of(load_shared4(place(stage))));
      } else {
        const uint2 raw = load_shared8(place(stage)), low = factors_of(raw.x), high = factors_of(raw.y);
        store_shared16(place(stage), {low.x, low.y, high.x, high.y});
      }
    }
    static __device__ __forceinline__ uint32_t place(uint32_t stage) {
      return stage + kFactors + threadIdx.x * (2 * kCount);
    }
  };
  // Of four block scales.
  static __device__ __forceinline__ uint2 factors_of(uint32_t raw) {
    const uint32_t low = __byte_perm(raw, 0, 0x4140), high = __byte_perm(raw, 0, 0x4342);
    const uint2 out = make_uint2(factor_pair(low), factor_pair(high));
    if (((raw & 0x7F7F7F7Fu) + 0x01010101u & 0x80808080u) == 0) return out;
    return {with_nan(low, out.x), with_nan(high, out.y)};
  }

  // Two E4M3 scales, in the low bytes of both halves, times 2^119. Exponent and mantissa placed as in
  // place_e2m1 are the magnitude times 2^-120.
  static __device__ __forceinline__ uint32_t factor_pair(uint32_t scales) {
    return mul_bf16x2(mul_bf16x2((scales & 0x007F007Fu) << 4, 0x7B807B80u), 0x7B007B00u) |
           (scales & 0x00800080u) << 8;
  }
  static __device__ uint32_t with_nan(uint32_t scales, uint32_t factors) {
    return factors | (((scales & 0x007F007Fu) + 0x00010001u) >> 7 & 0x00010001u) * 0x7FC0u;
  }

  // Of two steps each.
  static __device__ __forceinline__ StreamPlaces weight_places(int warp) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    StreamPlaces p;
#pragma unroll
    for (int s = 0; s < 4; ++s)
      p.at[s] = chunk_at(16 * kHeight * warp + lane / 4, s) + static_cast<uint32_t>(lane % 4 * 4);
    return p;
  }
  // Of steps s and s + 4.
  static __device__ __forceinline__ StreamPlaces act_places() {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    StreamPlaces p;
#pragma unroll
    for (int s = 0; s < 4; ++s) {
      p.at[s] = act_chunk_at(lane / 4, 2 * s + lane % 4 / 2) + static_cast<uint32_t>(lane % 2 * 8);
    }
    return p;
  }

  struct Stage {
    StreamPlaces codes;
    uint32_t factors[2 * kHeight][4];  // of this lane's rows, eight apart; two steps a word
    __device__ __forceinline__ Stage(const StreamPlaces& places, uint32_t shared, int warp)
        : codes(places.from(shared)) {
      const int row = 16 * kHeight * warp + static_cast<int>(threadIdx.x) % 32 / 4;
#pragma unroll
      for (int r = 0; r < 2 * kHeight; ++r) {
        load_shared16(shared + static_cast<uint32_t>(kFactors + (row + 8 * r) * (kDepth / 8)), factors[r]);
      }
    }
  };

  // Steps `step` and the next, which have their factors in one word.
  static __device__ __forceinline__ void weight_fragments(const Stage& s, int step,
                                                          uint32_t (&f)[kSteps][kHeight][4]) {
#pragma unroll
    for (int r = 0; r < 2 * kHeight; ++r) {
      const uint32_t both = s.factors[r][step / 2], factor[2] = {twice_low(both), twice_high(both)};
      uint32_t pair[4];
      place_stream(load_shared4(s.codes.at[step / 2] + static_cast<uint32_t>(8 * r * kRowBytes)), pair);
#pragma unroll
      for (int i = 0; i < 4; ++i) f[i / 2][r / 2][r % 2 + i % 2 * 2] = mul_bf16x2(pair[i], factor[i / 2]);
    }
  }
  template <bool kTwo>
  static __device__ __forceinline__ void act_fragments(const StreamPlaces& acts, int tile, int step,
                                                       uint32_t (&f)[4]) {
    const uint32_t at = acts.at[step % 4] + static_cast<uint32_t>(step / 4 * 128 + 8 * tile * kDepth * 2);
    const uint2 one = load_shared8(at);
    f[0] = one.x, f[1] = one.y;
    if constexpr (kTwo) {
      const uint2 two = load_shared8(at + 8 * kDepth * 2);
      f[2] = two.x, f[3] = two.y;
    }
  }
};

// Until this thread's copies of the next stage, and of kAhead more, have landed.
template <int kAhead>
__device__ __forceinline__ void wait_for_stage(int stages) {
  if (stages == 3) {
    cp_async_wait<1 - kAhead>();
  } else if (stages == 4) {
    cp_async_wait<2 - kAhead>();
  } else if (stages == 8) {
    cp_async_wait<6 - kAhead>();
  } else {
    cp_async_wait<14 - kAhead>();
  }
}

template <class Weights>
__host__ __device__ inline int stream_stage_bytes(int tile_rows) {
  return Weights::kWeightBytes + tile_rows * Weights::kDepth * 2;
}

// kMaxTiles of eight rows: few take fewer registers, so that more blocks share a multiprocessor.
template <class Weights, int kMaxTiles>
struct StreamKernel {
  static constexpr int kSteps = Weights::kDepth / 16, kHeight = Weights::kHeight;
  static constexpr int kCols = kHeight * kStreamCols;

  // Sums kTiles of eight rows and stores them.
  template <int kTiles>
  static __device__ __forceinline__ void sum(const StreamArgs& args, uint32_t shared, const GemmTile& tile,
                                             int rows) {
    const int warp = static_cast<int>(threadIdx.x) / 32;
    const int64_t left = args.grid.n - tile.col;
    const int cols = left < kCols ? static_cast<int>(left) : kCols;
    const int64_t stored_row = tile.group * args.group_rows + tile.col;
    using WeightCopy = StreamCopy<Weights::kRowBytes, kCols>;
    using ActCopy = StreamActCopy<Weights::kDepth * 2, 8 * kTiles>;
    using ActLayout = typename ActCopy::Layout;
    WeightCopy weights(static_cast<const char*>(args.weights) + stored_row * args.row_bytes, args.row_bytes,
                       cols);
    ActCopy acts(args, tile.row, rows);
    typename Weights::Scales scales(args, stored_row, cols);
    const uint32_t weight_chunk = Weights::chunk_at(WeightCopy::row(), WeightCopy::chunk());
    const uint32_t act_chunk =
        Weights::kWeightBytes + Weights::act_chunk_at(ActLayout::row(), ActLayout::chunk());
    const auto load = [&](uint32_t stage) {
      weights.copy(stage + weight_chunk);
      scales.copy(stage);
      acts.copy(stage + act_chunk);
    };
    const StreamPlaces weight_places = Weights::weight_places(warp), act_places = Weights::act_places();

    const auto bytes = static_cast<uint32_t>(stream_stage_bytes<Weights>(args.tile_rows));
    const uint32_t end = shared + static_cast<uint32_t>(args.stages) * bytes;
    const int count = static_cast<int>(args.grid.k / Weights::kDepth);
    int to_load = count;
    for (uint32_t stage = shared; stage + bytes < end; stage += bytes, --to_load) {
      if (to_load > 0) load(stage);
      cp_async_commit();
    }
    float acc[kHeight][kTiles][4] = {};
    uint32_t stage = shared, free_stage = end - bytes;
    wait_for_stage<0>(args.stages);
    scales.prepare(stage);
    for (int i = 0; i < count; ++i, --to_load) {
      const uint32_t next_stage = stage + bytes == end ? shared : stage + bytes;
      wait_for_stage<Weights::kAhead>(args.stages);
      __syncthreads();
      if (to_load > 0) load(free_stage);
      cp_async_commit();
      if (i + 1 < count) scales.prepare(next_stage);
      const typename Weights::Stage held(weight_places, stage, warp);
      const StreamPlaces acts_held = act_places.from(stage + Weights::kWeightBytes);
#pragma unroll
      for (int step = 0; step < kSteps; step += Weights::kSteps) {
        uint32_t w[Weights::kSteps][kHeight][4];
        Weights::weight_fragments(held, step, w);
#pragma unroll
        for (int i = 0; i < Weights::kSteps; ++i) {
#pragma unroll
          for (int t = 0; t < kTiles; t += 2) {
            uint32_t x[4];
            Weights::template act_fragments<(kTiles > 1)>(acts_held, t, step + i, x);
#pragma unroll
            for (int h = 0; h < kHeight; ++h) {
              mma_bf16(acc[h][t], w[i][h], x[0], x[1]);
              if constexpr (kTiles > 1) mma_bf16(acc[h][t + 1], w[i][h], x[2], x[3]);
            }
          }
        }
      }
      free_stage = stage;
      stage = next_stage;
    }
    store<kTiles>(args, tile, warp, acc);
  }

  static __device__ __forceinline__ int64_t act_row(const StreamArgs& args, int64_t row) {
    const int32_t from = args.act_rows[row];
    return from >= 0 && from < args.act_count ? from : 0;
  }

  template <int kTiles>
  static __device__ __forceinline__ void store(const StreamArgs& args, const GemmTile& tile, int warp,
                                               const float (&acc)[kHeight][kTiles][4]) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int64_t row = tile.row + 8 * t + lane % 4 * 2 + i;
        if (row >= tile.row_end || 8 * t >= args.tile_rows) continue;
        const bool elsewhere = args.act_rows && args.scales.a_of == ScaleOf::kRow;
        const Alpha alpha = alpha_of(args.scales, tile.group, elsewhere ? act_row(args, row) : row);
#pragma unroll
        for (int r = 0; r < 2 * kHeight; ++r) {
          const int64_t col = tile.col + 16 * kHeight * warp + 8 * r + lane / 4;
          if (col >= args.grid.n) continue;
          store_one(args.out, row * args.out.ld + col,
                    scaled(acc[r / 2][t][r % 2 * 2 + i] * Weights::kScaleBack, alpha));
        }
      }
    }
  }

  static __device__ __forceinline__ void run(const StreamArgs& args, uint32_t shared) {
    GemmTile tile;
    if (!locate(args.grid, blockIdx.x, args.tile_rows, kCols, &tile)) return;
    const int64_t left = tile.row_end - tile.row;
    const int rows = left < args.tile_rows ? static_cast<int>(left) : args.tile_rows;
    if (rows <= 8) return sum<1>(args, shared, tile, rows);
    if (rows <= 16) return sum<2>(args, shared, tile, rows);
    if constexpr (kMaxTiles > 2) {
      if (rows <= 32) return sum<4>(args, shared, tile, rows);
      return sum<8>(args, shared, tile, rows);
    }
  }
};

template <class Weights, int kMaxTiles>
__global__ void __launch_bounds__(kStreamThreads, kMaxTiles > 2 ? 4 : 5)
    gemm_stream(const __grid_constant__ StreamArgs args) {
  extern __shared__ __align__(128) unsigned char shared[];
  if (threadIdx.x == 0 && blockIdx.x < args.early_blocks) {
    prefetch(static_cast<const char*>(args.weights) + int64_t{blockIdx.x} * args.early_bytes,
             args.early_bytes);
  }
  wait_for_previous();
  StreamKernel<Weights, kMaxTiles>::run(args, shared_address(shared));
}

}  // namespace fp4t::cuda

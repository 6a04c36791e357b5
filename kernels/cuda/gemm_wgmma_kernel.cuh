// The Hopper core of kernels/cuda/gemm_problem.h. One persistent block of three warpgroups a processor: one
// thread copies tiles of both operands (TMA) through a ring of stages in shared memory; two warpgroups
// multiply, 64 rows of the tile each, and hand their results to TMA again. Depth runs in blocks of 64 in
// order, whatever the tile's shape and place, so that a row's bits depend on (N, K) alone.
#pragma once

#include <cuda_runtime.h>

#include "kernels/cuda/bf16_pair.cuh"
#include "kernels/cuda/context.h"
#include "kernels/cuda/gemm_epilogue.cuh"
#include "kernels/cuda/gemm_wgmma_ptx.cuh"

namespace fp4t::cuda::sm90 {

constexpr int kTileM = 128, kTileK = 64;  // 64 elements of BF16: the 128 bytes of a swizzled row
constexpr int kThreads = 384;
constexpr int kConsumerWarps = 8;
constexpr int kProducerRegisters = 40, kConsumerRegisters = 232;
constexpr int kPanel = 16;         // row tiles that meet a column tile before the next: what L2 holds
constexpr int kChunkBytes = 2048;  // results leave a warp in chunks of 16 rows of 128 bytes
constexpr int kStagingBytes = kConsumerWarps * 2 * kChunkBytes;
constexpr int kSharedLimit = 227 << 10;

constexpr int stage_bytes(int tile_n) { return (kTileM + tile_n) * kTileK * 2; }
constexpr int stages_of(int tile_n) {
  return (kSharedLimit - 2048 - kStagingBytes) / stage_bytes(tile_n);  // 2048: alignment and barriers
}
constexpr int shared_bytes(int tile_n) {
  return 2048 + kStagingBytes + stages_of(tile_n) * stage_bytes(tile_n);
}

// How blocks share out the tiles: blocks of `width` in a row have `tiles` tiles together, the next as many
// more. One such share is all, unless others need the multiprocessors too: of several shares, the later ones'
// blocks begin wherever one of the earlier has ended.
struct Shares {
  int width;
  int64_t tiles;  // a multiple of the width
};

struct Launch {
  GemmMode mode;
  bool out_bf16, accumulate;
  bool tma_out;  // rows of out are 16-byte aligned: copies store whole chunks
  int m, n, k;
  int groups;
  const int32_t* offsets;
  void* out;
  int64_t ld_out;
  GemmScales scales;
  Shares shares;
};

// One output tile and the depth that it sums over.
struct Tile {
  int group;
  int row, row_end;  // of A as its map counts them; rows from row_end on belong to others
  int col;
  int depth, depth_end;
};

// The tiles of a share's block b are b, b + width, ...; every role walks them by itself.
class Tiles {
 public:
  __device__ Tiles(const Launch& p, int tile_n) : p_(p), tile_n_(tile_n) {
    index_ = share() * p.shares.tiles + blockIdx.x % p.shares.width;
    n_tiles_ = (p.n + tile_n - 1) / tile_n;
    if (p.mode == GemmMode::kGroupedM) begin_ = end_ = p.offsets[0];
  }

  __device__ bool next(Tile& tile) {
    const int64_t index = index_;
    if (index >= (share() + 1) * p_.shares.tiles) return false;
    index_ += p_.shares.width;
    if (p_.mode == GemmMode::kGroupedM) return next_of_rows(index, tile);
    const int m_tiles = (p_.m + kTileM - 1) / kTileM;
    const int64_t per_group = static_cast<int64_t>(m_tiles) * n_tiles_;
    const int64_t group = index / per_group;
    if (group >= p_.groups) return false;
    place(static_cast<int>(index - group * per_group), m_tiles, tile);
    tile.group = static_cast<int>(group);
    tile.row_end = p_.m;
    const bool cut = p_.mode == GemmMode::kGroupedK;
    tile.depth = cut ? p_.offsets[group] : 0;
    tile.depth_end = cut ? p_.offsets[group + 1] : p_.k;
    return true;
  }

 private:
  __device__ int64_t share() const { return blockIdx.x / p_.shares.width; }

  __device__ bool next_of_rows(int64_t index, Tile& tile) {
    int m_tiles = (end_ - begin_ + kTileM - 1) / kTileM;
    while (index >= first_ + static_cast<int64_t>(m_tiles) * n_tiles_) {
      first_ += static_cast<int64_t>(m_tiles) * n_tiles_;
      if (++group_ >= p_.groups) return false;
      begin_ = end_;
      end_ = p_.offsets[group_ + 1];
      m_tiles = (end_ - begin_ + kTileM - 1) / kTileM;
    }
    place(static_cast<int>(index - first_), m_tiles, tile);
    tile.group = group_;
    tile.row += begin_;
    tile.row_end = end_;
    tile.depth = 0;
    tile.depth_end = p_.k;
    return true;
  }

  // Panels of kPanel row tiles, down the rows first.
  __device__ void place(int index, int m_tiles, Tile& tile) const {
    const int panel = index / (kPanel * n_tiles_);
    const int in_panel = index - panel * kPanel * n_tiles_;
    const int height = min(kPanel, m_tiles - panel * kPanel);
    tile.row = (panel * kPanel + in_panel % height) * kTileM;
    tile.col = in_panel / height * tile_n_;
  }

  const Launch& p_;
  int tile_n_, n_tiles_;
  int64_t index_;
  int64_t first_ = 0;  // kGroupedM: index of the group's first tile
  int group_ = -1, begin_ = 0, end_ = 0;
};

// A place in the ring of stages, and the parity of its current turn.
template <int kStages>
struct Ring {
  int stage = 0;
  uint32_t parity = 0;
  __device__ void advance() {
    if (++stage == kStages) stage = 0, parity ^= 1;
  }
};

// Shared addresses of one block.
template <int kTileN>
struct Shared {
  static constexpr int kStages = stages_of(kTileN);
  static constexpr int kABytes = kTileM * kTileK * 2;
  uint32_t base;  // 1024-byte aligned: the swizzle counts from there
  __device__ explicit Shared(const void* raw) : base((shared_address(raw) + 1023) & ~1023u) {}
  __device__ uint32_t a(int stage) const { return base + stage * stage_bytes(kTileN); }
  __device__ uint32_t b(int stage) const { return a(stage) + kABytes; }
  __device__ uint32_t staging(int warp) const {
    return base + kStages * stage_bytes(kTileN) + warp * 2 * kChunkBytes;
  }
  __device__ uint32_t full(int stage) const { return staging(kConsumerWarps) + stage * 16; }
  __device__ uint32_t empty(int stage) const { return full(stage) + 8; }
};

// One operand's share of a stage. MN-major tiles are copied 64 outer elements at a time.
template <bool kMn, int kRows>
__device__ __forceinline__ void load_operand(uint32_t to, const CUtensorMap* map, uint32_t bar, int row,
                                             int depth, int group) {
  if constexpr (kMn) {
#pragma unroll
    for (int i = 0; i < kRows / 64; ++i) {
      tma_load(to + i * 64 * kTileK * 2, map, bar, row + i * 64, depth, group);
    }
  } else {
    tma_load(to, map, bar, depth, row, group);
  }
}

template <bool kMnA, bool kMnB, int kTileN>
__device__ void produce(const Launch& p, const CUtensorMap* map_a, const CUtensorMap* map_b,
                        const Shared<kTileN>& shared) {
  Ring<Shared<kTileN>::kStages> ring;
  Tiles tiles(p, kTileN);
  Tile tile;
  while (tiles.next(tile)) {
    const int matrix = p.mode == GemmMode::kGroupedM ? tile.group : 0;
    for (int depth = tile.depth; depth < tile.depth_end; depth += kTileK) {
      barrier_wait(shared.empty(ring.stage), ring.parity ^ 1);
      const uint32_t full = shared.full(ring.stage);
      barrier_expect(full, stage_bytes(kTileN));
      load_operand<kMnA, kTileM>(shared.a(ring.stage), map_a, full, tile.row, depth, 0);
      load_operand<kMnB, kTileN>(shared.b(ring.stage), map_b, full, tile.col, depth, matrix);
      ring.advance();
    }
  }
}

// Zeros for the depth that a stage holds beyond the `valid` first of its group. Both consumer warpgroups
// together. MN-major: whole rows of 128 bytes; K-major (`valid` is a multiple of 8): pieces of 16 bytes of
// every row, where the swizzle has put them.
template <bool kMn, int kTileN>
__device__ __forceinline__ void clear_depth(const Shared<kTileN>& shared, int stage, int valid) {
  const int pieces = (kTileK - valid) * (kTileM + kTileN) / 8;
  const int in_row = kMn ? (kTileK - valid) * 8 : kTileK / 8 - valid / 8;
  for (int i = static_cast<int>(threadIdx.x); i < pieces; i += kConsumerWarps * 32) {
    const int row = i / in_row, piece = i % in_row;  // MN-major: a row is one of 64 outer elements
    const uint32_t to = shared.a(stage) + (kMn ? row * (64 * kTileK * 2) + valid * 128 + piece * 16
                                               : row * 128 + (((valid / 8 + piece) ^ row % 8) << 4));
    asm volatile("st.shared.v4.b32 [%0], {%1, %1, %1, %1};" ::"r"(to), "r"(0) : "memory");
  }
  fence_async_shared();
  named_barrier(1, kConsumerWarps * 32);
}

// The product of one tile into `acc`; `meanwhile` runs while the last block is being multiplied.
template <bool kMnA, bool kMnB, int kTileN, bool kRagged, class Meanwhile>
__device__ __forceinline__ void multiply_tile(const Tile& tile, const Shared<kTileN>& shared, int group,
                                              Ring<Shared<kTileN>::kStages>& ring, float (&acc)[kTileN / 2],
                                              const Meanwhile& meanwhile) {
  constexpr uint64_t kDescA = kMnA ? wgmma_descriptor(64 * kTileK * 2, 1024) : wgmma_descriptor(16, 1024);
  constexpr uint64_t kDescB = kMnB ? wgmma_descriptor(64 * kTileK * 2, 1024) : wgmma_descriptor(16, 1024);
  constexpr int kStepA = (kMnA ? 16 * 128 : 32) >> 4, kStepB = (kMnB ? 16 * 128 : 32) >> 4;
  const bool signals = threadIdx.x % 32 == 0;
  const int depth = tile.depth_end - tile.depth;
  int previous = -1;
  for (int begin = 0; begin < depth; begin += kTileK) {
    barrier_wait(shared.full(ring.stage), ring.parity);
    // Always whole blocks: a branch among the products would make the compiler wait after each.
    if (kRagged && depth - begin < kTileK) clear_depth<kMnA, kTileN>(shared, ring.stage, depth - begin);
    const uint64_t a = at_address(kDescA, shared.a(ring.stage) + group * (64 * kTileK * 2));
    const uint64_t b = at_address(kDescB, shared.b(ring.stage));
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < kTileK / 16; ++step) {
      wgmma<kMnA, kMnB, kTileN>(acc, a + step * kStepA, b + step * kStepB, begin | step);
    }
    wgmma_commit();
    wgmma_wait<1>();  // the block before has been read
    if (previous >= 0 && signals) barrier_arrive(shared.empty(previous));
    previous = ring.stage;
    ring.advance();
  }
  meanwhile();
  wgmma_wait<0>();
  if (previous >= 0 && signals) barrier_arrive(shared.empty(previous));
}

// A staged chunk of a warp to out by the warp itself: `rows` rows, `cols` columns. Pieces of 16 bytes where
// rows of out are aligned (then n is a whole number of pieces), else elements.
template <class T>
__device__ void copy_chunk(const Launch& p, uint32_t chunk, T* out, int rows, int cols) {
  constexpr int kPiece = 16 / sizeof(T);
  __syncwarp();
  const int lane = threadIdx.x % 32, piece = lane % 8 * kPiece;
#pragma unroll
  for (int row = lane / 8; row < 16; row += 4) {
    if (row >= rows || piece >= cols) continue;
    float4 x;
    asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w)
                 : "r"(chunk + row * 128 + ((lane % 8 ^ (row & 7)) << 4))
                 : "memory");
    T* to = out + row * p.ld_out + piece;
    if (p.tma_out && !p.accumulate && cols - piece >= kPiece) {
      *reinterpret_cast<float4*>(to) = x;
      continue;
    }
    const T* values = reinterpret_cast<const T*>(&x);
#pragma unroll
    for (int i = 0; i < kPiece; ++i) {
      if (piece + i >= cols) break;
      if constexpr (sizeof(T) == 4) {
        to[i] = p.accumulate ? values[i] + to[i] : values[i];
      } else {
        to[i] = values[i];
      }
    }
  }
  __syncwarp();
}

// An accumulator on its way out.
template <bool kScaled>
__device__ __forceinline__ float value_of(float acc, const Alpha& alpha) {
  return kScaled ? scaled(acc, alpha) : acc;
}

// 16 rows of 64 columns of BF16 into a chunk.
template <bool kScaled>
__device__ __forceinline__ void stage_bf16(const float* acc, const Alpha& top, const Alpha& bottom,
                                           uint32_t chunk) {
  const int lane = threadIdx.x % 32;
  const uint32_t row = chunk + (lane % 16) * 128;
#pragma unroll
  for (int j = 0; j < 8; j += 2) {
    const float* x = acc + 4 * j;
    const uint32_t to = row + ((static_cast<uint32_t>(j + lane / 16) ^ (lane & 7)) << 4);
    store_matrices(to, pack_bf16(value_of<kScaled>(x[0], top), value_of<kScaled>(x[1], top)),
                   pack_bf16(value_of<kScaled>(x[2], bottom), value_of<kScaled>(x[3], bottom)),
                   pack_bf16(value_of<kScaled>(x[4], top), value_of<kScaled>(x[5], top)),
                   pack_bf16(value_of<kScaled>(x[6], bottom), value_of<kScaled>(x[7], bottom)));
  }
}

// 16 rows of 32 columns of FP32 into a chunk.
template <bool kScaled>
__device__ __forceinline__ void stage_f32(const float* acc, const Alpha& top, const Alpha& bottom,
                                          uint32_t chunk) {
  const int lane = threadIdx.x % 32, r = lane / 4;
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    const uint32_t to = chunk + r * 128 + (((2 * j + (lane >> 1 & 1)) ^ r) << 4) + (lane & 1) * 8;
    asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(to), "f"(value_of<kScaled>(acc[4 * j], top)),
                 "f"(value_of<kScaled>(acc[4 * j + 1], top))
                 : "memory");
    asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(to + 1024),
                 "f"(value_of<kScaled>(acc[4 * j + 2], bottom)),
                 "f"(value_of<kScaled>(acc[4 * j + 3], bottom))
                 : "memory");
  }
}

template <class T, bool kScaled>
__device__ __forceinline__ void stage(const float* acc, const Alpha& top, const Alpha& bottom,
                                      uint32_t chunk) {
  if constexpr (sizeof(T) == 2) {
    stage_bf16<kScaled>(acc, top, bottom, chunk);
  } else {
    stage_f32<kScaled>(acc, top, bottom, chunk);
  }
}

__device__ __forceinline__ void stage_zeros(uint32_t chunk) {
  for (int i = 0; i < kChunkBytes; i += 512) {
    const uint32_t to = chunk + i + threadIdx.x % 32 * 16;
    asm volatile("st.shared.v4.b32 [%0], {%1, %1, %1, %1};" ::"r"(to), "r"(0) : "memory");
  }
}

// What a warp needs to hand over its 16 rows of a tile.
struct Rows {
  const CUtensorMap* map;
  int row;      // as the map of out counts them
  int count;    // rows of these 16 that are the tile's own
  int matrix;   // of out
  bool zero;    // nothing was summed
  bool scaled;  // not every factor is 1
  Alpha top, bottom;
};

// The two chunks of a warp's staging take turns: `staging` is the address of the next, `chunks` the sum of
// both.
template <class T, int kTileN>
__device__ __forceinline__ void store_rows(const Launch& p, const Tile& tile, const Rows& rows,
                                           uint32_t chunks, uint32_t& staging, float (&acc)[kTileN / 2]) {
  constexpr int kCols = 128 / sizeof(T);
  const bool whole = p.tma_out && rows.count == 16;
#pragma unroll
  for (int c = 0; c < kTileN / kCols; ++c) {
    const int col = tile.col + c * kCols;
    if (col >= p.n) break;
    const uint32_t chunk = staging;
    staging = chunks - staging;
    if (threadIdx.x % 32 == 0) tma_wait_read<1>();
    __syncwarp();
    if (rows.zero) {
      stage_zeros(chunk);
    } else if (rows.scaled) {
      stage<T, true>(acc + c * kCols / 2, rows.top, rows.bottom, chunk);
    } else {
      stage<T, false>(acc + c * kCols / 2, rows.top, rows.bottom, chunk);
    }
    if (whole) {
      fence_async_shared();
      __syncwarp();
      if (threadIdx.x % 32 == 0) {
        if (p.accumulate) {
          tma_add(rows.map, chunk, col, rows.row, rows.matrix);
        } else {
          tma_store(rows.map, chunk, col, rows.row, rows.matrix);
        }
      }
    } else {
      T* out = static_cast<T*>(p.out) + (static_cast<int64_t>(rows.matrix) * p.m + rows.row) * p.ld_out + col;
      copy_chunk(p, chunk, out, rows.count, p.n - col);
    }
    if (threadIdx.x % 32 == 0)
      tma_commit();  // an empty group where nothing was copied, so that turns and groups agree
  }
}

template <bool kMnA, bool kMnB, int kTileN, bool kRagged>
__device__ void consume(const Launch& p, const CUtensorMap* map_out, const Shared<kTileN>& shared) {
  Ring<Shared<kTileN>::kStages> ring;
  Tiles tiles(p, kTileN);
  Tile tile, following;
  bool more = tiles.next(following);
  const int warp = threadIdx.x / 32;
  uint32_t staging = shared.staging(warp);
  const uint32_t chunks = 2 * staging + kChunkBytes;
  float acc[kTileN / 2];
  while (more) {
    tile = following;
    multiply_tile<kMnA, kMnB, kTileN, kRagged>(tile, shared, warp / 4, ring, acc,
                                               [&] { more = tiles.next(following); });
    Rows rows{map_out, tile.row + warp * 16, 0, 0, false, false, {1, 1}, {1, 1}};
    rows.count = min(16, tile.row_end - rows.row);
    if (rows.count <= 0) continue;
    if (p.mode == GemmMode::kGroupedK) rows.matrix = tile.group;
    if (kRagged && tile.depth >= tile.depth_end) {
      if (p.accumulate) continue;
      rows.zero = true;  // acc holds another tile's values, the scales may hold anything
    } else {
      const int top = threadIdx.x % 32 / 4, last = rows.count - 1;
      rows.top = alpha_of(p.scales, tile.group, rows.row + min(top, last));
      rows.bottom = alpha_of(p.scales, tile.group, rows.row + min(top + 8, last));
      const auto scales = [](const Alpha& a) { return a.first != 1.0f || a.second != 1.0f; };
      rows.scaled = __any_sync(~0u, scales(rows.top) || scales(rows.bottom));
    }
    if (p.out_bf16) {
      store_rows<Bf16, kTileN>(p, tile, rows, chunks, staging, acc);
    } else {
      store_rows<float, kTileN>(p, tile, rows, chunks, staging, acc);
    }
  }
  if (threadIdx.x % 32 == 0) tma_wait_read<0>();
}

template <bool kMnA, bool kMnB, int kTileN, bool kRagged>
__global__ void __launch_bounds__(kThreads, 1)
    gemm_kernel(const __grid_constant__ CUtensorMap map_a, const __grid_constant__ CUtensorMap map_b,
                const __grid_constant__ CUtensorMap map_out, const __grid_constant__ Launch p) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ char raw[];
  const Shared<kTileN> shared(raw);
  if (threadIdx.x == 0) {
    for (int s = 0; s < Shared<kTileN>::kStages; ++s) {
      barrier_init(shared.full(s), 1);
      barrier_init(shared.empty(s), kConsumerWarps);
    }
    fence_barrier_init();
    prefetch_map(&map_a);
    prefetch_map(&map_b);
    if (p.tma_out) prefetch_map(&map_out);
  }
  __syncthreads();
  if (threadIdx.x >= kConsumerWarps * 32) {
    registers_down<kProducerRegisters>();
    if (threadIdx.x == kConsumerWarps * 32) produce<kMnA, kMnB, kTileN>(p, &map_a, &map_b, shared);
  } else {
    registers_up<kConsumerRegisters>();
    consume<kMnA, kMnB, kTileN, kRagged>(p, &map_out, shared);
  }
#else
  __trap();  // wgmma_takes() refuses other architectures
#endif
}

// Launches of one pair of majors, one a file (gemm_wgmma_*.cu): compilers take their time.
struct Maps {
  CUtensorMap a, b, out;
};
struct Grid {
  int tile_n;
  int blocks;
  cudaStream_t stream;
};
void launch_k_k(const Maps& maps, const Launch& p, const Grid& grid);
void launch_k_k_cut(const Maps& maps, const Launch& p, const Grid& grid);  // kGroupedK
void launch_k_mn(const Maps& maps, const Launch& p, const Grid& grid);
void launch_mn_mn(const Maps& maps, const Launch& p, const Grid& grid);

template <bool kMnA, bool kMnB, int kTileN, bool kRagged>
void launch_tile(const Maps& maps, const Launch& p, const Grid& grid) {
  const auto kernel = gemm_kernel<kMnA, kMnB, kTileN, kRagged>;
  constexpr int kBytes = shared_bytes(kTileN);
  FP4T_CUDA(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes));
  kernel<<<static_cast<unsigned>(grid.blocks), kThreads, kBytes, grid.stream>>>(maps.a, maps.b, maps.out, p);
  check_launch("gemm (wgmma)");
}

template <bool kMnA, bool kMnB, bool kRagged>
void launch_any(const Maps& maps, const Launch& p, const Grid& grid) {
  switch (grid.tile_n) {
    case 256:
      return launch_tile<kMnA, kMnB, 256, kRagged>(maps, p, grid);
    case 192:
      return launch_tile<kMnA, kMnB, 192, kRagged>(maps, p, grid);
    default:
      return launch_tile<kMnA, kMnB, 128, kRagged>(maps, p, grid);
  }
}

}  // namespace fp4t::cuda::sm90

// Attention of few rows over the key-value cache: a block of four warps holds a tile of up to 16 rows and one
// split of its keys, and the splits of a row run side by side; or, where the tiles alone fill the GPU, all of
// them one after another. Each warp loads, and where need be decodes, what it alone multiplies: 32 keys of a
// block for the scores, a quarter of the columns for the values. The warps meet twice a block, to share
// maxima and probabilities. A second kernel merges splits that ran side by side.
#include <type_traits>

#include "kernels/base/numeric.h"
#include "kernels/cuda/attention_cached.cuh"
#include "kernels/cuda/gemm_ptx.cuh"
#include "kernels/cuda/launch.cuh"

namespace fp4t::cuda {

namespace {

constexpr int kWarps = 4, kThreads = kWarps * 32;
constexpr int kRows = kDecodeRows, kWarpKeys = kBlockKeys / kWarps;
// What registers allow: the small tiles' codes take more of them than shared memory.
template <int kD, bool kCoded>
constexpr int kBlocksPerSm = kCoded&& kD == 64 ? 2 : 3;

template <int kD, bool kCoded>
struct Shared {
  static constexpr int kPart = kWarpKeys * kD;  // elements of a warp: its keys, or its columns of all values
  Bf16 q[kRows * kD];
  Bf16 p[kRows * kBlockKeys];
  // Values: keys and values. Codes: what the warp multiplies next, and the codes of keys and values.
  Bf16 tile[kWarps][kCoded ? kPart : 2 * kPart];
  uint8_t codes[kWarps][kCoded ? 2 * kPart : 16];
  float max[kWarps][kRows];
  float sum[kWarps][kRows][4];
};

// A warp's columns of all values, [kBlockKeys][kD / 4]: rows of kD / 32 chunks of 16 bytes, exchanged so that
// eight neighbouring rows of one chunk meet no bank twice.
template <int kD>
__device__ __forceinline__ uint32_t column_offset(int row, int chunk) {
  constexpr int kChunks = kD / 32;
  return static_cast<uint32_t>(row * kChunks + (chunk ^ (row * kChunks / 8 % kChunks))) * 16;
}

// out[16][kD / 4] += P[16][kBlockKeys] V, P a tile in shared memory, V as above.
template <int kD>
__device__ __forceinline__ void multiply_values(uint32_t p, uint32_t v, Fragment<kD / 4>& out) {
  const int lane = thread_now() % 32;
#pragma unroll
  for (int k = 0; k < kBlockKeys / 16; ++k) {
    uint32_t af[4];
    ldmatrix(p + tile_offset(kRows, lane % 16, 2 * k + lane / 16), af);
#pragma unroll
    for (int n = 0; n < kD / 64; ++n) {
      uint32_t bf[4];
      ldmatrix_trans(v + column_offset<kD>(16 * k + lane % 16, 2 * n + lane / 16), bf);
      mma_bf16(out[2 * n], af, bf[0], bf[1]);
      mma_bf16(out[2 * n + 1], af, bf[2], bf[3]);
    }
  }
}

// What a warp reads of a split: element (key, column) of its key head is at
// row_of(slot, key) * stride + first + column. The keys that a warp reads together, and those of a quarter of
// a block's values, lie in one page: pages hold a multiple of 32.
template <int kD, bool kCoded>
struct Loader {
  const Cached& args;
  Shared<kD, kCoded>& shared;
  int32_t slot;
  int first;
  int max_keys, warp, lane;
  // Of key `lane`, by block; of keys lane + 32 i. Read ahead: nothing may wait for them before they are
  // needed.
  uint8_t key_scales[kD / kKvBlock], value_scales[kBlockKeys / 32];

  // From the arguments, not in registers: those are all in use.
  __device__ __forceinline__ int stride() const { return args.kv_stride; }
  __device__ __forceinline__ int columns() const { return args.columns; }

  __device__ __forceinline__ uint32_t key_tile() const { return shared_address(shared.tile[warp]); }
  __device__ __forceinline__ uint32_t value_tile() const {
    return kCoded ? key_tile() : key_tile() + Shared<kD, kCoded>::kPart * 2;
  }
  // Element (key, 0), of a key behind the last too.
  __device__ __forceinline__ int64_t at(int key) const {
    return int64_t{args.places.small_row_of(slot, key < max_keys ? key : 0)} * stride() + first;
  }
  __device__ __forceinline__ uint32_t codes(bool values) const {
    return shared_address(shared.codes[warp]) + (values ? Shared<kD, kCoded>::kPart : 0);
  }

  // This warp's 32 keys of block b.
  __device__ __forceinline__ void load_keys(int b) {
    constexpr int kElements = kCoded ? 16 : 8, kChunks = kD / kElements;
    const int key = b * kBlockKeys + warp * kWarpKeys;
    const int64_t base = at(key);
#pragma unroll 4
    for (int i = lane; i < kWarpKeys * kChunks; i += 32) {
      const int row = i / kChunks, chunk = i % kChunks;
      const bool there = key + row < max_keys && chunk * kElements < columns();
      const int64_t from = there ? base + row * stride() + chunk * kElements : 0;
      if constexpr (kCoded) {
        cp_async16(codes(false) + static_cast<uint32_t>(row * kD + (chunk ^ (row % kChunks)) * 16),
                   static_cast<const uint8_t*>(args.k) + from, there ? 16 : 0);
      } else {
        cp_async16(key_tile() + tile_offset(kWarpKeys, row, chunk), static_cast<const Bf16*>(args.k) + from,
                   there ? 16 : 0);
      }
    }
    if constexpr (kCoded) {
      const bool there = key + lane < max_keys;
      const uint8_t* scales = args.k_scales + (base + lane * stride()) / kKvBlock;
#pragma unroll
      for (int i = 0; i < kD / kKvBlock; ++i) {
        key_scales[i] = there && i * kKvBlock < columns() ? scales[i] : uint8_t{0};
      }
    }
    cp_async_commit();
  }

  // This warp's columns of the values of block b.
  __device__ __forceinline__ void load_values(int b) {
    constexpr int kElements = kCoded ? 16 : 8, kChunks = kD / 4 / kElements;
    const int key = b * kBlockKeys, column = warp * (kD / 4);
#pragma unroll
    for (int part = 0; part < kBlockKeys / kWarpKeys; ++part) {
      const int first_key = key + part * kWarpKeys;
      const int64_t base = at(first_key) + column;
#pragma unroll 1
      for (int i = lane; i < kWarpKeys * kChunks; i += 32) {
        const int row = i / kChunks, chunk = i % kChunks;
        const bool there = first_key + row < max_keys && column + chunk * kElements < columns();
        const int64_t from = there ? base + row * stride() + chunk * kElements : 0;
        if constexpr (kCoded) {
          cp_async16(codes(true) + static_cast<uint32_t>((part * kWarpKeys * kChunks + i) * 16),
                     static_cast<const uint8_t*>(args.v) + from, there ? 16 : 0);
        } else {
          cp_async16(value_tile() + column_offset<kD>(part * kWarpKeys + row, chunk),
                     static_cast<const Bf16*>(args.v) + from, there ? 16 : 0);
        }
      }
      if constexpr (kCoded) {
        const bool there = first_key + lane < max_keys && column < columns();
        value_scales[part] = there ? args.v_scales[(base + lane * stride()) / kKvBlock] : uint8_t{0};
      }
    }
    cp_async_commit();
  }

  __device__ __forceinline__ void decode_keys() const {
    constexpr int kChunks = kD / 16;
    const uint32_t mine = together(key_scales);
#pragma unroll 2
    for (int i = lane; i < kWarpKeys * kChunks; i += 32) {
      const int row = i / kChunks, chunk = i % kChunks;
      const uint32_t scales = __shfl_sync(0xFFFFFFFFu, mine, row);
      const uint4 in =
          *reinterpret_cast<const uint4*>(shared.codes[warp] + row * kD + (chunk ^ (row % kChunks)) * 16);
      store(in, scales >> (chunk / 2 * 8) & 0xFFu, key_tile() + tile_offset(kWarpKeys, row, 2 * chunk),
            key_tile() + tile_offset(kWarpKeys, row, 2 * chunk + 1));
    }
  }

  __device__ __forceinline__ void decode_values() const {
    constexpr int kChunks = kD / 64;
    const uint32_t mine = together(value_scales);
#pragma unroll 1
    for (int i = lane; i < kBlockKeys * kChunks; i += 32) {
      const int row = i / kChunks, chunk = i % kChunks;
      const uint32_t scales = __shfl_sync(0xFFFFFFFFu, mine, row % 32);
      const uint4 in =
          *reinterpret_cast<const uint4*>(shared.codes[warp] + Shared<kD, kCoded>::kPart + i * 16);
      store(in, scales >> (row / 32 * 8) & 0xFFu, value_tile() + column_offset<kD>(row, 2 * chunk),
            value_tile() + column_offset<kD>(row, 2 * chunk + 1));
    }
  }

 private:
  template <int kCount>
  __device__ __forceinline__ static uint32_t together(const uint8_t (&bytes)[kCount]) {
    uint32_t out = 0;
#pragma unroll
    for (int i = 0; i < kCount; ++i) out |= uint32_t{bytes[i]} << (8 * i);
    return out;
  }
  __device__ __forceinline__ static void store(const uint4& codes, uint32_t scale, uint32_t low,
                                               uint32_t high) {
    uint32_t word[8];
    decode_codes(codes, scale, word);
    store_shared16(low, {word[0], word[1], word[2], word[3]});
    store_shared16(high, {word[4], word[5], word[6], word[7]});
  }
};

template <int kD, bool kCoded>
__device__ void load_queries(const Cached& args, const CachedTile& tile, Shared<kD, kCoded>& shared) {
  constexpr int kChunks = kD / 8;
  const int rows = static_cast<int>(tile.end - tile.begin) * tile.heads;
#pragma unroll
  for (int i = static_cast<int>(threadIdx.x); i < kRows * kChunks; i += kThreads) {
    const int row = i / kChunks, chunk = i % kChunks;
    const bool there = row < rows && chunk * 8 < args.shape.head_dim;
    const Bf16* from = args.qkv;
    if (there) from += tile.token(row) * args.shape.width() + args.shape.q(tile.head_of(row)) + chunk * 8;
    cp_async16(shared_address(shared.q) + tile_offset(kRows, row, chunk), from, there ? 16 : 0);
  }
}

// The warps' part of softmax_block: scores of 32 keys become probabilities in shared.p; the state and the
// sums are the same in all warps. Ends with everything shared in place.
template <int kD, bool kCoded>
__device__ __forceinline__ void share_softmax(Fragment<kWarpKeys>& s, float c, SoftmaxState& state,
                                              float (&rescale)[2], Shared<kD, kCoded>& shared) {
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  float largest[2];
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    largest[h] = fmaxf(s[0][2 * h], s[0][2 * h + 1]);
#pragma unroll
    for (int j = 1; j < kWarpKeys / 8; ++j)
      largest[h] = fmaxf(largest[h], fmaxf(s[j][2 * h], s[j][2 * h + 1]));
    largest[h] = row_max(largest[h]);
    if (lane % 4 == 0) shared.max[warp][lane / 4 + 8 * h] = largest[h];
  }
  __syncthreads();
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int row = lane / 4 + 8 * h;
    float m = state.m[h];
#pragma unroll
    for (int w = 0; w < kWarps; ++w) m = fmaxf(m, shared.max[w][row]);
    const float mc = scaled_max(m, c);
    rescale[h] = exp2_approx(__fmul_rn(state.m[h], c) - mc);
    state.m[h] = m;
    float sum = 0.0f;
#pragma unroll
    for (int j = 0; j < kWarpKeys / 8; ++j) {
      const float p0 = exp2_approx(__fmaf_rn(s[j][2 * h], c, -mc));
      const float p1 = exp2_approx(__fmaf_rn(s[j][2 * h + 1], c, -mc));
      sum += p0 + p1;
      *reinterpret_cast<uint32_t*>(reinterpret_cast<unsigned char*>(shared.p) +
                                   tile_offset(kRows, row, warp * (kWarpKeys / 8) + j) + lane % 4 * 4) =
          pack_bf16(p0, p1);
    }
    shared.sum[warp][row][lane % 4] = sum;
  }
  __syncthreads();
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int row = lane / 4 + 8 * h;
    const auto sum = [&](int w) { return shared.sum[w][row][lane % 4]; };
    state.l[h] = __fmaf_rn(state.l[h], rescale[h], (sum(0) + sum(1)) + (sum(2) + sum(3)));
  }
}

// As SplitSum, in registers: a warp's columns are few.
template <int kN>
struct RegisterSum {
  Fragment<kN> sum;
  float m[2], l[2];
  bool any = false;

  // Takes the split that ends here, leaves `o` and `state` empty.
  __device__ __forceinline__ void add(float c, Fragment<kN>& o, SoftmaxState& state) {
    join(c, o, state);
#pragma unroll
    for (int j = 0; j < kN / 8; ++j) {
#pragma unroll
      for (int i = 0; i < 4; ++i) sum[j][i] = o[j][i];
    }
    any = true;
    clear<kN>(o);
    state.clear();
  }
  // As add, but the whole sum is left in `o`.
  __device__ __forceinline__ void join(float c, Fragment<kN>& o, const SoftmaxState& state) {
    const float later[2] = {row_sum(state.l[0]), row_sum(state.l[1])};
    if (!any) {
#pragma unroll
      for (int h = 0; h < 2; ++h) m[h] = state.m[h], l[h] = later[h];
      return;
    }
    const Merge merge[2] = {Merge(c, state.m[0], later[0], m[0], l[0]),
                            Merge(c, state.m[1], later[1], m[1], l[1])};
#pragma unroll
    for (int j = 0; j < kN / 8; ++j) {
#pragma unroll
      for (int i = 0; i < 4; ++i) o[j][i] = merge[i / 2](sum[j][i], o[j][i]);
    }
  }
};

// Split `split`, or with `kAll` every one.
template <int kD, bool kCoded, bool kAll>
__device__ void attend_split(const Cached& args, const CachedTile& tile, int split,
                             Shared<kD, kCoded>& shared) {
  constexpr int kSplitBlocks = kSplitKeys / kBlockKeys;
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  const int first_block = split * kSplitBlocks;
  const int last_block = (tile.max_keys + kBlockKeys - 1) / kBlockKeys;
  const int end_block = kAll ? last_block : min(last_block, first_block + kSplitBlocks);
  if (first_block >= end_block) return;
  const int64_t dim = args.shape.head_dim;
  // Behind the split's end are the keys of others.
  const int max_keys = kAll ? tile.max_keys : min(tile.max_keys, (split + 1) * kSplitKeys);
  Loader<kD, kCoded> loader{
      args, shared, args.places.slots[tile.begin], tile.kv_head * args.columns, max_keys, warp, lane, {}, {}};
  load_queries(args, tile, shared);
  loader.load_keys(first_block);
  loader.load_values(first_block);
  int keys[2];
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int64_t token = tile.token(lane / 4 + 8 * h);
    keys[h] = token < tile.end ? num_keys(args, token) : 0;
  }
  Fragment<kD / 4> o;
  clear<kD / 4>(o);
  SoftmaxState state;
  state.clear();
  RegisterSum<kD / 4> total;
  for (int b = first_block; b < end_block; ++b) {
    if (kAll && b > 0 && b % kSplitBlocks == 0) total.add(args.c, o, state);
    cp_async_wait<1>();
    if (b == first_block) __syncthreads();  // the queries are everybody's
    __syncwarp();
    if constexpr (kCoded) {
      loader.decode_keys();
      __syncwarp();
      loader.load_keys(b + 1);
    }
    Fragment<kWarpKeys> s;
    clear<kWarpKeys>(s);
    multiply_rows<kD, kWarpKeys>(shared_address(shared.q), kRows, 0, loader.key_tile(), kWarpKeys, s);
    if constexpr (!kCoded) {
      __syncwarp();
      loader.load_keys(b + 1);
    }
    const int first_key = b * kBlockKeys + warp * kWarpKeys;
    mask_scores<kWarpKeys>(s, {keys[0] - first_key, keys[1] - first_key});
    float rescale[2];
    share_softmax(s, args.c, state, rescale, shared);
    rescale_rows<kD / 4>(o, rescale);
    cp_async_wait<1>();
    __syncwarp();
    if constexpr (kCoded) {
      loader.decode_values();
      __syncwarp();
      loader.load_values(b + 1);
    }
    multiply_values<kD>(shared_address(shared.p), loader.value_tile(), o);
    __syncwarp();
    if constexpr (!kCoded) loader.load_values(b + 1);
  }
  cp_async_wait<0>();
  if (kAll) total.join(args.c, o, state);
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int row = lane / 4 + 8 * h, column = warp * (kD / 4);
    if constexpr (kAll) {
      if (keys[h] == 0) continue;
      const int64_t place = tile.token(row) * args.shape.heads + tile.head_of(row);
      store_row<kD / 4>(o, h, total.l[h], static_cast<int>(dim), args.out + place * dim, column);
      continue;
    }
    const float l = row_sum(state.l[h]);
    if (keys[h] <= split * kSplitKeys) continue;
    const int64_t place = tile.token(row) * args.shape.heads + tile.head_of(row);
    if (keys[h] > kSplitKeys) {
      store_partial<kD / 4>(args, place, split, h, o, column);
      if (warp == 0 && lane % 4 == 0) {
        args.partial_ml[place * args.max_splits + split] = make_float2(state.m[h], l);
      }
    } else {
      store_row<kD / 4>(o, h, l, static_cast<int>(dim), args.out + place * dim, column);
    }
  }
}

template <int kD, bool kCoded, bool kAll>
__global__ void __launch_bounds__(kThreads, (kBlocksPerSm<kD, kCoded>)) decode_kernel(Cached args) {
  extern __shared__ __align__(1024) unsigned char memory[];
  wait_for_previous();
  const int64_t t = blockIdx.x;
  if (!tile_begins(args, t)) return;
  const CachedTile tile = tile_at(args, t, static_cast<int>(blockIdx.y));
  attend_split<kD, kCoded, kAll>(args, tile, static_cast<int>(blockIdx.z),
                                 *reinterpret_cast<Shared<kD, kCoded>*>(memory));
}

// One warp a row and head: merges its splits in order.
template <int kD>
__global__ void __launch_bounds__(kThreads) merge_kernel(Cached args) {
  constexpr int kPairs = kD / 64;  // of columns, a lane
  wait_for_previous();
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int64_t place = int64_t{blockIdx.x} * kWarps + threadIdx.x / 32;
  if (place >= args.rows * args.shape.heads) return;
  const int keys = num_keys(args, place / args.shape.heads);
  if (keys <= kSplitKeys) return;
  const int64_t first = place * args.max_splits;
  const int splits = (keys + kSplitKeys - 1) / kSplitKeys;
  float m = args.partial_ml[first].x, l = args.partial_ml[first].y;
  float2 o[kPairs];
  const auto part = [&](int split, int i) {
    return *reinterpret_cast<const float2*>(args.partial + (first + split) * kD + 64 * i + 2 * lane);
  };
#pragma unroll
  for (int i = 0; i < kPairs; ++i) o[i] = part(0, i);
  for (int split = 1; split < splits; ++split) {
    const float2 ml = args.partial_ml[first + split];
    const Merge merge(args.c, ml.x, ml.y, m, l);
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      const float2 later = part(split, i);
      o[i] = make_float2(merge(o[i].x, later.x), merge(o[i].y, later.y));
    }
  }
  const float inverse = 1.0f / l;
#pragma unroll
  for (int i = 0; i < kPairs; ++i) {
    const int column = 64 * i + 2 * lane;
    if (column >= args.shape.head_dim) continue;
    *reinterpret_cast<uint32_t*>(args.out + place * args.shape.head_dim + column) =
        pack_bf16(o[i].x * inverse, o[i].y * inverse);
  }
}

template <int kD, bool kCoded, bool kAll>
void launch(Queue& queue, const char* op, const Cached& args) {
  constexpr int kBytes = static_cast<int>(sizeof(Shared<kD, kCoded>));
  FP4T_CUDA(cudaFuncSetAttribute(decode_kernel<kD, kCoded, kAll>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                 kBytes));
  const dim3 grid(static_cast<unsigned>(args.rows),
                  static_cast<unsigned>(args.shape.kv_heads * args.head_chunks),
                  kAll ? 1u : static_cast<unsigned>(args.max_splits));
  launch_early(queue, op, decode_kernel<kD, kCoded, kAll>, grid, kThreads, kBytes, args);
  if (kAll || args.max_splits == 1) return;
  launch_early(queue, op, merge_kernel<kD>,
               dim3(static_cast<unsigned>(ceil_div(args.rows * args.shape.heads, kWarps))), kThreads, 0,
               args);
}

}  // namespace

void attend_few_rows(Queue& queue, const char* op, const Cached& args) {
  // Rows of one slot share tiles, so there may be fewer: then the splits of long caches stay side by side.
  const int64_t tiles = args.rows * args.shape.kv_heads * args.head_chunks;
  const bool all = args.max_splits > 1 && args.max_splits <= 4 && 2 * tiles >= 3 * context_of(queue).sm_count;
  const auto start = [&](auto dim, auto coded) {
    all ? launch<dim(), coded(), true>(queue, op, args) : launch<dim(), coded(), false>(queue, op, args);
  };
  const auto with_dim = [&](auto dim) {
    args.k_scales ? start(dim, std::true_type{}) : start(dim, std::false_type{});
  };
  if (args.shape.head_dim <= 64) {
    with_dim(std::integral_constant<int, 64>{});
  } else {
    with_dim(std::integral_constant<int, 128>{});
  }
}

}  // namespace fp4t::cuda

// Attention of rows over the key-value cache in BF16 on tensor cores, for decoding and prefill.
// A tile holds neighbouring rows of one slot, each with query heads of one key head. Here are the tiles of up
// to 64 pairs, which walk their keys from the first to the last; few rows take the kernel of
// attention_decode.cu. Both do the arithmetic of kernels/cuda/attention_tile.cuh, so the bits are the same.
#include "kernels/base/numeric.h"
#include "kernels/cuda/attention_cached.cuh"
#include "kernels/cuda/attention_general.cuh"
#include "kernels/cuda/attention_select.h"
#include "kernels/cuda/load.cuh"
#include "kernels/ops/run.h"

namespace fp4t::cuda {

namespace {

constexpr int kThreads = kGroupThreads;

template <int kD>
struct Shared {
  Bf16 q[kGroupRows * kD];
  Bf16 k[2][kBlockKeys * kD], v[2][kBlockKeys * kD];
  float sum[kD / 2 * kThreads];
  CachedTile tile;  // here, not in registers: they are few
};

// Where the keys of a tile lie: element (key, column) at row_of(key) * stride + first + column.
struct KeyPlaces {
  const CachePlaces& places;
  int32_t slot;
  int64_t stride, first;
  __device__ __forceinline__ int64_t operator()(int key, int column) const {
    return places.row_of(slot, key) * stride + first + column;
  }
};

// As load_tile, of keys [key, key + kBlockKeys).
template <int kD>
__device__ __forceinline__ void load_values(uint32_t tile, const Bf16* values, const KeyPlaces& places,
                                            int key, int valid, int columns) {
  constexpr int kChunks = kD / 8;
  const int thread = thread_now(), chunk = thread % kChunks;
#pragma unroll 4
  for (int row = thread / kChunks; row < kBlockKeys; row += kThreads / kChunks) {
    const bool zero = row >= valid || chunk * 8 >= columns;
    cp_async16(tile + tile_offset(kBlockKeys, row, chunk),
               zero ? values : values + places(key + row, chunk * 8), zero ? 0 : 16);
  }
}

// The same from codes.
template <int kD>
__device__ __forceinline__ void load_codes(uint32_t tile, const uint8_t* codes, const uint8_t* scales,
                                           const KeyPlaces& places, int key, int valid, int columns) {
  constexpr int kChunks = kD / 16;
  const int thread = thread_now(), chunk = thread % kChunks;
#pragma unroll 2
  for (int row = thread / kChunks; row < kBlockKeys; row += kThreads / kChunks) {
    uint32_t word[8] = {};
    if (row < valid && chunk * 16 < columns) {
      const int64_t at = places(key + row, chunk * 16);
      decode_codes(*reinterpret_cast<const uint4*>(codes + at), scales[at / kKvBlock], word);
    }
    store_shared16(tile + tile_offset(kBlockKeys, row, 2 * chunk), {word[0], word[1], word[2], word[3]});
    store_shared16(tile + tile_offset(kBlockKeys, row, 2 * chunk + 1), {word[4], word[5], word[6], word[7]});
  }
}

template <int kD, bool kCoded>
__device__ void load_block(const Cached& args, const CachedTile& tile, int b, Shared<kD>& shared) {
  const int64_t dim = args.shape.head_dim, stride = args.shape.kv_heads * dim;
  const KeyPlaces places{args.places, args.places.slots[tile.begin], stride, tile.kv_head * dim};
  const int key = b * kBlockKeys;
  const int valid = tile.max_keys - b * kBlockKeys, columns = static_cast<int>(dim);
  const uint32_t k = shared_address(shared.k[b % 2]), v = shared_address(shared.v[b % 2]);
  if constexpr (kCoded) {
    load_codes<kD>(k, static_cast<const uint8_t*>(args.k), args.k_scales, places, key, valid, columns);
    load_codes<kD>(v, static_cast<const uint8_t*>(args.v), args.v_scales, places, key, valid, columns);
  } else {
    load_values<kD>(k, static_cast<const Bf16*>(args.k), places, key, valid, columns);
    load_values<kD>(v, static_cast<const Bf16*>(args.v), places, key, valid, columns);
  }
  cp_async_commit();
}

template <int kD>
__device__ void load_queries(const Cached& args, const CachedTile& tile, uint32_t q) {
  constexpr int kChunks = kD / 8;
  const int chunk = static_cast<int>(threadIdx.x) % kChunks,
            rows = static_cast<int>(tile.end - tile.begin) * tile.heads;
  for (int row = static_cast<int>(threadIdx.x) / kChunks; row < kGroupRows; row += kThreads / kChunks) {
    const bool zero = row >= rows || chunk * 8 >= args.shape.head_dim;
    const Bf16* from = args.qkv;
    if (!zero) from += tile.token(row) * args.shape.width() + args.shape.q(tile.head_of(row)) + chunk * 8;
    cp_async16(q + tile_offset(kGroupRows, row, chunk), from, zero ? 0 : 16);
  }
}

template <int kD, bool kCoded>
__device__ void attend_tile(const Cached& args, const CachedTile& tile, Shared<kD>& shared) {
  const int lane = static_cast<int>(threadIdx.x) % 32, warp_row = static_cast<int>(threadIdx.x) / 32 * 16;
  const int num_blocks = (tile.max_keys + kBlockKeys - 1) / kBlockKeys;
  if (num_blocks == 0) return;
  int keys[2];
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int64_t token = tile.token(warp_row + lane / 4 + 8 * h);
    keys[h] = token < tile.end ? num_keys(args, token) : 0;
  }
  const uint32_t q = shared_address(shared.q);
  load_queries<kD>(args, tile, q);
  load_block<kD, kCoded>(args, tile, 0, shared);
  Fragment<kD> o;
  clear<kD>(o);
  SoftmaxState state;
  state.clear();
  SplitSum<kD, kThreads> total{shared.sum + threadIdx.x, {}, {}, false};
  for (int b = 0; b < num_blocks; ++b) {
    if (b > 0 && b % (kSplitKeys / kBlockKeys) == 0) total.add(args.c, o, state);
    if (b + 1 < num_blocks) {
      load_block<kD, kCoded>(args, tile, b + 1, shared);
      cp_async_wait<1>();
    } else {
      cp_async_wait<0>();
    }
    __syncthreads();
    Fragment<kBlockKeys> s;
    clear<kBlockKeys>(s);
    multiply_rows<kD, kBlockKeys>(q, kGroupRows, warp_row, shared_address(shared.k[b % 2]), kBlockKeys, s);
    mask_scores<kBlockKeys>(s, {keys[0] - b * kBlockKeys, keys[1] - b * kBlockKeys});
    float rescale[2];
    softmax_block<kBlockKeys>(s, args.c, state, rescale);
    rescale_rows<kD>(o, rescale);
    uint32_t p[kBlockKeys / 16][4];
    pack_operand<kBlockKeys>(s, p);
    multiply_columns<kD, kBlockKeys>(p, shared_address(shared.v[b % 2]), kBlockKeys, o);
    __syncthreads();
  }
  total.join(args.c, o, state);
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int row = warp_row + lane / 4 + 8 * h;
    if (keys[h] == 0) continue;
    const int64_t place = tile.token(row) * args.shape.heads + tile.head_of(row), dim = args.shape.head_dim;
    store_row<kD>(o, h, total.l[h], static_cast<int>(dim), args.out + place * dim);
  }
}

template <int kD, bool kCoded>
__global__ void __launch_bounds__(kThreads, 1) cached_kernel(Cached args) {
  extern __shared__ __align__(1024) unsigned char memory[];
  Shared<kD>& shared = *reinterpret_cast<Shared<kD>*>(memory);
  const int64_t begin = int64_t{blockIdx.x} * args.tokens_per_tile;
  const int64_t end = min(args.rows, begin + args.tokens_per_tile);
  for (int64_t t = begin; t < end;) {
    const CachedTile tile = tile_at(args, t, static_cast<int>(blockIdx.y));
    __syncthreads();  // the tile before this is done with shared memory
    if (threadIdx.x == 0) shared.tile = tile;
    __syncthreads();
    attend_tile<kD, kCoded>(args, shared.tile, shared);
    t = shared.tile.end;
  }
}

template <int kD>
void launch(Queue& queue, const char* op, const Cached& args) {
  const auto kernel = args.k_scales ? cached_kernel<kD, true> : cached_kernel<kD, false>;
  constexpr int kBytes = static_cast<int>(sizeof(Shared<kD>));
  FP4T_CUDA(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes));
  const dim3 grid(static_cast<unsigned>(ceil_div(args.rows, args.tokens_per_tile)),
                  static_cast<unsigned>(args.shape.kv_heads * args.head_chunks));
  kernel<<<grid, kThreads, kBytes, stream_of(queue)>>>(args);
  check_launch(op);
}

}  // namespace

void run(Queue& queue, const AttentionCached& op) {
  if (op.qkv.dim(0) == 0) return;
  if (!attention_on_tensor_cores(op.qkv.dtype, op.head_dim, op.scale)) return general_attention(queue, op);
  const KvCacheView& cache = op.cache;
  const bool coded = cache.format == Format::kMxfp8;
  FP4T_CHECK(cache.k.dim(0) * cache.k.dim(1) <= INT32_MAX, op.kName, ": more positions than 32 bits count");
  for (const TensorView& values : {cache.k, cache.v}) {
    FP4T_CHECK(aligned16(values.data), op.kName, ": the cache must start at a multiple of 16 bytes");
  }
  Workspace workspace(queue);
  const AlignedInput qkv(queue, workspace, op.qkv);
  const AlignedOutput out(queue, workspace, op.out);
  Cached args{};
  args.qkv = qkv.as<Bf16>();
  args.shape = {op.heads, op.kv_heads, op.head_dim};
  args.rows = op.qkv.dim(0);
  args.columns = static_cast<int>(op.head_dim);
  args.kv_stride = static_cast<int>(op.kv_heads * op.head_dim);
  args.places = CachePlaces::of(op.slots, op.positions, cache);
  args.k = cache.k.data;
  args.v = cache.v.data;
  if (coded) {
    args.k_scales = cache.k_scales.as<uint8_t>();
    args.v_scales = cache.v_scales.as<uint8_t>();
  }
  args.c = score_factor(op.scale);
  args.out = out.as<Bf16>();
  args.sink = fault_sink(queue, op.kName);
  args.max_splits = static_cast<int>(ceil_div(args.places.max_length, kSplitKeys));
  args.partial_columns = op.head_dim <= 64 ? 64 : 128;
  const int64_t sums = args.max_splits > 1 ? args.rows * op.heads * args.max_splits : 0;
  const int64_t sum_bytes = sums * (args.partial_columns + 2) * static_cast<int64_t>(sizeof(float));
  const bool few = args.rows <= kFewCachedRows && sum_bytes <= kMaxPartialBytes;
  args.set_tile(few ? kDecodeRows : kGroupRows);
  if (few) {
    args.partial = workspace.take<float>(sums * args.partial_columns);
    args.partial_ml = workspace.take<float2>(sums);
    attend_few_rows(queue, op.kName, args);
  } else if (op.head_dim <= 64) {
    launch<64>(queue, op.kName, args);
  } else {
    launch<128>(queue, op.kName, args);
  }
  out.finish();
}

}  // namespace fp4t::cuda

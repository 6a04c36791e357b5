// Attention of rows over the key-value cache in BF16 on tensor cores, for decoding and prefill.
// A tile holds up to 64 pairs of neighbouring rows of one slot and query heads of one key head. With few
// rows the splits of a row run side by side and a second kernel merges them; with many, a tile walks them in
// order. Both do the arithmetic of kernels/cuda/attention_tile.cuh, so the bits are the same.
#include <algorithm>

#include "kernels/base/numeric.h"
#include "kernels/cuda/attention_forward.cuh"
#include "kernels/cuda/attention_general.cuh"
#include "kernels/cuda/attention_plan.cuh"
#include "kernels/cuda/attention_select.h"
#include "kernels/cuda/kv_codec.cuh"
#include "kernels/cuda/load.cuh"
#include "kernels/ops/run.h"

namespace fp4t::cuda {

namespace {

constexpr int kThreads = kGroupThreads;

struct Cached {
  const Bf16* qkv;
  HeadShape shape;
  int64_t rows;
  CachePlaces places;
  const void *k, *v;
  const uint8_t *k_scales, *v_scales;  // null: values
  float c;
  Bf16* out;
  int heads_per_tile, tokens_per_tile, head_chunks;
  bool tile_per_row;  // a block looks whether a tile begins at its row; else it takes tokens_per_tile rows
  // Splits side by side: their sums; null where a tile walks the splits.
  int max_splits;
  float* partial;      // [rows * heads][max_splits][kD]
  float2* partial_ml;  // [rows * heads][max_splits]
  FaultSink sink;
};

template <int kD>
struct Shared {
  Bf16 q[kGroupRows * kD];
  Bf16 k[2][kBlockKeys * kD], v[2][kBlockKeys * kD];
  float sum[kD / 2 * kThreads];
};

// As load_tile, from codes; `scales` is the scale of the row's first block.
template <int kD>
__device__ __forceinline__ void load_codes(uint32_t tile, const uint8_t* codes, const uint8_t* scales,
                                           int64_t stride, int valid, int columns) {
  constexpr int kChunks = kD / 8;
  const int thread = static_cast<int>(threadIdx.x), chunk = thread % kChunks;
#pragma unroll 4
  for (int row = thread / kChunks; row < kBlockKeys; row += kThreads / kChunks) {
    uint32_t word[4] = {};
    if (row < valid && chunk * 8 < columns) {
      const uint2 raw = *reinterpret_cast<const uint2*>(codes + row * stride + chunk * 8);
      const float scale = e8m0_value(scales[row * (stride / kKvBlock) + chunk * 8 / kKvBlock]);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const uint32_t pair = (i < 2 ? raw.x : raw.y) >> (16 * (i % 2));
        word[i] = decode_kv<Bf16>(pair & 0xFFu, scale).bits |
                  static_cast<uint32_t>(decode_kv<Bf16>(pair >> 8 & 0xFFu, scale).bits) << 16;
      }
    }
    asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(tile + tile_offset(kBlockKeys, row, chunk)),
                 "r"(word[0]), "r"(word[1]), "r"(word[2]), "r"(word[3])
                 : "memory");
  }
}

// Tokens [begin, end) of one slot, query heads [head, head + heads) of one key head.
struct Tile {
  int64_t begin, end, head, kv_head;
  int heads, max_keys;

  // Of row i of the tile; a row behind the last has no keys.
  __device__ int64_t token(int i) const { return begin + i / heads; }
  __device__ int64_t head_of(int i) const { return head + i % heads; }
};

__device__ int num_keys(const Cached& args, int64_t token) {
  const int32_t slot = args.places.slots[token], position = args.places.positions[token];
  const bool good =
      slot >= 0 && slot < args.places.num_slots && position >= 0 && position < args.places.max_length;
  return good ? position + 1 : 0;
}

template <int kD, bool kCoded>
__device__ void load_block(const Cached& args, const Tile& tile, int b, Shared<kD>& shared) {
  const int64_t dim = args.shape.head_dim, stride = args.shape.kv_heads * dim;
  const int64_t row = args.places.slots[tile.begin] * args.places.max_length + int64_t{b} * kBlockKeys;
  const int64_t first = row * stride + tile.kv_head * dim;
  const int valid = tile.max_keys - b * kBlockKeys, columns = static_cast<int>(dim);
  const uint32_t k = shared_address(shared.k[b % 2]), v = shared_address(shared.v[b % 2]);
  if constexpr (kCoded) {
    load_codes<kD>(k, static_cast<const uint8_t*>(args.k) + first, args.k_scales + first / kKvBlock, stride,
                   valid, columns);
    load_codes<kD>(v, static_cast<const uint8_t*>(args.v) + first, args.v_scales + first / kKvBlock, stride,
                   valid, columns);
  } else {
    load_tile<kD, kThreads>(k, kBlockKeys, static_cast<const Bf16*>(args.k) + first, stride, valid, columns);
    load_tile<kD, kThreads>(v, kBlockKeys, static_cast<const Bf16*>(args.v) + first, stride, valid, columns);
  }
  cp_async_commit();
}

template <int kD>
__device__ void load_queries(const Cached& args, const Tile& tile, uint32_t q) {
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

template <int kD>
__device__ void store_partial(const Cached& args, int64_t place, int split, int h, const Fragment<kD>& o,
                              float m, float l) {
  const int64_t at = place * args.max_splits + split;
  const int lane = static_cast<int>(threadIdx.x) % 4;
#pragma unroll
  for (int j = 0; j < kD / 8; ++j) {
    *reinterpret_cast<float2*>(args.partial + at * kD + 8 * j + 2 * lane) =
        make_float2(o[j][2 * h], o[j][2 * h + 1]);
  }
  if (lane == 0) args.partial_ml[at] = make_float2(m, l);
}

template <int kD, bool kCoded>
__device__ void attend_tile(const Cached& args, const Tile& tile, int split, Shared<kD>& shared) {
  constexpr int kSplitBlocks = kSplitKeys / kBlockKeys;
  const int lane = static_cast<int>(threadIdx.x) % 32, warp_row = static_cast<int>(threadIdx.x) / 32 * 16;
  const int all_blocks = (tile.max_keys + kBlockKeys - 1) / kBlockKeys;
  const int first_block = args.partial ? split * kSplitBlocks : 0;
  const int end_block = args.partial ? min(all_blocks, first_block + kSplitBlocks) : all_blocks;
  if (first_block >= end_block) return;
  int keys[2];
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int64_t token = tile.token(warp_row + lane / 4 + 8 * h);
    keys[h] = token < tile.end ? num_keys(args, token) : 0;
  }
  const uint32_t q = shared_address(shared.q);
  __syncthreads();  // the tile before this is done with shared memory
  load_queries<kD>(args, tile, q);
  load_block<kD, kCoded>(args, tile, first_block, shared);
  Fragment<kD> o;
  clear<kD>(o);
  SoftmaxState state;
  state.clear();
  SplitSum<kD, kThreads> total{shared.sum + threadIdx.x, {}, {}, false};
  for (int b = first_block; b < end_block; ++b) {
    if (b > first_block && b % kSplitBlocks == 0) total.add(args.c, o, state);
    if (b + 1 < end_block) {
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
    if (keys[h] <= first_block * kBlockKeys) continue;
    const int64_t place = tile.token(row) * args.shape.heads + tile.head_of(row);
    if (args.partial && keys[h] > kSplitKeys) {
      store_partial<kD>(args, place, split, h, o, total.m[h], total.l[h]);
    } else {
      store_row<kD>(o, h, total.l[h], static_cast<int>(args.shape.head_dim),
                    args.out + place * args.shape.head_dim);
    }
  }
}

// The tile that begins at row t: to the next slot, or the next multiple of tokens_per_tile.
template <int kD, bool kCoded>
__device__ int64_t attend_rows(const Cached& args, int64_t t, Shared<kD>& shared) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  Tile tile;
  tile.begin = t;
  tile.end = t + 1;
  const int32_t* slots = args.places.slots;
  while (tile.end < args.rows && tile.end % args.tokens_per_tile != 0 && slots[tile.end] == slots[t])
    ++tile.end;
  tile.kv_head = blockIdx.y / args.head_chunks;
  const int64_t in_group = int64_t{blockIdx.y} % args.head_chunks * args.heads_per_tile;
  tile.head = tile.kv_head * args.shape.group() + in_group;
  tile.heads = static_cast<int>(min(int64_t{args.heads_per_tile}, args.shape.group() - in_group));
  int longest = 0;
  for (int64_t token = t + lane; token < tile.end; token += 32) {
    if (args.places.row(token, args.sink) >= 0) longest = max(longest, num_keys(args, token));
  }
  tile.max_keys = __reduce_max_sync(0xFFFFFFFFu, longest);
  attend_tile<kD, kCoded>(args, tile, static_cast<int>(blockIdx.z), shared);
  return tile.end;
}

template <int kD, bool kCoded>
__global__ void __launch_bounds__(kThreads, 1) cached_kernel(Cached args) {
  extern __shared__ __align__(1024) unsigned char memory[];
  Shared<kD>& shared = *reinterpret_cast<Shared<kD>*>(memory);
  if (args.tile_per_row) {
    const int64_t t = blockIdx.x;
    const bool begins = t % args.tokens_per_tile == 0 || args.places.slots[t] != args.places.slots[t - 1];
    if (begins) attend_rows<kD, kCoded>(args, t, shared);
    return;
  }
  const int64_t begin = int64_t{blockIdx.x} * args.tokens_per_tile;
  const int64_t end = min(args.rows, begin + args.tokens_per_tile);
  for (int64_t t = begin; t < end;) t = attend_rows<kD, kCoded>(args, t, shared);
}

// One warp a row and head: merges its splits in order.
template <int kD>
__global__ void __launch_bounds__(kThreads) merge_kernel(Cached args) {
  constexpr int kPerLane = kD / 64;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int64_t place = int64_t{blockIdx.x} * (kThreads / 32) + threadIdx.x / 32;
  if (place >= args.rows * args.shape.heads) return;
  const int keys = num_keys(args, place / args.shape.heads);
  if (keys <= kSplitKeys) return;
  const int64_t first = place * args.max_splits;
  const int splits = (keys + kSplitKeys - 1) / kSplitKeys;
  float m = args.partial_ml[first].x, l = args.partial_ml[first].y;
  float2 o[kPerLane];
  const auto part = [&](int split, int i) {
    return *reinterpret_cast<const float2*>(args.partial + (first + split) * kD + 64 * i + 2 * lane);
  };
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) o[i] = part(0, i);
  for (int split = 1; split < splits; ++split) {
    const float2 ml = args.partial_ml[first + split];
    const Merge merge(args.c, ml.x, ml.y, m, l);
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      const float2 later = part(split, i);
      o[i] = make_float2(merge(o[i].x, later.x), merge(o[i].y, later.y));
    }
  }
  const float inverse = 1.0f / l;
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) {
    const int column = 64 * i + 2 * lane;
    if (column >= args.shape.head_dim) continue;
    *reinterpret_cast<uint32_t*>(args.out + place * args.shape.head_dim + column) =
        pack_bf16(o[i].x * inverse, o[i].y * inverse);
  }
}

// Up to this many rows the splits run side by side, unless their sums would take more than the second limit.
constexpr int64_t kMaxSideBySideRows = 512, kMaxPartialBytes = int64_t{256} << 20;

template <int kD>
void launch(Queue& queue, const AttentionCached& op, Cached args) {
  const cudaStream_t stream = stream_of(queue);
  Workspace workspace(queue);
  const int64_t splits = ceil_div(args.places.max_length, kSplitKeys), sums = args.rows * op.heads * splits;
  const bool side_by_side = splits > 1 && args.rows <= kMaxSideBySideRows &&
                            sums * (kD + 2) * static_cast<int64_t>(sizeof(float)) <= kMaxPartialBytes;
  args.tile_per_row = args.rows <= 2 * kMaxSideBySideRows;
  args.max_splits = side_by_side ? static_cast<int>(splits) : 1;
  if (side_by_side) {
    args.partial = workspace.take<float>(sums * kD);
    args.partial_ml = workspace.take<float2>(sums);
  }
  const auto kernel = args.k_scales ? cached_kernel<kD, true> : cached_kernel<kD, false>;
  constexpr int kBytes = static_cast<int>(sizeof(Shared<kD>));
  FP4T_CUDA(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes));
  const int64_t units = args.tile_per_row ? args.rows : ceil_div(args.rows, args.tokens_per_tile);
  const dim3 grid(static_cast<unsigned>(units), static_cast<unsigned>(op.kv_heads * args.head_chunks),
                  static_cast<unsigned>(args.max_splits));
  kernel<<<grid, kThreads, kBytes, stream>>>(args);
  check_launch(op.kName);
  if (!side_by_side) return;
  merge_kernel<kD>
      <<<static_cast<unsigned>(ceil_div(args.rows * op.heads, kThreads / 32)), kThreads, 0, stream>>>(args);
  check_launch(op.kName);
}

}  // namespace

void run(Queue& queue, const AttentionCached& op) {
  if (op.qkv.dim(0) == 0) return;
  if (!attention_on_tensor_cores(op.qkv.dtype, op.head_dim, op.scale)) return general_attention(queue, op);
  const KvCacheView& cache = op.cache;
  const bool coded = cache.format == Format::kMxfp8;
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
  args.places = {op.slots.as<int32_t>(), op.positions.as<int32_t>(), cache.k.dim(0), cache.k.dim(1)};
  args.k = cache.k.data;
  args.v = cache.v.data;
  if (coded) {
    args.k_scales = cache.k_scales.as<uint8_t>();
    args.v_scales = cache.v_scales.as<uint8_t>();
  }
  args.c = score_factor(op.scale);
  args.out = out.as<Bf16>();
  const int64_t group = args.shape.group();
  args.heads_per_tile = static_cast<int>(std::min<int64_t>(group, kGroupRows));
  args.tokens_per_tile = kGroupRows / args.heads_per_tile;
  args.head_chunks = static_cast<int>(ceil_div(group, kGroupRows));
  args.sink = fault_sink(queue, op.kName);
  if (op.head_dim <= 64) {
    launch<64>(queue, op, args);
  } else {
    launch<128>(queue, op, args);
  }
  out.finish();
}

}  // namespace fp4t::cuda

// One warp a row and head: lanes over keys for the scores, over dimensions for the sums.
#include "kernels/cuda/attention_general.cuh"

#include "kernels/base/numeric.h"
#include "kernels/cuda/attention_plan.cuh"
#include "kernels/cuda/fault.cuh"
#include "kernels/cuda/kv_codec.cuh"
#include "kernels/cuda/load.cuh"
#include "kernels/cuda/reduce.cuh"
#include "kernels/formats/math.h"

namespace fp4t::cuda {

namespace {

constexpr int kWarps = 8;
constexpr int kPerLane = kMaxHeadDim / 32;  // dimensions of a lane: lane, lane + 32, ...

// Rows of keys and values that one query head reads.
template <class T>
struct PackedKeys {
  const T *k, *v;
  int64_t stride;
  __device__ float key(int64_t j, int64_t d) const { return to_f32(k[j * stride + d]); }
  __device__ float value(int64_t j, int64_t d) const { return to_f32(v[j * stride + d]); }
};

// The same in a cache: element (row, 0) of the head is at row_of(slot, row) * stride + first.
template <class T>
struct CachedKeys {
  const T *k, *v;
  CachePlaces places;
  int32_t slot;
  int64_t first, stride;
  __device__ int64_t at(int64_t j, int64_t d) const {
    return places.row_of(slot, static_cast<int32_t>(j)) * stride + first + d;
  }
  __device__ float key(int64_t j, int64_t d) const { return to_f32(k[at(j, d)]); }
  __device__ float value(int64_t j, int64_t d) const { return to_f32(v[at(j, d)]); }
};

template <class T>
struct CodedKeys {
  const uint8_t *k, *v, *k_scales, *v_scales;
  CachePlaces places;
  int32_t slot;
  int64_t first, stride;
  __device__ float key(int64_t j, int64_t d) const { return at(k, k_scales, j, d); }
  __device__ float value(int64_t j, int64_t d) const { return at(v, v_scales, j, d); }

 private:
  __device__ float at(const uint8_t* codes, const uint8_t* scales, int64_t j, int64_t d) const {
    const int64_t i = places.row_of(slot, static_cast<int32_t>(j)) * stride + first + d;
    return to_f32(decode_kv<T>(codes[i], e8m0_value(scales[i / kKvBlock])));
  }
};

// Where rows find their keys: `num_keys` is 0 for a row that is refused.
template <class T>
struct PackedSource {
  const T* qkv;
  HeadShape shape;
  const int32_t* doc_begin;
  FaultSink sink;

  __device__ int64_t num_keys(int64_t t) const {
    return check_document(doc_begin, t, sink) ? t - doc_begin[t] + 1 : 0;
  }
  __device__ PackedKeys<T> keys(int64_t t, int64_t kv_head) const {
    const T* first = qkv + doc_begin[t] * shape.width();
    return {first + shape.k(kv_head), first + shape.v(kv_head), shape.width()};
  }
};

template <class T>
struct CacheSource {
  const T *k, *v;
  HeadShape shape;
  CachePlaces places;
  FaultSink sink;

  __device__ int64_t num_keys(int64_t t) const {
    return places.row(t, sink) < 0 ? 0 : int64_t{places.positions[t]} + 1;
  }
  __device__ CachedKeys<T> keys(int64_t t, int64_t kv_head) const {
    return {k, v, places, places.slots[t], kv_head * shape.head_dim, shape.kv_heads * shape.head_dim};
  }
};

template <class T>
struct CodedSource {
  const uint8_t *k, *v, *k_scales, *v_scales;
  HeadShape shape;
  CachePlaces places;
  FaultSink sink;

  __device__ int64_t num_keys(int64_t t) const {
    return places.row(t, sink) < 0 ? 0 : int64_t{places.positions[t]} + 1;
  }
  __device__ CodedKeys<T> keys(int64_t t, int64_t kv_head) const {
    return {k,
            v,
            k_scales,
            v_scales,
            places,
            places.slots[t],
            kv_head * shape.head_dim,
            shape.kv_heads * shape.head_dim};
  }
};

template <class T, class Source>
__global__ void __launch_bounds__(kWarps * 32)
    forward_kernel(Source source, const T* qkv, int64_t rows, float scale, T* out, float* lse) {
  __shared__ float queries[kWarps][kMaxHeadDim];
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  const HeadShape shape = source.shape;
  const int64_t item = int64_t{blockIdx.x} * kWarps + warp, dim = shape.head_dim;
  if (item >= rows * shape.heads) return;
  const int64_t t = item / shape.heads, head = item % shape.heads, n = source.num_keys(t);
  if (n == 0) return;
  float* q = queries[warp];
  for (int64_t d = lane; d < dim; d += 32) q[d] = to_f32(qkv[t * shape.width() + shape.q(head) + d]);
  __syncwarp();
  const auto keys = source.keys(t, head / shape.group());
  float m = -INFINITY, l = 0.0f, acc[kPerLane] = {};
  for (int64_t first = 0; first < n; first += 32) {
    const int64_t j = first + lane, count = n - first < 32 ? n - first : 32;
    float s = 0.0f;
    if (j < n) {
      for (int64_t d = 0; d < dim; ++d) s = __fmaf_rn(q[d], keys.key(j, d), s);
    }
    s = j < n ? s * scale : -INFINITY;
    const float largest = fmaxf(m, warp_max(s));
    const float rescale = exp_f32(m - largest), p = j < n ? exp_f32(s - largest) : 0.0f;
    m = largest;
    l = l * rescale + p;
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) acc[i] *= rescale;
    for (int key = 0; key < count; ++key) {
      const float weight = __shfl_sync(0xFFFFFFFFu, p, key);
#pragma unroll
      for (int i = 0; i < kPerLane; ++i) {
        if (lane + 32 * i < dim) acc[i] = __fmaf_rn(weight, keys.value(first + key, lane + 32 * i), acc[i]);
      }
    }
  }
  const float total = warp_sum(l);
  for (int i = 0; i < kPerLane; ++i) {
    if (lane + 32 * i < dim) out[item * dim + lane + 32 * i] = from_f32<T>(acc[i] / total);
  }
  if (lse && lane == 0) lse[item] = m + log_f32(total);
}

template <class T>
struct Gradient {
  const T* qkv;
  HeadShape shape;
  const int32_t* doc_begin;
  float scale;
  const T* out;
  const float* lse;
  const T* dout;
  T* dqkv;
  int64_t rows;
  FaultSink sink;

  __device__ const T* q(int64_t t, int64_t head) const { return qkv + t * shape.width() + shape.q(head); }
  __device__ const T* k(int64_t t, int64_t head) const { return qkv + t * shape.width() + shape.k(head); }
  __device__ const T* v(int64_t t, int64_t head) const { return qkv + t * shape.width() + shape.v(head); }
  __device__ const T* dout_of(int64_t t, int64_t head) const {
    return dout + (t * shape.heads + head) * shape.head_dim;
  }
  __device__ float dot(const T* a, const T* b) const {
    float sum = 0.0f;
    for (int64_t d = 0; d < shape.head_dim; ++d) sum = __fmaf_rn(to_f32(a[d]), to_f32(b[d]), sum);
    return sum;
  }
  // P and dS of query (t, head) and key j.
  __device__ void pair(int64_t t, int64_t head, int64_t j, float delta, float& p, float& ds) const {
    const int64_t kv_head = head / shape.group();
    p = exp_f32(dot(q(t, head), k(j, kv_head)) * scale - lse[t * shape.heads + head]);
    ds = p * (dot(dout_of(t, head), v(j, kv_head)) - delta) * scale;
  }
  __device__ float delta(int64_t t, int64_t head) const {
    return dot(dout_of(t, head), out + (t * shape.heads + head) * shape.head_dim);
  }
};

template <class T>
__global__ void __launch_bounds__(kWarps * 32) query_gradient_kernel(Gradient<T> g) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int64_t item = int64_t{blockIdx.x} * kWarps + threadIdx.x / 32, dim = g.shape.head_dim;
  if (item >= g.rows * g.shape.heads) return;
  const int64_t t = item / g.shape.heads, head = item % g.shape.heads;
  if (!check_document(g.doc_begin, t, g.sink)) return;
  const float delta = g.delta(t, head);
  float acc[kPerLane] = {};
  for (int64_t first = g.doc_begin[t]; first <= t; first += 32) {
    float p, ds = 0.0f;
    if (first + lane <= t) g.pair(t, head, first + lane, delta, p, ds);
    for (int64_t j = first; j <= t && j < first + 32; ++j) {
      const float weight = __shfl_sync(0xFFFFFFFFu, ds, static_cast<int>(j - first));
      const T* key = g.k(j, head / g.shape.group());
#pragma unroll
      for (int i = 0; i < kPerLane; ++i) {
        if (lane + 32 * i < dim) acc[i] = __fmaf_rn(weight, to_f32(key[lane + 32 * i]), acc[i]);
      }
    }
  }
  T* to = g.dqkv + t * g.shape.width() + g.shape.q(head);
  for (int i = 0; i < kPerLane; ++i) {
    if (lane + 32 * i < dim) to[lane + 32 * i] = from_f32<T>(acc[i]);
  }
}

template <class T>
__global__ void __launch_bounds__(kWarps * 32) key_gradient_kernel(Gradient<T> g) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int64_t item = int64_t{blockIdx.x} * kWarps + threadIdx.x / 32, dim = g.shape.head_dim;
  if (item >= g.rows * g.shape.kv_heads) return;
  const int64_t j = item / g.shape.kv_heads, kv_head = item % g.shape.kv_heads;
  if (!check_document(g.doc_begin, j, g.sink)) return;
  const int32_t begin = g.doc_begin[j];
  float dk[kPerLane] = {}, dv[kPerLane] = {};
  for (int64_t head = kv_head * g.shape.group(); head < (kv_head + 1) * g.shape.group(); ++head) {
    for (int64_t first = j; first < g.rows && g.doc_begin[first] == begin; first += 32) {
      const int64_t mine = first + lane;
      const bool mine_counts = mine < g.rows && g.doc_begin[mine] == begin;
      float p = 0.0f, ds = 0.0f;
      if (mine_counts) g.pair(mine, head, j, g.delta(mine, head), p, ds);
      const int count = __popc(__ballot_sync(0xFFFFFFFFu, mine_counts));
      for (int r = 0; r < count; ++r) {
        const float pr = __shfl_sync(0xFFFFFFFFu, p, r), dsr = __shfl_sync(0xFFFFFFFFu, ds, r);
        const T *query = g.q(first + r, head), *grad = g.dout_of(first + r, head);
#pragma unroll
        for (int i = 0; i < kPerLane; ++i) {
          if (lane + 32 * i >= dim) continue;
          dk[i] = __fmaf_rn(dsr, to_f32(query[lane + 32 * i]), dk[i]);
          dv[i] = __fmaf_rn(pr, to_f32(grad[lane + 32 * i]), dv[i]);
        }
      }
    }
  }
  T* row = g.dqkv + j * g.shape.width();
  for (int i = 0; i < kPerLane; ++i) {
    if (lane + 32 * i >= dim) continue;
    row[g.shape.k(kv_head) + lane + 32 * i] = from_f32<T>(dk[i]);
    row[g.shape.v(kv_head) + lane + 32 * i] = from_f32<T>(dv[i]);
  }
}

template <class Op>
HeadShape checked_shape(const Op& op) {
  FP4T_CHECK(op.head_dim <= kMaxHeadDim, op.kName, ": head_dim ", op.head_dim, " on a GPU is at most ",
             kMaxHeadDim);
  return {op.heads, op.kv_heads, op.head_dim};
}

unsigned grid_of(int64_t warps) { return static_cast<unsigned>(ceil_div(warps, kWarps)); }

template <class T, class Source, class Op>
void forward(Queue& queue, const Op& op, const Source& source, float* lse) {
  const int64_t rows = op.qkv.dim(0);
  forward_kernel<<<grid_of(rows * op.heads), kWarps * 32, 0, stream_of(queue)>>>(
      source, static_cast<const T*>(op.qkv.template as<T>()), rows, op.scale, op.out.template as<T>(), lse);
  check_launch(op.kName);
}

}  // namespace

void general_attention(Queue& queue, const AttentionForward& op) {
  const HeadShape shape = checked_shape(op);
  for_float_type(op.qkv.dtype, [&](auto type) {
    using T = decltype(type);
    const PackedSource<T> source{op.qkv.as<T>(), shape, op.doc_begin.as<int32_t>(),
                                 fault_sink(queue, op.kName)};
    forward<T>(queue, op, source, op.lse.as<float>());
  });
}

void general_attention(Queue& queue, const AttentionCached& op) {
  const HeadShape shape = checked_shape(op);
  const KvCacheView& cache = op.cache;
  const CachePlaces places = CachePlaces::of(op.slots, op.positions, cache);
  const FaultSink sink = fault_sink(queue, op.kName);
  for_float_type(op.qkv.dtype, [&](auto type) {
    using T = decltype(type);
    if (cache.format == Format::kBf16) {
      forward<T>(queue, op, CacheSource<T>{cache.k.as<T>(), cache.v.as<T>(), shape, places, sink}, nullptr);
    } else {
      const CodedSource<T> source{cache.k.as<uint8_t>(),
                                  cache.v.as<uint8_t>(),
                                  cache.k_scales.as<uint8_t>(),
                                  cache.v_scales.as<uint8_t>(),
                                  shape,
                                  places,
                                  sink};
      forward<T>(queue, op, source, nullptr);
    }
  });
}

void general_attention(Queue& queue, const AttentionBackward& op) {
  const HeadShape shape = checked_shape(op);
  for_float_type(op.qkv.dtype, [&](auto type) {
    using T = decltype(type);
    const int64_t rows = op.qkv.dim(0);
    const Gradient<T> g{op.qkv.as<T>(),
                        shape,
                        op.doc_begin.as<int32_t>(),
                        op.scale,
                        op.out.as<T>(),
                        op.lse.as<float>(),
                        op.dout.as<T>(),
                        op.dqkv.as<T>(),
                        rows,
                        fault_sink(queue, op.kName)};
    query_gradient_kernel<<<grid_of(rows * op.heads), kWarps * 32, 0, stream_of(queue)>>>(g);
    check_launch(op.kName);
    key_gradient_kernel<<<grid_of(rows * op.kv_heads), kWarps * 32, 0, stream_of(queue)>>>(g);
    check_launch(op.kName);
  });
}

}  // namespace fp4t::cuda

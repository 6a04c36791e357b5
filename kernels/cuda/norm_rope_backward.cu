// A block has a chunk of tokens: first all its query heads, then all key heads, because a group of lanes
// sums the gradient of one weight in registers. The next head is loaded while this one is worked on.
#include "kernels/cuda/norm_rope.cuh"
#include "kernels/ops/norm.h"
#include "kernels/ops/run.h"

namespace fp4t::cuda {

namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;

template <class T>
struct Args {
  const T* qkv;
  const int32_t* positions;
  const float *cos, *sin, *q_weight, *k_weight, *rstd;
  const T* dout;
  T* dqkv;
  float* partials;  // [chunks, 2 head_dim]: of q_weight, of k_weight
  int64_t tokens, width, chunk, max_position;
  int heads, kv_heads, half, lanes;
  FaultSink sink;

  __device__ int rotated() const { return heads + kv_heads; }
  __device__ bool is_good(int32_t position) const { return position >= 0 && position < max_position; }
};

// The head that a group works on, and the one that it loads.
struct Item {
  int64_t token;
  int head;
  int32_t position;
  float rstd;
  RawPair x, g;
};

// dx of the pair (rstd (g - xhat mean)) in g, given the head's mean.
__device__ __forceinline__ void finish(Pair& g, const Pair& xhat, float rstd, float mean) {
#pragma unroll
  for (int k = 0; k < kVector; ++k) {
    g.a[k] = rstd * (g.a[k] - xhat.a[k] * mean);
    g.b[k] = rstd * (g.b[k] - xhat.b[k] * mean);
  }
}

// Heads [begin, begin + count) of every token of the block's chunk.
struct Heads {
  __device__ Heads(const Args<Bf16>& args, int begin_head, int count_of_heads, const float* its_weight)
      : a(args),
        begin(begin_head),
        count(count_of_heads),
        lane(static_cast<int>(threadIdx.x) % args.lanes),
        groups(kThreads / args.lanes),
        mine(lane * kVector < args.half),
        first(int64_t{blockIdx.x} * args.chunk),
        last(min(args.tokens, first + args.chunk)) {
    if (its_weight && mine) weight = load_weight_pair(its_weight + lane * kVector, args.half);
  }

  __device__ int64_t at(const Item& i) const {
    return i.token * a.width + int64_t{begin + i.head} * 2 * a.half + lane * kVector;
  }
  __device__ void load(Item& i) const {
    if (i.token >= last) return;
    i.position = a.positions[i.token];
    if (a.q_weight) i.rstd = a.rstd[i.token * a.rotated() + begin + i.head];
    if (!mine) return;
    i.g = load_raw_pair(a.dout + at(i), a.half);
    if (a.q_weight) i.x = load_raw_pair(a.qkv + at(i), a.half);
  }
  __device__ void advance(Item& i) const {
    i.token += groups / count;
    i.head += groups % count;
    if (i.head >= count) i.head -= count, ++i.token;
  }

  __device__ void work(const Item& i) {
    bool active = mine && i.token < last;
    if (active && !a.is_good(i.position)) {
      report(a.sink, FaultKind::kIndex, i.token, i.position);
      active = false;
    }
    Pair g = {}, xhat = {};
    if (active) {
      float cos[kVector], sin[kVector];
      const int64_t angle = int64_t{i.position} * a.half + lane * kVector;
      load_vector(a.cos + angle, cos);
      load_vector(a.sin + angle, sin);
      g = decode_pair(i.g);
      rotate_back(g, cos, sin);
      if (a.q_weight) {
        xhat = decode_pair(i.x);
        scale_pair(xhat, i.rstd);
      }
    }
    if (a.q_weight) {
#pragma unroll
      for (int k = 0; k < kVector; ++k) {
        dweight.a[k] = __fmaf_rn(g.a[k], xhat.a[k], dweight.a[k]);
        dweight.b[k] = __fmaf_rn(g.b[k], xhat.b[k], dweight.b[k]);
      }
      multiply_pair(g, weight);
      Dot dot;
      add_pair(dot, g, xhat);
      finish(g, xhat, i.rstd, head_sum(dot.sum(), a.lanes) / static_cast<float>(2 * a.half));
    }
    if (active) store_raw_pair(encode_pair(g), a.dqkv + at(i), a.half);
  }

  __device__ void run() {
    const int group = static_cast<int>(threadIdx.x) / a.lanes;
    Item next = {first + group / count, group % count, 0, 0.0f, {}, {}};
    load(next);
    const int64_t steps = ((last - first) * count + groups - 1) / groups;  // the same for the whole block
    for (int64_t s = 0; s < steps; ++s) {
      const Item now = next;
      advance(next);
      load(next);
      work(now);
    }
  }

  // Over the block's groups: within each warp, then warp after warp.
  __device__ void store_dweight(float* shared, float* partial) {
    const int dim = 2 * a.half, warp = static_cast<int>(threadIdx.x) / 32;
    for (int step = a.lanes; step < 32; step *= 2) {
#pragma unroll
      for (int k = 0; k < kVector; ++k) {
        dweight.a[k] += __shfl_xor_sync(0xFFFFFFFFu, dweight.a[k], step);
        dweight.b[k] += __shfl_xor_sync(0xFFFFFFFFu, dweight.b[k], step);
      }
    }
    __syncthreads();
    if (mine && threadIdx.x % 32 < static_cast<unsigned>(a.lanes)) {
      store_vector(dweight.a, shared + warp * dim + lane * kVector);
      store_vector(dweight.b, shared + warp * dim + a.half + lane * kVector);
    }
    __syncthreads();
    for (int d = static_cast<int>(threadIdx.x); d < dim; d += kThreads) {
      float sum = shared[d];
      for (int w = 1; w < kWarps; ++w) sum += shared[w * dim + d];
      partial[d] = sum;
    }
  }

  const Args<Bf16>& a;
  int begin, count, lane, groups;
  bool mine;
  int64_t first, last;
  Pair weight = {}, dweight = {};
};

__device__ void copy_values(const Args<Bf16>& a) {
  const int64_t first = int64_t{blockIdx.x} * a.chunk, last = min(a.tokens, first + a.chunk);
  const int vectors = a.kv_heads * 2 * a.half / kVector;  // of a token
  const int64_t begin = int64_t{a.rotated()} * 2 * a.half;
  for (int64_t v = threadIdx.x; v < (last - first) * vectors; v += kThreads) {
    int within = 0;
    const int64_t token = first + divide(v, vectors, within);
    const int64_t at = token * a.width + begin + within * kVector;
    store_raw(load_raw(a.dout + at), a.dqkv + at);
  }
}

__global__ void __launch_bounds__(kThreads, 2) backward_chunk(const __grid_constant__ Args<Bf16> a) {
  extern __shared__ float shared[];
  float* partial = a.partials + int64_t{blockIdx.x} * 4 * a.half;
  for (int part = 0; part < 2; ++part) {
    Heads heads(a, part == 0 ? 0 : a.heads, part == 0 ? a.heads : a.kv_heads,
                part == 0 ? a.q_weight : a.k_weight);
    heads.run();
    if (a.q_weight) heads.store_dweight(shared, partial + part * 2 * a.half);
  }
  if (a.dqkv != a.dout) copy_values(a);
}

// One group of lanes a head; a head may be wider than what its lanes hold at once: it is read twice.
template <class T>
__global__ void __launch_bounds__(kThreads) backward_dx_any(const __grid_constant__ Args<T> a) {
  const int lane = static_cast<int>(threadIdx.x) % a.lanes, total = a.rotated() + a.kv_heads;
  const int64_t unit = (int64_t{blockIdx.x} * kThreads + threadIdx.x) / a.lanes;
  int head = 0;
  const int64_t token = divide(unit, total, head), half = a.half, at = token * a.width + head * 2 * half;
  const bool is_rotated = head < a.rotated(), norm = a.q_weight && is_rotated;
  bool active = token < a.tokens;
  const int32_t position = active ? a.positions[token] : 0;
  if (active && !a.is_good(position)) {
    report(a.sink, FaultKind::kIndex, token, position);
    active = false;
  }
  const int64_t first = active ? lane * kVector : half, stride = int64_t{a.lanes} * kVector;
  const float rstd = active && norm ? a.rstd[token * a.rotated() + head] : 0.0f;
  Pair g, xhat = {};
  const auto load = [&](int64_t i) {
    load_pair(a.dout + at, i, half, g);
    if (is_rotated) {
      float cos[kVector], sin[kVector];
      load_part(a.cos + position * half, i, half, cos);
      load_part(a.sin + position * half, i, half, sin);
      rotate_back(g, cos, sin);
    }
    if (norm) {
      Pair weight;
      load_pair(head < a.heads ? a.q_weight : a.k_weight, i, half, weight);
      load_pair(a.qkv + at, i, half, xhat);
      scale_pair(xhat, rstd);
      multiply_pair(g, weight);
    }
  };
  Dot dot;
  if (norm) {
    for (int64_t i = first; i < half; i += stride) {
      load(i);
      add_pair(dot, g, xhat);
    }
  }
  const float mean = head_sum(dot.sum(), a.lanes) / static_cast<float>(2 * half);
  for (int64_t i = first; i < half; i += stride) {
    load(i);
    if (norm) finish(g, xhat, rstd, mean);
    store_pair(g, a.dqkv + at, i, half);
  }
}

// One thread an element of the two weights.
template <class T>
__global__ void __launch_bounds__(kThreads) backward_dweight_any(const __grid_constant__ Args<T> a) {
  const int64_t half = a.half, dim = 2 * half, column = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (column >= 2 * dim) return;
  const bool query = column < dim;
  const int64_t d = column % dim, i = d % half;
  const int begin = query ? 0 : a.heads, count = query ? a.heads : a.kv_heads;
  const int64_t first = int64_t{blockIdx.y} * a.chunk, last = min(a.tokens, first + a.chunk);
  float sum = 0.0f;
  for (int64_t token = first; token < last; ++token) {
    if (!a.is_good(a.positions[token])) continue;  // reported with dx
    const int64_t angle = a.positions[token] * half + i;
    const float cos = a.cos[angle], sin = a.sin[angle];
    for (int h = begin; h < begin + count; ++h) {
      const int64_t at = token * a.width + h * dim;
      const float left = to_f32(a.dout[at + i]), right = to_f32(a.dout[at + half + i]);
      const float grad = d < half ? left * cos + right * sin : right * cos - left * sin;
      sum = __fmaf_rn(grad, to_f32(a.qkv[at + d]) * a.rstd[token * a.rotated() + h], sum);
    }
  }
  a.partials[int64_t{blockIdx.y} * 2 * dim + column] = sum;
}

bool fits_chunks(const Args<Bf16>& a) {
  return head_in_registers(2 * a.half) && aligned16(a.qkv) && aligned16(a.dout) && aligned16(a.dqkv) &&
         aligned16(a.cos) && aligned16(a.sin) && aligned16(a.q_weight) && aligned16(a.k_weight);
}

// dweight before dx: dqkv may be dout.
template <class T>
void launch_any(Queue& queue, const Args<T>& a, int64_t chunks) {
  if (a.q_weight) {
    const dim3 grid(static_cast<unsigned>(ceil_div(4 * a.half, kThreads)), static_cast<unsigned>(chunks));
    backward_dweight_any<T><<<grid, kThreads, 0, stream_of(queue)>>>(a);
  }
  const int64_t units = a.tokens * (a.heads + 2 * a.kv_heads);
  const auto blocks = narrow<uint32_t>(ceil_div(units, kThreads / a.lanes));
  backward_dx_any<T><<<blocks, kThreads, 0, stream_of(queue)>>>(a);
}

template <class T>
void backward(Queue& queue, const QkNormRopeBackward& op) {
  const bool norm = !op.q_weight.empty();
  const int64_t tokens = op.qkv.dim(0), dim = op.head_dim, chunk = tokens_per_chunk(tokens);
  const int64_t chunks = ceil_div(tokens, chunk);
  if (tokens == 0) return;
  Workspace workspace(queue);
  const Args<T> a{.qkv = op.qkv.as<T>(),
                  .positions = op.positions.as<int32_t>(),
                  .cos = op.cos.as<float>(),
                  .sin = op.sin.as<float>(),
                  .q_weight = norm ? op.q_weight.as<float>() : nullptr,
                  .k_weight = norm ? op.k_weight.as<float>() : nullptr,
                  .rstd = norm ? op.rstd.as<float>() : nullptr,
                  .dout = op.dout.as<T>(),
                  .dqkv = op.dqkv.as<T>(),
                  .partials = norm ? workspace.take<float>(chunks * 2 * dim) : nullptr,
                  .tokens = tokens,
                  .width = op.qkv.dim(1),
                  .chunk = chunk,
                  .max_position = op.cos.dim(0),
                  .heads = narrow<int>(op.heads),
                  .kv_heads = narrow<int>(op.kv_heads),
                  .half = narrow<int>(dim / 2),
                  .lanes = lanes_of_head(dim),
                  .sink = fault_sink(queue, op.kName)};
  bool fast = false;
  if constexpr (std::is_same_v<T, Bf16>) {
    fast = fits_chunks(a);
    const auto bytes = static_cast<size_t>(kWarps * dim) * sizeof(float);  // at most 16 KB
    if (fast) backward_chunk<<<static_cast<unsigned>(chunks), kThreads, bytes, stream_of(queue)>>>(a);
  }
  if (!fast) launch_any(queue, a, chunks);
  check_launch(op.kName);
  if (norm) {
    add_partials(queue, op.kName, a.partials, chunks, 2 * dim, op.dq_weight.as<float>(), dim,
                 op.dk_weight.as<float>());
  }
}

}  // namespace

void run(Queue& queue, const QkNormRopeBackward& op) {
  for_float_type(op.qkv.dtype, [&](auto type) { backward<decltype(type)>(queue, op); });
}

}  // namespace fp4t::cuda

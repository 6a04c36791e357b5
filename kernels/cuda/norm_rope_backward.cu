// A block has a chunk of tokens, a warp every eighth of them; its lanes sum the gradients of their part of
// both weights in registers and fetch their part of the next heads into shared memory while they work.
#include "kernels/cuda/norm_rope.cuh"
#include "kernels/ops/norm.h"
#include "kernels/ops/run.h"

namespace fp4t::cuda {

namespace {

constexpr int kThreads = 256;
constexpr int kWarps = HeadWalk::kWarps;
constexpr int kStages = 4;
constexpr int kVectorsPerStage = 4;  // of a thread: both halves of dout and of x

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

// dx of the pair (rstd (g - xhat mean)) in g, given the head's mean.
__device__ __forceinline__ void finish(Pair& g, const Pair& xhat, float rstd, float mean) {
#pragma unroll
  for (int k = 0; k < kVector; ++k) {
    g.a[k] = rstd * (g.a[k] - xhat.a[k] * mean);
    g.b[k] = rstd * (g.b[k] - xhat.b[k] * mean);
  }
}

struct Chunk {
  // `shared` holds the stages, then both weights.
  __device__ Chunk(const Args<Bf16>& args, uint4* shared)
      : a(args),
        walk(args.heads, args.kv_heads, args.half, args.lanes, args.dqkv != args.dout,
             int64_t{blockIdx.x} * args.chunk, min(args.tokens, (int64_t{blockIdx.x} + 1) * args.chunk)),
        angles(walk, args.positions),
        slots(shared + threadIdx.x),
        weights(reinterpret_cast<float*>(shared + kStages * kVectorsPerStage * kThreads)) {}

  __device__ void load_weights() {
    const int dim = 2 * a.half;
    for (int d = static_cast<int>(threadIdx.x); d < 2 * dim; d += kThreads) {
      weights[d] = d < dim ? a.q_weight[d] : a.k_weight[d - dim];
    }
    __syncthreads();
  }

  __device__ int64_t at(const HeadWalk::Place& p, int head) const {
    return p.token * a.width + int64_t{head} * 2 * a.half + walk.column;
  }
  __device__ uint4* slot(int stage, int vector) const {
    return slots + (stage * kVectorsPerStage + vector) * kThreads;
  }
  __device__ RawPair raw(int stage, int vector) const {
    return {*slot(stage, vector), *slot(stage, vector + 1)};
  }

  __device__ void fetch_heads(const HeadWalk::Place& p, int stage) const {
    if (const int head = walk.head(p); head >= 0) {
      const int64_t i = at(p, head);
      fetch(slot(stage, 0), a.dout + i);
      fetch(slot(stage, 1), a.dout + i + a.half);
      if (a.q_weight && head < a.rotated()) {
        fetch(slot(stage, 2), a.qkv + i);
        fetch(slot(stage, 3), a.qkv + i + a.half);
      }
    }
    fetch_commit();
  }
  __device__ float load_rstd(const HeadWalk::Place& p) const {
    const int head = walk.head(p);
    return a.q_weight && head >= 0 && head < a.rotated() ? a.rstd[p.token * a.rotated() + head] : 0.0f;
  }

  __device__ void begin_token(int64_t token) {
    good = angles.begin(walk, token, a.cos, a.sin, a.max_position);
    if (!good && threadIdx.x % 32 == 0) report(a.sink, FaultKind::kIndex, token, angles.position);
  }

  __device__ void work(const HeadWalk::Place& p, int stage, float rstd) {
    const HeadKind kind = walk.kind(p);
    const int head = walk.head(p);
    const bool valid = good && head >= 0;
    if (kind == HeadKind::kValue) {
      if (valid) store_raw_pair(raw(stage, 0), a.dqkv + at(p, head), a.half);
      return;
    }
    Pair g = {}, xhat = {};
    if (valid) {
      g = decode_pair(raw(stage, 0));
      rotate_back(g, angles.cos, angles.sin);
    }
    if (a.q_weight) {
      if (valid) {
        xhat = decode_pair(raw(stage, 2));
        scale_pair(xhat, rstd);
        if (kind == HeadKind::kQuery) {  // not a reference to one of the two: they are registers
          accumulate(dq, g, xhat);
        } else {
          accumulate(dk, g, xhat);
        }
        const float* weight = weights + (kind == HeadKind::kQuery ? 0 : 2 * a.half);
        multiply_pair(g, load_weight_pair(weight + walk.column, a.half));
      }
      Dot dot;
      add_pair(dot, g, xhat);
      finish(g, xhat, rstd, head_sum(dot.sum(), a.lanes) / static_cast<float>(2 * a.half));
    }
    if (valid) store_raw_pair(encode_pair(g), a.dqkv + at(p, head), a.half);
  }

  __device__ static void accumulate(Pair& sum, const Pair& g, const Pair& xhat) {
#pragma unroll
    for (int k = 0; k < kVector; ++k) {
      sum.a[k] = __fmaf_rn(g.a[k], xhat.a[k], sum.a[k]);
      sum.b[k] = __fmaf_rn(g.b[k], xhat.b[k], sum.b[k]);
    }
  }

  __device__ void run() {
    HeadWalk::Place fetched = walk.begin(), now = fetched;
#pragma unroll
    for (int s = 0; s < kStages - 1; ++s) {
      fetch_heads(fetched, s);
      walk.advance(fetched);
    }
    float next_rstd = load_rstd(now);
    const int64_t steps = walk.steps();
    for (int64_t s = 0; s < steps; ++s) {
      const int stage = static_cast<int>(s % kStages);
      fetch_heads(fetched, (stage + kStages - 1) % kStages);
      walk.advance(fetched);
      if (now.block == 0) begin_token(now.token);
      const HeadWalk::Place here = now;
      walk.advance(now);
      const float rstd = next_rstd;
      next_rstd = load_rstd(now);
      fetch_wait<kStages - 1>();
      work(here, stage, rstd);
    }
  }

  // The block's sums of one weight: within each warp over its heads, then warp after warp.
  __device__ void store_dweight(Pair& sum, float* shared, float* partial) const {
    const int dim = 2 * a.half, warp = static_cast<int>(threadIdx.x) / 32;
    for (int step = a.lanes; step < 32; step *= 2) {
#pragma unroll
      for (int k = 0; k < kVector; ++k) {
        sum.a[k] += __shfl_xor_sync(0xFFFFFFFFu, sum.a[k], step);
        sum.b[k] += __shfl_xor_sync(0xFFFFFFFFu, sum.b[k], step);
      }
    }
    __syncthreads();
    if (walk.column < a.half && walk.group == 0) {
      store_vector(sum.a, shared + warp * dim + walk.column);
      store_vector(sum.b, shared + warp * dim + a.half + walk.column);
    }
    __syncthreads();
    for (int d = static_cast<int>(threadIdx.x); d < dim; d += kThreads) {
      float total = shared[d];
      for (int w = 1; w < kWarps; ++w) total += shared[w * dim + d];
      partial[d] = total;
    }
  }

  const Args<Bf16>& a;
  HeadWalk walk;
  Angles angles;
  uint4* slots;
  float* weights;
  bool good = true;
  Pair dq = {}, dk = {};
};

int64_t shared_bytes(int64_t head_dim) {
  return kStages * kVectorsPerStage * kThreads * 16 + 2 * head_dim * static_cast<int64_t>(sizeof(float));
}

__global__ void __launch_bounds__(kThreads, 2) backward_chunk(const __grid_constant__ Args<Bf16> a) {
  extern __shared__ uint4 shared[];
  Chunk chunk(a, shared);
  if (a.q_weight) chunk.load_weights();
  chunk.run();
  if (!a.q_weight) return;
  float *partial = a.partials + int64_t{blockIdx.x} * 4 * a.half, *free = reinterpret_cast<float*>(shared);
  chunk.store_dweight(chunk.dq, free, partial);
  chunk.store_dweight(chunk.dk, free, partial + 2 * a.half);
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
    if (fast) {
      const auto bytes = static_cast<int>(shared_bytes(dim));
      FP4T_CUDA(cudaFuncSetAttribute(backward_chunk, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
      backward_chunk<<<static_cast<unsigned>(chunks), kThreads, static_cast<size_t>(bytes),
                       stream_of(queue)>>>(a);
    }
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

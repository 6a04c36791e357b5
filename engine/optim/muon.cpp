#include "engine/optim/muon.h"

#include <algorithm>
#include <cmath>

#include "kernels/ops/run.h"

namespace fp4t {

namespace {

// Of Keller Jordan's Muon: steep at zero, so small singular values grow fast; what is left oscillates
// around 1 between about 0.7 and 1.2.
constexpr float kA = 3.4445f, kB = -4.7750f, kC = 2.0315f;
constexpr double kTiny = 1e-7;  // keeps the division by the norm finite

int64_t columns_of(const ParamInfo& info) { return info.shape[info.shape.rank() - 1]; }
int64_t rows_of(const ParamInfo& info) { return info.shape[info.shape.rank() - 2]; }

// The first elements of a scratch block in another shape.
TensorView part(const TensorView& block, const Shape& shape) { return {block.data, block.dtype, shape}; }

Operand plain(const TensorView& values, bool transposed) {
  Operand o;
  o.values = values;
  o.transposed = transposed;
  return o;
}

}  // namespace

bool is_muon_parameter(const ParamInfo& info) {
  return info.role == ParamRole::kExpertWeight ||
         (info.role == ParamRole::kGemmWeight && info.module != Module::kHead);
}

std::vector<RowSlice> muon_matrices(const ParamInfo& info, const ModelSpec& model) {
  const int64_t rows = rows_of(info);
  std::vector<int64_t> parts = {rows};
  switch (info.module) {
    case Module::kAttnQkv:
      parts = {model.heads * model.head_dim, model.kv_heads * model.head_dim,
               model.kv_heads * model.head_dim};
      break;
    case Module::kMlpGateUp:
    case Module::kExpertsGateUp:
    case Module::kSharedGateUp:
      parts = {rows / 2, rows / 2};
      break;
    default:
      break;
  }
  const int64_t count = info.role == ParamRole::kExpertWeight ? info.shape[0] : 1;
  std::vector<RowSlice> slices;
  int64_t begin = 0;
  for (int64_t i = 0; i < count; ++i) {
    for (const int64_t n : parts) {
      slices.push_back({begin, n});
      begin += n;
    }
  }
  return slices;
}

NewtonSchulz::NewtonSchulz(Queue& queue, Arena& arena, const std::vector<ParamInfo>& parameters)
    : queue_(queue) {
  int64_t largest = 0, side = 0;
  for (const ParamInfo& info : parameters) {
    if (!is_muon_parameter(info)) continue;
    const int64_t rows = rows_of(info), columns = columns_of(info);
    largest = std::max(largest, rows * columns);
    side = std::max(side, std::min(rows, columns));
  }
  product_ = arena.take("optimizer scratch", DType::kF32, {largest});
  gram_ = arena.take("optimizer scratch", DType::kF32, {side, side});
  square_ = arena.take("optimizer scratch", DType::kF32, {side, side});
  factor_ = arena.take("optimizer scratch", DType::kF32, {side, side});
  sum_ = arena.take("optimizer scalars", DType::kF64, {1});
  nonfinite_ = arena.take("optimizer scalars", DType::kF64, {1});
}

double NewtonSchulz::frobenius_norm(const TensorView& x) {
  queue_.fill_bytes(sum_.data, 0, sum_.bytes());
  queue_.fill_bytes(nonfinite_.data, 0, nonfinite_.bytes());
  run(queue_, SumSquares{.x = x.reshape({x.elements()}), .sum = sum_, .nonfinite = nonfinite_});
  double sum = 0;
  queue_.copy_to_host(&sum, sum_.data, sizeof(sum));
  return std::sqrt(sum);
}

void NewtonSchulz::iterate(const TensorView& x) {
  const int64_t rows = x.dim(0), columns = x.dim(1);
  // The polynomial is odd, so it may be taken on the short side: (x x^T) x = x (x^T x).
  const bool wide = rows <= columns;
  const Shape square = {std::min(rows, columns), std::min(rows, columns)};
  const TensorView gram = part(gram_, square), gram2 = part(square_, square), factor = part(factor_, square);
  const TensorView product = part(product_, x.shape);
  run(queue_, Gemm{plain(x, !wide), plain(x, !wide), gram, false});
  run(queue_, Gemm{plain(gram, false), plain(gram, false), gram2, false});
  run(queue_, LinearCombination{kB, gram, kC, gram2, factor});
  if (wide) {
    run(queue_, Gemm{plain(factor, false), plain(x, true), product, false});
  } else {
    run(queue_, Gemm{plain(x, false), plain(factor, false), product, false});
  }
  run(queue_, LinearCombination{kA, x, 1.0f, product, x});
}

void NewtonSchulz::orthogonalise(const TensorView& x, int64_t iterations) {
  const double norm = frobenius_norm(x);
  if (norm == 0) return;
  run(queue_, LinearCombination{static_cast<float>(1.0 / (norm + kTiny)), x, 0.0f, {}, x});
  for (int64_t i = 0; i < iterations; ++i) iterate(x);
  const double ratio = static_cast<double>(x.dim(0)) / static_cast<double>(x.dim(1));
  run(queue_, LinearCombination{static_cast<float>(std::sqrt(std::max(1.0, ratio))), x, 0.0f, {}, x});
}

}  // namespace fp4t

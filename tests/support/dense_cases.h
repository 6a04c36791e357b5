// Ops with their operands, filled from a seed: one struct a family, shared by the parity and the
// gradient tests. Outputs are NaN until written.
#pragma once

#include <random>
#include <string>

#include "kernels/ops/run.h"
#include "tests/support/dense_reference.h"

namespace fp4t::test {

constexpr float kEps = 1e-5f;
constexpr int32_t kMaxPosition = 512;

struct NormCase {
  NormCase(DType dtype, const Shape& shape, bool residual_given, uint64_t seed)
      : x(normal_tensor(dtype, shape, seed)),
        residual(normal_tensor(dtype, shape, seed + 1)),
        weight(normal_tensor(DType::kF32, {shape[1]}, seed + 2)),
        sum(dtype, shape),
        out(dtype, shape),
        rstd(DType::kF32, {shape[0]}),
        dout(normal_tensor(dtype, shape, seed + 3)),
        dresidual(normal_tensor(dtype, shape, seed + 4)),
        dx(dtype, shape),
        dweight(zeros(DType::kF32, {shape[1]})),
        with_residual(residual_given) {}

  NormForward forward_op() {
    return {.x = x.view(),
            .residual = with_residual ? residual.view() : TensorView{},
            .weight = weight.view(),
            .eps = kEps,
            .sum = with_residual ? sum.view() : TensorView{},
            .out = out.view(),
            .rstd = rstd.view()};
  }
  void forward(Queue& queue) { run(queue, forward_op()); }
  void backward(Queue& queue, bool past) {
    run(queue, NormBackward{.x = with_residual ? sum.view() : x.view(),
                            .weight = weight.view(),
                            .rstd = rstd.view(),
                            .dout = dout.view(),
                            .dresidual = past ? dresidual.view() : TensorView{},
                            .dx = dx.view(),
                            .dweight = dweight.view()});
  }
  NormCase in_f32() {
    NormCase c = *this;
    for (HostTensor* t : {&c.x, &c.residual, &c.sum, &c.out, &c.dout, &c.dresidual, &c.dx}) {
      *t = in_dtype(*t, DType::kF32);
    }
    return c;
  }
  // Row t of another case becomes row 0 of this one.
  void take_row(NormCase& from, int64_t t) {
    HostTensor NormCase::*const fields[] = {&NormCase::x, &NormCase::residual, &NormCase::dout,
                                            &NormCase::dresidual};
    for (auto field : fields) {
      const TensorView row = (from.*field).view().rows(t, 1);
      std::memcpy((this->*field).view().data, row.data, static_cast<size_t>(row.bytes()));
    }
    weight = from.weight;
  }

  HostTensor x, residual, weight, sum, out, rstd, dout, dresidual, dx, dweight;
  bool with_residual;
};

struct RopeCase {
  RopeCase(DType dtype, int64_t tokens, const reference::Heads& h, bool norm_given, uint64_t seed)
      : heads(h),
        norm(norm_given),
        qkv(normal_tensor(dtype, {tokens, h.width()}, seed)),
        positions(DType::kI32, {tokens}),
        cos(DType::kF32, {kMaxPosition, h.head_dim / 2}),
        sin(DType::kF32, {kMaxPosition, h.head_dim / 2}),
        q_weight(normal_tensor(DType::kF32, {h.head_dim}, seed + 1)),
        k_weight(normal_tensor(DType::kF32, {h.head_dim}, seed + 2)),
        out(dtype, {tokens, h.width()}),
        rstd(DType::kF32, {tokens, h.heads + h.kv_heads}),
        dout(normal_tensor(dtype, {tokens, h.width()}, seed + 3)),
        dqkv(dtype, {tokens, h.width()}),
        dq_weight(zeros(DType::kF32, {h.head_dim})),
        dk_weight(zeros(DType::kF32, {h.head_dim})) {
    std::mt19937_64 engine(seed);
    for (int64_t t = 0; t < tokens; ++t) {
      positions.as<int32_t>()[t] = static_cast<int32_t>(engine() % static_cast<uint64_t>(kMaxPosition));
    }
    const int64_t half = h.head_dim / 2;
    for (int64_t i = 0; i < kMaxPosition * half; ++i) {
      const double angle = static_cast<double>(i / half) *
                           std::pow(10000.0, -static_cast<double>(i % half) / static_cast<double>(half));
      cos.as<float>()[i] = static_cast<float>(std::cos(angle));
      sin.as<float>()[i] = static_cast<float>(std::sin(angle));
    }
  }

  void forward(Queue& queue) {
    const TensorView none;
    run(queue, QkNormRopeForward{.qkv = qkv.view(),
                                 .heads = heads.heads,
                                 .kv_heads = heads.kv_heads,
                                 .head_dim = heads.head_dim,
                                 .positions = positions.view(),
                                 .cos = cos.view(),
                                 .sin = sin.view(),
                                 .q_weight = norm ? q_weight.view() : none,
                                 .k_weight = norm ? k_weight.view() : none,
                                 .eps = kEps,
                                 .out = out.view(),
                                 .rstd = norm ? rstd.view() : none});
  }
  QkNormRopeBackward backward_op() {
    const TensorView none;
    return {.qkv = qkv.view(),
            .heads = heads.heads,
            .kv_heads = heads.kv_heads,
            .head_dim = heads.head_dim,
            .positions = positions.view(),
            .cos = cos.view(),
            .sin = sin.view(),
            .q_weight = norm ? q_weight.view() : none,
            .k_weight = norm ? k_weight.view() : none,
            .rstd = norm ? rstd.view() : none,
            .dout = dout.view(),
            .dqkv = dqkv.view(),
            .dq_weight = norm ? dq_weight.view() : none,
            .dk_weight = norm ? dk_weight.view() : none};
  }
  void backward(Queue& queue) { run(queue, backward_op()); }

  // The forward in FP64 of these values, with this case's weights and positions.
  Values expected(const Values& values) { return expected(values, values_of(q_weight), values_of(k_weight)); }
  Values expected(const Values& values, const Values& q, const Values& k) {
    const std::vector<int32_t> places(positions.as<int32_t>(),
                                      positions.as<int32_t>() + positions.elements());
    return reference::qk_norm_rope(values, heads, places, values_of(cos), values_of(sin), norm ? q : Values{},
                                   norm ? k : Values{}, kEps);
  }
  RopeCase in_f32() {
    RopeCase c = *this;
    for (HostTensor* t : {&c.qkv, &c.out, &c.dout, &c.dqkv}) *t = in_dtype(*t, DType::kF32);
    return c;
  }
  std::string text() {
    return qkv.view().shape.text() + " heads " + std::to_string(heads.heads) + "/" +
           std::to_string(heads.kv_heads) + " x " + std::to_string(heads.head_dim) + (norm ? " norm" : "");
  }

  reference::Heads heads;
  bool norm;
  HostTensor qkv, positions, cos, sin, q_weight, k_weight, out, rstd, dout, dqkv, dq_weight, dk_weight;
};

// Documents of random lengths 1..max_length until `tokens` are reached.
inline std::vector<int32_t> random_documents(int64_t tokens, int64_t max_length, uint64_t seed) {
  std::mt19937_64 engine(seed);
  std::vector<int32_t> first;
  while (static_cast<int64_t>(first.size()) < tokens) {
    const auto begin = static_cast<int32_t>(first.size());
    const int64_t length = 1 + static_cast<int64_t>(engine() % static_cast<uint64_t>(max_length));
    for (int64_t i = 0; i < length && static_cast<int64_t>(first.size()) < tokens; ++i)
      first.push_back(begin);
  }
  return first;
}

struct AttentionCase {
  AttentionCase(DType dtype, const std::vector<int32_t>& documents, const reference::Heads& h, uint64_t seed)
      : heads(h),
        doc_begin(documents),
        tokens(static_cast<int64_t>(documents.size())),
        scale(1.0f / std::sqrt(static_cast<float>(h.head_dim))),
        qkv(normal_tensor(dtype, {tokens, h.width()}, seed)),
        documents_tensor(i32_tensor(documents)),
        out(dtype, {tokens, h.heads * h.head_dim}),
        lse(DType::kF32, {tokens, h.heads}),
        dout(normal_tensor(dtype, {tokens, h.heads * h.head_dim}, seed + 1)),
        dqkv(dtype, {tokens, h.width()}) {}

  AttentionForward forward_op() {
    return {.qkv = qkv.view(),
            .heads = heads.heads,
            .kv_heads = heads.kv_heads,
            .head_dim = heads.head_dim,
            .doc_begin = documents_tensor.view(),
            .scale = scale,
            .out = out.view(),
            .lse = lse.view()};
  }
  void forward(Queue& queue) { run(queue, forward_op()); }
  void backward(Queue& queue) {
    run(queue, AttentionBackward{.qkv = qkv.view(),
                                 .heads = heads.heads,
                                 .kv_heads = heads.kv_heads,
                                 .head_dim = heads.head_dim,
                                 .doc_begin = documents_tensor.view(),
                                 .scale = scale,
                                 .out = out.view(),
                                 .lse = lse.view(),
                                 .dout = dout.view(),
                                 .dqkv = dqkv.view()});
  }
  Values expected(const Values& values) {
    Values unused;
    return reference::attention(values, heads, doc_begin, scale, unused);
  }
  std::string text() {
    return qkv.view().shape.text() + " heads " + std::to_string(heads.heads) + "/" +
           std::to_string(heads.kv_heads) + " x " + std::to_string(heads.head_dim);
  }

  reference::Heads heads;
  std::vector<int32_t> doc_begin;
  int64_t tokens;
  float scale;
  HostTensor qkv, documents_tensor, out, lse, dout, dqkv;
};

}  // namespace fp4t::test

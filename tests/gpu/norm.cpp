// Norms and rotary embedding on the GPU against the CPU. Widths: odd, one warp, several warps, and past
// what fits registers; tokens: none, one, and more than one chunk of the weight gradient.
#include "kernels/ops/norm.h"

#include <cmath>
#include <random>

#include "kernels/formats/bf16.h"
#include "tests/support/mirror.h"

namespace fp4t::test {
namespace {

constexpr DType kTypes[] = {DType::kBf16, DType::kF32};
constexpr float kEps = 1e-5f;

struct NormTensors {
  NormTensors(Mirror& m, DType type, const Shape& shape, bool with_residual)
      : x(m.normal(type, shape)),
        residual(with_residual ? m.normal(type, shape) : TensorView{}),
        weight(m.normal(DType::kF32, {shape[1]})),
        sum(with_residual ? m.fresh(type, shape) : TensorView{}),
        out(m.fresh(type, shape)),
        rstd(m.fresh(DType::kF32, {shape[0]})),
        dout(m.normal(type, shape)),
        dresidual(with_residual ? m.normal(type, shape) : TensorView{}),
        dx(m.fresh(type, shape)),
        dweight(m.normal(DType::kF32, {shape[1]})) {}

  NormForward forward() const {
    return {
        .x = x, .residual = residual, .weight = weight, .eps = kEps, .sum = sum, .out = out, .rstd = rstd};
  }
  NormBackward backward() const {
    return {.x = residual.empty() ? x : sum,
            .weight = weight,
            .rstd = rstd,
            .dout = dout,
            .dresidual = dresidual,
            .dx = dx,
            .dweight = dweight};
  }
  TensorView x, residual, weight, sum, out, rstd, dout, dresidual, dx, dweight;
};

const Shape kShapes[] = {{0, 8},     {1, 1},     {1, 90},    {33, 90},  {5000, 128},  {67, 256},
                         {31, 264},  {9, 768},   {3, 1000},  {7, 1536}, {1100, 2048}, {20, 2880},
                         {70, 4096}, {19, 5120}, {37, 8192}, {3, 8200}, {2, 33000},   {601, 51}};

TEST(GpuNorm, forward_and_backward_hold_their_class_on_every_shape) {
  for (DType type : kTypes) {
    for (const Shape& shape : kShapes) {
      for (bool residual : {false, true}) {
        SCOPED_TRACE(std::string(dtype_name(type)) + " " + shape.text() + (residual ? " with residual" : ""));
        Mirror m;
        const NormTensors t(m, type, shape, residual);
        if (residual) m.compare_by(t.sum, Bitwise());
        m.check(t.forward());
        m.check(t.backward());
      }
    }
  }
}

TEST(GpuNorm, dx_may_alias_dresidual) {
  for (const Shape& shape : {Shape{70, 90}, Shape{1100, 512}}) {
    Mirror m;
    const NormTensors t(m, DType::kBf16, shape, true);
    m.check(t.forward());
    NormBackward op = t.backward();
    op.dx = op.dresidual;
    m.check(op);
  }
}

// Bytes of row `row` of a tensor.
std::vector<char> row_bytes(const TensorView& v, int64_t row) {
  const TensorView one = v.rows(row, 1);
  const char* p = static_cast<const char*>(one.data);
  return {p, p + one.bytes()};
}

TEST(GpuNorm, a_row_depends_neither_on_its_batch_nor_on_its_place) {
  for (int64_t width : {90, 256, 264, 2048, 5120}) {
    SCOPED_TRACE(width);
    Mirror m;
    const NormTensors t(m, DType::kBf16, {1100, width}, true);
    m.run_on_gpu(t.forward());
    m.run_on_gpu(t.backward());
    for (int64_t row : {0, 1, 43, 1099}) {
      NormForward forward = t.forward();
      NormBackward backward = t.backward();
      const TensorView out = m.fresh(DType::kBf16, {1, width}), dx = m.fresh(DType::kBf16, {1, width});
      for (TensorView* v : {&forward.x, &forward.residual, &forward.sum, &forward.rstd}) *v = v->rows(row, 1);
      for (TensorView* v : {&backward.x, &backward.rstd, &backward.dout, &backward.dresidual})
        *v = v->rows(row, 1);
      forward.out = out;
      backward.dx = dx;
      m.run_on_gpu(forward);
      m.run_on_gpu(backward);
      EXPECT_EQ(row_bytes(t.out, row), row_bytes(out, 0)) << row;
      EXPECT_EQ(row_bytes(t.dx, row), row_bytes(dx, 0)) << row;
    }
  }
}

// Views that begin two bytes after a 16-byte boundary take the path without vectors; the same bits come out.
TEST(GpuNorm, rows_that_cannot_be_read_as_vectors_give_the_same_bits) {
  for (int64_t width : {264, 2048, 5120}) {
    SCOPED_TRACE(width);
    Mirror m;
    const NormTensors t(m, DType::kBf16, {5, width}, true);
    m.run_on_gpu(t.forward());
    m.run_on_gpu(t.backward());
    const int64_t n = 5 * width;
    const auto shifted = [&](const TensorView& from) {
      const TensorView room = m.fresh(DType::kBf16, {n + 1});
      const TensorView v = {static_cast<char*>(room.data) + 2, DType::kBf16, {5, width}};
      std::memcpy(v.data, from.data, static_cast<size_t>(v.bytes()));
      return v;
    };
    NormForward forward = t.forward();
    forward.x = shifted(t.x);
    forward.residual = shifted(t.residual);
    forward.out = shifted(t.x);
    NormBackward backward = t.backward();
    backward.dout = shifted(t.dout);
    backward.dx = shifted(t.dout);
    const std::vector<char> out = row_bytes(t.out.reshape({1, n}), 0),
                            dx = row_bytes(t.dx.reshape({1, n}), 0);
    m.run_on_gpu(forward);
    m.run_on_gpu(backward);
    EXPECT_EQ(out, row_bytes(forward.out.reshape({1, n}), 0));
    EXPECT_EQ(dx, row_bytes(backward.dx.reshape({1, n}), 0));
  }
}

TEST(GpuNorm, a_nan_stays_in_its_row) {
  for (int64_t width : {90, 2048}) {
    Mirror m;
    const NormTensors t(m, DType::kBf16, {6, width}, false);
    t.x.as<Bf16>()[3 * width + 7] = {0x7FC0};
    m.run_on_gpu(t.forward());
    for (int64_t i = 0; i < 6 * width; ++i) {
      ASSERT_EQ(std::isnan(bf16_to_f32(t.out.as<Bf16>()[i])), i / width == 3) << i;
    }
  }
}

struct Heads {
  int64_t heads, kv_heads, head_dim;
  int64_t width() const { return (heads + 2 * kv_heads) * head_dim; }
};

const Heads kHeads[] = {{1, 1, 2},    {3, 3, 18}, {4, 2, 32},  {6, 2, 48},  {5, 1, 64},  {32, 4, 128},
                        {16, 4, 128}, {7, 1, 80}, {2, 1, 256}, {1, 1, 512}, {2, 1, 600}, {2, 2, 1040}};

struct RopeTensors {
  RopeTensors(Mirror& m, DType type, int64_t tokens, const Heads& h, bool with_norm)
      : heads(h),
        norm(with_norm),
        qkv(m.normal(type, {tokens, h.width()})),
        cos(m.fresh(DType::kF32, {kPositions, h.head_dim / 2})),
        sin(m.fresh(DType::kF32, {kPositions, h.head_dim / 2})),
        q_weight(m.normal(DType::kF32, {h.head_dim})),
        k_weight(m.normal(DType::kF32, {h.head_dim})),
        out(m.fresh(type, {tokens, h.width()})),
        rstd(m.fresh(DType::kF32, {tokens, h.heads + h.kv_heads})),
        dout(m.normal(type, {tokens, h.width()})),
        dqkv(m.fresh(type, {tokens, h.width()})),
        dq_weight(m.normal(DType::kF32, {h.head_dim})),
        dk_weight(m.normal(DType::kF32, {h.head_dim})) {
    std::mt19937_64 engine(7);
    std::vector<int32_t> p;
    for (int64_t t = 0; t < tokens; ++t) p.push_back(static_cast<int32_t>(engine() % kPositions));
    positions = m.i32(p);
    for (int64_t i = 0; i < cos.elements(); ++i) {
      const double angle = static_cast<double>(engine() % 10000) * 1e-3;
      cos.as<float>()[i] = static_cast<float>(std::cos(angle));
      sin.as<float>()[i] = static_cast<float>(std::sin(angle));
    }
  }
  QkNormRopeForward forward() const {
    return {.qkv = qkv,
            .heads = heads.heads,
            .kv_heads = heads.kv_heads,
            .head_dim = heads.head_dim,
            .positions = positions,
            .cos = cos,
            .sin = sin,
            .q_weight = norm ? q_weight : TensorView{},
            .k_weight = norm ? k_weight : TensorView{},
            .eps = kEps,
            .out = out,
            .rstd = norm ? rstd : TensorView{}};
  }
  QkNormRopeBackward backward() const {
    return {.qkv = qkv,
            .heads = heads.heads,
            .kv_heads = heads.kv_heads,
            .head_dim = heads.head_dim,
            .positions = positions,
            .cos = cos,
            .sin = sin,
            .q_weight = norm ? q_weight : TensorView{},
            .k_weight = norm ? k_weight : TensorView{},
            .rstd = norm ? rstd : TensorView{},
            .dout = dout,
            .dqkv = dqkv,
            .dq_weight = norm ? dq_weight : TensorView{},
            .dk_weight = norm ? dk_weight : TensorView{}};
  }
  static constexpr int64_t kPositions = 97;
  Heads heads;
  bool norm;
  TensorView qkv, cos, sin, q_weight, k_weight, out, rstd, dout, dqkv, dq_weight, dk_weight, positions;
};

TEST(GpuQkNormRope, forward_and_backward_hold_their_class_on_every_shape) {
  for (DType type : kTypes) {
    for (const Heads& heads : kHeads) {
      for (int64_t tokens : {0, 1, 31, 130}) {
        for (bool norm : {false, true}) {
          Mirror m;
          const RopeTensors t(m, type, tokens, heads, norm);
          SCOPED_TRACE(std::string(dtype_name(type)) + " " + t.qkv.shape.text() + " head_dim " +
                       std::to_string(heads.head_dim) + (norm ? " norm" : ""));
          m.check(t.forward());
          m.check(t.backward());
        }
      }
    }
  }
}

TEST(GpuQkNormRope, many_chunks_of_tokens_hold_their_class) {
  for (const Heads& heads : {Heads{4, 2, 32}, Heads{3, 1, 18}}) {
    Mirror m;
    const RopeTensors t(m, DType::kBf16, 5003, heads, true);
    m.check(t.forward());
    m.check(t.backward());
  }
}

TEST(GpuQkNormRope, rotation_without_norm_is_bitwise) {
  for (const Heads& heads : {Heads{4, 2, 32}, Heads{3, 1, 18}, Heads{32, 4, 128}}) {
    Mirror m;
    const RopeTensors t(m, DType::kBf16, 130, heads, false);
    m.compare_by(t.out, Bitwise());
    m.compare_by(t.dqkv, Bitwise());
    m.check(t.forward());
    m.check(t.backward());
  }
}

TEST(GpuQkNormRope, dqkv_may_alias_dout) {
  for (const Heads& heads : {Heads{4, 2, 32}, Heads{3, 1, 18}, Heads{2, 2, 1040}}) {
    for (bool norm : {false, true}) {
      Mirror m;
      const RopeTensors t(m, DType::kBf16, 130, heads, norm);
      m.check(t.forward());
      QkNormRopeBackward op = t.backward();
      op.dqkv = op.dout;
      m.check(op);
    }
  }
}

TEST(GpuQkNormRope, a_token_depends_neither_on_its_batch_nor_on_its_place) {
  for (const Heads& heads : {Heads{6, 2, 48}, Heads{32, 4, 128}, Heads{3, 1, 18}}) {
    Mirror m;
    const RopeTensors t(m, DType::kBf16, 37, heads, true);
    m.run_on_gpu(t.forward());
    m.run_on_gpu(t.backward());
    for (int64_t row : {0, 5, 36}) {
      QkNormRopeForward forward = t.forward();
      QkNormRopeBackward backward = t.backward();
      const TensorView out = m.fresh(DType::kBf16, {1, heads.width()});
      const TensorView dqkv = m.fresh(DType::kBf16, {1, heads.width()});
      for (TensorView* v : {&forward.qkv, &forward.positions, &forward.rstd}) *v = v->rows(row, 1);
      for (TensorView* v : {&backward.qkv, &backward.positions, &backward.rstd, &backward.dout})
        *v = v->rows(row, 1);
      forward.out = out;
      backward.dqkv = dqkv;
      m.run_on_gpu(forward);
      m.run_on_gpu(backward);
      EXPECT_EQ(row_bytes(t.out, row), row_bytes(out, 0)) << row;
      EXPECT_EQ(row_bytes(t.dqkv, row), row_bytes(dqkv, 0)) << row;
    }
  }
}

TEST(GpuQkNormRope, positions_outside_the_table_are_refused) {
  for (const Heads& heads : {Heads{4, 2, 32}, Heads{3, 1, 18}}) {
    for (int32_t position : {-1, 97, 1 << 30}) {
      Mirror m;
      const RopeTensors t(m, DType::kBf16, 40, heads, true);
      t.positions.as<int32_t>()[33] = position;
      EXPECT_THROW(m.run_on_gpu(t.forward()), InternalError);
      EXPECT_THROW(m.run_on_gpu(t.backward()), InternalError);
    }
  }
}

// Tensors of more than 2^31 elements: the last rows give what they give alone.
TEST(GpuNorm, the_last_rows_of_a_huge_tensor_are_right) {
  constexpr int64_t kWidth = 2048, kRows = (int64_t{1} << 20) + 5, kLast = 3;
  Queue queue = Queue::cuda(0);
  Machine machine;
  cuda::describe_device(0, machine);
  if (machine.memory_bytes < int64_t{60} << 30) GTEST_SKIP() << "needs 60 GiB";
  const auto tensor = [&](DType type, const Shape& shape, int fill) {
    TensorView v = {nullptr, type, shape};
    v.data = queue.allocate(v.bytes());
    queue.fill_bytes(v.data, fill, v.bytes());
    return v;
  };
  const Shape shape = {kRows, kWidth};
  NormForward forward = {.x = tensor(DType::kBf16, shape, 0x3C),
                         .residual = tensor(DType::kBf16, shape, 0x3D),
                         .weight = tensor(DType::kF32, {kWidth}, 0x3E),
                         .eps = kEps,
                         .sum = tensor(DType::kBf16, shape, 0),
                         .out = tensor(DType::kBf16, shape, 0),
                         .rstd = tensor(DType::kF32, {kRows}, 0)};
  NormBackward backward = {.x = forward.sum,
                           .weight = forward.weight,
                           .rstd = forward.rstd,
                           .dout = forward.x,
                           .dresidual = {},
                           .dx = tensor(DType::kBf16, shape, 0),
                           .dweight = tensor(DType::kF32, {kWidth}, 0)};
  HostTensor values(DType::kBf16, {kLast, kWidth});
  for (uint64_t seed : {1u, 2u}) {
    fill_normal(values, seed);
    const TensorView to = seed == 1 ? forward.x : forward.residual;
    queue.copy_from_host(to.rows(kRows - kLast, kLast).data, values.view().data, values.view().bytes());
  }
  run(queue, forward);
  run(queue, backward);
  const auto last = [&](const TensorView& v) {
    HostTensor got(DType::kBf16, {kLast, kWidth});
    queue.copy_to_host(got.view().data, v.rows(kRows - kLast, kLast).data, got.view().bytes());
    return got;
  };
  const HostTensor out = last(forward.out), dx = last(backward.dx);
  NormForward forward_alone = forward;
  NormBackward backward_alone = backward;
  for (TensorView* v : {&forward_alone.x, &forward_alone.residual, &forward_alone.sum, &forward_alone.out,
                        &forward_alone.rstd, &backward_alone.x, &backward_alone.rstd, &backward_alone.dout,
                        &backward_alone.dx}) {
    *v = v->rows(kRows - kLast, kLast);
  }
  for (const TensorView& v : {forward_alone.out, backward_alone.dx}) queue.fill_bytes(v.data, 0, v.bytes());
  run(queue, forward_alone);
  run(queue, backward_alone);
  EXPECT_TRUE(out.same_bytes(last(forward.out)));
  EXPECT_TRUE(dx.same_bytes(last(backward.dx)));
  for (const TensorView& v : {forward.x, forward.residual, forward.weight, forward.sum, forward.out,
                              forward.rstd, backward.dx, backward.dweight}) {
    queue.release(v.data);
  }
}

}  // namespace
}  // namespace fp4t::test

FP4T_GPU_TEST_MAIN

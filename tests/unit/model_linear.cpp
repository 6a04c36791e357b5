// One linear layer under every kind of cell, against products in FP64.
#include "engine/model/linear.h"

#include <cmath>
#include <map>

#include "engine/plan/step_layout.h"
#include "gtest/gtest.h"
#include "tests/support/linear_bench.h"

namespace fp4t::test {
namespace {

using Bench = LinearBench;
constexpr int64_t kTokens = Bench::kTokens;

struct Nmse {
  double error = 0, signal = 0;
  void add(double got, double expected) {
    error += (got - expected) * (got - expected);
    signal += expected * expected;
  }
  double value() const { return error / signal; }
};

struct Errors {
  double fprop, dgrad, wgrad;
};

Errors measure(const TestCells& cells, Module module) {
  Bench b(cells, module);
  const int64_t out = b.site.out, in = b.site.in;
  const TensorView x = b.random("x", {kTokens, in}, 1), dy = b.random("dy", {kTokens, out}, 2);
  const TensorView y = b.arena.take("y", b.plan.act, {kTokens, out});
  const TensorView dx = b.arena.take("dx", b.plan.act, {kTokens, in});
  const Call call = b.call();
  b.linear->forward(call, x, b.offsets(), {}, y);
  b.linear->backward(call, x, {}, dy, b.offsets(), dx);

  Nmse fprop, dgrad, wgrad;
  std::vector<double> dw(static_cast<size_t>(b.site.matrices() * out * in));
  for (int64_t t = 0; t < kTokens; ++t) {
    const int64_t g = b.group_of(t);
    std::vector<double> dx_row(static_cast<size_t>(in));
    for (int64_t o = 0; o < out; ++o) {
      double sum = 0;
      const double d = gradient_element(dy, t * out + o);
      for (int64_t i = 0; i < in; ++i) {
        const double xi = gradient_element(x, t * in + i);
        sum += xi * b.w(g, o, i);
        dx_row[static_cast<size_t>(i)] += d * b.w(g, o, i);
        dw[static_cast<size_t>((g * out + o) * in + i)] += d * xi;
      }
      fprop.add(gradient_element(y, t * out + o), sum);
    }
    for (int64_t i = 0; i < in; ++i)
      dgrad.add(gradient_element(dx, t * in + i), dx_row[static_cast<size_t>(i)]);
  }
  for (size_t i = 0; i < dw.size(); ++i) {
    wgrad.add(gradient_element(b.weight->gradient, static_cast<int64_t>(i)), dw[i]);
  }
  return {fprop.value(), dgrad.value(), wgrad.value()};
}

// Expected squared error of a product of two operands: the sum of theirs. NVFP4 of normal values costs
// about 0.009 with nearest rounding, 0.024 drawn; MXFP8 about 0.0007; BF16 storage 3e-6.
void expect_errors(const TestCells& cells, Errors bound) {
  for (const Module module : {Module::kAttnQkv, Module::kAttnOut, Module::kExpertsGateUp,
                              Module::kExpertsDown, Module::kSharedDown}) {
    const Errors e = measure(cells, module);
    EXPECT_LT(e.fprop, bound.fprop) << name_of(module);
    EXPECT_LT(e.dgrad, bound.dgrad) << name_of(module);
    EXPECT_LT(e.wgrad, bound.wgrad) << name_of(module);
    // Quantisation must show, too.
    EXPECT_GT(e.fprop, bound.fprop / 8) << name_of(module);
    EXPECT_GT(e.dgrad, bound.dgrad / 8) << name_of(module);
    EXPECT_GT(e.wgrad, bound.wgrad / 8) << name_of(module);
  }
}

TEST(ModelLinear, fp32_products_are_exact_to_rounding) {
  for (const Module module : {Module::kAttnQkv, Module::kExpertsGateUp}) {
    const Errors e = measure(fp32_cells(), module);
    EXPECT_LT(e.fprop, 1e-12);
    EXPECT_LT(e.dgrad, 1e-12);
    EXPECT_LT(e.wgrad, 1e-12);
  }
}

TEST(ModelLinear, bf16_products_round_once) { expect_errors({}, {8e-6, 8e-6, 8e-6}); }
TEST(ModelLinear, mxfp8_products_are_close) { expect_errors(mxfp8_cells(), {2.5e-3, 2.5e-3, 2.5e-3}); }
TEST(ModelLinear, nvidia_nvfp4_products_are_close) {
  expect_errors(nvidia_nvfp4_cells(), {0.03, 0.06, 0.06});
}
TEST(ModelLinear, quartet2_products_are_close) { expect_errors(quartet2_cells(), {0.025, 0.08, 0.08}); }
TEST(ModelLinear, rl_nvfp4_products_are_close) { expect_errors(rl_nvfp4_cells(), {0.03, 0.015, 0.015}); }

TEST(ModelLinear, a_layer_takes_the_scratch_that_the_plan_prices) {
  for (const TestCells& cells : {nvidia_nvfp4_cells(), quartet2_cells(), mxfp8_cells(), rl_nvfp4_cells()}) {
    for (const Module module : {Module::kAttnQkv, Module::kExpertsGateUp, Module::kExpertsDown}) {
      Bench b(cells, module);
      const TensorView x = b.random("x", {kTokens, b.site.in}, 1),
                       dy = b.random("dy", {kTokens, b.site.out}, 2);
      const TensorView y = b.arena.take("y", b.plan.act, {kTokens, b.site.out});
      const TensorView dx = b.arena.take("dx", b.plan.act, {kTokens, b.site.in});
      b.linear->forward(b.call(), x, b.offsets(), {}, y);
      b.linear->backward(b.call(), x, {}, dy, b.offsets(), dx);
      const TablePair tables{b.pass.forward, b.pass.backward};
      EXPECT_EQ(b.scratch.high_water_bytes(), gemm_scratch_bytes(b.site, tables, kTokens)) << name_of(module);
    }
  }
}

// A training forward makes what dgrad multiplies beside its own codes; a sampler's leaves it to backward.
TEST(ModelLinear, when_a_weight_is_coded_changes_no_gradient) {
  for (const Module module : {Module::kAttnQkv, Module::kExpertsDown}) {
    std::vector<uint8_t> dx_bytes[2], dw_bytes[2];
    for (const bool early : {false, true}) {
      Bench b(nvidia_nvfp4_cells(), module);
      const TensorView x = b.random("x", {kTokens, b.site.in}, 1),
                       dy = b.random("dy", {kTokens, b.site.out}, 2);
      const TensorView y = b.arena.take("y", b.plan.act, {kTokens, b.site.out});
      const TensorView dx = b.arena.take("dx", b.plan.act, {kTokens, b.site.in});
      if (!early) b.linear->prepare_forward(b.call());
      b.linear->forward(b.call(), x, b.offsets(), {}, y);
      const double of_dgrad =
          b.stats.as<double>()[stats_row(GemmRole::kDgrad, OperandRole::kWeight) * kNumQuantStats +
                               kStatElements];
      EXPECT_EQ(of_dgrad > 0, early);
      b.linear->backward(b.call(), x, {}, dy, b.offsets(), dx);
      const auto copy = [](const TensorView& v) {
        const auto* bytes = static_cast<const uint8_t*>(v.data);
        return std::vector<uint8_t>(bytes, bytes + v.bytes());
      };
      dx_bytes[early] = copy(dx);
      dw_bytes[early] = copy(b.weight->gradient);
    }
    EXPECT_EQ(dx_bytes[0], dx_bytes[1]) << name_of(module);
    EXPECT_EQ(dw_bytes[0], dw_bytes[1]) << name_of(module);
  }
}

TEST(ModelLinear, codes_that_forward_kept_change_no_gradient) {
  for (const Module module : {Module::kAttnQkv, Module::kExpertsGateUp}) {
    std::vector<uint8_t> results[2];
    for (const bool kept : {false, true}) {
      Bench b(nvidia_nvfp4_cells(), module);
      const TensorView x = b.random("x", {kTokens, b.site.in}, 1),
                       dy = b.random("dy", {kTokens, b.site.out}, 2);
      const TensorView y = b.arena.take("y", b.plan.act, {kTokens, b.site.out});
      const TensorView dx = b.arena.take("dx", b.plan.act, {kTokens, b.site.in});
      LayerActs acts;
      if (kept) {
        const int64_t tokens = b.site.groups > 0 ? kTokens / b.dims.top_k : kTokens;
        take_act_codes(b.plan, b.dims, {b.pass.forward, b.pass.backward}, 0, tokens, acts,
                       ArenaTake{b.arena});
      }
      const KeptCodes& codes = acts.codes[static_cast<size_t>(module)];
      EXPECT_EQ(codes.wgrad.empty(), !kept);
      b.linear->forward(b.call(), x, b.offsets(), codes, y);
      const TensorView of_backward = kept ? b.arena.take("unread", x.dtype, x.shape) : x;
      b.linear->backward(b.call(), of_backward, codes, dy, b.offsets(), dx);
      for (const TensorView& v : {y, dx, b.weight->gradient, b.stats}) {
        const auto* bytes = static_cast<const uint8_t*>(v.data);
        results[kept].insert(results[kept].end(), bytes, bytes + v.bytes());
      }
    }
    EXPECT_EQ(results[0], results[1]) << name_of(module);
  }
}

// BF16 backward on fprop's operands: the products of exactly the decoded values.
TEST(ModelLinear, backward_from_forward_multiplies_what_fprop_multiplied) {
  for (const Module module : {Module::kAttnQkv, Module::kExpertsGateUp}) {
    Bench b(rl_nvfp4_cells(), module);
    const int64_t out = b.site.out, in = b.site.in;
    const TensorView x = b.random("x", {kTokens, in}, 3), dy = b.random("dy", {kTokens, out}, 4);
    const TensorView dx = b.arena.take("dx", b.plan.act, {kTokens, in});
    b.linear->backward(b.call(), x, {}, dy, b.offsets(), dx);

    const ForwardCell& cell = b.pass.forward->cell(0, module);
    const auto decode = [&](OperandRole operand, const TensorView& values, const TensorView& offsets) {
      const OperandForm form = operand_form(GemmRole::kFprop, operand, cell, nullptr);
      const QuantView codes =
          take_quant("codes", operand_layout(form, b.site, values.dim(0)), ArenaTake{b.arena});
      run(b.queue, Quantize{.x = values,
                            .offsets = offsets,
                            .orientation = Orientation::kRow,
                            .draw_key = {},
                            .first_expert = 0,
                            .signs_key = {},
                            .input_scale = {},
                            .stats = {},
                            .measure_error = false,
                            .out = codes});
      const TensorView full = b.arena.take("full", DType::kF32, values.shape);
      run(b.queue,
          Dequantize{
              .x = codes, .offsets = offsets, .scale = DecodeScale::kFull, .out = full, .inexact = {}});
      return full;
    };
    const TensorView xq = decode(OperandRole::kAct, x, b.offsets());
    const TensorView wq =
        decode(OperandRole::kWeight, operand_of(*b.weight).reshape({b.site.matrices() * out, in}), {});

    Nmse dgrad, wgrad;
    std::vector<double> dw(static_cast<size_t>(b.site.matrices() * out * in));
    for (int64_t t = 0; t < kTokens; ++t) {
      const int64_t g = b.group_of(t);
      for (int64_t i = 0; i < in; ++i) {
        double sum = 0;
        for (int64_t o = 0; o < out; ++o) {
          const double d = gradient_element(dy, t * out + o);
          sum += d * gradient_element(wq, (g * out + o) * in + i);
          dw[static_cast<size_t>((g * out + o) * in + i)] += d * gradient_element(xq, t * in + i);
        }
        dgrad.add(gradient_element(dx, t * in + i), sum);
      }
    }
    for (size_t i = 0; i < dw.size(); ++i) {
      wgrad.add(gradient_element(b.weight->gradient, static_cast<int64_t>(i)), dw[i]);
    }
    EXPECT_LT(dgrad.value(), 8e-6);  // dx is stored in BF16
    EXPECT_LT(wgrad.value(), b.weight->gradient.dtype == DType::kF32 ? 1e-11 : 8e-6);
  }
}

// With 16x16 blocks forward and backward see the same weights: the column codes are the row codes, turned.
TEST(ModelLinear, square_blocks_give_the_same_codes_in_both_orientations) {
  Queue queue = Queue::cpu(2);
  const int64_t rows = 96, cols = 64;
  HostTensor w(DType::kBf16, {rows, cols});
  fill_normal(w, 31);
  QuantSpec spec = nvfp4();
  spec.block = BlockShape::k16x16;
  Arena arena(queue, "codes", 1 << 20, Poison::kNan);
  const auto full = [&](Orientation orientation) {
    const bool row = orientation == Orientation::kRow;
    const QuantView codes =
        take_quant("codes", quant_layout(spec, GroupAxis::kRows, 1, row ? rows : cols, row ? cols : rows),
                   ArenaTake{arena});
    run(queue, Quantize{.x = w.view(),
                        .offsets = {},
                        .orientation = orientation,
                        .draw_key = {},
                        .first_expert = 0,
                        .signs_key = {},
                        .input_scale = {},
                        .stats = {},
                        .measure_error = false,
                        .out = codes});
    const TensorView values = arena.take("values", DType::kF32, {row ? rows : cols, row ? cols : rows});
    run(queue,
        Dequantize{.x = codes, .offsets = {}, .scale = DecodeScale::kFull, .out = values, .inexact = {}});
    return values;
  };
  const TensorView by_row = full(Orientation::kRow), by_column = full(Orientation::kColumn);
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t c = 0; c < cols; ++c) {
      ASSERT_EQ(gradient_element(by_row, r * cols + c), gradient_element(by_column, c * rows + r))
          << r << " " << c;
    }
  }
}

TEST(ModelLinear, kept_codes_follow_the_weights) {
  Bench b(mxfp8_cells(), Module::kAttnQkv);
  const TensorView x = b.random("x", {kTokens, b.site.in}, 5);
  const TensorView y = b.arena.take("y", b.plan.act, {kTokens, b.site.out});
  const auto forward = [&] {
    b.linear->forward(b.call(), x, {}, {}, y);
    return bytes_of(y);
  };
  const auto before = forward();
  Bf16* w = b.weight->copy.as<Bf16>();
  for (int64_t i = 0; i < b.weight->copy.elements(); ++i) w[i] = to_bf16(-2 * from_bf16(w[i]));
  EXPECT_EQ(forward(), before);  // not told yet
  b.linear->weights_changed();
  EXPECT_NE(forward(), before);
  const double quantised = b.stats.as<double>()[kNumQuantStats + kStatElements];
  EXPECT_EQ(quantised, 2.0 * static_cast<double>(b.weight->copy.elements()));  // twice in four uses
}

}  // namespace
}  // namespace fp4t::test

// The three products of a linear layer against NUMERICS.md section 0.0, read sentence by sentence: which
// matrix each operand is, its scale domain, the keys of its draws, where a tensor scale goes. Bit for bit,
// for the cells of every preset and for mixtures of them. Quantisers are those of tests/formats/reference.h;
// keys, scales and products are written here once more.
#include "tests/formats/reference.h"

#include "gtest/gtest.h"
#include "tests/support/coded_operand.h"
#include "tests/support/linear_bench.h"

namespace fp4t::test {
namespace {

constexpr uint64_t kSeed = 0x0123456789ABCDEFull;
constexpr uint32_t kStep = 1234, kSample = 77;

// "Site key K = words 0, 1 of Philox(key = seed lo, hi; counter = (purpose | copy << 8, site id, step,
// ...))".
PhiloxKey key_of(uint32_t purpose, uint32_t copy, uint32_t site, uint32_t sample) {
  const PhiloxKey seed{static_cast<uint32_t>(kSeed), static_cast<uint32_t>(kSeed >> 32)};
  const PhiloxBits b = philox4x32(seed, purpose | copy << 8, site, kStep, sample);
  return {b.word[0], b.word[1]};
}

// What a product multiplies: values, and the scale that they leave out, one or one a row.
struct Side {
  bool coded = false;
  Matrix stored;               // codes: padded
  int64_t rows = 0, cols = 0;  // logical
  std::vector<float> scale;
};

Matrix decoded(const ReferenceResult& r, const QuantSpec& spec) {
  Matrix m{r.rotated.rows, r.rotated.cols, {}};
  const int64_t block = block_length(spec), height = outer_padding(spec);
  for (int64_t row = 0; row < m.rows; ++row) {
    for (int64_t c = 0; c < m.cols; ++c) {
      const auto i = static_cast<size_t>(row * m.cols + c);
      const uint32_t s = r.block_scales[static_cast<size_t>(row / height * (m.cols / block) + c / block)];
      m.v.push_back(spec.format == Format::kNvfp4
                        ? plain_e2m1(r.codes[i / 2] >> (i % 2 * 4) & 15u) * plain_e4m3(s)
                        : plain_e4m3(r.codes[i]) * std::ldexp(1.0f, static_cast<int>(s) - 127));
    }
  }
  return m;
}

Matrix logical_part(const Matrix& m, int64_t rows, int64_t cols) {
  Matrix out{rows, cols, {}};
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t c = 0; c < cols; ++c) out.v.push_back(m.at(r, c));
  }
  return out;
}

class Contract {
 public:
  Contract(const GemmSite& site, int64_t expert)
      : site_(site), base_(expert < 0 ? 0 : static_cast<uint64_t>(expert + 1) << 40) {}

  // `role` of fprop, dgrad, wgrad 0..2; of act, weight, grad 0..2; copy 0: rows, 1: columns.
  Side side(const QuantSpec& spec, const Matrix& x, uint32_t gemm, uint32_t role, uint32_t copy) const {
    Side out{spec.quantised(), x, x.rows, x.cols, {}};
    if (!spec.quantised()) return out;
    const auto layer = static_cast<uint32_t>(site_.layer), module = static_cast<uint32_t>(site_.module);
    const uint32_t site = ((layer * 64 + module) * 4 + gemm) * 4;
    ReferenceKeys keys;
    keys.draw = key_of(1, copy, site + role, role == 1 ? 0 : kSample);
    keys.signs = key_of(2, 0, site, kSample);
    keys.draw_base = base_;
    keys.weight_is_transposed = copy == 1;
    const ReferenceResult r = reference_quantize(x, spec, keys);
    out.stored = decoded(r, spec);
    out.scale = r.tensor_scale;
    return out;
  }

  // An operand of dgrad or wgrad: the column copy of a matrix whose row copy fprop multiplied.
  Side backward_side(const QuantSpec& spec, const QuantSpec& forward, const Matrix& x, uint32_t gemm,
                     uint32_t role) const {
    if (spec.source == Source::kTensor || !forward.quantised()) {
      return side(spec, transposed(x), gemm, role, 1);
    }
    const Side f = side(forward, x, 0, role, 0);
    Matrix values = logical_part(f.stored, x.rows, x.cols);
    float old_scale = 1;
    bool has_scale = false;
    if (forward.scale_scope == ScaleScope::kRow && forward.format == Format::kNvfp4) {
      for (int64_t r = 0; r < values.rows; ++r) {
        for (int64_t c = 0; c < values.cols; ++c) values.at(r, c) *= f.scale[static_cast<size_t>(r)];
      }
    } else if (!f.scale.empty()) {
      old_scale = f.scale[0];
      has_scale = true;
    }
    for (float v : values.v) EXPECT_EQ(from_bf16(to_bf16(v)), v) << "not exact in BF16";
    Side out = side(spec, transposed(values), gemm, role, 1);
    if (!has_scale) return out;
    if (out.scale.empty()) {
      out.scale = {old_scale};
    } else {
      out.scale[0] = out.scale[0] * old_scale;
    }
    return out;
  }

 private:
  GemmSite site_;
  uint64_t base_;
};

// out[m, n] of two sides, before rounding to the output's type.
Matrix product(const Side& a, const Side& b) {
  const int64_t depth = a.coded && b.coded ? a.stored.cols : a.cols;
  Matrix out{a.rows, b.rows, {}};
  for (int64_t m = 0; m < a.rows; ++m) {
    for (int64_t n = 0; n < b.rows; ++n) {
      float acc = 0;
      for (int64_t k = 0; k < depth; ++k) acc = std::fma(a.stored.at(m, k), b.stored.at(n, k), acc);
      const float sa = a.scale.empty() ? kNoScale : a.scale[a.scale.size() > 1 ? static_cast<size_t>(m) : 0];
      out.v.push_back(scaled(acc, sa, b.scale.empty() ? kNoScale : b.scale[0]));
    }
  }
  return out;
}

Matrix matrix_of(const TensorView& v, int64_t begin, int64_t rows, int64_t cols) {
  Matrix m{rows, cols, {}};
  for (int64_t i = 0; i < rows * cols; ++i) m.v.push_back(get(v, begin * cols + i));
  return m;
}

void expect_bits(const Matrix& expected, const TensorView& got, int64_t begin, const std::string& what) {
  for (int64_t i = 0; i < expected.rows * expected.cols; ++i) {
    float x = expected.v[static_cast<size_t>(i)];
    if (got.dtype == DType::kBf16) x = from_bf16(to_bf16(x));
    ASSERT_EQ(bits_of(x), bits_of(get(got, begin * expected.cols + i)))
        << what << ": " << x << " against " << get(got, begin * expected.cols + i) << " at row "
        << i / expected.cols << ", column " << i % expected.cols;
  }
}

void check_layer(const TestCells& cells, Module module, const std::string& name, int64_t experts = 6) {
  ModelSpec model = LinearBench::one_moe_layer();
  model.layers = 2;
  model.moe.experts = experts;
  model.moe.top_k = std::min<int64_t>(experts, 2);
  LinearBench b(cells, module, model);
  ASSERT_EQ(b.site.layer, 1);
  b.pass.seed = kSeed;
  b.pass.step = kStep;
  b.pass.sample_id = kSample;
  const int64_t out = b.site.out, in = b.site.in, tokens = LinearBench::kTokens;
  const TensorView x = b.random("x", {tokens, in}, 1), dy = b.random("dy", {tokens, out}, 2);
  const TensorView y = b.arena.take("y", b.plan.act, {tokens, out});
  const TensorView dx = b.arena.take("dx", b.plan.act, {tokens, in});
  b.linear->forward(b.call(), x, b.offsets(), {}, y);
  b.linear->backward(b.call(), x, {}, dy, b.offsets(), dx);

  for (int64_t g = 0; g < b.site.matrices(); ++g) {
    const int64_t first = b.group_begin(g), count = b.group_begin(g + 1) - first;
    const std::string what = name + " " + name_of(module) + " group " + std::to_string(g);
    const Contract contract(b.site, b.site.groups > 0 ? g : -1);
    const Matrix w = matrix_of(operand_of(*b.weight), g * out, out, in);
    const Matrix xs = matrix_of(x, first, count, in), dys = matrix_of(dy, first, count, out);
    const ForwardCell& f = cells.forward;
    const BackwardCell& c = cells.backward;
    expect_bits(product(contract.side(f.act, xs, 0, 0, 0), contract.side(f.weight, w, 0, 1, 0)), y, first,
                what + " fprop");
    expect_bits(product(contract.side(c.dgrad_grad, dys, 1, 2, 0),
                        contract.backward_side(c.dgrad_weight, f.weight, w, 1, 1)),
                dx, first, what + " dgrad");
    expect_bits(product(contract.side(c.wgrad_grad, transposed(dys), 2, 2, 1),
                        contract.backward_side(c.wgrad_act, f.act, xs, 2, 0)),
                b.weight->gradient, g * out, what + " wgrad");
  }
}

void check(const TestCells& cells, const std::string& name) {
  for (const Module module : {Module::kAttnOut, Module::kSharedDown, Module::kExpertsGateUp}) {
    check_layer(cells, module, name);
  }
}

QuantSpec stochastic() {
  QuantSpec s = nvfp4();
  s.rounding = Rounding::kStochastic;
  return s;
}
QuantSpec rotated(QuantSpec s, int32_t size) {
  s.hadamard = size;
  s.signs = Signs::kFresh;
  return s;
}

TEST(LinearContract, bf16) { check({}, "bf16"); }
TEST(LinearContract, mxfp8) { check(mxfp8_cells(), "mxfp8"); }
TEST(LinearContract, nvidia_nvfp4) { check(nvidia_nvfp4_cells(), "nvidia_nvfp4"); }
TEST(LinearContract, quartet2) { check(quartet2_cells(), "quartet2"); }
TEST(LinearContract, rl_nvfp4) { check(rl_nvfp4_cells(), "rl_nvfp4"); }

TEST(LinearContract, every_operand_drawn_with_headroom) {
  QuantSpec s = stochastic();
  s.headroom = Headroom::k17over16;
  TestCells c;
  c.forward = {s, s};
  c.backward = {s, from_forward(s), s, from_forward(s)};
  check(c, "drawn from the forward");
  c.backward = {s, s, s, s};
  check(c, "drawn from the tensor");
}

TEST(LinearContract, a_single_expert_draws_as_an_expert) {
  TestCells c;
  c.forward = {stochastic(), stochastic()};
  c.backward = {stochastic(), stochastic(), stochastic(), stochastic()};
  check_layer(c, Module::kExpertsDown, "alone", 1);
}

TEST(LinearContract, fresh_rotations_of_every_size) {
  for (const int32_t size : {16, 32, 64, 128}) {
    const QuantSpec s = rotated(stochastic(), size);
    TestCells c;
    c.forward = {s, s};
    c.backward = {s, s, s, s};
    check(c, "rotated by " + std::to_string(size));
  }
}

TEST(LinearContract, mxfp8_backward_of_an_nvfp4_forward) {
  TestCells c;
  c.forward = {nvfp4(), nvfp4()};
  c.backward = {mxfp8(), from_forward(mxfp8()), mxfp8(), from_forward(mxfp8())};
  check(c, "tensor scales");
  c.forward.act = nvfp4_row(ScaleRound::kPow2);
  check(c, "row scales");
}

TEST(LinearContract, ms_eden_backward_of_an_mxfp8_forward) {
  QuantSpec eden = rotated(nvfp4(), 64);
  eden.rounding = Rounding::kMsEden;
  TestCells c;
  c.forward = {mxfp8(), mxfp8()};
  c.backward = {eden, from_forward(eden), eden, from_forward(eden)};
  check(c, "from mxfp8");
}

TEST(LinearContract, one_coded_operand_beside_bf16) {
  const QuantSpec plain;
  TestCells c;
  c.forward = {nvfp4_row(), plain};
  c.backward = {stochastic(), plain, plain, nvfp4()};
  check(c, "coded act");
  c.forward = {plain, nvfp4()};
  c.backward = {plain, from_forward(plain), mxfp8(), plain};
  check(c, "coded weight");
}

}  // namespace
}  // namespace fp4t::test

// Sampling on the GPU: the CPU's tokens, and the trainer's log-probabilities.
#include "kernels/ops/sample.h"

#include <cmath>
#include <limits>

#include "tests/support/mirror.h"

namespace fp4t::test {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

struct DrawMirror {
  DrawMirror(int64_t rows, int64_t vocab, float temperature_in, float top_p_in, float scale = 2.0f)
      : temperature(temperature_in),
        top_p(top_p_in),
        logits(m.normal(DType::kF32, {rows, vocab}, scale)),
        sample_ids(m.fresh(DType::kI64, {rows})),
        positions(m.fresh(DType::kI32, {rows})),
        tokens(m.fresh(DType::kI32, {rows})),
        log_prob(m.fresh(DType::kF32, {rows})) {
    for (int64_t b = 0; b < rows; ++b) {
      sample_ids.as<int64_t>()[b] = (int64_t{1} << 33) + b / 16;
      positions.as<int32_t>()[b] = static_cast<int32_t>(b % 16 + (b % 3 << 20));
    }
    // Its sum has the GPU's order, as LogProbForward's has.
    m.compare_by(log_prob, exactness_of<LogProbForward>());
  }
  SampleTokens op() const {
    return {.logits = logits,
            .temperature = temperature,
            .top_p = top_p,
            .key = PhiloxKey{0x1234567u, 0x89ABCDEu},
            .sample_ids = sample_ids,
            .positions = positions,
            .tokens = tokens,
            .log_prob = log_prob};
  }

  float temperature, top_p;
  Mirror m;
  TensorView logits, sample_ids, positions, tokens, log_prob;
};

struct Size {
  int64_t rows, vocab;
};
constexpr Size kSizes[] = {{0, 8},    {3, 1},      {5, 2},      {300, 61},    {500, 257},  {40, 512},
                           {9, 4096}, {150, 8193}, {40, 50257}, {100, 50304}, {11, 151936}};

TEST(GpuSample, tokens_are_the_cpus) {
  for (const Size& s : kSizes) {
    for (float temperature : {1.0f, 0.6f, 0.0f}) {
      for (float top_p : {1.0f, 0.95f, 0.4f}) {
        SCOPED_TRACE(detail::concat(s.rows, " x ", s.vocab, " at ", temperature, ", top_p ", top_p));
        DrawMirror d(s.rows, s.vocab, temperature, top_p);
        d.m.check(d.op());
      }
    }
  }
}

TEST(GpuSample, tokens_are_the_cpus_whatever_the_spread_of_the_logits) {
  for (float scale : {0.0f, 1e-4f, 0.3f, 8.0f, 1e3f}) {
    for (float top_p : {1.0f, 0.9f}) {
      SCOPED_TRACE(detail::concat("scale ", scale, " top_p ", top_p));
      DrawMirror d(400, 3001, 1.0f, top_p, scale);
      for (int64_t i = 0; i < d.logits.elements(); i += 5) d.logits.as<float>()[i] = -kInf;
      d.m.check(d.op());
    }
  }
}

TEST(GpuSample, ties_go_to_the_lower_index) {
  for (float temperature : {1.0f, 0.0f}) {
    for (float top_p : {1.0f, 0.9f, 0.5f, 0.01f}) {
      SCOPED_TRACE(detail::concat("temperature ", temperature, " top_p ", top_p));
      DrawMirror d(200, 2000, temperature, top_p);
      for (int64_t i = 0; i < d.logits.elements(); ++i) {
        float& x = d.logits.as<float>()[i];
        x = std::round(x);
      }
      d.m.check(d.op());
    }
  }
}

TEST(GpuSample, log_probs_equal_the_trainers_bit_for_bit) {
  for (const Size& s : kSizes) {
    for (float temperature : {1.0f, 0.6f}) {
      for (float top_p : {1.0f, 0.95f, 0.4f}) {
        if (!next_is_in_gpu_share()) continue;
        SCOPED_TRACE(detail::concat(s.rows, " x ", s.vocab, " at ", temperature, ", top_p ", top_p));
        DrawMirror d(s.rows, s.vocab, temperature, top_p);
        const TensorView scored = d.m.fresh(DType::kF32, {s.rows});
        const TensorView lse = d.m.fresh(DType::kF32, {s.rows});
        d.m.run_on_gpu(d.op());
        d.m.run_on_gpu(LogProbForward{d.logits, d.tokens, temperature, top_p, scored, lse, {}});
        EXPECT_TRUE(matches_bitwise(d.log_prob, scored));
        // The trainer's rows stand elsewhere, among more of them, and ask for the entropy.
        const TensorView wider = d.m.fresh(DType::kF32, {s.rows + 3, s.vocab});
        const TensorView targets = d.m.i32(std::vector<int32_t>(static_cast<size_t>(s.rows + 3), -1));
        const TensorView again = d.m.fresh(DType::kF32, {s.rows + 3});
        const TensorView lse2 = d.m.fresh(DType::kF32, {s.rows + 3}),
                         h = d.m.fresh(DType::kF32, {s.rows + 3});
        std::memset(wider.data, 0, static_cast<size_t>(wider.bytes()));
        if (s.rows > 0) {
          std::memcpy(wider.rows(3, s.rows).data, d.logits.data, static_cast<size_t>(d.logits.bytes()));
          std::memcpy(targets.rows(3, s.rows).data, d.tokens.data, static_cast<size_t>(d.tokens.bytes()));
        }
        d.m.run_on_gpu(LogProbForward{wider, targets, temperature, top_p, again, lse2, h});
        EXPECT_TRUE(matches_bitwise(d.log_prob, again.rows(3, s.rows)));
      }
    }
  }
}

TEST(GpuSample, rows_without_a_distribution_are_refused) {
  for (float bad : {kNan, kInf}) {
    for (int64_t vocab : {257, 8192}) {
      DrawMirror d(40, vocab, 1.0f, 0.9f);
      d.logits.as<float>()[37 * vocab + 256] = bad;
      EXPECT_THROW(d.m.run_on_gpu(d.op()), NonFiniteError);
    }
  }
  DrawMirror d(2, 257, 1.0f, 1.0f);
  for (int64_t i = 0; i < 257; ++i) d.logits.as<float>()[i] = -kInf;
  EXPECT_THROW(d.m.run_on_gpu(d.op()), NonFiniteError);
}

TEST(GpuSample, rows_beyond_two_to_the_31_elements_are_right) {
  const int64_t vocab = 131072, rows = 16385;
  DrawMirror d(1, vocab, 1.0f, 1.0f, 3.0f);
  d.m.check(d.op());
  Queue& gpu = d.m.gpu();
  std::vector<void*> blocks;
  const auto take = [&](DType dtype, const Shape& shape) {
    const TensorView v{nullptr, dtype, shape};
    blocks.push_back(gpu.allocate(v.bytes()));
    gpu.fill_bytes(blocks.back(), 0, v.bytes());
    return TensorView{blocks.back(), dtype, shape};
  };
  const TensorView logits = take(DType::kF32, {rows, vocab}), ids = take(DType::kI64, {rows});
  const TensorView positions = take(DType::kI32, {rows}), tokens = take(DType::kI32, {rows});
  const TensorView log_prob = take(DType::kF32, {rows});
  gpu.copy_from_host(logits.rows(rows - 1, 1).data, d.logits.data, d.logits.bytes());
  gpu.copy_from_host(ids.rows(rows - 1, 1).data, d.sample_ids.data, 8);
  SampleTokens op = d.op();
  op.logits = logits, op.sample_ids = ids, op.positions = positions, op.tokens = tokens;
  op.log_prob = log_prob;
  run(gpu, op);
  int32_t token = -1;
  gpu.copy_to_host(&token, tokens.rows(rows - 1, 1).data, 4);
  EXPECT_EQ(token, d.tokens.as<int32_t>()[0]);
  for (void* block : blocks) gpu.release(block);
}

}  // namespace
}  // namespace fp4t::test

FP4T_GPU_TEST_MAIN

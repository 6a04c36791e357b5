// The head by chunks of tokens: neither scores nor gradients notice where a chunk ends, but for the order in
// which the gradient of the head's own weight is summed.
#include <map>

#include "engine/plan/step_layout.h"
#include "gtest/gtest.h"
#include "kernels/base/numeric.h"
#include "tests/support/compare.h"
#include "tests/support/model_runs.h"

namespace fp4t::test {
namespace {

// Cells of the head; those of the blocks are BF16.
const std::map<std::string, TestCells>& head_cells() {
  static const std::map<std::string, TestCells> cells = [] {
    std::map<std::string, TestCells> c;
    c["fp32"] = fp32_cells();
    c["bf16"] = {};
    c["mxfp8"] = mxfp8_cells();
    c["nvidia_nvfp4"] = nvidia_nvfp4_cells();
    c["quartet2"] = quartet2_cells();
    c["rl_nvfp4"] = rl_nvfp4_cells();
    TestCells plain_backward, by_row, square;
    plain_backward.forward = {nvfp4(), nvfp4()};
    by_row.forward = {nvfp4_row(), nvfp4()};
    square.forward = {nvfp4(), nvfp4()};
    square.forward.act.block = square.forward.weight.block = BlockShape::k16x16;
    c["nvfp4_forward_bf16_backward"] = plain_backward;
    c["nvfp4_row_forward_bf16_backward"] = by_row;
    c["nvfp4_square_forward_bf16_backward"] = square;
    return c;
  }();
  return cells;
}

struct Outcome {
  std::vector<uint8_t> log_prob, lse, entropy;
  std::vector<std::vector<uint8_t>> gradients;
  std::vector<OperandStats> stats;
};

class HeadChunks : public testing::TestWithParam<std::string> {
 protected:
  Plan plan(int64_t chunk, bool tied = false) const {
    const TestCells& cells = head_cells().at(GetParam());
    ModelSpec model = tiny_model();
    model.tied_head = tied;
    const TestSizes sizes{.max_tokens = 96,  // decoding needs less than training does
                          .max_decode_tokens = 4,
                          .max_cache_slots = 4,
                          .max_cache_length = 8,
                          .head_chunk = chunk};
    Plan p = make_plan_by_hand(model, cells.fp32 ? cells : TestCells{}, {}, "none", sizes);
    StagePrecision& tables = p.stages[0].precision;
    tables.forward.spans[0].table.head = cells.forward;
    tables.backward.spans[0].table.head = cells.backward;
    p.memory = plan_memory(p);
    return p;
  }

  Outcome run_once(TestModel& m, bool score_first) const {
    const TokenBatch batch = random_batch({31, 1, 24, 33}, m.plan.model.vocabulary, 5);
    m.model.weights_changed();  // codes of weights are counted when they are made
    m.model.zero_gradients();
    m.model.forward(m.training_pass(), batch);
    const Scoring scoring{0.9f, 1.0f, true};
    if (score_first) m.model.score(m.training_pass(), scoring);
    const auto buffers = m.model.token_buffers(batch.size());
    for (int64_t t = 0; t < batch.size(); ++t) {
      buffers.d_log_prob.as<float>()[t] = 0.01f * static_cast<float>(t % 5 - 2);
    }
    m.model.backward(m.training_pass(), scoring, 0.003f);
    return {bytes_of(buffers.log_prob), bytes_of(buffers.lse), bytes_of(buffers.entropy), gradient_bytes(m),
            m.model.take_operand_stats()};
  }

  void expect_same(TestModel& a, const Outcome& first, const Outcome& second, const std::string& summed) {
    EXPECT_EQ(first.log_prob, second.log_prob);
    EXPECT_EQ(first.lse, second.lse);
    EXPECT_EQ(first.entropy, second.entropy);
    const auto& params = a.model.params().params();
    for (size_t i = 0; i < params.size(); ++i) {
      if (params[i].info.name != summed) {
        EXPECT_EQ(first.gradients[i], second.gradients[i]) << params[i].info.name;
        continue;
      }
      const auto view = [&](const Outcome& o) {
        return TensorView{const_cast<uint8_t*>(o.gradients[i].data()), DType::kF32, params[i].info.shape};
      };
      EXPECT_TRUE(matches_nmse(view(first), view(second), 1e-12)) << summed;
    }
    ASSERT_EQ(first.stats.size(), second.stats.size());
    for (size_t i = 0; i < first.stats.size(); ++i) {
      for (int k = 0; k < kNumQuantStats; ++k) EXPECT_EQ(first.stats[i].stat[k], second.stats[i].stat[k]);
    }
  }
};

TEST_P(HeadChunks, ends_of_chunks_change_nothing_but_the_order_of_one_sum) {
  TestModel whole(plan(1024)), cut(plan(32));
  const std::string summed = head_gradient_is_whole(cut.plan) ? "" : "head.weight";
  for (const bool score_first : {true, false}) {
    expect_same(whole, run_once(whole, score_first), run_once(cut, score_first), summed);
  }
}

TEST_P(HeadChunks, a_tied_head_adds_to_the_embedding) {
  TestModel whole(plan(1024, true)), cut(plan(32, true));
  const std::string summed = head_gradient_is_whole(cut.plan) ? "" : "embed.weight";
  expect_same(whole, run_once(whole, false), run_once(cut, false), summed);
}

TEST_P(HeadChunks, backward_scores_what_was_not_scored) {
  for (const int64_t chunk : {1024, 32}) {
    TestModel m(plan(chunk));
    const Outcome before = run_once(m, true);
    expect_same(m, before, run_once(m, false), "");
  }
}

TEST_P(HeadChunks, no_more_than_a_chunk_of_logits_is_held) {
  const Plan whole = plan(1024), cut = plan(32);
  const auto logits = [](const Plan& p) {
    int64_t bytes = 0;
    take_logits(p, dims_of(p), [&](const std::string&, DType dtype, const Shape& shape) {
      bytes += Arena::block_bytes(shape.elements() * dtype_bytes(dtype));
      return TensorView{nullptr, dtype, shape};
    });
    EXPECT_GE(p.memory.scratch_bytes, bytes);
    return bytes;
  };
  const int64_t vocab = whole.model.vocabulary;
  const bool fp32 = whole.act == DType::kF32, all = head_gradient_is_whole(cut);
  const auto bytes = [&](int64_t tokens, int64_t gradient_tokens) {
    const int64_t gradient = fp32 ? 0 : align_up(gradient_tokens * vocab * 2, 256);
    return align_up(tokens * vocab * 4, 256) + gradient;
  };
  EXPECT_EQ(logits(whole), bytes(96, 96));
  EXPECT_EQ(logits(cut), bytes(32, all ? 96 : 32));
}

INSTANTIATE_TEST_SUITE_P(Model, HeadChunks, testing::ValuesIn([] {
                           std::vector<std::string> names;
                           for (const auto& [name, cells] : head_cells()) names.push_back(name);
                           return names;
                         }()),
                         [](const auto& test) { return test.param; });

TEST(ModelHead, gradients_are_whole_where_backward_multiplies_codes) {
  Plan p = make_plan_by_hand(tiny_model(), {});
  EXPECT_FALSE(head_gradient_is_whole(p));
  BackwardCell& head = p.stages[0].precision.backward.spans[0].table.head;
  for (QuantSpec* operand : {&head.dgrad_grad, &head.dgrad_weight, &head.wgrad_grad, &head.wgrad_act}) {
    *operand = mxfp8();
    EXPECT_TRUE(head_gradient_is_whole(p));
    *operand = {};
  }
}

TEST(ModelHead, logits_of_several_chunks_are_refused) {
  TestSizes sizes;
  sizes.head_chunk = 32;
  TestModel m(make_plan_by_hand(tiny_model(), {}, {}, "none", sizes));
  const TokenBatch batch = random_batch({31, 2}, tiny_model().vocabulary, 5);
  m.model.forward(m.training_pass(), batch);
  EXPECT_THROW(m.model.logits(m.training_pass()), InternalError);
}

}  // namespace
}  // namespace fp4t::test

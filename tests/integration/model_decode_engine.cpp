// Cached decoding against the training forward: equal bits wherever the cells are row-invariant.
#include <map>

#include "gtest/gtest.h"
#include "tests/support/model_runs.h"

namespace fp4t::test {
namespace {

const std::map<std::string, TestCells>& row_invariant_cells() {
  static const std::map<std::string, TestCells> cells = [] {
    std::map<std::string, TestCells> c;
    c["fp32"] = fp32_cells();
    c["bf16"] = {};
    c["bf16_kv_mxfp8"] = {};
    c["bf16_kv_mxfp8"].kv_cache = Format::kMxfp8;
    c["mxfp8_kv_mxfp8"] = mxfp8_cells();
    c["mxfp8_kv_mxfp8"].kv_cache = Format::kMxfp8;
    c["nvfp4_row"].forward = c["nvfp4_row"].sampler = {nvfp4_row(), nvfp4()};
    c["rl_nvfp4"] = rl_nvfp4_cells();
    c["rl_nvfp4_kv_mxfp8"] = rl_nvfp4_cells();
    c["rl_nvfp4_kv_mxfp8"].kv_cache = Format::kMxfp8;
    return c;
  }();
  return cells;
}

using Rows = Transformer::DecodeRows;

class Decode : public testing::TestWithParam<std::string> {
 protected:
  Plan plan() const { return make_plan_by_hand(tiny_model(), row_invariant_cells().at(GetParam())); }
};

std::vector<std::vector<uint8_t>> logits_of(const TensorView& logits) {
  std::vector<std::vector<uint8_t>> rows;
  for (int64_t r = 0; r < logits.dim(0); ++r) rows.push_back(bytes_of(logits.rows(r, 1)));
  return rows;
}

std::vector<std::vector<uint8_t>> forward_logits(TestModel& m, const TokenBatch& batch) {
  m.model.forward(m.training_pass(), batch);
  return logits_of(m.model.logits(m.training_pass()));
}

void add_row(Rows& rows, const TokenBatch& batch, size_t token, int32_t slot) {
  rows.logit_rows.push_back(static_cast<int32_t>(rows.tokens.size()));
  rows.tokens.push_back(batch.tokens[token]);
  rows.positions.push_back(batch.positions[token]);
  rows.slots.push_back(slot);
}

// Every token of the batch in the order of `calls`, decoded; logits by token.
std::vector<std::vector<uint8_t>> decode_all(TestModel& m, const TokenBatch& batch,
                                             const std::vector<std::vector<size_t>>& calls) {
  std::vector<std::vector<uint8_t>> result(static_cast<size_t>(batch.size()));
  for (const std::vector<size_t>& tokens : calls) {
    Rows rows;
    for (const size_t t : tokens) add_row(rows, batch, t, 90 - batch.doc_begin[t]);
    const auto logits = logits_of(m.model.decode(m.sampling_pass(), rows));
    for (size_t i = 0; i < tokens.size(); ++i) result[tokens[i]] = logits[i];
  }
  return result;
}

TEST_P(Decode, logits_equal_the_training_forward_bit_for_bit) {
  TestModel m(plan());
  const TokenBatch batch = random_batch({17, 1, 30, 9}, tiny_model().vocabulary, 21);
  const auto expected = forward_logits(m, batch);

  // Token by token of all documents together; then prompts of 6 at once and the rest one by one, each
  // document alone, last document first.
  std::vector<std::vector<size_t>> together(30), alone;
  for (size_t t = 0; t < batch.tokens.size(); ++t) {
    together[static_cast<size_t>(batch.positions[t])].push_back(t);
  }
  for (size_t t = 0; t < batch.tokens.size(); ++t) {
    if (batch.positions[t] > 0 && batch.positions[t] < 6) {
      alone.back().push_back(t);
    } else {
      alone.push_back({t});
    }
  }
  EXPECT_EQ(decode_all(m, batch, together), expected);
  EXPECT_EQ(decode_all(m, batch, alone), expected);
}

TEST_P(Decode, slots_are_reused_without_a_trace) {
  TestModel m(plan());
  const TokenBatch batch = random_batch({12}, tiny_model().vocabulary, 22);
  const TokenBatch earlier = random_batch({30}, tiny_model().vocabulary, 23);
  std::vector<std::vector<size_t>> whole(1), other(1);
  for (size_t t = 0; t < 12; ++t) whole[0].push_back(t);
  for (size_t t = 0; t < 30; ++t) other[0].push_back(t);
  const auto fresh = decode_all(m, batch, whole);
  decode_all(m, earlier, other);
  EXPECT_EQ(decode_all(m, batch, whole), fresh);
}

TEST_P(Decode, a_document_does_not_see_its_neighbours) {
  TestModel m(plan());
  const TokenBatch one = random_batch({14, 20}, tiny_model().vocabulary, 24);
  TokenBatch two = random_batch({14, 20, 3}, tiny_model().vocabulary, 25);
  std::copy(one.tokens.begin() + 14, one.tokens.end(), two.tokens.begin() + 14);
  const auto first = forward_logits(m, one);
  const auto second = forward_logits(m, two);
  EXPECT_NE(first[0], second[0]);
  for (size_t t = 14; t < 34; ++t) EXPECT_EQ(first[t], second[t]) << "token " << t;
}

TEST_P(Decode, only_the_rows_asked_for_have_logits) {
  TestModel m(plan());
  const TokenBatch batch = random_batch({12}, tiny_model().vocabulary, 26);
  Rows rows;
  for (size_t t = 0; t < 12; ++t) add_row(rows, batch, t, 0);
  const auto all = logits_of(m.model.decode(m.sampling_pass(), rows));
  rows.logit_rows = {11, 3};
  const auto some = logits_of(m.model.decode(m.sampling_pass(), rows));
  ASSERT_EQ(some.size(), 2u);
  EXPECT_EQ(some[0], all[11]);
  EXPECT_EQ(some[1], all[3]);
  rows.logit_rows.clear();
  EXPECT_EQ(m.model.decode(m.sampling_pass(), rows).dim(0), 0);
}

INSTANTIATE_TEST_SUITE_P(Model, Decode, testing::ValuesIn([] {
                           std::vector<std::string> names;
                           for (const auto& [name, cells] : row_invariant_cells()) names.push_back(name);
                           return names;
                         }()),
                         [](const auto& test) { return test.param; });

TEST(ModelDecode, hostile_rows_are_refused) {
  TestModel m(make_plan_by_hand(tiny_model(), {}));
  const auto refused = [&](int32_t token, int32_t slot, int32_t position, int32_t logit_row) {
    Rows rows{{token}, {slot}, {position}, {logit_row}};
    EXPECT_THROW(m.model.decode(m.sampling_pass(), rows), InternalError)
        << token << " " << slot << " " << position << " " << logit_row;
  };
  refused(61, 0, 0, 0);
  refused(-1, 0, 0, 0);
  refused(0, 96, 0, 0);
  refused(0, 0, 64, 0);
  refused(0, 0, 0, 1);
  TokenBatch batch = random_batch({5, 5}, 61, 1);
  batch.doc_begin[7] = 3;
  EXPECT_THROW(m.model.forward(m.training_pass(), batch), InternalError);
}

}  // namespace
}  // namespace fp4t::test

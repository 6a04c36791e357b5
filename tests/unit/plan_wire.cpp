// Bytes on the wire by hand: gradients, weights and norm under ZeRO 1 to 3, experts' rows, what leaves a fast
// domain. tests/multi/wire.cpp compares the same with what ranks send.
#include "engine/plan/wire.h"

#include <gtest/gtest.h>

#include "engine/plan/dims.h"
#include "engine/plan/run_layout.h"
#include "tests/support/plans.h"

namespace fp4t::test {
namespace {

const WireLine& line_of(const std::vector<WireLine>& lines, const std::string& name) {
  for (const WireLine& line : lines) {
    if (line.name == name) return line;
  }
  throw InternalError("no line " + name);
}

Plan plan_on(const Axes& axes, int64_t zero, const ModelSpec& model = tiny_model()) {
  Plan plan = make_plan_by_hand(model, TestCells{}, {}, "none", {.axes = axes});
  plan.parallel.zero = zero;
  return plan;
}

double elements(const Plan& plan, bool in_layers) {
  double n = 0;
  for (const ParamInfo& p : plan.parameters) {
    if (!in_layers || p.layer >= 0) n += real(p.shape.elements());
  }
  return n;
}

TEST(Wire, one_rank_sends_nothing) {
  EXPECT_TRUE(update_wire(plan_on({}, 1), {}, 1).empty());
  const Plan plan = plan_on({}, 1);
  EXPECT_TRUE(expert_forward_wire(plan, plan.stages[0].precision.forward.at(0), 32).empty());
}

TEST(Wire, gradients_go_to_their_owners_once_or_a_block_at_a_time) {
  const Plan one = plan_on({4, 1}, 1), two = plan_on({4, 1}, 2);
  // Of four ranks' F32 gradients each rank owns a quarter and sends three.
  EXPECT_DOUBLE_EQ(line_of(update_wire(one, {}, 3), "gradients to their owners").bytes(),
                   3 * 4 * elements(one, false) / 4);
  const double outside = elements(two, false) - elements(two, true);
  EXPECT_DOUBLE_EQ(line_of(update_wire(two, {}, 3), "gradients to their owners").bytes(),
                   3.0 / 4 * 4 * (outside + 3 * elements(two, true)));
}

// Bytes of weights that products read: copies where there are any.
double weight_bytes(const Plan& plan, bool blocks, int64_t layer = -1) {
  double bytes = 0;
  for (const ParamInfo& p : plan.parameters) {
    if (has_shared_copy(p, plan) != blocks || (layer >= 0 && p.layer != layer)) continue;
    bytes += real(p.shape.elements()) * (blocks || has_copy(p, plan) ? 2 : 4);
  }
  return bytes;
}

double weight_bytes_of_experts(const Plan& plan) {
  double bytes = 0;
  for (const ParamInfo& p : plan.parameters) {
    if (p.placement == Placement::kSplitByExpert) bytes += real(p.shape.elements()) * 2;
  }
  return bytes;
}

TEST(Wire, owners_send_their_weights_to_all_others_whole_or_block_by_block) {
  for (const int64_t zero : {1, 2, 3}) {
    const Plan plan = plan_on({4, 1}, zero);
    // Each of four owns a quarter, and sends it to three.
    EXPECT_DOUBLE_EQ(line_of(update_wire(plan, {}, 1), "weights after the update").bytes(),
                     3 * weight_bytes(plan, false) / 4);
  }
  EXPECT_EQ(weight_bytes(plan_on({4, 1}, 1), true), 0);
  ModelSpec model = tiny_model();
  model.layers = 5;
  const Plan plan = plan_on({4, 1}, 3, model);
  double expected[2] = {0, 0};
  for (int64_t l = 0; l < 5; ++l) {
    // One micro-batch: forward and backward, but the last two are still there at the turn. Two: the first two
    // are still there at the second forward.
    expected[0] += weight_bytes(plan, true, l) * (l >= 3 ? 1 : 2);
    expected[1] += weight_bytes(plan, true, l) * (l >= 3 ? 2 : l < 2 ? 3 : 4);
  }
  EXPECT_DOUBLE_EQ(line_of(update_wire(plan, {}, 1), "weights block by block").bytes(), 3 * expected[0] / 4);
  EXPECT_DOUBLE_EQ(line_of(update_wire(plan, {}, 2), "weights block by block").bytes(), 3 * expected[1] / 4);
}

TEST(Wire, the_norm_is_two_sums_a_chunk_from_its_owner_to_everybody) {
  const Plan plan = plan_on({4, 1}, 1);
  const int64_t most = most_owned_chunks(plan);
  int64_t all = 0;
  for (const ParamInfo& p : plan.parameters) for_norm_chunks(p, [&](const Span&) { ++all; });
  EXPECT_GE(4 * most, all);
  EXPECT_LT(most, all);
  EXPECT_EQ(line_of(update_wire(plan, {}, 1), "norm, two sums a chunk").bytes(), real(3 * 2 * 8 * most));
}

TEST(Wire, what_leaves_a_fast_domain_follows_from_who_shares_what) {
  // Eight ranks in domains of four, experts over pairs: 7 others, 3 of them near; of 3 replicas of a rank's
  // experts one is near.
  ModelSpec model = tiny_model();
  const Plan plan = plan_on({4, 2}, 1, model);
  double experts = 0;
  for (const ParamInfo& p : plan.parameters) {
    if (p.placement == Placement::kSplitByExpert) experts += real(p.shape.elements());
  }
  const double rest = elements(plan, false) - experts;
  const WireLine gradients = line_of(update_wire(plan, {4}, 1), "gradients to their owners");
  EXPECT_NEAR(gradients.inside_bytes, 4 * (rest / 8 * 3 + experts / 2 / 4 * 1), 1e-6);
  EXPECT_NEAR(gradients.outside_bytes, 4 * (rest / 8 * 4 + experts / 2 / 4 * 2), 1e-6);
  const WireLine whole = line_of(update_wire(plan, {}, 1), "gradients to their owners");
  EXPECT_EQ(whole.outside_bytes, 0);
  EXPECT_NEAR(whole.inside_bytes, gradients.bytes(), 1e-6);
}

TEST(Wire, by_domains_a_sum_leaves_once_a_domain_and_a_weight_comes_once) {
  // Eight ranks in domains of four: three others near; one of the same place far. Experts over pairs: of four
  // replicas of a rank's experts two are in a domain.
  ModelSpec model = tiny_model();
  const auto gradients = [&](int64_t domain, int64_t fast) {
    Plan plan = plan_on({4, 2}, 1, model);
    plan.parallel.domain = domain;
    return line_of(update_wire(plan, {fast}, 1), "gradients to their owners");
  };
  const Plan plan = plan_on({4, 2}, 1, model);
  double experts = 0;
  for (const ParamInfo& p : plan.parameters) {
    if (p.placement == Placement::kSplitByExpert) experts += real(p.shape.elements());
  }
  const double rest = elements(plan, false) - experts, half = experts / 2;
  const WireLine nested = gradients(4, 4);
  EXPECT_NEAR(nested.inside_bytes, 4 * (rest / 4 * 3 + half / 2 * 1), 1e-6);
  EXPECT_NEAR(nested.outside_bytes, 4 * (rest / 8 * 1 + half / 4 * 1), 1e-6);
  EXPECT_LT(nested.outside_bytes, gradients(0, 4).outside_bytes);
  EXPECT_EQ(nested.calls, 2 * gradients(0, 4).calls);
  // Of one fast domain all stays inside, and of links that reach fewer ranks more goes beyond.
  EXPECT_EQ(gradients(4, 0).outside_bytes, 0);
  EXPECT_NEAR(gradients(4, 0).inside_bytes, nested.bytes(), 1e-6);
  EXPECT_NEAR(gradients(4, 2).inside_bytes, 4 * (rest / 4 * 1), 1e-6);
  Plan whole = plan;
  whole.parallel.domain = 4;
  EXPECT_NEAR(line_of(update_wire(whole, {4}, 1), "weights after the update").outside_bytes,
              weight_bytes(plan, false) / 8 * 1 + weight_bytes_of_experts(plan) * (1.0 / 2 / 4 - 1.0 / 8),
              1e-6);
}

TEST(Wire, a_token_goes_once_to_every_rank_that_has_any_of_its_experts) {
  ModelSpec model = tiny_model();
  model.moe.top_k = 6;  // all six: every token goes to every rank
  const Plan plan = plan_on({1, 2}, 1, model);
  const ForwardTable& table = plan.stages[0].precision.forward.at(0);
  const auto forward = expert_forward_wire(plan, table, 32), backward = expert_backward_wire(plan, table, 32);
  // One layer of experts; rows of 64: BF16 there, 6 choices and 6 gates, F32 back. From host to host rows of
  // 6 experts, tokens that come to and leave 2 ranks, a sample id.
  EXPECT_DOUBLE_EQ(line_of(forward, "rows to experts").bytes(), 32 * (64 * 2 + 2 * 6 * 4));
  EXPECT_DOUBLE_EQ(line_of(forward, "counts of rows").bytes(), 4 * (6 + 2 * 2 + 1));
  EXPECT_DOUBLE_EQ(line_of(forward, "sums from experts").bytes(), 32 * 64 * 4);
  EXPECT_DOUBLE_EQ(line_of(backward, "gradients to experts").bytes(), 32 * 64 * 2);
  EXPECT_DOUBLE_EQ(line_of(backward, "gradients from experts").bytes(), 32 * (64 * 4 + 6 * 4));
  ForwardTable coded = table;
  coded.dispatch = Format::kNvfp4;
  EXPECT_DOUBLE_EQ(line_of(expert_forward_wire(plan, coded, 32), "rows to experts").bytes(),
                   32 * (64 * 0.5625 + 4 + 2 * 6 * 4));
  coded.dispatch = Format::kMxfp8;
  EXPECT_DOUBLE_EQ(line_of(expert_forward_wire(plan, coded, 32), "rows to experts").bytes(),
                   32 * (64 * (1 + 1.0 / 32) + 2 * 6 * 4));
}

TEST(Wire, what_travels_in_chunks_is_hidden_but_for_the_first_and_the_last) {
  ModelSpec model = tiny_model();
  model.moe.experts = 8;
  model.moe.top_k = 2;
  const auto line = [&](int64_t chunks) {
    const Plan plan =
        make_plan_by_hand(model, TestCells{}, {}, "none", {.axes = {1, 2}, .expert_chunks = chunks});
    return line_of(expert_forward_wire(plan, plan.stages[0].precision.forward.at(0), 32), "rows to experts");
  };
  EXPECT_EQ(line(1).share_beside, 0);
  EXPECT_EQ(line(1).calls, 1);
  // Of two choices among eight: 22 of 28 pairs have any of a rank's four experts, 13 any of two of them, 7 a
  // given one.
  EXPECT_NEAR(line(2).share_beside, 1 - 13.0 / 22, 1e-12);
  EXPECT_NEAR(line(4).share_beside, 1 - 7.0 / 22, 1e-12);
  EXPECT_EQ(line(4).calls, 4);
  EXPECT_EQ(line(4).bytes(), line(1).bytes());
  EXPECT_EQ(line(9).calls, 4);  // no more than there are experts
}

TEST(Wire, gradients_of_the_last_chunk_leave_beside_a_product_of_their_layer) {
  ModelSpec model = tiny_model();
  model.moe.experts = 8;
  model.moe.top_k = 2;
  for (const int64_t chunks : {1, 2}) {
    const Plan plan =
        make_plan_by_hand(model, TestCells{}, {}, "none", {.axes = {1, 2}, .expert_chunks = chunks});
    const ForwardTable& table = plan.stages[0].precision.forward.at(0);
    const auto forward = expert_forward_wire(plan, table, 32),
               backward = expert_backward_wire(plan, table, 32);
    const WireLine back = line_of(backward, "gradients from experts");
    EXPECT_NEAR(back.share_last, chunks == 1 ? 1 : 13.0 / 22, 1e-12);
    EXPECT_NEAR(back.share_beside + back.share_last, 1, 1e-12);
    EXPECT_EQ(back.chunks, chunks);
    EXPECT_EQ(line_of(backward, "gradients to experts").share_last, 0);
    EXPECT_EQ(line_of(forward, "sums from experts").share_last, 0);
  }
}

TEST(Wire, chunks_that_the_recipe_leaves_open_follow_from_what_travels) {
  ModelSpec model = tiny_model();
  model.moe.experts = 32;
  const Plan plan = make_plan_by_hand(model, TestCells{}, {}, "none", {.axes = {1, 2}});
  ModelDims d = dims_of(plan);
  EXPECT_EQ(d.expert_chunks, 1);  // kilobytes
  d.hidden = 8192;                // 16 KiB a token: 1024 of them a chunk
  d.expert_chunks = 8;
  EXPECT_EQ(call_chunks(plan, d, 16384), 8);
  EXPECT_EQ(call_chunks(plan, d, 4096), 8);
  EXPECT_EQ(call_chunks(plan, d, 1024), 1);
}

TEST(Wire, a_line_takes_the_slower_of_both_links_and_what_its_calls_take) {
  MachineSpec m;
  m.fast = {{100, ""}, {10, ""}};
  m.slow = {{10, ""}, {50, ""}};
  WireLine line;
  line.inside_bytes = 2e9, line.calls = 100;
  EXPECT_DOUBLE_EQ(seconds_of(line, m), 0.02 + 0.001);
  line.outside_bytes = 1e9;
  EXPECT_DOUBLE_EQ(seconds_of(line, m), 0.1 + 0.005);
  line.collective = Collective::kAllGather;  // between hosts
  EXPECT_DOUBLE_EQ(seconds_of(line, m), 0.3 + 0.005);
}

TEST(Wire, fewer_choices_reach_fewer_ranks) {
  ModelSpec model = tiny_model();  // six experts, two a token, on three ranks of two
  const Plan plan = plan_on({1, 3}, 1, model);
  // Of 15 pairs of experts 6 leave a given rank out.
  EXPECT_DOUBLE_EQ(share_of_guests(dims_of(plan), 2), 9.0 / 15);
  const ForwardTable& table = plan.stages[0].precision.forward.at(0);
  EXPECT_DOUBLE_EQ(line_of(expert_forward_wire(plan, table, 30), "sums from experts").bytes(),
                   30 * 2 * 9.0 / 15 * 64 * 4);
}

}  // namespace
}  // namespace fp4t::test

// Notes of a plan: a key that does less than it says, and rounds that round otherwise, are said in one line.
#include "engine/plan/notes.h"

#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "tests/support/predictions.h"

namespace fp4t::test {
namespace {

using Texts = std::vector<std::string>;

Plan plan_of(int64_t ranks, const Texts& overrides) {
  return planned("configs/quickstart.yaml", "cpu", ranks, overrides).plan();
}
// In BF16, which has no note about rounds.
Texts notes_of(int64_t ranks, Texts overrides) {
  overrides.push_back("precision={preset: bf16}");
  return notes(plan_of(ranks, overrides));
}

TEST(PlanNotes, a_recipe_whose_keys_do_what_they_say_has_none) {
  EXPECT_EQ(notes_of(1, {}), Texts{});
  EXPECT_EQ(notes_of(2, {"parallel.expert=2", "parallel.expert_chunks=4", "parallel.domain=2"}), Texts{});
  EXPECT_EQ(notes_of(2, {"parallel.expert=2", "parallel.expert_chunks=0"}), Texts{});
  EXPECT_EQ(notes_of(4, {"parallel.expert=2", "parallel.domain=2", "parallel.zero=3"}), Texts{});
  EXPECT_EQ(describe(plan_of(1, {})).find("notes\n"), std::string::npos);
}

TEST(PlanNotes, keys_with_less_effect_than_they_say) {
  EXPECT_EQ(notes_of(2, {"parallel.expert=2", "parallel.expert_chunks=5"}),
            Texts{"parallel.expert_chunks: 5 becomes 4, as many as a rank has experts"});
  EXPECT_EQ(notes_of(2, {"parallel.expert_chunks=2"}),
            Texts{"parallel.expert_chunks: 2 has no effect: no tokens travel where parallel.expert is 1"});
  EXPECT_EQ(notes_of(2, {"parallel.receive_factor=0.5"}),
            Texts{"parallel.receive_factor: 0.5 has no effect: no tokens travel where parallel.expert is 1"});
  EXPECT_EQ(notes_of(2, {"parallel.domain=3"}),
            Texts{"parallel.domain: 3 has no effect on 2 ranks: one domain holds them all, as with 0"});
  EXPECT_EQ(notes_of(1, {"parallel.zero=2"}), Texts{"parallel.zero: 2 has no effect on one rank"});
}

TEST(PlanNotes, the_text_and_the_json_have_them) {
  const Plan plan = plan_of(2, {"parallel.domain=3"});
  EXPECT_NE(describe(plan).find("\nnotes\n  parallel.domain: 3 has no effect on 2 ranks"), std::string::npos);
  EXPECT_EQ(nlohmann::json::parse(plan_json(plan)).at("notes").get<Texts>(), notes(plan));
}

TEST(PlanNotes, rounds_that_are_rounded_otherwise_than_one) {
  const auto with = [](const std::string& preset, const std::string& factor) {
    return notes(plan_of(
        2, {"parallel.expert=2", "precision={preset: " + preset + "}", "parallel.receive_factor=" + factor}));
  };
  for (const char* one_round : {"0", "2"}) EXPECT_EQ(with("nvidia_nvfp4", one_round), Texts{}) << one_round;
  for (const char* rows_alone : {"bf16", "fp32"}) EXPECT_EQ(with(rows_alone, "0.1"), Texts{}) << rows_alone;
  EXPECT_EQ(
      with("nvidia_nvfp4", "0.1"),
      Texts{"parallel.receive_factor: the worst routing takes 20 rounds, and an expert's rows of several "
            "rounds are rounded otherwise than together (layers.0 experts.gate_up: act has one scale for "
            "all rows of an expert); 0: always one"});
  // The forward's codes are a row's own, those of the weights' gradient are not.
  const Texts mxfp8 = with("mxfp8", "0.1");
  ASSERT_EQ(mxfp8.size(), 1U);
  EXPECT_NE(mxfp8[0].find("experts.gate_up: wgrad's grad has blocks along an expert's rows"),
            std::string::npos)
      << mxfp8[0];
}

}  // namespace
}  // namespace fp4t::test

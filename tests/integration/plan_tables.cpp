// Plans for machines elsewhere from the outside. The tables of engine/plan/README.md are what the built
// program prints: here up to 576 ranks, all of them in plan_tables_slow.cpp.
#include "tests/support/tables.h"

namespace fp4t::test {
namespace {

TEST(PlanTables, stand_as_the_program_predicts_up_to_576_ranks) { expect_tables({"--up-to", "576"}); }

Exit plan(const std::vector<std::string>& more) {
  const ScratchFolder folder;
  std::vector<std::string> args = {"plan", "--config",
                                   from_environment("FP4T_TEST_SOURCE") + "/configs/scale/moe-30b-a3b.yaml"};
  args.insert(args.end(), more.begin(), more.end());
  return run_binary(folder.path(), args);
}

#define EXPECT_HAS(text, part) EXPECT_NE((text).find(part), std::string::npos) << "in: " << (text)

TEST(PlanTables, a_plan_for_a_machine_elsewhere_is_printed_with_its_prediction) {
  const Exit exit = plan({"--machine", "gb300", "--ranks", "72"});
  EXPECT_EQ(exit.code, 0) << exit.errors;
  for (const char* text :
       {"72: data 9 x expert 8", "memory on NVIDIA GB300", "prediction for 72 x NVIDIA GB300", "it fits",
        "head and loss", "rows to experts", "of it exposed", "a decode call"}) {
    EXPECT_HAS(exit.output, text);
  }
}

TEST(PlanTables, what_cannot_be_planned_is_a_mistake_of_the_recipe) {
  const Exit groups = plan({"--machine", "h200", "--ranks", "64", "--set", "parallel.expert=16"});
  EXPECT_EQ(groups.code, 2);
  EXPECT_HAS(groups.errors, "--set: parallel.expert: 16 ranks share experts");
  const Exit unknown = plan({"--machine", "gb30"});
  EXPECT_EQ(unknown.code, 2);
  EXPECT_HAS(unknown.errors, "did you mean gb300?");
}

}  // namespace
}  // namespace fp4t::test

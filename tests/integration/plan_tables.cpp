// The tables of predictions in engine/plan/README.md are what the built program prints; here up to 576 ranks,
// all of them in plan_tables_slow.cpp.
#include "tests/support/tables.h"

TEST(PlanTables, stand_as_the_program_predicts_up_to_576_ranks) {
  fp4t::test::expect_tables({"--up-to", "576"});
}

#include "tests/support/tables.h"

TEST(PlanTables, stand_as_the_program_predicts) { fp4t::test::expect_tables({}); }

#include <gtest/gtest.h>

#include <cmath>

#include "engine/optim/optimizer.h"

namespace fp4t {
namespace {

ScheduleSpec spec_of(const std::string& kind, int64_t warmup, double final_fraction) {
  ScheduleSpec s;
  s.kind = kind;
  s.warmup = warmup;
  s.final_fraction = final_fraction;
  return s;
}

TEST(OptimSchedule, warm_up_rises_by_equal_steps_from_its_inverse_to_one) {
  const ScheduleSpec s = spec_of("cosine", 4, 0.1);
  EXPECT_EQ(schedule_factor(s, 0, 100), 0.25);
  EXPECT_EQ(schedule_factor(s, 1, 100), 0.5);
  EXPECT_EQ(schedule_factor(s, 3, 100), 1.0);
  EXPECT_LT(schedule_factor(s, 4, 100), 1.0);
}

TEST(OptimSchedule, cosine_matches_hand_values) {
  const ScheduleSpec s = spec_of("cosine", 2, 0.1);
  // Eight updates on the way down: x = 1/4 at update 3, 1/2 at update 5.
  EXPECT_NEAR(schedule_factor(s, 3, 10), 0.1 + 0.9 * 0.5 * (1 + std::sqrt(0.5)), 1e-15);
  EXPECT_NEAR(schedule_factor(s, 5, 10), 0.55, 1e-15);
  EXPECT_EQ(schedule_factor(s, 9, 10), 0.1);
}

TEST(OptimSchedule, linear_matches_hand_values) {
  const ScheduleSpec s = spec_of("linear", 0, 0.2);
  EXPECT_NEAR(schedule_factor(s, 0, 4), 0.8, 1e-15);
  EXPECT_NEAR(schedule_factor(s, 1, 4), 0.6, 1e-15);
  EXPECT_EQ(schedule_factor(s, 3, 4), 0.2);
}

TEST(OptimSchedule, wsd_is_flat_until_its_last_part) {
  ScheduleSpec s = spec_of("wsd", 10, 0.0);
  s.decay_fraction = 0.2;  // of 100: updates 80..99
  EXPECT_EQ(schedule_factor(s, 10, 100), 1.0);
  EXPECT_EQ(schedule_factor(s, 79, 100), 1.0);
  EXPECT_NEAR(schedule_factor(s, 80, 100), 0.95, 1e-15);
  EXPECT_NEAR(schedule_factor(s, 89, 100), 0.5, 1e-15);
  EXPECT_EQ(schedule_factor(s, 99, 100), 0.0);
}

TEST(OptimSchedule, constant_stays_at_one_after_warm_up) {
  const ScheduleSpec s = spec_of("constant", 2, 0.1);
  EXPECT_EQ(schedule_factor(s, 0, 10), 0.5);
  EXPECT_EQ(schedule_factor(s, 9, 10), 1.0);
}

TEST(OptimSchedule, every_kind_ends_exactly_at_its_final_fraction) {
  for (const char* kind : {"cosine", "linear", "wsd"}) {
    for (const int64_t total : {1, 7, 600}) {
      EXPECT_EQ(schedule_factor(spec_of(kind, 0, 0.1), total - 1, total), 0.1) << kind << " " << total;
      EXPECT_EQ(schedule_factor(spec_of(kind, 0, 0.1), total + 5, total), 0.1) << kind << " " << total;
    }
  }
}

TEST(OptimSchedule, a_warm_up_as_long_as_the_run_just_rises) {
  EXPECT_EQ(schedule_factor(spec_of("cosine", 10, 0.1), 9, 10), 1.0);
  EXPECT_EQ(schedule_factor(spec_of("cosine", 20, 0.1), 9, 10), 0.5);
}

}  // namespace
}  // namespace fp4t

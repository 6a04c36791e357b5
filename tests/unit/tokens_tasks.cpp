#include <gtest/gtest.h>

#include <set>

#include "engine/tokens/expression.h"
#include "engine/tokens/permutation.h"
#include "engine/tokens/tasks.h"
#include "kernels/base/check.h"

namespace fp4t {
namespace {

TaskSpec sums_spec(double fraction = 0.1) {
  TaskSpec spec;
  spec.kind = "sums";
  spec.held_out = {fraction, 7, ""};
  return spec;
}

// Both orders of a sum, as one name.
std::string pair_of(const std::string& prompt) {
  const int64_t a = std::stoll(prompt), b = std::stoll(prompt.substr(prompt.find('+') + 1));
  return std::to_string(std::min(a, b)) + "+" + std::to_string(std::max(a, b));
}

TEST(Permutation, visits_every_index_once) {
  for (int64_t n : {1, 2, 3, 16, 17, 1000, 4097}) {
    std::set<int64_t> seen;
    for (int64_t i = 0; i < n; ++i) seen.insert(permuted_index({1, 2}, n, i));
    EXPECT_EQ(static_cast<int64_t>(seen.size()), n);
    EXPECT_EQ(*seen.rbegin(), n - 1);
  }
  EXPECT_THROW(permuted_index({1, 2}, 3, 3), InternalError);
}

TEST(Sums, held_out_pairs_never_appear_in_training_in_either_order) {
  const auto task = make_task(sums_spec());
  std::set<std::string> held_out;
  for (const Problem& p : task->held_out()) held_out.insert(pair_of(p.prompt));
  EXPECT_EQ(held_out.size(), 409u);  // a tenth of 90 * 91 / 2 unordered pairs
  std::set<std::string> training;
  for (int64_t i = 0; i < 200000; ++i) training.insert(pair_of(task->training({3, 4}, i).prompt));
  EXPECT_EQ(training.size(), 4095u - 409u);
  for (const std::string& p : training) EXPECT_EQ(held_out.count(p), 0u) << p;
}

TEST(Sums, the_split_follows_its_own_seed_and_is_checked_by_its_hash) {
  TaskSpec spec = sums_spec();
  const std::string hash = make_task(spec)->held_out_hash();
  spec.held_out.hash = hash;
  EXPECT_NO_THROW(make_task(spec));
  spec.held_out.seed = 8;
  try {
    make_task(spec);
    FAIL() << "another split was accepted";
  } catch (const BadDataError& e) {
    EXPECT_NE(std::string(e.what()).find(hash), std::string::npos);
  }
}

TEST(Sums, only_the_exact_finished_answer_is_right) {
  const auto task = make_task(sums_spec());
  const Problem p{"37+58=", "95"};
  EXPECT_EQ(task->verify(p, "95", true), Verdict::kRight);
  EXPECT_EQ(task->verify(p, "94", true), Verdict::kWrong);
  EXPECT_EQ(task->verify(p, "095", true), Verdict::kWrong);
  for (const char* text : {"", " 95", "95 ", "+95", "9.5e1", "95x", "999999999999999999999999"}) {
    EXPECT_EQ(task->verify(p, text, true), Verdict::kUnverifiable) << text;
  }
  EXPECT_EQ(task->verify(p, "95", false), Verdict::kUnverifiable);
}

TEST(Sums, wrong_documents_are_off_by_one) {
  const auto task = make_task(sums_spec());
  EXPECT_EQ(task->document({"37+58=", "95"}, false, 1), "37+58=95\n");
  EXPECT_EQ(task->document({"37+58=", "95"}, true, 1), "37+58=96\n");
  EXPECT_EQ(task->document({"37+58=", "95"}, true, 0), "37+58=94\n");
}

TEST(Expression, evaluates_exactly_and_refuses_what_it_cannot) {
  EXPECT_EQ(parse_expression("1/3+1/6")->value, (Rational{1, 2}));
  EXPECT_EQ(parse_expression("2*(3-5)")->value, (Rational{-4, 1}));
  EXPECT_EQ(parse_expression("10-4-3")->value, (Rational{3, 1}));
  EXPECT_EQ(parse_expression("8/4/2")->value, (Rational{1, 1}));
  for (const char* text : {"", "1+", "(1", "1)", "1/0", "1/(2-2)", "--1", "1 + 1", "2**3", "1e3",
                           "99999999999999999", "999999999999*999999999999"}) {
    EXPECT_FALSE(parse_expression(text)) << text;
  }
  EXPECT_FALSE(parse_expression(std::string(100, '(') + "1" + std::string(100, ')')));
  EXPECT_FALSE(parse_expression(std::string(300, '1')));
}

TEST(Countdown, answers_of_its_own_problems_are_right_and_splits_are_disjoint) {
  TaskSpec spec;
  spec.kind = "countdown";
  spec.low = 1;
  spec.high = 20;
  spec.numbers = 3;
  spec.held_out = {0.1, 5, ""};
  const auto task = make_task(spec);
  std::set<std::string> held_out;
  for (const Problem& p : task->held_out()) {
    EXPECT_EQ(task->verify(p, p.answer, true), Verdict::kRight) << p.prompt << p.answer;
    held_out.insert(p.prompt);
  }
  EXPECT_EQ(held_out.size(), 400u);
  for (int64_t i = 0; i < 5000; ++i) {
    const Problem p = task->training({1, 1}, i);
    EXPECT_EQ(held_out.count(p.prompt), 0u) << p.prompt;
    EXPECT_EQ(task->verify(p, p.answer, true), Verdict::kRight) << p.prompt << p.answer;
  }
}

TEST(Sums, a_split_that_holds_nothing_out_is_refused) {
  TaskSpec spec = sums_spec(0.001);
  spec.low = 1;
  spec.high = 9;  // 45 pairs
  EXPECT_THROW(make_task(spec), BadDataError);
  spec.held_out.fraction = 0.03;
  EXPECT_EQ(make_task(spec)->held_out().size(), 1u);
}

TEST(Countdown, numbers_that_make_no_problem_are_refused_at_once) {
  TaskSpec spec;
  spec.kind = "countdown";
  spec.numbers = 2;
  spec.low = spec.high = 0;  // 0 + 0, 0 - 0, 0 * 0: targets begin at 1
  EXPECT_THROW(make_task(spec), BadDataError);
  spec.low = spec.high = 1000000000;
  EXPECT_THROW(make_task(spec), BadDataError);
  spec.low = 1;
  spec.high = 9;
  spec.held_out = {1e-9, 1, ""};
  EXPECT_THROW(make_task(spec), BadDataError);
}

TEST(Tasks, of_an_evaluation_may_hold_all_problems_out) {
  TaskSpec spec = sums_spec(1);
  spec.low = 1;
  spec.high = 9;
  EXPECT_EQ(make_task(spec)->held_out().size(), 45u);
  EXPECT_THROW(make_task(spec)->training({1, 1}, 0), BadDataError);
  spec.kind = "countdown";
  EXPECT_EQ(make_task(spec)->held_out().size(), 400u);
  EXPECT_THROW(make_task(spec)->training({1, 1}, 0), BadDataError);
}

// Two numbers of 1 to 4 and their targets are few: all of them come up, on one side or the other.
TEST(Countdown, a_small_universe_is_held_out_whole) {
  TaskSpec spec;
  spec.kind = "countdown";
  spec.numbers = 2;
  spec.low = 1;
  spec.high = 4;
  spec.held_out = {0.5, 3, ""};
  const auto task = make_task(spec);
  std::set<std::string> held_out;
  for (const Problem& p : task->held_out()) held_out.insert(p.prompt);
  EXPECT_EQ(held_out.size(), task->held_out().size());
  std::set<std::string> training;
  for (int64_t i = 0; i < 3000; ++i) training.insert(task->training({1, 1}, i).prompt);
  for (const std::string& p : training) EXPECT_EQ(held_out.count(p), 0u) << p;
  std::set<std::string> universe;
  for (int a = 1; a <= 4; ++a) {
    for (int b = a; b <= 4; ++b) {
      for (const int target : {a + b, a * b, b - a}) {
        if (target < 1) continue;
        universe.insert(std::to_string(a) + "," + std::to_string(b) + ":" + std::to_string(target) + "=");
      }
    }
  }
  EXPECT_EQ(held_out.size() + training.size(), universe.size());
}

TEST(Countdown, wrong_documents_use_the_numbers_and_miss_the_target) {
  TaskSpec spec;
  spec.kind = "countdown";
  spec.low = 1;
  spec.high = 9;
  const auto task = make_task(spec);
  std::set<std::string> answers;
  for (uint32_t bits = 0; bits < 200; ++bits) {
    const Problem p{"2,3,7:27=", "(2+7)*3"};
    EXPECT_EQ(task->document(p, false, bits), "2,3,7:27=(2+7)*3\n");
    const std::string text = task->document(p, true, bits * 2654435761u);
    ASSERT_EQ(text.rfind(p.prompt, 0), 0u);
    const std::string answer = text.substr(p.prompt.size(), text.size() - p.prompt.size() - 1);
    EXPECT_EQ(task->verify(p, answer, true), Verdict::kWrong) << answer;
    EXPECT_EQ(parse_expression(answer)->numbers.size(), 3u) << answer;
    answers.insert(answer);
  }
  EXPECT_GT(answers.size(), 30u);  // of 54 orders and operators
  // 0, 0 and 0 make nothing but 0.
  EXPECT_EQ(task->document({"0,0,0:0=", "0+0+0"}, true, 5), "0,0,0:0=1\n");
}

TEST(Countdown, each_number_is_used_at_most_as_often_as_given) {
  TaskSpec spec;
  spec.kind = "countdown";
  const auto task = make_task(spec);
  const Problem p{"3,3,7:21=", "3*7"};
  EXPECT_EQ(task->verify(p, "7*3", true), Verdict::kRight);
  EXPECT_EQ(task->verify(p, "7+7+7", true), Verdict::kWrong);
  EXPECT_EQ(task->verify(p, "21", true), Verdict::kWrong);
  EXPECT_EQ(task->verify(p, "3*7+3-3", true), Verdict::kWrong);
  EXPECT_EQ(task->verify(p, "3*(7", true), Verdict::kUnverifiable);
  EXPECT_EQ(task->verify(p, "3*7", false), Verdict::kUnverifiable);
}

}  // namespace
}  // namespace fp4t

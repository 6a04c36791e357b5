// Which GPU each rank of a run gets.
#include "engine/stage/devices.h"

#include <gtest/gtest.h>

#include "kernels/base/check.h"

namespace fp4t::test {
namespace {

using Gpus = std::vector<int>;

std::string refusal(const std::vector<RankDevices>& ranks, bool shared) {
  try {
    choose_gpus(ranks, shared);
  } catch (const RecipeError& e) {
    return e.what();
  }
  return "";
}

TEST(StageDevices, ranks_that_see_all_gpus_take_one_after_another) {
  const RankDevices a = {"a", {"1", "2"}}, b = {"b", {"3", "4"}};
  EXPECT_EQ(choose_gpus({a, a, b, b}, false), (Gpus{0, 1, 0, 1}));
  EXPECT_EQ(choose_gpus({a, b, a, b}, false), (Gpus{0, 0, 1, 1}));
}

TEST(StageDevices, ranks_that_see_one_gpu_take_that) {
  EXPECT_EQ(choose_gpus({{"a", {"1"}}, {"a", {"2"}}, {"b", {"3"}}}, false), (Gpus{0, 0, 0}));
}

TEST(StageDevices, more_ranks_than_gpus_are_refused_with_the_host_and_both_counts) {
  const RankDevices a = {"a", {"1", "2"}}, b = {"node7", {"3"}};
  const std::string text = refusal({a, b, b, a}, false);
  EXPECT_NE(text.find("host 'node7' has 2 ranks and 1 GPUs"), std::string::npos) << text;
  EXPECT_NE(text.find("parallel.transport: host"), std::string::npos) << text;
  EXPECT_NE(refusal({a, {"c", {}}}, false).find("host 'c' has 1 ranks and 0 GPUs"), std::string::npos);
}

TEST(StageDevices, ranks_share_gpus_in_turns_where_they_may) {
  const RankDevices a = {"a", {"1", "2"}}, b = {"b", {"3"}};
  EXPECT_EQ(choose_gpus({a, a, a, b, b}, true), (Gpus{0, 1, 0, 0, 0}));
  EXPECT_NE(refusal({a, {"c", {}}}, true).find("host 'c' has 1 ranks and 0 GPUs"), std::string::npos);
}

TEST(StageDevices, uneven_machines_and_hosts_are_told_with_the_first_rank_of_each) {
  const RankPlace a = {"a", "cpu, 64 GiB, 8 threads"}, b = {"b", "cpu, 64 GiB, 8 threads"},
                  small = {"c", "cpu, 32 GiB, 8 threads"};
  EXPECT_EQ(unevenness({a}), "");
  EXPECT_EQ(unevenness({a, a, b, b}), "");
  EXPECT_EQ(unevenness({a, small, b}),
            "ranks are uneven, and the slowest sets the pace:\n"
            "  cpu, 32 GiB, 8 threads, 1 rank on the host: 1 of them, the first is rank 1 on 'c'\n"
            "  cpu, 64 GiB, 8 threads, 1 rank on the host: 2 of them, the first is rank 0 on 'a'");
  EXPECT_EQ(unevenness({a, a, a, b}),
            "ranks are uneven, and the slowest sets the pace:\n"
            "  cpu, 64 GiB, 8 threads, 1 rank on the host: 1 of them, the first is rank 3 on 'b'\n"
            "  cpu, 64 GiB, 8 threads, 3 ranks on the host: 3 of them, the first is rank 0 on 'a'");
}

}  // namespace
}  // namespace fp4t::test

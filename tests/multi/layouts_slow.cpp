// Eight ranks in every layout that eight ranks have here: experts over 1, 2 and 4 of them, ZeRO 1 to 3.
#include <cmath>

#include "tests/support/layouts.h"

namespace fp4t::test {
namespace {

class Layouts : public ::testing::Test {
 protected:
  // One sequence a rank and micro-batch.
  void SetUp() override { write_inputs(folder_.path(), kTinyModel + spread_pretraining(1)); }
  std::string dir(const std::string& name) const { return folder_ / name; }
  void on(int ranks, const std::string& name, int expert, int zero, std::vector<std::string> more = {}) {
    more.insert(more.end(), {"--set", "parallel.expert=" + std::to_string(expert), "--set",
                             "parallel.zero=" + std::to_string(zero)});
    train_on(ranks, folder_.path(), name, more);
  }

  ScratchFolder folder_;
};

std::string name_of(int expert, int zero) {
  return "e" + std::to_string(expert) + "z" + std::to_string(zero);
}

TEST_F(Layouts, eight_ranks_have_the_bits_of_one_whatever_they_share_of_the_optimizer) {
  // One step, unclipped: from then on, the embedding's last bits reach everything.
  const std::vector<std::string> step = {"--set", "stages.0.pretrain.steps=1", "--set",
                                         "stages.0.pretrain.optimizer.clip_norm=0"};
  std::vector<std::string> one = step;
  one.insert(one.end(), {"--set", "run.dir=one"});
  train(folder_.path(), one);
  const auto want = without_embedding(dir("one"));
  for (const int zero : {1, 2, 3}) {
    on(8, name_of(1, zero), 1, zero, step);
    EXPECT_EQ(without_embedding(dir(name_of(1, zero))), want) << "zero " << zero;
  }
}

// With experts over ranks the combined sums of the backward are rounded at other places, so the gradients of
// two numbers of expert ranks agree within BF16; with the same number, to the bit.
TEST_F(Layouts, what_ranks_share_changes_no_bit_for_any_spread_of_experts) {
  for (const int expert : {1, 2, 4}) {
    std::map<std::string, std::string> whole;
    for (const int zero : {1, 2, 3}) {
      on(8, name_of(expert, zero), expert, zero, {"--set", "stages.0.pretrain.steps=3"});
      const auto tensors = tensors_in(latest_checkpoint_of(dir(name_of(expert, zero))));
      if (zero == 1) whole = tensors;
      EXPECT_EQ(tensors, whole) << name_of(expert, zero);
    }
  }
}

TEST_F(Layouts, a_row_invariant_forward_has_the_same_bits_on_eight_ranks_however_experts_are_spread) {
  std::vector<nlohmann::json> first;
  for (const int expert : {1, 2, 4}) {
    on(8, name_of(expert, 1), expert, 1,
       {"--set", "precision={preset: mxfp8}", "--set", "stages.0.pretrain.steps=1"});
    const auto evals = metrics_of(dir(name_of(expert, 1)), "eval"),
               steps = metrics_of(dir(name_of(expert, 1)), "step");
    ASSERT_GE(evals.size(), 1u);
    ASSERT_EQ(steps.size(), 1u);
    const std::vector<nlohmann::json> lines = {evals[0], steps[0]};
    if (first.empty()) first = lines;
    EXPECT_EQ(lines[0], first[0]) << "expert " << expert;
    for (const char* figure :
         {"loss", "router_z", "router_aux", "expert_load.0", "expert_load.1", "trained_tokens"}) {
      EXPECT_EQ(lines[1].at(figure), first[1].at(figure)) << "expert " << expert << ", " << figure;
    }
    EXPECT_NEAR(lines[1].at("grad_norm").get<double>(), first[1].at("grad_norm").get<double>(), 2e-3)
        << "expert " << expert;
  }
}

}  // namespace
}  // namespace fp4t::test

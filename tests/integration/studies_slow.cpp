// Scripts that run whole studies, in their short form.
#include <gtest/gtest.h>

#include "tests/support/process.h"

namespace fp4t::test {
namespace {

class Studies : public ::testing::Test {
 protected:
  Exit rl_precisions(const std::vector<std::string>& more) {
    const std::string source = from_environment("FP4T_TEST_SOURCE");
    Command command{{"/usr/bin/env", "python3", source + "/scripts/rl_precision_study.py", "--binary",
                     from_environment("FP4T_TEST_BINARY"), "--recipe", source + "/configs/quickstart.yaml",
                     "--out", folder_ / "study", "--tiny", "--jobs", "2"}};
    command.words.insert(command.words.end(), more.begin(), more.end());
    return Process(folder_.path(), command).wait();
  }
  ScratchFolder folder_;
};

TEST_F(Studies, of_rl_precisions_prints_a_row_a_run_and_means) {
  const Exit exit = rl_precisions({"--set", "run.threads=1"});
  ASSERT_EQ(exit.code, 0) << exit.output << exit.errors;
  // Equal rows agree in every token and route alike; mismatched ones with the sampler's routing tell both.
  EXPECT_NE(exit.output.find("\n| bf16/bf16 | 1 | "), std::string::npos) << exit.output;
  EXPECT_NE(exit.output.find("\n| w4a4/bf16+replay | 1 | "), std::string::npos) << exit.output;
  EXPECT_NE(exit.output.find("| 1 | 0 | 0 | 1 |  | "), std::string::npos) << exit.output;
  EXPECT_NE(exit.output.find("\n| w4a4/bf16+replay | 0."), std::string::npos) << exit.output;
  // What is there is not run again.
  const Exit again = rl_precisions({"--set", "run.threads=no number"});
  EXPECT_EQ(again.code, 0) << again.errors;
  EXPECT_EQ(again.output, exit.output);
}

TEST_F(Studies, of_rl_precisions_ends_with_the_words_of_a_run_that_fails) {
  const Exit exit = rl_precisions({"--set", "run.seeds=1"});
  EXPECT_EQ(exit.code, 1);
  EXPECT_NE(exit.errors.find("exit code 2, see "), std::string::npos) << exit.errors;
  EXPECT_EQ(exit.errors.find("Traceback"), std::string::npos) << exit.errors;
}

}  // namespace
}  // namespace fp4t::test

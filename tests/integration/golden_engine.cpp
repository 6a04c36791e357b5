// The CPU quantisers against the independent oracle, through the function behind `fp4train selfcheck`.
#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>

#include "engine/stage/selfcheck.h"
#include "kernels/base/check.h"

namespace fp4t {
namespace {

std::string golden_path() {
  const char* source = std::getenv("FP4T_TEST_SOURCE");
  return std::string(source ? source : ".") + "/tests/golden/quantise.jsonl";
}

std::string first_line() {
  std::ifstream file(golden_path());
  std::string line;
  std::getline(file, line);
  return line;
}

// A file of this content, removed at the end of the scope.
class TemporaryFile {
 public:
  explicit TemporaryFile(const std::string& content)
      : path_(std::filesystem::temp_directory_path() /
              ("golden_engine_" + std::to_string(::getpid()) + ".jsonl")) {
    std::ofstream(path_) << content;
  }
  ~TemporaryFile() { std::filesystem::remove(path_); }
  std::string path() const { return path_; }

 private:
  std::filesystem::path path_;
};

TEST(Golden, every_case_is_equal_bit_for_bit_on_one_and_three_threads) {
  for (int threads : {1, 3}) {
    Queue queue = Queue::cpu(threads);
    const GoldenResult result = check_golden(queue, golden_path());
    EXPECT_EQ(result.cases, 260);
    EXPECT_EQ(result.equal, result.cases);
    for (const std::string& failure : result.failures) ADD_FAILURE() << failure;
  }
}

TEST(Golden, a_changed_digit_is_found_and_named) {
  std::string line = first_line();
  const size_t at = line.find("\"codes\":") + 12;
  line[at] = line[at] == '0' ? '1' : '0';
  Queue queue = Queue::cpu(1);
  const GoldenResult result = check_golden(queue, TemporaryFile(line + "\n").path());
  EXPECT_EQ(result.cases, 13);
  EXPECT_EQ(result.equal, 12);
  ASSERT_EQ(result.failures.size(), 1u);
  EXPECT_NE(result.failures[0].find("nvfp4 1x16: codes byte"), std::string::npos) << result.failures[0];
}

TEST(Golden, missing_empty_and_damaged_files_are_refused) {
  Queue queue = Queue::cpu(1);
  EXPECT_THROW(check_golden(queue, "/no/such/file.jsonl"), MissingInputError);
  const std::string line = first_line();
  std::string short_input = line, other_rows = line, bad_digit = line, bad_rule = line;
  short_input.erase(line.find("input_bf16") + 20, 2);
  other_rows.replace(line.find("\"rows\":48"), 9, "\"rows\":47");
  bad_digit[line.find("input_bf16") + 20] = 'x';
  bad_rule.replace(line.find("\"amax\""), 6, "\"amin\"");
  for (const std::string& content :
       {std::string(), std::string("\n\n"), line.substr(0, line.size() / 2), std::string("{}\n"),
        std::string("[1, 2]\n"), short_input, other_rows, bad_digit, bad_rule,
        // Two terabytes of input are not asked for before they are seen.
        std::string(
            R"({"seed":1,"kind":"x","rows":1048576,"cols":1048576,"input_bf16":"00","cases":[{}]})")}) {
    EXPECT_THROW(check_golden(queue, TemporaryFile(content).path()), BadDataError) << content.substr(0, 60);
  }
}

}  // namespace
}  // namespace fp4t

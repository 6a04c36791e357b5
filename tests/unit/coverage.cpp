// Every op of op_list.inc has a case against a reference, and every backward op a case against finite
// differences: read from the sources of the tests, so an op that is added without them fails here.
#include <gtest/gtest.h>

#include <cctype>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <string>
#include <vector>

namespace fp4t::test {
namespace {

#define FP4T_OP(op, exactness) #op,
const std::vector<std::string> kOps = {
#include "kernels/ops/op_list.inc"
};
#undef FP4T_OP

std::filesystem::path tests_folder() {
  return std::filesystem::path(std::getenv("FP4T_TEST_SOURCE")) / "tests";
}

std::string text_of(const std::filesystem::path& file) {
  std::ostringstream text;
  text << std::ifstream(file).rdbuf();
  return text.str();
}

std::string without_comments(const std::string& text) {
  std::istringstream lines(text);
  std::string code, line;
  while (std::getline(lines, line)) code += line.substr(0, line.find("//")) + "\n";
  return code;
}

// The code of a folder's tests, with the test headers that they include.
std::string code_of(const std::string& folder) {
  std::string code;
  for (const auto& entry : std::filesystem::directory_iterator(tests_folder() / folder)) {
    if (entry.path().extension() != ".cpp") continue;
    const std::string text = text_of(entry.path()), include = "#include \"tests/";
    code += without_comments(text);
    for (size_t at = text.find(include); at != std::string::npos; at = text.find(include, at + 1)) {
      const size_t begin = at + include.size(), end = text.find('"', begin);
      code += without_comments(text_of(tests_folder() / text.substr(begin, end - begin)));
    }
  }
  return code;
}

bool is_word_part(char c) { return std::isalnum(static_cast<unsigned char>(c)) != 0 || c == '_'; }

bool names(const std::string& code, const std::string& word) {
  for (size_t at = code.find(word); at != std::string::npos; at = code.find(word, at + 1)) {
    if (!is_word_part(code[at - 1]) && !is_word_part(code[at + word.size()])) return true;
  }
  return false;
}

TEST(Coverage, the_list_of_ops_is_there) { EXPECT_GT(kOps.size(), 30u); }

TEST(Coverage, every_op_runs_in_a_parity_test) {
  const std::string code = code_of("parity") + code_of("formats");
  for (const std::string& op : kOps) {
    EXPECT_TRUE(names(code, op)) << "no test in tests/parity or tests/formats names " << op;
  }
  EXPECT_FALSE(names(code, "AnOpThatWasForgotten"));
}

TEST(Coverage, every_backward_op_has_finite_differences) {
  const std::string code = code_of("grad");
  for (const std::string& op : kOps) {
    if (op.size() < 8 || op.compare(op.size() - 8, 8, "Backward") != 0) continue;
    EXPECT_TRUE(code.find("TEST(" + op + ",") != std::string::npos)
        << "no suite of tests/grad is called " << op;
  }
}

}  // namespace
}  // namespace fp4t::test

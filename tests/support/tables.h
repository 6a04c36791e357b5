// scripts/plan_table.py --check with the built program.
#pragma once

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "tests/support/process.h"

namespace fp4t::test {

inline void expect_tables(const std::vector<std::string>& more) {
  const std::string source = from_environment("FP4T_TEST_SOURCE");
  Command command{{"/usr/bin/env", "python3", source + "/scripts/plan_table.py", "--binary",
                   from_environment("FP4T_TEST_BINARY"), "--check"}};
  command.words.insert(command.words.end(), more.begin(), more.end());
  const ScratchFolder folder;  // of the command's output
  Process process(folder.path(), command);
  const Exit exit = process.wait();
  EXPECT_EQ(exit.code, 0) << exit.output << exit.errors;
}

}  // namespace fp4t::test

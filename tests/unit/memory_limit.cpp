// Limits of control groups, as files of either version show them.
#include "kernels/base/memory_limit.h"

#include <gtest/gtest.h>

#include <filesystem>

#include "kernels/base/check.h"
#include "kernels/base/queue.h"
#include "tests/support/process.h"

namespace fp4t {
namespace {

namespace fs = std::filesystem;

class MemoryLimit : public ::testing::Test {
 protected:
  void put(const std::string& name, const std::string& text) {
    fs::create_directories(fs::path(folder_ / name).parent_path());
    test::write_text(folder_ / name, text);
  }
  int64_t limit_of(const std::string& groups) {
    test::write_text(folder_ / "self", groups);
    return control_group_limit(folder_ / "self", folder_ / "mounted");
  }
  test::ScratchFolder folder_;
};

TEST_F(MemoryLimit, version_2_takes_the_smallest_of_a_group_and_those_around_it) {
  EXPECT_EQ(limit_of("0::/a/b\n"), 0) << "nothing is mounted";
  put("mounted/a/b/memory.max", "max\n");
  EXPECT_EQ(limit_of("0::/a/b\n"), 0);
  put("mounted/a/memory.max", "3000000000\n");
  EXPECT_EQ(limit_of("0::/a/b\n"), 3000000000);
  put("mounted/a/b/memory.max", "4000000000\n");
  EXPECT_EQ(limit_of("0::/a/b\n"), 3000000000);
  put("mounted/a/b/memory.max", "2000000000\n");
  EXPECT_EQ(limit_of("0::/a/b\n"), 2000000000);
  EXPECT_EQ(limit_of("0::/other\n"), 0);
  put("mounted/memory.max", "1000000000\n");  // a container's root
  EXPECT_EQ(limit_of("0::/\n"), 1000000000);
  EXPECT_EQ(limit_of("0::/a/b\n"), 1000000000);
  EXPECT_EQ(limit_of("0::/of/the/host\n"), 1000000000);
  EXPECT_EQ(limit_of("0::/../../elsewhere\n"), 1000000000);
}

TEST_F(MemoryLimit, version_1_has_a_mount_of_its_own_for_memory) {
  put("mounted/memory/jobs/memory.limit_in_bytes", "500000000\n");
  put("mounted/memory/memory.limit_in_bytes", "9223372036854771712\n");
  EXPECT_EQ(limit_of("12:cpu,cpuacct:/jobs\n4:hugetlb,memory:/jobs/7\n0::/\n"), 500000000);
  EXPECT_EQ(limit_of("4:memory:/\n"), 9223372036854771712);
  EXPECT_EQ(limit_of("12:cpu,cpuacct:/jobs\n"), 0);
  EXPECT_EQ(limit_of("nonsense\n:\n\n"), 0);
  EXPECT_EQ(control_group_limit(folder_ / "nowhere", folder_ / "mounted"), 0);
}

TEST_F(MemoryLimit, counts_as_the_machines_memory) {
  const int64_t limit = control_group_limit();
  const int64_t memory = probe_machine("cpu", 1).memory_bytes;
  EXPECT_GT(memory, 0);
  EXPECT_TRUE(limit == 0 || memory <= limit) << memory << " against " << limit;
}

#if !defined(__SANITIZE_ADDRESS__)  // it ends the process instead
TEST(Allocation, of_more_than_there_is_is_no_bug_of_ours) {
  try {
    Queue::cpu(1).allocate(int64_t{1} << 50);
    ADD_FAILURE() << "it was given";
  } catch (const MemoryError& e) {
    EXPECT_EQ(e.code(), ExitCode::kRecipe);
    EXPECT_NE(std::string(e.what()).find(std::to_string(int64_t{1} << 50)), std::string::npos);
  }
}
#endif

}  // namespace
}  // namespace fp4t

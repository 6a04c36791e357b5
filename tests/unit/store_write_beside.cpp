// A folder written beside its place, with the process killed before every step that touches the disk.
#include "engine/store/write_beside.h"

#include <sys/wait.h>
#include <unistd.h>

#include "gtest/gtest.h"
#include "kernels/base/check.h"
#include "tests/unit/store_fixture.h"

namespace fp4t::test {
namespace {

namespace fs = std::filesystem;

void write_number(const std::string& to, int number, bool replace, const SaveHook& hook = {}) {
  write_beside(to, replace, "mark", hook, [&](const std::string& folder) {
    for (const char* name : {"a", "mark"}) write_file(folder + "/" + name, std::to_string(number), hook);
  });
}

// Writes in a child that ends before step `n`; false when it got through.
bool killed_at(const std::string& to, int number, int n) {
  const pid_t child = ::fork();
  if (child == 0) {
    int count = 0;
    try {
      write_number(to, number, true, [&](const std::string&) {
        if (count++ == n) ::_exit(9);
      });
    } catch (...) {
      ::_exit(1);
    }
    ::_exit(0);
  }
  int status = 0;
  EXPECT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status) && (WEXITSTATUS(status) == 9 || WEXITSTATUS(status) == 0)) << status;
  return WIFEXITED(status) && WEXITSTATUS(status) == 9;
}

std::vector<std::string> all_in(const TempFolder& dir) { return names_in(dir.path()); }

TEST(WriteBeside, a_process_killed_at_any_step_leaves_the_old_folder_or_the_new_one) {
  int steps = 0;
  for (bool killed = true; killed; ++steps) {
    const TempFolder dir;
    write_number(dir / "out", 1, false);
    killed = killed_at(dir / "out", 2, steps);
    const std::string a = file_text(dir / "out/a");
    EXPECT_EQ(a, file_text(dir / "out/mark")) << steps;
    EXPECT_TRUE(a == "1" || a == "2") << steps;
    write_number(dir / "out", 3, true);  // the next one clears up
    EXPECT_EQ(all_in(dir), std::vector<std::string>{"out"}) << steps;
    EXPECT_EQ(file_text(dir / "out/a"), "3");
  }
  EXPECT_GT(steps, 6);
}

TEST(WriteBeside, a_process_killed_at_the_first_write_leaves_nothing_under_the_name) {
  int steps = 0;
  for (bool killed = true; killed; ++steps) {
    const TempFolder dir;
    killed = killed_at(dir / "out", 2, steps);
    if (fs::exists(dir / "out")) {
      EXPECT_EQ(file_text(dir / "out/mark"), "2") << steps;
    }
    write_number(dir / "out", 3, true);
    EXPECT_EQ(all_in(dir), std::vector<std::string>{"out"}) << steps;
  }
  EXPECT_GT(steps, 4);
}

// As on file systems that cannot exchange two names.
TEST(WriteBeside, what_a_process_killed_between_two_renames_put_aside_comes_back) {
  const TempFolder dir;
  write_number(dir / "out", 1, false);
  fs::rename(dir / "out", dir / "out.replaced.4711");
  EXPECT_THROW(write_number(dir / "out", 2, false), RecipeError);  // it is there
  EXPECT_EQ(file_text(dir / "out/a"), "1");
  EXPECT_EQ(all_in(dir), std::vector<std::string>{"out"});
}

TEST(WriteBeside, folders_of_others_stay) {
  const TempFolder dir;
  for (const char* name : {"out.tmp.", "out.tmp.x1", "out.tmp", "other.tmp.12", "out.replaced.old"}) {
    fs::create_directory(dir / name);
  }
  const std::vector<std::string> before = all_in(dir);
  // One at work holds its folder: here the write within the write.
  write_beside(dir / "out", false, "mark", {}, [&](const std::string& folder) {
    write_file(folder + "/mark", "1", {});
    const pid_t child = ::fork();
    if (child == 0) {
      write_number(dir / "out", 2, false);
      ::_exit(0);
    }
    int status = 0;
    EXPECT_EQ(::waitpid(child, &status, 0), child);
    EXPECT_TRUE(fs::exists(folder + "/mark"));
    fs::remove_all(dir / "out");
  });
  EXPECT_EQ(file_text(dir / "out/mark"), "1");
  std::vector<std::string> after = all_in(dir);
  std::erase(after, "out");
  EXPECT_EQ(after, before);
}

}  // namespace
}  // namespace fp4t::test

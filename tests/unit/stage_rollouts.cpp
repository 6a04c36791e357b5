// Files of completions that a resumed run has left behind.
#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>

#include "engine/stage/rollout_files.h"
#include "kernels/base/check.h"
#include "tests/support/process.h"

namespace fp4t::test {
namespace {

namespace fs = std::filesystem;

template <class E, class Body>
std::string thrown(const Body& body) {
  try {
    body();
    return "";
  } catch (const E& e) {
    return e.what();
  }
}

TEST(StageRollouts, files_of_another_course_that_cannot_be_removed_are_an_error) {
  ScratchFolder folder;
  const std::string rollouts = folder / "rollouts", later = rollouts + "/stage-0-step-000004.jsonl";
  cut_rollouts(folder.path(), 0, 3);  // none are there
  fs::create_directory(rollouts);
  for (const char* step : {"000003", "000004"})
    write_text(rollouts + "/stage-0-step-" + step + ".jsonl", "{}");
  fs::permissions(folder.path(), fs::perms::all);
  fs::permissions(rollouts, fs::perms::all);
  constexpr auto kWrite = fs::perms::owner_write | fs::perms::group_write | fs::perms::others_write;
  fs::permissions(rollouts, kWrite, fs::perm_options::remove);
  const uid_t user = ::geteuid();
  ASSERT_EQ(::seteuid(user == 0 ? 65534 : user), 0);
  const std::string why = thrown<SaveError>([&] { cut_rollouts(folder.path(), 0, 3); });
  ASSERT_EQ(::seteuid(user), 0);
  EXPECT_EQ(why, "cannot remove '" + later + "': Permission denied");
  fs::permissions(rollouts, fs::perms::owner_all);
  cut_rollouts(folder.path(), 0, 3);
  EXPECT_FALSE(fs::exists(later));
  EXPECT_TRUE(fs::exists(rollouts + "/stage-0-step-000003.jsonl"));
}

}  // namespace
}  // namespace fp4t::test

// A process killed anywhere inside a save: the survivor is the previous checkpoint or the new one, whole.
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <random>
#include <thread>

#include "engine/store/checkpoint.h"
#include "gtest/gtest.h"
#include "tests/unit/store_fixture.h"

namespace fp4t::test {
namespace {

StoreOptions options_with(SaveHook hook) {
  StoreOptions options;
  options.shard_bytes = 600;
  options.hook = std::move(hook);
  return options;
}

// Loads the newest checkpoint and compares it with the run that its step implies; returns the step, -1
// when there is none.
int64_t survivor(const std::string& run_dir) {
  std::vector<std::string> notes;
  CheckpointStore store(run_dir);
  const std::string path = store.newest(&notes);
  if (path.empty()) return -1;
  const CheckpointInfo info = read_checkpoint_info(path, true);
  SmallRun expected(info.state.step), loaded(info.state.step + 1);
  Queue queue = Queue::cpu(1);
  load_tensors(queue, path, loaded.tensors(), {});
  EXPECT_TRUE(loaded.same_tensors(expected)) << path;
  EXPECT_EQ(info.state.next_sample, expected.state().next_sample) << path;
  for (const std::string& note : notes) {  // leftovers are mentioned, damaged checkpoints never arise
    EXPECT_EQ(note.find("passed over"), std::string::npos) << note;
  }
  for (const auto& entry : std::filesystem::directory_iterator(run_dir + "/checkpoints")) {
    EXPECT_EQ(entry.path().filename().string().find(".tmp."), std::string::npos) << entry.path();
    EXPECT_EQ(entry.path().filename().string().find(".replaced"), std::string::npos) << entry.path();
  }
  return info.state.step;
}

void save_step(const std::string& run_dir, int64_t step, int64_t keep, SaveHook hook) {
  Queue queue = Queue::cpu(1);
  SmallRun run(step);
  CheckpointStore(run_dir, options_with(std::move(hook))).save(queue, run.tensors(), run.state(), keep);
}

// Saves `step` in a child that kills itself before write step number `n`; false when it got through.
bool killed_at(const std::string& run_dir, int64_t step, int64_t keep, int n, std::string* where) {
  int report[2];
  EXPECT_EQ(::pipe(report), 0);
  const pid_t child = ::fork();
  if (child == 0) {
    int count = 0;
    save_step(run_dir, step, keep, [&](const std::string& name) {
      if (count++ != n) return;
      (void)!::write(report[1], name.data(), name.size());
      ::kill(::getpid(), SIGKILL);
    });
    ::_exit(0);
  }
  ::close(report[1]);
  char text[256];
  const ssize_t bytes = ::read(report[0], text, sizeof text);
  where->assign(text, static_cast<size_t>(std::max<ssize_t>(bytes, 0)));
  ::close(report[0]);
  int status = 0;
  EXPECT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFSIGNALED(status) || WEXITSTATUS(status) == 0) << status;
  return WIFSIGNALED(status);
}

TEST(Crash, at_every_write_step_leaves_the_previous_or_the_new_one) {
  int steps = 0;
  bool previous = false, next = false;
  for (int n = 0;; ++n, ++steps) {
    TempFolder dir;
    save_step(dir.path(), 1, 2, {});
    save_step(dir.path(), 2, 2, {});
    std::string where;
    const bool killed = killed_at(dir.path(), 3, 2, n, &where);
    const int64_t step = survivor(dir.path());
    if (!killed) {
      EXPECT_EQ(step, 3);
      break;
    }
    EXPECT_TRUE(step == 2 || step == 3) << "killed at step " << n << ", " << where << ": " << step;
    (step == 2 ? previous : next) = true;
    save_step(dir.path(), 4, 2, {});  // and the run goes on
    EXPECT_EQ(survivor(dir.path()), 4) << where;
  }
  EXPECT_GT(steps, 20);
  EXPECT_TRUE(previous && next);
}

TEST(Crash, while_replacing_a_folder_of_the_same_name_never_loses_both) {
  for (int n = 0;; ++n) {
    TempFolder dir;
    save_step(dir.path(), 3, 1, {});
    std::string where;
    const bool killed = killed_at(dir.path(), 3, 1, n, &where);
    EXPECT_EQ(survivor(dir.path()), 3) << "killed at step " << n << ", " << where;
    if (!killed) break;
  }
}

TEST(Crash, in_the_first_save_leaves_none_or_the_first) {
  for (int n = 0;; ++n) {
    TempFolder dir;
    std::string where;
    const bool killed = killed_at(dir.path(), 1, 2, n, &where);
    const int64_t step = survivor(dir.path());
    EXPECT_TRUE(step == 1 || (killed && step == -1)) << "killed at step " << n << ", " << where;
    if (!killed) break;
  }
}

TEST(Crash, an_error_at_every_write_step_is_reported_and_harmless) {
  for (int n = 0;; ++n) {
    TempFolder dir;
    save_step(dir.path(), 1, 2, {});
    int count = 0;
    bool thrown = false;
    try {
      save_step(dir.path(), 2, 2, [&](const std::string& name) {
        if (count++ == n) throw SaveError("no space at " + name);
      });
    } catch (const SaveError&) {
      thrown = true;
    }
    const int64_t step = survivor(dir.path());
    EXPECT_TRUE(step == 2 || (thrown && step == 1)) << n;
    if (!thrown) break;
  }
}

TEST(Crash, at_random_instants_of_endless_saving_always_resumes) {
  const uint64_t seed = std::random_device{}();
  std::mt19937_64 random(seed);
  TempFolder dir;
  // Instants between nothing saved and a few saves, however slow this machine is just now.
  const auto begin = std::chrono::steady_clock::now();
  for (int64_t step = 0; step < 3; ++step) save_step(dir.path(), step, 2, {});
  const auto save =
      std::chrono::duration_cast<std::chrono::microseconds>(std::chrono::steady_clock::now() - begin) / 3;
  int64_t last = survivor(dir.path());
  const int64_t first = last;
  for (int round = 0; round < 25; ++round) {
    const pid_t child = ::fork();
    if (child == 0) {
      try {
        for (int64_t step = last + 1;; ++step) save_step(dir.path(), step, 2, {});
      } catch (...) {
        ::_exit(1);
      }
    }
    std::this_thread::sleep_for(
        std::chrono::microseconds(random() % static_cast<uint64_t>(4 * save.count() + 1)));
    ::kill(child, SIGKILL);
    int status = 0;
    ASSERT_EQ(::waitpid(child, &status, 0), child);
    ASSERT_TRUE(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL) << status;
    const int64_t step = survivor(dir.path());
    EXPECT_GE(step, last) << "seed " << seed << ", round " << round;
    last = step;
  }
  EXPECT_GT(last, first) << "seed " << seed;
}

}  // namespace
}  // namespace fp4t::test

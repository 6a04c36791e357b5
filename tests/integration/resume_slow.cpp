// Many kills, damaged checkpoints and full disks; whatever happens, the run ends as the uninterrupted one or
// says by its exit code why it cannot.
#include "tests/support/interrupted.h"

namespace fp4t::test {
namespace {

namespace fs = std::filesystem;

class ResumeSlow : public Interrupted {
 protected:
  // Ten random kills in a stage; after each, up to three more wherever they fall, then to the end.
  void ten_kills_in(const std::string& stage, int64_t steps) {
    for (int round = 0; round < 10; ++round) {
      SCOPED_TRACE("round " + std::to_string(round));
      fs::remove_all(run_);
      Process first(folder_.path(), train_args());
      const int64_t step = draw_step(steps);
      wait_for_step(stage, step);
      first.signal(SIGKILL);
      EXPECT_TRUE(first.wait().killed());
      std::string kills = std::to_string(step);
      for (auto more = static_cast<int>(draw(4)); more > 0; --more) {
        Process next(folder_.path(), train_args());
        const double seconds = draw(0.6);
        sleep_seconds(seconds);
        next.signal(SIGKILL);
        const Exit exit = next.wait();
        EXPECT_TRUE(exit.killed() || exit.code == 0) << exit.code << exit.errors;
        kills += ", +" + std::to_string(seconds) + "s";
      }
      std::printf("%s: killed after step %s\n", stage.c_str(), kills.c_str());
      train(folder_.path());
      expect_equal_to_uninterrupted();
    }
  }

  // Runs until some checkpoints stand, and kills.
  void leave_checkpoints(size_t count) {
    Process first(folder_.path(), train_args());
    ASSERT_TRUE(wait_until([&] { return checkpoints_of(run_).size() >= count; }));
    first.signal(SIGKILL);
    first.wait();
  }

  // Flips one bit of a random byte of the tensors.
  void damage(const std::string& checkpoint) {
    const std::string path = checkpoint + "/tensors-00001.safetensors";
    std::string bytes = read_text(path);
    ASSERT_FALSE(bytes.empty());
    const auto at = std::uniform_int_distribution<size_t>(0, bytes.size() - 1)(random_);
    std::printf("damaged byte %zu of %s\n", at, path.c_str());
    bytes[at] = static_cast<char>(bytes[at] ^ 1);
    write_text(path, bytes);
  }

  int64_t count_in_log(const std::string& words) const {
    const std::string log = read_text(run_ + "/log.txt");
    int64_t n = 0;
    for (size_t at = log.find(words); at != std::string::npos; at = log.find(words, at + 1)) ++n;
    return n;
  }
};

// Smaller than the tensors of a checkpoint, larger than every other file of the run.
constexpr int64_t kFullDisk = 200000;

TEST_F(ResumeSlow, ten_kills_in_pretraining) { ten_kills_in("pretrain", 16); }

TEST_F(ResumeSlow, ten_kills_in_rl) { ten_kills_in("rl", 11); }

TEST_F(ResumeSlow, a_damaged_newest_checkpoint_is_passed_over_by_name) {
  leave_checkpoints(2);
  const std::string newest = latest_checkpoint_of(run_);
  damage(newest);
  const Exit exit = train(folder_.path());
  const std::string name = fs::path(newest).filename().string();
  EXPECT_NE(exit.output.find("checkpoint 'run/checkpoints/" + name + "' is passed over: "), std::string::npos)
      << exit.output;
  EXPECT_NE(exit.output.find("resuming from run/checkpoints/step_"), std::string::npos);
  EXPECT_EQ(exit.output.find("resuming from run/checkpoints/" + name), std::string::npos);
  expect_equal_to_uninterrupted();
}

TEST_F(ResumeSlow, with_every_checkpoint_damaged_it_exits_76_after_one_try) {
  leave_checkpoints(2);
  for (const std::string& name : checkpoints_of(run_)) damage(run_ + "/checkpoints/" + name);
  // What a killed save had not finished may be swept away; a checkpoint may not change.
  const auto whole_files = [this] {
    auto files = all_bytes_of(run_ + "/checkpoints");
    std::erase_if(files, [](const auto& file) { return file.first.find(".tmp") != std::string::npos; });
    return files;
  };
  const auto before = whole_files();
  for (int again = 0; again < 2; ++again) {
    const Exit exit = run_binary(folder_.path(), train_args());
    EXPECT_EQ(exit.code, 76);
    for (const std::string& name : checkpoints_of(run_)) {
      EXPECT_NE(exit.errors.find(name), std::string::npos) << exit.errors;
    }
    EXPECT_NE(exit.errors.find("tensors-00001.safetensors"), std::string::npos) << exit.errors;
  }
  EXPECT_EQ(whole_files(), before);
}

TEST_F(ResumeSlow, a_full_disk_at_a_periodic_save_does_not_stop_training) {
  Process process(folder_.path(), train_args());
  ASSERT_TRUE(wait_until([&] { return !latest_checkpoint_of(run_).empty(); }));
  process.limit_file_size(kFullDisk);
  const std::string warning = "could not be written, training goes on";
  ASSERT_TRUE(wait_until([&] { return count_in_log(warning) >= 2; }));
  process.limit_file_size(-1);
  const Exit exit = process.wait();
  EXPECT_EQ(exit.code, 0) << exit.errors;
  expect_equal_to_uninterrupted();
}

TEST_F(ResumeSlow, a_full_disk_at_the_last_save_exits_73_and_the_old_checkpoint_stands) {
  Process process(folder_.path(), train_args());
  ASSERT_TRUE(wait_until([&] { return !latest_checkpoint_of(run_).empty(); }));
  process.limit_file_size(kFullDisk);
  const std::string before = latest_checkpoint_of(run_);
  const Exit exit = process.wait();
  EXPECT_EQ(exit.code, 73) << exit.errors;
  EXPECT_NE(exit.errors.find("tensors-00001.safetensors"), std::string::npos) << exit.errors;
  EXPECT_EQ(latest_checkpoint_of(run_), before);
  EXPECT_EQ(run_binary(folder_.path(), {"inspect", "run", "--verify"}).code, 0);
  train(folder_.path());
  expect_equal_to_uninterrupted();
}

}  // namespace
}  // namespace fp4t::test

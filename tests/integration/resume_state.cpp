// What a run continues from: a checkpoint of another folder, and states that pass every hash but are absurd.
#include <csignal>
#include <cstring>
#include <filesystem>
#include <functional>
#include <limits>

#include "engine/store/manifest.h"
#include "tests/support/cli.h"

namespace fp4t::test {
namespace {

namespace fs = std::filesystem;

// The recipe of cli.h with two updates a rollout, so that there is something between them.
std::string two_updates() {
  const std::string one = "drop_zero_advantage: false";
  std::string text = kRecipe;
  return text.replace(text.find(one), one.size(), one + ", mini_batches: 2");
}

using Args = std::vector<std::string>;

class ResumeState : public ::testing::Test {
 protected:
  static void SetUpTestSuite() {
    done_ = new ScratchFolder;
    write_inputs(done_->path(), two_updates());
    train(done_->path());
  }
  static void TearDownTestSuite() {
    delete done_;
    done_ = nullptr;
  }
  void SetUp() override {
    write_inputs(folder_.path(), two_updates());
    copy_done();
  }

  void copy_done() {
    fs::remove_all(run_);
    fs::copy(*done_ / "run", run_, fs::copy_options::recursive);
  }
  Exit run(const Args& args) { return run_binary(folder_.path(), args); }
  // Starts a run, stops it when `dir` has a checkpoint and some steps more, and wants it stopped.
  Exit stop_in(const std::string& dir, const Args& args, int64_t steps) {
    Process process(folder_.path(), train_args(args));
    EXPECT_TRUE(wait_until([&] { return count_steps(folder_ / dir, "rl") >= steps; }));
    process.signal(SIGTERM);
    const Exit exit = process.wait();
    EXPECT_EQ(exit.code, 75) << exit.errors << exit.output;
    return exit;
  }
  // Writes a checkpoint's manifest anew, with hashes that match.
  static void change_state(const std::string& checkpoint, const std::function<void(RunState&)>& change) {
    const std::string file = checkpoint + "/manifest.json";
    Manifest manifest = parse_manifest(file, read_text(file));
    change(manifest.state);
    write_text(file, manifest_text(manifest));
  }

  inline static ScratchFolder* done_ = nullptr;
  ScratchFolder folder_;
  std::string run_ = folder_ / "run";
};

bool contains(const std::string& text, const std::string& words) {
  return text.find(words) != std::string::npos;
}

TEST_F(ResumeState, the_same_command_with_a_checkpoint_of_another_folder_continues_after_a_stop) {
  const Args args = {
      "--set", "run.dir=fresh",          "--set",           "run.resume=run/checkpoints/step_1_0_0",
      "--set", "stages.1.rl.steps=2000", "--accept-changes"};
  const Exit first = stop_in("fresh", args, 2);
  EXPECT_TRUE(contains(first.output, "resuming from run/checkpoints/step_1_0_0")) << first.output;
  EXPECT_FALSE(contains(first.output, "the rest is lost")) << "the metrics are another folder's";
  EXPECT_TRUE(contains(first.errors, "; the same command continues")) << first.errors;
  const int64_t steps = count_steps(folder_ / "fresh", "rl");
  fs::remove_all(run_);  // not needed any more
  const Exit second = stop_in("fresh", args, steps + 2);
  EXPECT_TRUE(contains(second.output, "resuming from fresh/checkpoints/step_1_" + std::to_string(steps)))
      << second.output;
  EXPECT_TRUE(contains(second.output, "run.resume: run/checkpoints/step_1_0_0 is passed over"))
      << second.output;
  int64_t expected = 1;
  for (const auto& line : metrics_of(folder_ / "fresh", "step")) EXPECT_EQ(line.at("step"), expected++);
  EXPECT_EQ(expected, count_steps(folder_ / "fresh", "rl") + 1);
}

TEST_F(ResumeState, a_finished_checkpoint_of_another_folder_gets_a_checkpoint_here) {
  const Args args = {"--set", "run.dir=fresh", "--set", "run.resume=run/checkpoints/step_1_2_0"};
  train(folder_.path(), args);
  EXPECT_EQ(latest_checkpoint_of(folder_ / "fresh"), folder_ / "fresh/checkpoints/step_1_2_0");
  fs::remove_all(run_);
  EXPECT_TRUE(contains(train(folder_.path(), args).output, "already done"));
}

TEST_F(ResumeState, a_stop_under_resume_never_does_not_promise_that_the_same_command_continues) {
  const Exit exit = stop_in(
      "fresh", {"--set", "run.dir=fresh", "--set", "run.resume=never", "--set", "stages.1.rl.steps=2000"}, 1);
  EXPECT_FALSE(contains(exit.errors, "the same command continues")) << exit.errors;
  EXPECT_TRUE(contains(exit.errors, "with run.resume: auto it continues")) << exit.errors;
}

TEST_F(ResumeState, telemetry_and_summary_of_wrong_types_do_no_harm) {
  const std::string hash = summary_of(run_).at("content_hash");
  for (const char* telemetry :
       {R"({"seconds": "x", "restarts": []})", R"({"seconds": -1e300, "restarts": 1e300})",
        R"({"seconds": null, "restarts": -7})", "[1]"}) {
    for (const char* summary : {R"({"content_hash": 5})", R"({"content_hash": null})", "[]", "5"}) {
      write_text(run_ + "/checkpoints/step_1_2_0/telemetry.json", telemetry);
      write_text(run_ + "/summary.json", summary);
      const Exit exit = train(folder_.path());
      EXPECT_EQ(exit.errors, "") << telemetry << summary;
      EXPECT_EQ(summary_of(run_).at("content_hash"), hash);
      EXPECT_GE(summary_of(run_).at("seconds").get<double>(), 0);
    }
  }
}

TEST_F(ResumeState, an_absurd_state_is_refused_by_name_and_training_takes_the_one_before) {
  const double nan = std::numeric_limits<double>::quiet_NaN();
  const struct {
    const char* field;
    std::function<void(RunState&)> change;
  } cases[] = {
      {"state.stage is 7", [](RunState& s) { s.stage = 7; }},
      {"state.step is ", [](RunState& s) { s.step = std::numeric_limits<int64_t>::max(); }},
      {"state.next_sample is ", [](RunState& s) { s.next_sample = int64_t{1} << 53; }},
      {"state.update is 1 without a rollout",
       [](RunState& s) { s.step = 1, s.update = 1, s.texts.erase("done.1"); }},
      {"state.update is 2", [](RunState& s) { s.update = 2; }},
      {"state.update is 1", [](RunState& s) { s.stage = 0, s.update = 1; }},
      {"counters.stage_samples is -7", [](RunState& s) { s.counters["stage_samples"] = -7; }},
      {"counters.stage_samples is ", [](RunState& s) { s.counters["stage_samples"] = 0x1p53; }},
      {"counters.tokens is ", [nan](RunState& s) { s.counters["tokens"] = nan; }},
      {"counters.skipped_in_a_row is 0.5", [](RunState& s) { s.counters["skipped_in_a_row"] = 0.5; }},
      {"span_steps.0", [](RunState& s) { s.texts["span_steps.0"] = "x"; }},
      {"its recipe", [](RunState& s) { s.recipe_yaml = "run: 1\n"; }},
  };
  for (const auto& c : cases) {
    copy_done();
    change_state(run_ + "/checkpoints/step_1_2_0", c.change);
    const Exit text = run({"generate", "--checkpoint", "run", "--prompt", "1+2="});
    EXPECT_EQ(text.code, 65) << c.field << text.errors << text.output;
    EXPECT_TRUE(contains(text.errors, c.field)) << c.field << " in " << text.errors;
    const Exit exit = train(folder_.path());
    EXPECT_TRUE(contains(exit.output, c.field)) << c.field << " in " << exit.output;
    EXPECT_TRUE(contains(exit.output, "step_1_2_0' is passed over")) << exit.output;
    expect_same_outcome(run_, *done_ / "run");
  }
}

// The largest step in a TensorBoard event file: records of length, checksum, protobuf and checksum, where
// field 1 is the time and field 2 the step.
uint64_t last_event_step(const std::string& file) {
  const std::string bytes = read_text(file);
  uint64_t last = 0;
  for (size_t at = 0; at + 16 <= bytes.size();) {
    uint64_t length = 0;
    std::memcpy(&length, &bytes[at], sizeof length);
    const std::string event = bytes.substr(at + 12, length);
    at += length + 16;
    if (event.size() < 10 || event[9] != 0x10) continue;
    uint64_t step = 0;
    for (size_t i = 10, shift = 0; i < event.size(); ++i, shift += 7) {
      step |= static_cast<uint64_t>(event[i] & 0x7F) << shift;
      if ((event[i] & 0x80) == 0) break;
    }
    last = std::max(last, step);
  }
  return last;
}

TEST_F(ResumeState, steps_of_a_stage_that_is_over_change_nothing_and_a_warning_says_so) {
  for (const auto& entry : fs::recursive_directory_iterator(run_)) {
    if (contains(entry.path().filename().string(), "tfevents")) fs::remove(entry.path());
  }
  const Exit exit = train(folder_.path(), {"--accept-changes", "--set", "stages.0.pretrain.steps=50", "--set",
                                           "stages.1.rl.steps=3"});
  EXPECT_TRUE(contains(exit.output, "stage 'pretrain' is over after 4 steps; that the recipe now says 50"))
      << exit.output;
  EXPECT_EQ(count_steps(run_, "pretrain"), 4);
  EXPECT_EQ(count_steps(run_, "rl"), 3);
  uint64_t last = 0;
  for (const auto& entry : fs::recursive_directory_iterator(run_)) {
    if (contains(entry.path().filename().string(), "tfevents")) {
      last = std::max(last, last_event_step(entry.path().string()));
    }
  }
  EXPECT_EQ(last, 7u);
}

TEST_F(ResumeState, a_latest_that_names_nothing_does_not_hide_the_newest) {
  for (const char* text : {"step_9_9_9\n", "garbage", ""}) {
    write_text(run_ + "/checkpoints/latest", text);
    for (const Args& args : {Args{"inspect", "run"}, Args{"generate", "--checkpoint", "run", "--prompt",
                                                          "1+2=", "--max-tokens", "2"}}) {
      const Exit exit = run(args);
      EXPECT_EQ(exit.code, 0) << args[0] << " '" << text << "': " << exit.errors;
    }
    EXPECT_TRUE(contains(run({"inspect", "run"}).output, "checkpoint run/checkpoints/step_1_2_0\n"));
    fs::remove_all(folder_ / "fresh");
    const Exit exit = train(folder_.path(), {"--set", "run.dir=fresh", "--set", "run.resume=run"});
    EXPECT_TRUE(contains(exit.output, "resuming from run/checkpoints/step_1_2_0")) << exit.output;
  }
}

}  // namespace
}  // namespace fp4t::test

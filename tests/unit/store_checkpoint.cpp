#include "engine/store/checkpoint.h"

#include <sys/resource.h>
#include <sys/wait.h>

#include <chrono>
#include <cmath>
#include <csignal>
#include <cstring>
#include <initializer_list>
#include <limits>
#include <memory>
#include <thread>

#include "gtest/gtest.h"
#include "tests/unit/store_fixture.h"

namespace fp4t::test {
namespace {

namespace fs = std::filesystem;

std::string save(const std::string& run_dir, SmallRun& run, int64_t keep = 2, StoreOptions options = {}) {
  Queue queue = Queue::cpu(1);
  return CheckpointStore(run_dir, std::move(options)).save(queue, run.tensors(), run.state(), keep);
}

void load(const std::string& path, SmallRun& run) {
  Queue queue = Queue::cpu(1);
  load_tensors(queue, path, run.tensors(), {});
}

std::vector<std::string> listing(const std::string& dir) {
  std::vector<std::string> names;
  for (const auto& entry : fs::directory_iterator(dir)) names.push_back(entry.path().filename().string());
  std::sort(names.begin(), names.end());
  return names;
}

Rollout small_rollout() {
  Rollout r;
  r.samples_per_prompt = 2;
  r.problems = {{"1+2=", "3"}, {"\xFF\x01+4=", "", 7, true}};
  r.prompts = {{1, 2, 3}, {7}};
  r.completions = {{3, 10}, {10}, {4, 4, 10}, {9}};
  const float nan = std::numeric_limits<float>::quiet_NaN();
  r.log_probs = {{-0.1f, -0.0f}, {nan}, {-1e-40f, -2.0f, -3.0f}, {-std::numeric_limits<float>::infinity()}};
  r.old_log_probs = {{-0.1f, -0.25f}, {-1}, {-1, -2, -3}, {-9}};
  r.finished = {1, 1, 1, 0};
  r.verdicts = {0, 1, 1, 2};
  r.rewards = {1, 0, 0, 0.1f};
  r.reward_parts = {{1, -0.5f}, {0, 0.25f}, {0, 0}, {0, 0.1f}};
  r.advantages = {0.5f, -0.5f, -0.05f, 0.05f};
  return r;
}

template <class T>
bool same_bits(const std::vector<T>& a, const std::vector<T>& b) {
  return a.size() == b.size() && (a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(T)) == 0);
}

template <class T>
bool same_bits(const std::vector<std::vector<T>>& a, const std::vector<std::vector<T>>& b) {
  if (a.size() != b.size()) return false;
  for (size_t i = 0; i < a.size(); ++i) {
    if (!same_bits(a[i], b[i])) return false;
  }
  return true;
}

TEST(Checkpoint, tensors_and_state_come_back_exactly) {
  TempFolder dir;
  SmallRun written(5), loaded(6);
  written.state().counters = {{"third", 1.0 / 3.0},
                              {"tiny", 5e-324},
                              {"minus zero", -0.0},
                              {"large", 1.7976931348623157e308},
                              {"infinite", -std::numeric_limits<double>::infinity()},
                              {"nan", std::numeric_limits<double>::quiet_NaN()}};
  written.state().texts = {{"utf-8", "\u00e9\n\"x\""}, {"bytes", std::string("\xFF\x00\x80", 3)}};
  written.state().lineage = {"step 3: optimizer.learning_rate: 0.1 -> 0.2"};
  const std::string path = save(dir.path(), written);
  load(path, loaded);
  EXPECT_TRUE(loaded.same_tensors(written));

  const CheckpointInfo info = read_checkpoint_info(path, true);
  const RunState &a = written.state(), &b = info.state;
  EXPECT_EQ(a.step, b.step);
  EXPECT_EQ(a.attempted_updates, b.attempted_updates);
  EXPECT_EQ(a.applied_updates, b.applied_updates);
  EXPECT_EQ(a.next_sample, b.next_sample);
  EXPECT_EQ(a.metrics_lines, b.metrics_lines);
  ASSERT_EQ(a.counters.size(), b.counters.size());
  for (const auto& [name, value] : a.counters) {
    EXPECT_EQ(std::memcmp(&value, &b.counters.at(name), sizeof value), 0) << name;
  }
  EXPECT_EQ(a.texts, b.texts);
  EXPECT_EQ(a.lineage, b.lineage);
  EXPECT_EQ(a.recipe_yaml, b.recipe_yaml);
  EXPECT_EQ(a.precision_hash, b.precision_hash);
  EXPECT_EQ(a.telemetry_json, b.telemetry_json);
  EXPECT_EQ(b.rollout.size(), 0);
  EXPECT_EQ(info.tensor_names.size(), 4u);
  EXPECT_TRUE(info.notes.empty());
}

TEST(Checkpoint, a_rollout_in_progress_comes_back_bit_for_bit) {
  TempFolder dir;
  SmallRun run(1);
  run.state().stage = 1;
  run.state().update = 3;
  run.state().rollout = small_rollout();
  const std::string path = save(dir.path(), run);
  EXPECT_EQ(fs::path(path).filename(), "step_1_1_3");
  const Rollout &a = run.state().rollout, b = read_checkpoint_info(path, true).state.rollout;
  EXPECT_EQ(a.samples_per_prompt, b.samples_per_prompt);
  ASSERT_EQ(a.problems.size(), b.problems.size());
  for (size_t i = 0; i < a.problems.size(); ++i) {
    EXPECT_EQ(a.problems[i].prompt, b.problems[i].prompt);
    EXPECT_EQ(a.problems[i].answer, b.problems[i].answer);
    EXPECT_EQ(a.problems[i].max_tokens, b.problems[i].max_tokens);
    EXPECT_EQ(a.problems[i].conversation, b.problems[i].conversation);
  }
  EXPECT_TRUE(same_bits(a.prompts, b.prompts));
  EXPECT_TRUE(same_bits(a.completions, b.completions));
  EXPECT_TRUE(same_bits(a.log_probs, b.log_probs));
  EXPECT_TRUE(same_bits(a.old_log_probs, b.old_log_probs));
  EXPECT_TRUE(same_bits(a.reference_log_probs, b.reference_log_probs));
  EXPECT_TRUE(same_bits(a.finished, b.finished));
  EXPECT_TRUE(same_bits(a.verdicts, b.verdicts));
  EXPECT_TRUE(same_bits(a.rewards, b.rewards));
  EXPECT_EQ(a.reward_parts, b.reward_parts);
  EXPECT_TRUE(same_bits(a.advantages, b.advantages));
  SmallRun loaded(2);
  load(path, loaded);  // the rollout's arrays are no left-overs
  EXPECT_TRUE(loaded.same_tensors(run));
}

TEST(Checkpoint, a_rollout_that_contradicts_itself_is_refused) {
  TempFolder dir;
  SmallRun run(1);
  run.state().rollout = small_rollout();
  run.state().rollout.rewards.pop_back();
  const std::string path = save(dir.path(), run);
  const std::string message = error_of([&] { read_checkpoint_info(path, true); });
  EXPECT_NE(message.find("rollout"), std::string::npos) << message;
}

TEST(Checkpoint, equal_content_gives_equal_bytes_but_for_telemetry) {
  TempFolder a, b;
  SmallRun first(5), second(5);
  first.state().rollout = second.state().rollout = small_rollout();
  second.state().telemetry_json = "{\"seconds\": 2}";
  const std::string path_a = save(a.path(), first), path_b = save(b.path(), second);
  ASSERT_EQ(listing(path_a), listing(path_b));
  for (const std::string& name : listing(path_a)) {
    EXPECT_EQ(file_text(path_a + "/" + name) == file_text(path_b + "/" + name), name != "telemetry.json")
        << name;
    EXPECT_EQ(file_text(path_a + "/" + name).find(a.path()), std::string::npos) << name;
  }
}

TEST(Checkpoint, content_hash_depends_on_content_and_not_on_shards_or_folders) {
  TempFolder dir;
  StoreOptions tiny;
  tiny.shard_bytes = 300;
  SmallRun run(5);
  run.state().rollout = small_rollout();
  const std::string whole = save(dir / "a", run), cut = save(dir / "b", run, 2, tiny);
  EXPECT_EQ(listing(whole).size(), 3u);
  EXPECT_GT(listing(cut).size(), 4u);
  const std::string hash = read_checkpoint_info(whole, true).content_hash;
  EXPECT_EQ(hash, read_checkpoint_info(cut, true).content_hash);
  EXPECT_EQ(hash.size(), 16u);

  int folder = 0;
  const auto hash_after = [&](const auto& change) {
    SmallRun other(5);
    other.state().rollout = small_rollout();
    change(other);
    return read_checkpoint_info(save(dir / std::to_string(folder++), other), true).content_hash;
  };
  EXPECT_EQ(hash, hash_after([](SmallRun& r) { r.state().recipe_yaml = "run: {dir: elsewhere}"; }));
  EXPECT_EQ(hash, hash_after([](SmallRun& r) { r.state().telemetry_json = "[]"; }));
  EXPECT_NE(hash, hash_after([](SmallRun& r) { r.tensors()[1].view.as<float>()[7] *= -1.0f; }));
  EXPECT_NE(hash, hash_after([](SmallRun& r) { r.state().counters["loss"] += 1e-16; }));
  EXPECT_NE(hash, hash_after([](SmallRun& r) { r.state().counters["skips"] = -0.0; }));
  EXPECT_NE(hash, hash_after([](SmallRun& r) { r.state().next_sample++; }));
  EXPECT_NE(hash, hash_after([](SmallRun& r) { r.state().precision_hash = "f"; }));
  EXPECT_NE(hash, hash_after([](SmallRun& r) { r.state().lineage.push_back("x"); }));
  EXPECT_NE(hash, hash_after([](SmallRun& r) { r.state().rollout.rewards[0] = 0.5f; }));
  EXPECT_NE(hash, hash_after([](SmallRun& r) { r.state().rollout.problems[0].answer = "4"; }));
}

TEST(Checkpoint, older_ones_beyond_keep_are_removed_once_the_new_one_is_safe) {
  TempFolder dir;
  for (const int64_t step : {1, 2, 10, 11}) {
    SmallRun run(step);
    save(dir.path(), run);
  }
  EXPECT_EQ(listing(dir / "checkpoints"), (std::vector<std::string>{"latest", "step_0_10_0", "step_0_11_0"}));
  EXPECT_EQ(file_text(dir / "checkpoints/latest"), "step_0_11_0\n");
  std::vector<std::string> notes;
  EXPECT_EQ(CheckpointStore(dir.path()).newest(&notes), dir / "checkpoints/step_0_11_0");
  EXPECT_TRUE(notes.empty());
}

TEST(Checkpoint, saving_again_under_the_same_name_replaces) {
  TempFolder dir;
  SmallRun first(5), second(5), loaded(9);
  second.tensors()[1].view.as<float>()[0] = 42;
  save(dir.path(), first);
  load(save(dir.path(), second), loaded);
  EXPECT_TRUE(loaded.same_tensors(second));
  EXPECT_EQ(listing(dir / "checkpoints"), (std::vector<std::string>{"latest", "step_0_5_0"}));
}

TEST(Checkpoint, a_run_that_fell_back_does_not_count_the_folders_ahead_of_it) {
  TempFolder dir;
  for (const int64_t step : {10, 20, 12}) {  // 20 turned out damaged, the run went on from 10
    SmallRun run(step);
    save(dir.path(), run);
    if (step == 20) fs::resize_file(dir / "checkpoints/step_0_20_0/manifest.json", 100);
  }
  std::vector<std::string> notes;
  CheckpointStore store(dir.path());
  EXPECT_EQ(store.newest(&notes), dir / "checkpoints/step_0_12_0");
  EXPECT_TRUE(notes.empty());
  fs::remove_all(dir / "checkpoints/step_0_12_0");
  EXPECT_EQ(store.newest(&notes), dir / "checkpoints/step_0_10_0");
}

TEST(Checkpoint, an_empty_run_folder_has_none) {
  TempFolder dir;
  std::vector<std::string> notes;
  EXPECT_EQ(CheckpointStore(dir / "new/run").newest(&notes), "");
  EXPECT_TRUE(notes.empty());
}

TEST(Checkpoint, loading_wants_every_name_type_and_shape) {
  TempFolder dir;
  SmallRun run(5);
  const std::string path = save(dir.path(), run);
  Queue queue = Queue::cpu(1);
  const auto failure = [&](std::vector<NamedTensor> tensors, const std::vector<std::string>& optional = {}) {
    return error_of([&] { load_tensors(queue, path, tensors, optional); });
  };
  EXPECT_EQ(failure(run.tensors()), "");

  auto tensors = run.tensors();
  tensors.pop_back();
  EXPECT_NE(failure(tensors).find("'layers.0.router.load' is unknown"), std::string::npos);
  EXPECT_EQ(failure(tensors, {"layers.0.router"}), "");

  tensors = run.tensors();
  HostTensor extra(DType::kF32, {1});
  tensors.push_back({"extra", extra.view()});
  EXPECT_NE(failure(tensors).find("'extra' is missing"), std::string::npos);
  EXPECT_EQ(failure(tensors, {"extra"}), "");

  tensors = run.tensors();
  tensors[0].view.shape = {7, 33};
  EXPECT_NE(failure(tensors).find("'embed.weight' is BF16 [33, 7], this run's is BF16 [7, 33]"),
            std::string::npos);
  tensors = run.tensors();
  tensors[3].view.dtype = DType::kF64;
  EXPECT_NE(failure(tensors).find("'layers.0.router.load' is I64 [3], this run's is F64 [3]"),
            std::string::npos);
}

TEST(Checkpoint, an_unusable_telemetry_file_is_noted_and_harmless) {
  TempFolder dir;
  SmallRun run(5);
  const std::string path = save(dir.path(), run);
  for (const char* text : {"{", "\xFF"}) {
    set_file(path + "/telemetry.json", text);
    const CheckpointInfo info = read_checkpoint_info(path, true);
    EXPECT_EQ(info.state.telemetry_json, "{}");
    ASSERT_EQ(info.notes.size(), 1u);
    EXPECT_NE(info.notes[0].find("telemetry.json"), std::string::npos);
  }
  fs::remove(path + "/telemetry.json");
  EXPECT_EQ(read_checkpoint_info(path, true).notes.size(), 1u);
}

TEST(Checkpoint, inspection_lists_tensors_and_ends_with_the_content_hash) {
  TempFolder dir;
  SmallRun run(5);
  run.state().lineage = {"step 3: optimizer.learning_rate: 0.1 -> 0.2"};
  const std::string path = save(dir.path(), run);
  const std::string text = describe_checkpoint(path, true);
  const std::string last = "\ncontent hash: " + read_checkpoint_info(path, false).content_hash + "\n";
  ASSERT_GT(text.size(), last.size());
  EXPECT_EQ(text.substr(text.size() - last.size()), last);
  for (const char* part : {"embed.weight", "BF16", "[33, 7]", "loss = ", "0.1 -> 0.2", "step 5"}) {
    EXPECT_NE(text.find(part), std::string::npos) << part << " in\n" << text;
  }
  EXPECT_EQ(find_checkpoint(path), path);
  EXPECT_EQ(find_checkpoint(dir.path()), path);
  EXPECT_EQ(find_checkpoint(dir / "checkpoints"), path);
  EXPECT_THROW(find_checkpoint(dir / "elsewhere"), MissingInputError);
}

TEST(Checkpoint, a_path_that_cannot_be_looked_at_is_told_with_the_reason) {
  TempFolder dir;
  fs::create_directory_symlink("round", dir / "round");
  EXPECT_NE(error_of([&] { find_checkpoint(dir / "round"); }).find("oo many"), std::string::npos);
  const std::string long_path(5000, 'x');
  const std::string text = error_of([&] { find_checkpoint(long_path); });
  EXPECT_NE(text.find("too long"), std::string::npos) << text;
  EXPECT_LT(text.size(), 1200u);
  EXPECT_THROW(find_checkpoint(dir / "round"), MissingInputError);
}

// Gives up root's right to read everything.
class Unprivileged {
 public:
  Unprivileged() : user_(::geteuid()) { EXPECT_EQ(::seteuid(user_ == 0 ? 65534 : user_), 0); }
  ~Unprivileged() { EXPECT_EQ(::seteuid(user_), 0); }

 private:
  uid_t user_;
};

TEST(Checkpoint, a_folder_that_cannot_be_listed_is_not_one_without_checkpoints) {
  TempFolder dir;
  SmallRun run(5);
  save(dir.path(), run);
  fs::permissions(dir.path(), fs::perms::all);
  CheckpointStore store(dir.path());
  fs::permissions(dir / "checkpoints", fs::perms::none);
  {
    const Unprivileged scope;
    const std::string found = error_of([&] { find_checkpoint(dir.path()); });
    EXPECT_NE(found.find("cannot list '" + (dir / "checkpoints") + "': Permission denied"), std::string::npos)
        << found;
    std::vector<std::string> notes;
    EXPECT_THROW(store.newest(&notes), NoCheckpointError);
    Queue queue = Queue::cpu(1);
    EXPECT_THROW(store.save(queue, run.tensors(), run.state(), 1), SaveError);
  }
  fs::permissions(dir / "checkpoints", fs::perms::owner_all);
  std::vector<std::string> notes;
  EXPECT_EQ(store.newest(&notes), dir / "checkpoints/step_0_5_0");
}

TEST(Checkpoint, a_small_disk_is_announced) {
  TempFolder dir;
  const CheckpointStore store(dir.path());
  EXPECT_EQ(store.space_warning(1, 2), "");
  EXPECT_NE(store.space_warning(int64_t{1} << 60, 2).find("bytes free"), std::string::npos);
}

// A file size limit stands for the full disk: write() fails half way.
TEST(Checkpoint, a_full_disk_is_a_save_error_and_leaves_the_previous_one_intact) {
  TempFolder dir;
  SmallRun first(1);
  save(dir.path(), first);
  const pid_t child = ::fork();
  if (child == 0) {
    std::signal(SIGXFSZ, SIG_IGN);
    SmallRun second(2);
    int failures = 0;
    for (const rlim_t limit : std::initializer_list<rlim_t>{0, 8, 500, 900, 1100}) {
      const rlimit bytes{limit, RLIM_INFINITY};
      if (::setrlimit(RLIMIT_FSIZE, &bytes) != 0) ::_exit(100);
      try {
        save(dir.path(), second, 1);
      } catch (const SaveError&) {
        ++failures;
      }
    }
    ::_exit(failures);
  }
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  ASSERT_TRUE(WIFEXITED(status));
  EXPECT_EQ(WEXITSTATUS(status), 5);
  EXPECT_EQ(listing(dir / "checkpoints"), (std::vector<std::string>{"latest", "step_0_1_0"}));
  SmallRun loaded(9);
  std::vector<std::string> notes;
  load(CheckpointStore(dir.path()).newest(&notes), loaded);
  EXPECT_TRUE(loaded.same_tensors(first));
  EXPECT_TRUE(notes.empty());
}

TEST(RunLock, a_folder_made_for_it_goes_with_it_while_nothing_is_written) {
  TempFolder dir;
  {
    const RunLock lock(dir / "a/b/run");
    const CheckpointStore store(dir / "a/b/run");
    EXPECT_TRUE(fs::exists(dir / "a/b/run/checkpoints"));
  }
  EXPECT_TRUE(listing(dir.path()).empty());
  fs::create_directory(dir / "a");
  { const RunLock lock(dir / "a/run"); }
  EXPECT_EQ(listing(dir.path()), std::vector<std::string>{"a"}) << "it was there before";
  EXPECT_TRUE(listing(dir / "a").empty());
  {
    const RunLock lock(dir / "a/run");
    set_file(dir / "a/run/log.txt", "begun\n");
  }
  EXPECT_EQ(listing(dir / "a/run"), (std::vector<std::string>{"lock", "log.txt"}));
  fs::create_directory(dir / "own");
  { const RunLock lock(dir / "own"); }
  EXPECT_EQ(listing(dir / "own"), std::vector<std::string>{"lock"});
}

TEST(RunLock, who_waited_for_a_lock_that_went_away_holds_a_new_one) {
  TempFolder dir;
  auto first = std::make_unique<RunLock>(dir / "run");
  std::unique_ptr<RunLock> second;
  std::thread waits([&] { second = std::make_unique<RunLock>(dir / "run"); });
  std::this_thread::sleep_for(std::chrono::milliseconds(200));
  first.reset();
  waits.join();
  EXPECT_TRUE(fs::exists(dir / "run/lock"));
  EXPECT_THROW(RunLock(dir / "run"), RecipeError) << "two hold it";
}

TEST(Checkpoint, the_lock_refuses_a_second_process_and_names_the_first) {
  TempFolder dir;
  {
    const RunLock lock(dir / "run");
    const std::string message = error_of([&] { RunLock second(dir / "run"); });
    EXPECT_NE(message.find("process " + std::to_string(::getpid()) + ";"), std::string::npos) << message;
    EXPECT_THROW(RunLock(dir / "run"), RecipeError);
  }
  EXPECT_NO_THROW(RunLock(dir / "run"));
}

TEST(Checkpoint, a_killed_process_leaves_no_lock) {
  TempFolder dir;
  int ready[2];
  ASSERT_EQ(::pipe(ready), 0);
  const pid_t child = ::fork();
  if (child == 0) {
    const RunLock lock(dir.path());
    (void)!::write(ready[1], "x", 1);
    ::pause();
  }
  char byte;
  ASSERT_EQ(::read(ready[0], &byte, 1), 1);
  const std::string message = error_of([&] { RunLock second(dir.path()); });
  EXPECT_NE(message.find("process " + std::to_string(child) + ";"), std::string::npos) << message;
  ::kill(child, SIGKILL);
  ::waitpid(child, nullptr, 0);
  EXPECT_NO_THROW(RunLock(dir.path()));
}

}  // namespace
}  // namespace fp4t::test

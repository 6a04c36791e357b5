// Every file of a checkpoint, damaged in every way: a named error, and the one before it is used.
#include <random>

#include "engine/store/checkpoint.h"
#include "gtest/gtest.h"
#include "tests/unit/store_fixture.h"

namespace fp4t::test {
namespace {

namespace fs = std::filesystem;

class Damage : public testing::Test {
 protected:
  Damage() : queue_(Queue::cpu(1)), store_(dir_.path(), small_shards()), good_(10), newest_(20) {
    good_path_ = store_.save(queue_, good_.tensors(), good_.state(), 2);
    path_ = store_.save(queue_, newest_.tensors(), newest_.state(), 2);
  }

  static StoreOptions small_shards() {
    StoreOptions options;
    options.shard_bytes = 600;
    return options;
  }

  // Files under hash, all but telemetry.json.
  std::vector<std::string> files() const {
    std::vector<std::string> names;
    for (const auto& entry : fs::directory_iterator(path_)) {
      const std::string name = entry.path().filename().string();
      if (name != "telemetry.json") names.push_back(name);
    }
    std::sort(names.begin(), names.end());
    return names;
  }

  // The damage done, the error names the file, and the store falls back and says so.
  void expect_refused(const std::string& name, const std::string& what) {
    const std::string message = error_of([&] { read_checkpoint_info(path_, true); });
    EXPECT_NE(message.find(name), std::string::npos) << what << ": '" << message << "'";
    if (name != "manifest.json") {
      EXPECT_NE(message.find("tensor '"), std::string::npos) << what << ": '" << message << "'";
    }
    std::vector<std::string> notes;
    EXPECT_EQ(store_.newest(&notes), good_path_) << what;
    ASSERT_EQ(notes.size(), 1u) << what;
    EXPECT_NE(notes[0].find(path_), std::string::npos) << what << ": " << notes[0];
    EXPECT_NE(notes[0].find(name), std::string::npos) << what << ": " << notes[0];
  }

  TempFolder dir_;
  Queue queue_;
  CheckpointStore store_;
  SmallRun good_, newest_;
  std::string good_path_, path_;
};

TEST_F(Damage, any_flipped_bit_is_found) {
  ASSERT_GE(files().size(), 3u);
  std::mt19937_64 random(7);
  for (const std::string& name : files()) {
    const std::string file = path_ + "/" + name, original = file_text(file);
    for (int i = 0; i < 60; ++i) {
      const size_t bit = random() % (original.size() * 8);
      std::string flipped = original;
      flipped[bit / 8] = static_cast<char>(flipped[bit / 8] ^ (1 << (bit % 8)));
      set_file(file, flipped);
      const std::string message = error_of([&] { read_checkpoint_info(path_, true); });
      EXPECT_NE(message.find(name), std::string::npos) << name << " bit " << bit << ": " << message;
    }
    set_file(file, original);
  }
  EXPECT_EQ(error_of([&] { read_checkpoint_info(path_, true); }), "");
}

TEST_F(Damage, a_flipped_bit_of_each_file_falls_back) {
  for (const std::string& name : files()) {
    const std::string file = path_ + "/" + name, original = file_text(file);
    std::string flipped = original;
    flipped[flipped.size() - 9] = static_cast<char>(flipped[flipped.size() - 9] ^ 4);
    set_file(file, flipped);
    expect_refused(name, "flip in " + name);
    set_file(file, original);
  }
}

TEST_F(Damage, a_truncated_byte_of_each_file_falls_back) {
  for (const std::string& name : files()) {
    const std::string file = path_ + "/" + name, original = file_text(file);
    for (const size_t size : {original.size() - 1, original.size() / 2, size_t{3}, size_t{0}}) {
      set_file(file, original.substr(0, size));
      expect_refused(name, name + " cut to " + std::to_string(size));
    }
    set_file(file, original + "\n");
    expect_refused(name, name + " with a byte more");
    set_file(file, original);
  }
}

TEST_F(Damage, each_deleted_file_falls_back) {
  for (const std::string& name : files()) {
    const std::string file = path_ + "/" + name, original = file_text(file);
    fs::remove(file);
    expect_refused(name, name + " deleted");
    set_file(file, original);
  }
}

TEST_F(Damage, swapped_shards_fall_back) {
  const std::string first = path_ + "/tensors-00001.safetensors",
                    second = path_ + "/tensors-00002.safetensors";
  fs::rename(first, path_ + "/x");
  fs::rename(second, first);
  fs::rename(path_ + "/x", second);
  expect_refused("tensors-0000", "swap");
}

TEST_F(Damage, shards_of_another_checkpoint_fall_back) {
  for (const std::string& name : files()) {
    if (name == "manifest.json") continue;
    const std::string file = path_ + "/" + name, original = file_text(file);
    set_file(file, file_text(good_path_ + "/" + name));
    expect_refused(name, name + " of the older checkpoint");
    set_file(file, original);
  }
}

TEST_F(Damage, an_older_manifest_over_newer_tensors_falls_back) {
  set_file(path_ + "/manifest.json", file_text(good_path_ + "/manifest.json"));
  expect_refused("tensors-0000", "old manifest");
}

TEST_F(Damage, a_damaged_or_absent_latest_does_not_hide_the_newest) {
  const std::string latest = dir_ / "checkpoints/latest";
  for (const char* text : {"", "../../etc", "step_0_20_0/..", "step_0_99_0\n", "\xFF\xFF"}) {
    set_file(latest, text);
    std::vector<std::string> notes;
    EXPECT_EQ(store_.newest(&notes), path_) << text;
  }
  fs::remove(latest);
  std::vector<std::string> notes;
  EXPECT_EQ(store_.newest(&notes), path_);
}

TEST_F(Damage, a_damaged_or_absent_latest_means_what_training_would_try_first) {
  const std::string latest = dir_ / "checkpoints/latest";
  for (const char* text : {"", "step_0_99_0\n", "\xFF\xFF"}) {
    set_file(latest, text);
    EXPECT_EQ(find_checkpoint(dir_.path()), path_) << text;
    EXPECT_EQ(find_checkpoint(dir_ / "checkpoints"), path_) << text;
  }
  fs::remove(latest);
  EXPECT_EQ(find_checkpoint(dir_.path()), path_);
  set_file(latest, "step_0_10_0\n");
  EXPECT_EQ(find_checkpoint(dir_.path()), good_path_);
}

TEST_F(Damage, damaged_checkpoints_are_not_counted_as_kept) {
  SmallRun next(30), later(40);
  const std::string shard = path_ + "/tensors-00001.safetensors", original = file_text(shard);
  set_file(shard, original.substr(0, original.size() - 1));
  const std::string third = store_.save(queue_, next.tensors(), next.state(), 2);
  EXPECT_TRUE(fs::exists(good_path_)) << "the only good one before the new one";
  EXPECT_TRUE(fs::exists(path_)) << "not behind the last kept one";
  set_file(third + "/manifest.json", "{}");
  store_.save(queue_, later.tensors(), later.state(), 2);
  EXPECT_TRUE(fs::exists(good_path_));
  set_file(shard, original);
  SmallRun last(50);
  store_.save(queue_, last.tensors(), last.state(), 3);
  EXPECT_TRUE(fs::exists(path_));
  EXPECT_FALSE(fs::exists(good_path_)) << "two good ones stand before it";
}

TEST_F(Damage, what_a_check_of_the_state_refuses_is_passed_over) {
  std::vector<std::string> notes;
  const auto refuse = [](const CheckpointInfo& info) {
    if (info.state.step == 20) throw BadDataError("absurd");
  };
  EXPECT_EQ(store_.newest(&notes, refuse), good_path_);
  ASSERT_EQ(notes.size(), 1u);
  EXPECT_NE(notes[0].find("absurd"), std::string::npos) << notes[0];
}

TEST_F(Damage, when_none_is_readable_it_ends_after_one_try) {
  fs::resize_file(path_ + "/manifest.json", 10);
  fs::remove(good_path_ + "/tensors-00001.safetensors");
  std::vector<std::string> notes;
  try {
    store_.newest(&notes);
    ADD_FAILURE() << "a damaged checkpoint was taken";
  } catch (const NoCheckpointError& error) {
    EXPECT_EQ(error.code(), ExitCode::kNoCheckpoint);
    const std::string message = error.what();
    EXPECT_NE(message.find(path_ + "/manifest.json"), std::string::npos) << message;
    EXPECT_NE(message.find(good_path_ + "/tensors-00001.safetensors"), std::string::npos) << message;
  }
  EXPECT_EQ(notes.size(), 2u);
}

TEST_F(Damage, damage_after_verification_is_found_while_loading) {
  const std::string file = path_ + "/tensors-00001.safetensors";
  std::string text = file_text(file);
  text.back() = static_cast<char>(text.back() ^ 1);
  set_file(file, text);
  SmallRun loaded(1);
  const std::string message = error_of([&] { load_tensors(queue_, path_, loaded.tensors(), {}); });
  EXPECT_NE(message.find("tensors-00001.safetensors': tensor '"), std::string::npos) << message;
  EXPECT_NE(error_of([&] { describe_checkpoint(path_, true); }), "");
  EXPECT_EQ(error_of([&] { describe_checkpoint(path_, false); }), "");
}

}  // namespace
}  // namespace fp4t::test

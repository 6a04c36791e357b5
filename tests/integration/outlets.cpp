// What a run shows and leaves behind.
#include <filesystem>
#include <regex>
#include <set>
#include <sstream>

#include "tests/support/runs.h"

namespace fp4t::test {
namespace {

namespace fs = std::filesystem;

class Outlets : public ::testing::Test {
 protected:
  static void SetUpTestSuite() {
    folder_ = new ScratchFolder;
    write_inputs(folder_->path(), kTinyRecipe);
    output_ = train(folder_->path()).output;
  }
  static void TearDownTestSuite() {
    delete folder_;
    folder_ = nullptr;
  }
  static std::string run() { return *folder_ / "run"; }
  static int64_t lines_like(const std::string& pattern) {
    std::istringstream lines(output_);
    int64_t count = 0;
    for (std::string line; std::getline(lines, line);) count += std::regex_search(line, std::regex(pattern));
    return count;
  }

  inline static ScratchFolder* folder_ = nullptr;
  inline static std::string output_;
};

TEST_F(Outlets, one_plain_progress_line_a_step) {
  EXPECT_EQ(lines_like("^pretrain step=[0-9]+/16 loss=[0-9.]+ grad_norm=[0-9.]+ lr=.* tok/s=[0-9]+ eta="),
            16);
  EXPECT_EQ(
      lines_like("^rl step=[0-9]+/13 reward=[0-9.]+ grad_norm=[0-9.]+ lr=.*logprob_equal=1.0000 tok/s="), 13);
  EXPECT_EQ(output_.find('\r'), std::string::npos) << "not on a terminal";
  EXPECT_EQ(output_.find('\033'), std::string::npos) << "not on a terminal";
}

TEST_F(Outlets, metrics_are_one_object_a_step_after_a_header) {
  const auto lines = metrics_of(run());
  ASSERT_FALSE(lines.empty());
  EXPECT_EQ(lines[0].at("kind"), "header");
  EXPECT_EQ(lines[0].at("seed"), 3);
  for (const char* stage : {"pretrain", "rl"}) {
    const auto steps = metrics_of(run(), "step", stage);
    ASSERT_EQ(steps.size(), stage == std::string("rl") ? 13u : 16u);
    for (size_t i = 0; i < steps.size(); ++i) EXPECT_EQ(steps[i].at("step"), i + 1);
  }
}

TEST_F(Outlets, metrics_hold_no_times_rates_places_or_command_lines) {
  const std::set<std::string> allowed = {"learning_rate"};
  for (const auto& line : metrics_of(run())) {
    for (const auto& [name, value] : line.items()) {
      const bool suspicious =
          std::regex_search(name, std::regex("second|time|speed|rate|pid|host|command|dir"));
      EXPECT_TRUE(!suspicious || allowed.count(name)) << name;
    }
  }
}

// `name`, "name", `name.<of>`, or `name_first`, `_second`.
bool names(const std::string& page, const std::string& key) {
  const std::string head = key.substr(0, key.find('.'));
  const auto has = [&](const std::string& text) { return page.find(text) != std::string::npos; };
  bool found = has("`" + head + "`") || has("`" + head + ".") || has('"' + head + '"');
  for (size_t at = head.find('_'); !found && at != std::string::npos; at = head.find('_', at + 1)) {
    found = has("`" + head.substr(at) + "`") && has("`" + head.substr(0, at));
  }
  return found;
}

TEST_F(Outlets, every_key_of_metrics_and_summary_has_its_meaning_in_the_readme) {
  const std::string page = read_text(from_environment("FP4T_TEST_SOURCE") + "/engine/metrics/README.md");
  std::set<std::string> keys;
  for (const auto& line : metrics_of(run())) {
    for (const auto& [name, value] : line.items()) keys.insert(name);
  }
  EXPECT_GT(keys.size(), 60u);
  const auto summary = summary_of(run());
  for (const auto& [name, value] : summary.items()) keys.insert(name);
  for (const std::string& key : keys) EXPECT_TRUE(names(page, key)) << key;
}

TEST_F(Outlets, every_step_says_how_many_log_probabilities_are_equal) {
  EXPECT_EQ(step_figures(run(), "rl", "logprob_equal_fraction"), std::vector<double>(13, 1.0));
}

TEST_F(Outlets, the_summary_holds_what_scripts_look_for) {
  const auto summary = summary_of(run());
  for (const char* name :
       {"seconds", "text_loss_start", "text_loss_end", "accuracy_before_rl", "accuracy_after_rl",
        "greedy_accuracy_before_rl", "greedy_accuracy_after_rl", "logprob_equal_fraction_min"}) {
    EXPECT_TRUE(summary.contains(name) && summary.at(name).is_number()) << name << " in " << summary;
  }
  EXPECT_LT(summary.at("text_loss_end"), summary.at("text_loss_start"));
  EXPECT_TRUE(std::regex_match(summary.at("content_hash").get<std::string>(), std::regex("[0-9a-f]{16}")));
}

TEST_F(Outlets, the_report_stands_alone_with_its_curves) {
  const std::string report = read_text(run() + "/report.html");
  EXPECT_NE(report.find("<svg"), std::string::npos);
  for (const char* outside : {"<script src", "<link", "<img src=\"http", "@import", "url("}) {
    EXPECT_EQ(report.find(outside), std::string::npos) << outside;
  }
}

TEST_F(Outlets, tensorboard_gets_one_event_file_a_process) {
  int files = 0;
  for (const auto& entry : fs::directory_iterator(run() + "/tensorboard")) {
    files += entry.path().filename().string().rfind("events.out.tfevents.", 0) == 0;
    EXPECT_GT(entry.file_size(), 1000u);
  }
  EXPECT_EQ(files, 1);
}

TEST_F(Outlets, recipe_and_plan_of_the_run_stand_in_its_folder) {
  const Exit again = run_binary(folder_->path(), {"print-config", "--config", "run/recipe.yaml"});
  EXPECT_EQ(again.output, read_text(run() + "/recipe.yaml")) << again.errors;
  EXPECT_EQ(read_text(run() + "/plan.txt"),
            run_binary(folder_->path(), {"plan", "--config", "run/recipe.yaml"}).output);
  EXPECT_FALSE(nlohmann::json::parse(read_text(run() + "/plan.json")).empty());
}

}  // namespace
}  // namespace fp4t::test

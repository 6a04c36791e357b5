// The commands from the outside: what they print, their exit codes, and that bad input gets an answer.
#include <filesystem>
#include <random>
#include <regex>
#include <sstream>

#include "tests/support/cli.h"

namespace fp4t::test {
namespace {

namespace fs = std::filesystem;

// Commands -------------------------------------------------------------------------------------------

TEST_F(Cli, version_and_help_exit_0) {
  EXPECT_TRUE(std::regex_match(run({"--version"}).output, std::regex("fp4train [0-9]+\\.[0-9]+\\.[0-9]+\n")));
  const Exit help = run({"--help"});
  EXPECT_EQ(help.code, 0);
  for (const char* word : {"validate", "print-config", "plan", "schema", "inspect", "generate", "selfcheck",
                           "report", "evaluate", "--set", "--dry-run", "--accept-changes"}) {
    EXPECT_NE(help.output.find(word), std::string::npos) << word;
  }
}

TEST_F(Cli, a_wrong_command_line_exits_2_and_says_where_help_is) {
  EXPECT_ANSWER(run({}), 2, "--help");
  EXPECT_ANSWER(run({"trian"}), 2, "trian");
  EXPECT_ANSWER(run({"--config"}), 2, "--config");
  EXPECT_ANSWER(run({"validate"}), 2, "--config");
  EXPECT_ANSWER(run({"inspect"}), 2, "dir");
  EXPECT_ANSWER(run({"generate", "--checkpoint", "run"}), 2, "--prompt");
  EXPECT_ANSWER(run({"generate", "--checkpoint", "run", "--prompt", "a", "--samples", "0"}), 2, "--samples");
  EXPECT_ANSWER(run({"generate", "--checkpoint", "run", "--prompt", "a", "--seed", "-1"}), 2, "--seed");
  EXPECT_ANSWER(run({"validate", "--config", "recipe.yaml", "--set", "run.seed"}), 2, "run.seed");
}

TEST_F(Cli, validate_accepts_and_computes_nothing) {
  EXPECT_ANSWER(run({"validate", "--config", "recipe.yaml"}), 0, "recipe.yaml: valid");
  EXPECT_FALSE(fs::exists(run_));
}

TEST_F(Cli, print_config_feeds_back) {
  const std::string printed = run({"print-config", "--config", "recipe.yaml"}).output;
  write_text(folder_ / "printed.yaml", printed);
  EXPECT_EQ(run({"print-config", "--config", "printed.yaml"}).output, printed);
  EXPECT_EQ(run({"plan", "--config", "printed.yaml"}).output,
            run({"plan", "--config", "recipe.yaml"}).output);
}

TEST_F(Cli, print_config_of_a_preset_shows_its_rules_and_feeds_back) {
  write_text(folder_ / "recipe.yaml", std::string(kTinyModel) + "precision: {preset: rl_nvfp4}\n" + kStages);
  const std::string printed = run({"print-config", "--config", "recipe.yaml"}).output;
  EXPECT_NE(printed.find("format: nvfp4"), std::string::npos) << printed;
  write_text(folder_ / "printed.yaml", printed);
  EXPECT_EQ(run({"print-config", "--config", "printed.yaml"}).output, printed);
}

TEST_F(Cli, set_overrides_a_key_and_wins_over_the_file) {
  const Exit exit = run({"print-config", "--config", "recipe.yaml", "--set", "run.seed=77", "--set",
                         "stages.0.pretrain.steps=9", "--set", "stages[1].rl.steps=8"});
  EXPECT_NE(exit.output.find("seed: 77"), std::string::npos);
  EXPECT_NE(exit.output.find("steps: 9"), std::string::npos);
  EXPECT_NE(exit.output.find("steps: 8"), std::string::npos);
  EXPECT_ANSWER(run({"validate", "--config", "recipe.yaml", "--set", "run.sead=77"}), 2, "seed");
  EXPECT_ANSWER(run({"validate", "--config", "recipe.yaml", "--set", "stages.7.rl.steps=1"}), 2, "stages");
}

TEST_F(Cli, plan_and_dry_run_print_the_same_and_compute_nothing) {
  const Exit plan = run({"plan", "--config", "recipe.yaml"});
  EXPECT_EQ(plan.code, 0) << plan.errors;
  const Exit dry = run({"--config", "recipe.yaml", "--dry-run"});
  EXPECT_EQ(dry.code, 0) << dry.errors;
  EXPECT_EQ(plan.output, dry.output);
  for (const char* word :
       {"pretrain.forward", "rl.sampler", "agree bit for bit", "parameters", "checkpoint"}) {
    EXPECT_NE(plan.output.find(word), std::string::npos) << word << "\n" << plan.output;
  }
  EXPECT_FALSE(fs::exists(run_));
}

TEST_F(Cli, schema_is_json_and_names_the_parts_of_a_recipe) {
  const auto schema = nlohmann::json::parse(run({"schema"}).output);
  for (const char* part : {"run", "model", "precision", "stages"}) {
    EXPECT_TRUE(schema.at("properties").contains(part)) << part;
  }
}

TEST_F(Cli, inspect_ends_with_the_content_hash) {
  const std::string hash = summary_of(*done_ / "run").at("content_hash");
  for (const char* where : {"run", "run/checkpoints", "run/checkpoints/step_1_2_0"}) {
    const Exit exit = look({"inspect", where, "--verify"});
    EXPECT_EQ(exit.code, 0) << exit.errors;
    EXPECT_EQ(last_line(exit.output), "content hash: " + hash);
    EXPECT_NE(exit.output.find("model.layers.0."), std::string::npos);
  }
  EXPECT_ANSWER(look({"inspect", "nowhere"}), 66, "nowhere");
}

TEST_F(Cli, a_damaged_checkpoint_is_refused_with_file_and_tensor) {
  copy_done();
  const std::string file = latest_checkpoint_of(run_) + "/tensors-00001.safetensors";
  std::string bytes = read_text(file);
  bytes[bytes.size() - 5] = static_cast<char>(bytes[bytes.size() - 5] ^ 8);
  write_text(file, bytes);
  EXPECT_ANSWER(run({"inspect", "run", "--verify"}), 65, "tensors-00001.safetensors': tensor '");
  EXPECT_ANSWER(run({"generate", "--checkpoint", "run", "--prompt", "a"}), 65, "tensor '");
  EXPECT_ANSWER(go_on({"--set", "run.dir=fresh", "--set", "run.resume=run"}), 65, "tensor '");
}

TEST_F(Cli, generate_continues_a_prompt_from_run_folders_and_checkpoints) {
  const auto text = [&](const std::string& where, const std::vector<std::string>& more) {
    std::vector<std::string> args = {"generate", "--checkpoint", where, "--prompt",
                                     "the cat",  "--max-tokens", "5"};
    args.insert(args.end(), more.begin(), more.end());
    const Exit exit = look(args);
    EXPECT_EQ(exit.code, 0) << exit.errors;
    EXPECT_EQ(exit.output.rfind("the cat", 0), 0u) << exit.output;
    return exit.output;
  };
  const std::string once = text("run", {});
  EXPECT_EQ(text("run/checkpoints/step_1_2_0", {}), once);
  EXPECT_EQ(text("run", {"--seed", "1"}), once);
  EXPECT_NE(text("run", {"--seed", "2"}), once);
  EXPECT_EQ(text("run", {"--temperature", "0", "--seed", "1"}),
            text("run", {"--temperature", "0", "--seed", "2"}));
  const std::string three = text("run", {"--samples", "3"});
  EXPECT_EQ(three.rfind(once, 0), 0u) << "the first of three is the one alone";
}

TEST_F(Cli, generate_refuses_what_it_cannot_do) {
  EXPECT_ANSWER(look({"generate", "--checkpoint", "run", "--prompt", "a", "--max-tokens", "32"}), 2,
                "model.max_positions 32");
  EXPECT_ANSWER(look({"generate", "--checkpoint", "run", "--prompt", ""}), 2, "--prompt");
  EXPECT_ANSWER(look({"generate", "--checkpoint", "nowhere", "--prompt", "a"}), 66, "nowhere");
}

TEST_F(Cli, generate_needs_no_rule_about_how_the_run_was_kept) {
  const std::vector<std::string> once = {"--set", "run.resume=never", "--set",
                                         "stages.0.pretrain.checkpoint.keep=1"};
  train(folder_.path(), once);
  EXPECT_ANSWER(run({"generate", "--checkpoint", "run", "--prompt", "a", "--max-tokens", "2"}), 0, "a");
}

TEST_F(Cli, selfcheck_counts_equal_cases_and_fails_on_others) {
  const std::string golden = from_environment("FP4T_TEST_SOURCE") + "/tests/golden/quantise.jsonl";
  const Exit good = run({"selfcheck", "--golden", golden});
  EXPECT_EQ(good.code, 0);
  EXPECT_EQ(good.output, "260 cases, 260 equal\n");

  std::string text = read_text(golden);
  const size_t at = text.find("\"codes\":\"") + 9;
  ASSERT_LT(at, text.size());
  ASSERT_GT(at, size_t{9});
  text[at] = text[at] == '0' ? '1' : '0';
  write_text(folder_ / "changed.jsonl", text);
  EXPECT_ANSWER(run({"selfcheck", "--golden", "changed.jsonl"}), 1, "260 cases, 259 equal");
  write_text(folder_ / "cut.jsonl", text.substr(0, text.size() / 2));
  EXPECT_ANSWER(run({"selfcheck", "--golden", "cut.jsonl"}), 65, "cut.jsonl:");
  EXPECT_ANSWER(run({"selfcheck", "--golden", "nowhere.jsonl"}), 66, "nowhere.jsonl");
}

TEST_F(Cli, a_report_that_failed_once_is_not_taken_for_the_new_one) {
  copy_done();
  const std::vector<std::string> longer = {"--accept-changes", "--set", "stages.1.rl.steps=3"};
  fs::create_directory(run_ + "/report.html.tmp");  // so that the report cannot be written
  EXPECT_ANSWER(go_on(longer), 73, "report.html");
  EXPECT_FALSE(fs::exists(run_ + "/report.html")) << "the report of the shorter run stands";
  fs::remove(run_ + "/report.html.tmp");
  train(folder_.path(), longer);
  const std::string made = read_text(run_ + "/report.html");
  EXPECT_ANSWER(run({"report", "run"}), 0, "run/report.html");
  EXPECT_EQ(read_text(run_ + "/report.html"), made);
  EXPECT_ANSWER(go_on(longer), 0, "already done");
}

TEST_F(Cli, a_summary_that_is_no_file_is_an_answer) {
  copy_done();
  fs::remove(run_ + "/summary.json");
  fs::create_directory(run_ + "/summary.json");
  EXPECT_ANSWER(run({"report", "run"}), 65, "run/summary.json is no regular file");
  EXPECT_ANSWER(go_on({}), 73, "run/summary.json");
  fs::remove(run_ + "/summary.json");
  EXPECT_ANSWER(go_on({}), 0, "done in");
}

TEST_F(Cli, a_damaged_line_of_metrics_is_told_before_training) {
  copy_done();
  const std::string file = run_ + "/metrics.jsonl";
  std::string text = read_text(file);
  text.insert(text.find('\n') + 1, "{\"kind\":3}\n");
  write_text(file, text);
  const Exit exit = go_on({"--accept-changes", "--set", "stages.1.rl.steps=3"});
  EXPECT_ANSWER(exit, 65, "run/metrics.jsonl:2: ");
  EXPECT_EQ(exit.output.find("rl step="), std::string::npos) << "found after training";
  EXPECT_ANSWER(run({"report", "run"}), 65, "run/metrics.jsonl:2: ");
}

TEST_F(Cli, report_is_drawn_again) {
  copy_done();
  const std::string before = read_text(run_ + "/report.html");
  fs::remove(run_ + "/report.html");
  EXPECT_ANSWER(run({"report", "run"}), 0, "run/report.html");
  EXPECT_EQ(read_text(run_ + "/report.html"), before);
  EXPECT_ANSWER(run({"report", "nowhere"}), 66, "nowhere");
}

// Bad input ------------------------------------------------------------------------------------------

TEST_F(Cli, missing_inputs_exit_66) {
  EXPECT_ANSWER(run({"--config", "nowhere.yaml"}), 66, "nowhere.yaml");
  EXPECT_ANSWER(run({"validate", "--config", "nowhere.yaml"}), 66, "nowhere.yaml");
  EXPECT_ANSWER(go_on({"--set", "stages.0.pretrain.data.0.paths=nothing/*.txt"}), 66, "nothing/*.txt");
  EXPECT_ANSWER(go_on({"--set", "run.resume=nowhere"}), 66, "nowhere");
  EXPECT_ANSWER(go_on({"--set", "run.branch_from=nowhere"}), 66, "nowhere");
}

TEST_F(Cli, what_to_go_on_from_is_looked_for_by_validate_and_a_refused_start_leaves_nothing) {
  fs::create_directory_symlink("round", folder_ / "round");
  const std::vector<std::string> paths = {"/nope", "round", "round/run", std::string(5000, 'x')};
  for (const std::string& path : paths) {
    for (const std::string key : {"run.resume", "run.branch_from"}) {
      EXPECT_ANSWER(run({"validate", "--config", "recipe.yaml", "--set", key + "=" + path}), 66, key + ": ");
      EXPECT_ANSWER(go_on({"--set", key + "=" + path}), 66, key + ": ");
      EXPECT_FALSE(fs::exists(run_)) << key << " " << path.substr(0, 20);
    }
    EXPECT_ANSWER(run({"inspect", path}), 66, "'" + path.substr(0, 200));
    EXPECT_ANSWER(run({"generate", "--checkpoint", path, "--prompt", "a"}), 66, path.substr(0, 200));
    EXPECT_ANSWER(run({"report", path}), 66, path.substr(0, 200));
  }
  copy_done();
  const std::vector<std::string> branch = {"--set", "run.dir=new/folder", "--set", "run.branch_from=run"};
  std::vector<std::string> other = branch;
  other.insert(other.end(), {"--set", "model.moe.experts=8"});
  EXPECT_ANSWER(go_on(other), 2, "model.moe.experts");
  EXPECT_FALSE(fs::exists(folder_ / "new")) << "refused for the recipe it branches from";
  EXPECT_ANSWER(run({"validate", "--config", "recipe.yaml", branch[0], branch[1], branch[2], branch[3]}), 0,
                "valid");
  EXPECT_FALSE(fs::exists(folder_ / "new"));
}

TEST_F(Cli, checkpoints_that_cannot_be_looked_at_are_told_with_the_reason) {
  copy_done();
  fs::rename(run_ + "/checkpoints", folder_ / "elsewhere");
  fs::create_directory_symlink("checkpoints", run_ + "/checkpoints");
  EXPECT_ANSWER(run({"inspect", "run"}), 66, "cannot list 'run/checkpoints': Too many levels");
  EXPECT_ANSWER(go_on({"--set", "run.dir=new", "--set", "run.resume=run"}), 66, "Too many levels");
  EXPECT_ANSWER(go_on({}), 73, "run/checkpoints': Too many levels");
}

TEST_F(Cli, bad_data_exits_65_and_names_the_file) {
  write_text(folder_ / "text/words.txt", std::string("a\0b\n", 4));
  EXPECT_ANSWER(go_on({}), 65, "text/words.txt");
  write_text(folder_ / "text/words.txt", "");
  EXPECT_ANSWER(go_on({}), 65, "words");
  write_text(folder_ / "text/words.txt", "{\"text\": \"good\"}\n{\"text\": 3}\n");
  const std::string source = "stages.0.pretrain.data=[{name: j, kind: jsonl, paths: text}]";
  EXPECT_ANSWER(go_on({"--set", source}), 65, "text/words.txt:2: no text under the key 'text'");
  write_text(folder_ / "text/words.txt", "{\"text\": \"good\"}\n{\"text\": \n");
  EXPECT_ANSWER(go_on({"--set", source}), 65, "text/words.txt:2: ");
}

TEST_F(Cli, a_run_folder_that_cannot_be_made_exits_73) {
  EXPECT_ANSWER(go_on({"--set", "run.dir=text/words.txt/run"}), 73, "text/words.txt/run");
}

TEST_F(Cli, errors_of_a_recipe_come_all_at_once_with_their_places) {
  const Exit exit = validate(
      "run: {name: tiny, sead: 1}\n"
      "model: {layers: two, hidden: 32, heads: 2, kv_heads: 1, head_dim: 32, mlp_hidden: 64, heads: 4}\n" +
      kStages);
  EXPECT_EQ(exit.code, 2);
  EXPECT_EQ(exit.output, "");
  std::istringstream lines(exit.errors);
  int count = 0;
  for (std::string line; std::getline(lines, line); ++count) {
    EXPECT_TRUE(std::regex_search(line, std::regex("^(fp4train: )?recipe\\.yaml:[0-9]+:[0-9]+: "))) << line;
  }
  EXPECT_GE(count, 3) << exit.errors;
  for (const char* part :
       {"run.sead", "seed", "model.layers", "two", "duplicate key heads", "recipe.yaml:2:"}) {
    EXPECT_NE(exit.errors.find(part), std::string::npos) << part << " in\n" << exit.errors;
  }
}

// Whatever stands in the file, the answer is "valid" or messages and exit code 2.
void expect_an_answer(const Exit& exit, const std::string& input) {
  const bool valid = exit.code == 0 && exit.errors.empty();
  const bool refused = exit.code == 2 && exit.errors.rfind("fp4train: recipe.yaml", 0) == 0;
  const bool no_input =
      (exit.code == 66 || exit.code == 65) && exit.errors.rfind("fp4train: recipe.yaml:", 0) == 0;
  EXPECT_TRUE(valid || refused || no_input) << "exit code " << exit.code << "\n"
                                            << exit.errors << "\nfor\n"
                                            << input;
}

TEST_F(Cli, hostile_recipes_get_an_answer) {
  const std::string deep(5000, '[');
  for (const std::string& text : {std::string(),
                                  std::string("\n\n"),
                                  std::string("null"),
                                  std::string("[]"),
                                  std::string("- a\n- b\n"),
                                  std::string("just words"),
                                  std::string("{"),
                                  std::string("a: b: c"),
                                  std::string("\t\tx: 1\n"),
                                  std::string("a: &x [*x]\n"),
                                  std::string("a: *nowhere\n"),
                                  std::string("<<: {a: 1}\n"),
                                  std::string("--- \na: 1\n--- \nb: 2\n"),
                                  std::string("\xff\xfe\x00z", 4),
                                  std::string("run: 1\n"),
                                  std::string("model: [1, 2]\nstages: {}\n"),
                                  std::string("stages: [pretrain, rl]\n"),
                                  deep,
                                  std::string("? [a]\n: b\n"),
                                  std::string("run: {seed: 99999999999999999999999}\n"),
                                  std::string("run: {seed: -1}\n"),
                                  std::string("!!binary x: y\n"),
                                  std::string(70000, 'a'),
                                  std::string("a: \"unfinished\n"),
                                  std::string("%YAML 9.9\n---\na: 1\n")}) {
    const Exit exit = validate(text);
    EXPECT_EQ(exit.code, 2) << text.substr(0, 100);
    expect_an_answer(exit, text.substr(0, 100));
  }
}

TEST_F(Cli, randomly_changed_recipes_get_an_answer) {
  const unsigned seed = std::random_device{}();
  std::printf("random seed %u\n", seed);
  std::mt19937 random(seed);
  const auto draw = [&](size_t n) { return std::uniform_int_distribution<size_t>(0, n - 1)(random); };
  static const char* const kPieces[] = {"0",  "-1", "1e99", ".nan", "[",  "]",    "{",     "}", ":",   ",",
                                        "\n", " ",  "\"",   "*",    "&a", "true", "nvfp4", "%", "100", "#"};
  for (int round = 0; round < 150; ++round) {
    std::string text = kTinyRecipe;
    for (size_t changes = 1 + draw(3); changes > 0; --changes) {
      const size_t at = draw(text.size());
      const std::string piece = kPieces[draw(std::size(kPieces))];
      switch (draw(3)) {
        case 0:
          text.insert(at, piece);
          break;
        case 1:
          text.replace(at, 1 + draw(6), piece);
          break;
        default:
          text.erase(at, 1 + draw(40));
      }
    }
    expect_an_answer(validate(text), text);
    if (HasFailure()) break;
  }
}

}  // namespace
}  // namespace fp4t::test

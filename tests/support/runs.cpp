#include "tests/support/runs.h"

#include <algorithm>
#include <filesystem>
#include <sstream>

namespace fp4t::test {

namespace fs = std::filesystem;

std::string tiny_model(const std::string& run, const std::string& keys, const std::string& of_moe) {
  return "run: {" + run + "}\n" + R"(model:
  layers: 2
  hidden: 32
  heads: 2
  kv_heads: 1
  head_dim: 32
)" + keys +
         "  moe: {experts: 4, top_k: 2, hidden: 32" + of_moe + "}\n";
}

const char* const kTinyTables = R"(precision:
  pretrain.forward:
    - {module: [embed, head], format: bf16}
    - {module: "experts.*", format: nvfp4, scale_rule: four_over_six}
    - {module: "*", format: mxfp8}
  pretrain.backward:
    - {module: head, format: bf16}
    - {module: "experts.*", format: nvfp4, rounding: ms_eden, hadamard: 32, signs: fresh}
    - {module: "*", format: nvfp4, operand: grad, rounding: stochastic, headroom: 17/16}
    - {module: "*", format: nvfp4}
)";

const std::string kTinyRecipe = std::string(kTinyModel) + R"(parallel: {recompute: block}
dtypes: {masters: bf16, moments: bf16}
)" + kTinyTables + R"(  rl.sampler: &policy
    - {module: [embed, head], format: bf16}
    - {module: "experts.*", format: nvfp4, scale_round: pow2}
    - {module: "*", format: mxfp8}
  rl.trainer.forward: *policy
  rl.trainer.backward:
    - {module: head, format: bf16}
    - {module: "experts.*", format: nvfp4, rounding: ms_eden, hadamard: 32, signs: fresh}
    - {module: "*", format: bf16}
stages:
  - pretrain:
      steps: 16
      batch: {tokens: 256, micro_sequences: 4, length: 32}
      data:
        - {name: words, kind: text, paths: text, separator: "%", weight: 0.3, held_out: {fraction: 0.1, seed: 7}}
        - {name: sums, kind: sums, low: 0, high: 4, wrong_fraction: 0.3, end_of_document: false, weight: 0.7,
           held_out: &split {fraction: 0.2, seed: 7}}
      optimizer: {learning_rate: 2e-2, weight_decay: 0.1}
      schedule: {kind: cosine, warmup: 3}
      eval: {every: 5, tokens: 256, prompts: ["1+2="], max_tokens: 4}
      checkpoint: {every: 5}
  - rl:
      steps: 13
      task: &task {kind: sums, low: 0, high: 4, held_out: *split}
      sampling: {prompts: 8, samples: 4, temperature: 0.9, top_p: 0.95, max_tokens: 4, max_batch: 8,
                 end_tokens: ["\n", "<eod>"]}
      objective: {kl: 0.02, mini_batches: 3, micro_tokens: 64}
      optimizer: {learning_rate: 1e-3}
      schedule: {kind: cosine}
      eval: {every: 5, tokens: 256, task: *task, task_samples: 2, max_tokens: 4}
      checkpoint: {every: 5, every_updates: 7, keep: 3}
)";

void write_corpus(const std::string& folder) {
  static const char* const kWords[] = {"the", "a",  "cat", "dog", "sat", "ran", "on",   "mat",
                                       "log", "so", "it",  "was", "red", "old", "then", "new"};
  fs::create_directories(folder + "/text");
  std::string text;
  uint32_t x = 12345;  // a linear congruential generator: the same text everywhere
  const auto draw = [&x](uint32_t n) { return (x = x * 1664525u + 1013904223u, x >> 16) % n; };
  for (int document = 0; document < 120; ++document) {
    for (uint32_t words = 3 + draw(9); words > 0; --words) text += std::string(kWords[draw(16)]) + " ";
    text += "\n%\n";
  }
  write_text(folder + "/text/words.txt", text);
}

void write_inputs(const std::string& folder, const std::string& recipe) {
  write_corpus(folder);
  write_text(folder + "/recipe.yaml", recipe);
}

std::vector<std::string> train_args(const std::vector<std::string>& more) {
  std::vector<std::string> args = {"--config", "recipe.yaml"};
  args.insert(args.end(), more.begin(), more.end());
  return args;
}

Exit train(const std::string& folder, const std::vector<std::string>& more) {
  const Exit exit = run_binary(folder, train_args(more));
  EXPECT_EQ(exit.code, 0) << exit.errors << "\n" << exit.output;
  return exit;
}

Exit train_on(int ranks, const std::string& folder, const std::string& run_dir,
              std::vector<std::string> more) {
  more.insert(more.end(), {"--set", "run.dir=" + run_dir});
  const Exit exit = run_ranks(ranks, folder, train_args(more));
  EXPECT_EQ(exit.code, 0) << exit.errors << "\n" << exit.output;
  return exit;
}

std::vector<nlohmann::json> metrics_of(const std::string& run_dir, const std::string& kind,
                                       const std::string& stage) {
  const std::string text = read_text(run_dir + "/metrics.jsonl");
  std::vector<nlohmann::json> lines;
  size_t begin = 0;
  for (size_t end = text.find('\n'); end != std::string::npos; end = text.find('\n', begin)) {
    const auto line = nlohmann::json::parse(text.substr(begin, end - begin));
    begin = end + 1;
    if (!kind.empty() && line.at("kind") != kind) continue;
    if (!stage.empty() && line.value("stage", "") != stage) continue;
    lines.push_back(line);
  }
  return lines;
}

int64_t count_steps(const std::string& run_dir, const std::string& stage) {
  return static_cast<int64_t>(metrics_of(run_dir, "step", stage).size());
}

std::vector<double> step_figures(const std::string& run_dir, const std::string& stage,
                                 const std::string& name) {
  std::vector<double> values;
  for (const auto& line : metrics_of(run_dir, "step", stage)) values.push_back(line.at(name).get<double>());
  return values;
}

nlohmann::json summary_of(const std::string& run_dir) {
  return nlohmann::json::parse(read_text(run_dir + "/summary.json"));
}

std::string latest_checkpoint_of(const std::string& run_dir) {
  std::string name = read_text(run_dir + "/checkpoints/latest");
  while (!name.empty() && name.back() == '\n') name.pop_back();
  return name.empty() ? "" : run_dir + "/checkpoints/" + name;
}

std::vector<std::string> checkpoints_of(const std::string& run_dir) {
  std::vector<std::string> names;
  std::error_code ignored;
  for (const auto& entry : fs::directory_iterator(run_dir + "/checkpoints", ignored)) {
    const std::string name = entry.path().filename().string();
    if (name.rfind("step_", 0) == 0 && name.find('.') == std::string::npos) names.push_back(name);
  }
  std::sort(names.begin(), names.end());
  return names;
}

std::map<std::string, std::string> stored_bytes_of(const std::string& folder) {
  std::map<std::string, std::string> files;
  for (const auto& entry : fs::directory_iterator(folder)) {
    const std::string name = entry.path().filename().string();
    if (name != "telemetry.json") files[name] = read_text(entry.path().string());
  }
  return files;
}

std::map<std::string, std::string> all_bytes_of(const std::string& folder) {
  std::map<std::string, std::string> files;
  for (const auto& entry : fs::recursive_directory_iterator(folder)) {
    if (entry.is_regular_file()) files[entry.path().string()] = read_text(entry.path().string());
  }
  return files;
}

std::map<std::string, std::string> tensor_hashes_of(const std::string& checkpoint,
                                                    const std::string& prefix) {
  const ScratchFolder scratch;
  const Exit exit = run_binary(scratch.path(), {"inspect", checkpoint, "--verify"});
  EXPECT_EQ(exit.code, 0) << exit.errors;
  std::map<std::string, std::string> hashes;
  std::istringstream lines(exit.output);
  for (std::string line; std::getline(lines, line);) {
    std::istringstream words(line);
    std::string name, type, hash;
    if (words >> name >> type >> hash && name.rfind(prefix, 0) == 0 && hash.size() == 16) hashes[name] = hash;
  }
  return hashes;
}

namespace {

// The first line that differs, for a message that can be read.
std::string first_difference(const std::string& a, const std::string& b) {
  std::istringstream left(a), right(b);
  std::string x, y;
  for (int line = 1;; ++line) {
    const bool more_left = static_cast<bool>(std::getline(left, x));
    const bool more_right = static_cast<bool>(std::getline(right, y));
    if (!more_left && !more_right) return "equal lines, other bytes";
    if (more_left && more_right && x == y) continue;
    return "line " + std::to_string(line) + ":\n" + (more_left ? x : "(ended)") + "\nagainst\n" +
           (more_right ? y : "(ended)");
  }
}

}  // namespace

void expect_same_outcome(const std::string& run_dir, const std::string& other_run_dir) {
  const std::string a = read_text(run_dir + "/metrics.jsonl");
  const std::string b = read_text(other_run_dir + "/metrics.jsonl");
  EXPECT_FALSE(a.empty());
  EXPECT_TRUE(a == b) << "metrics.jsonl, " << first_difference(a, b);
  const std::string last = latest_checkpoint_of(run_dir), other_last = latest_checkpoint_of(other_run_dir);
  ASSERT_FALSE(last.empty());
  ASSERT_FALSE(other_last.empty());
  EXPECT_EQ(fs::path(last).filename(), fs::path(other_last).filename());
  const auto files = stored_bytes_of(last), others = stored_bytes_of(other_last);
  EXPECT_EQ(files.size(), others.size());
  EXPECT_GE(files.size(), 2u);
  for (const auto& [name, bytes] : files) {
    const auto it = others.find(name);
    ASSERT_NE(it, others.end()) << name;
    EXPECT_TRUE(bytes == it->second) << name << ", "
                                     << (name == "manifest.json" ? first_difference(bytes, it->second) : "");
  }
  EXPECT_EQ(summary_of(run_dir).at("content_hash"), summary_of(other_run_dir).at("content_hash"));
}

}  // namespace fp4t::test

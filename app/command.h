// A command of the binary: a word, what it does, its options, its body. One file a command; no logic here.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace fp4t {

// Options that every command which reads a recipe has.
struct RecipeOptions {
  std::string config;
  std::vector<std::string> overrides;
};

struct AppOptions {
  RecipeOptions recipe;
  bool dry_run = false;
  int64_t ranks = 1;    // plan
  std::string machine;  // plan: a machine elsewhere, by name or file
  bool json = false;    // plan
  bool accept_changes = false;
  std::string command_line;
  std::string checkpoint;             // inspect, generate, evaluate
  bool verify = false;                // inspect
  std::string prompt;                 // generate
  std::string tokenizer;              // generate, export, tokenize
  bool chat = false;                  // generate
  std::string system;                 // generate
  int64_t max_tokens = 0;             // generate, evaluate; 0: 128, or what fits
  double temperature = 1.0;           // generate
  double top_p = 1.0;                 // generate
  uint64_t seed = 1;                  // generate
  int64_t samples = 1;                // generate
  std::string golden;                 // selfcheck
  std::string device = "auto";        // selfcheck
  std::vector<std::string> run_dirs;  // report
  std::string out;                    // report, evaluate, tokenize
  // evaluate
  std::string table, text, choices, prompts, field = "text", separator, before, after;
  std::vector<std::string> stop;
  int64_t context = 0, stride = 0, batch_tokens = 4096;
  bool details = false;
  // import, export, logits
  std::string from, to;
  bool replace = false, no_tokenizer = false;
  std::string format = "hf", numbers = "exact", export_table, calibrate, preset;
  uint64_t shard_bytes = uint64_t{4} << 30;
  std::string tokens;
  // tokenize, beside field and separator
  std::vector<std::string> inputs;
  std::string kind = "text";
  bool no_end_of_document = false, special_tokens = false;
  int64_t threads = 0;  // 0: one a core
};

int cmd_tokenize(const AppOptions& options);
int cmd_train(const AppOptions& options);
int cmd_validate(const AppOptions& options);
int cmd_print_config(const AppOptions& options);
int cmd_plan(const AppOptions& options);
int cmd_schema(const AppOptions& options);
int cmd_inspect(const AppOptions& options);
int cmd_generate(const AppOptions& options);
int cmd_selfcheck(const AppOptions& options);
int cmd_report(const AppOptions& options);
int cmd_evaluate(const AppOptions& options);
int cmd_import(const AppOptions& options);
int cmd_export(const AppOptions& options);
int cmd_logits(const AppOptions& options);

}  // namespace fp4t

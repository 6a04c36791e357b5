// The command line: a table of commands and one try block that maps exceptions to exit codes.
#include <CLI/CLI.hpp>
#include <cstdio>
#include <exception>
#include <map>

#include "app/command.h"
#include "kernels/base/check.h"

namespace {

using fp4t::AppOptions;

void add_recipe_options(CLI::App* app, AppOptions& o, bool required) {
  auto* config = app->add_option("-c,--config", o.recipe.config, "the recipe, a YAML file");
  if (required) config->required();
  app->add_option("--set", o.recipe.overrides, "key=value over the recipe, for example --set run.seed=2")
      ->type_name("A.B.C=VALUE")
      ->allow_extra_args(false)
      ->take_all();
}

struct Entry {
  CLI::App* app;
  int (*body)(const AppOptions&);
};

std::vector<Entry> add_commands(CLI::App& app, AppOptions& o) {
  std::vector<Entry> entries;
  auto add = [&](const char* name, const char* help, int (*body)(const AppOptions&)) {
    entries.push_back({app.add_subcommand(name, help), body});
    return entries.back().app;
  };
  add_recipe_options(add("validate", "check a recipe and exit", fp4t::cmd_validate), o, true);
  add_recipe_options(add("print-config", "print the resolved recipe as YAML", fp4t::cmd_print_config), o,
                     true);
  add_recipe_options(add("plan", "print what a recipe will do, and compute nothing", fp4t::cmd_plan), o,
                     true);
  add("schema", "print the JSON schema of recipes", fp4t::cmd_schema);
  CLI::App* inspect = add("inspect", "list a checkpoint", fp4t::cmd_inspect);
  inspect->add_option("dir", o.checkpoint, "a checkpoint, or a run folder: its latest")->required();
  inspect->add_flag("--verify", o.verify, "check every hash");
  CLI::App* generate = add("generate", "continue a text from a checkpoint", fp4t::cmd_generate);
  generate->add_option("--checkpoint", o.checkpoint, "a checkpoint, or a run folder: its latest")->required();
  generate->add_option("--prompt", o.prompt, "the text to continue")->required();
  generate->add_option("--max-tokens", o.max_tokens, "at most so many tokens (128, or what fits)")
      ->check(CLI::PositiveNumber);
  generate->add_option("--temperature", o.temperature, "0: greedy")->check(CLI::NonNegativeNumber);
  generate->add_option("--top-p", o.top_p, "probability mass to draw from")->check(CLI::Range(1e-6, 1.0));
  generate->add_option("--seed", o.seed, "seed of the draws")->check(CLI::NonNegativeNumber);
  generate->add_option("--samples", o.samples, "how many continuations")->check(CLI::PositiveNumber);
  CLI::App* selfcheck = add("selfcheck", "check this machine's numerics", fp4t::cmd_selfcheck);
  selfcheck->add_option("--golden", o.golden, "oracle vectors (JSON lines) to compare the quantisers with")
      ->required();
  CLI::App* report = add("report", "draw report.html of a run folder again", fp4t::cmd_report);
  report->add_option("dir", o.run_dir, "the run folder")->required();
  return entries;
}

int run(int argc, char** argv) {
  CLI::App app{"fp4train: mixture-of-experts pretraining and reinforcement learning in 4 bits", "fp4train"};
  AppOptions o;
  for (int i = 0; i < argc; ++i) o.command_line += std::string(i ? " " : "") + argv[i];
  app.set_version_flag("--version", std::string("fp4train ") + FP4T_VERSION);
  add_recipe_options(&app, o, false);
  app.add_flag("--dry-run", o.dry_run, "print the plan and stop");
  app.add_flag("--accept-changes", o.accept_changes, "continue a run with changed course keys");
  const auto entries = add_commands(app, o);
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& e) {
    const int code = app.exit(e);
    return code == 0 ? 0 : static_cast<int>(fp4t::ExitCode::kRecipe);
  }
  for (const Entry& entry : entries) {
    if (entry.app->parsed()) return entry.body(o);
  }
  if (o.recipe.config.empty())
    throw fp4t::RecipeError("--config is missing; fp4train --help lists the commands");
  return o.dry_run ? fp4t::cmd_plan(o) : fp4t::cmd_train(o);
}

}  // namespace

int main(int argc, char** argv) {
  try {
    return run(argc, argv);
  } catch (const fp4t::Error& e) {
    std::fprintf(stderr, "fp4train: %s\n", e.what());
    return static_cast<int>(e.code());
  } catch (const std::exception& e) {
    std::fprintf(stderr, "fp4train: internal error: %s\n", e.what());
    return static_cast<int>(fp4t::ExitCode::kInternal);
  }
}

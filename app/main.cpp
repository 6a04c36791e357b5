// The command line: a table of commands and one try block that maps exceptions to exit codes.
#include <malloc.h>

#include <CLI/CLI.hpp>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <exception>
#include <filesystem>
#include <map>
#include <new>
#include <set>

#include "app/command.h"
#include "engine/comm/ending.h"
#include "engine/recipe/problems.h"
#include "engine/recipe/scalars.h"
#include "engine/store/export_layout.h"
#include "kernels/base/check.h"
#include "kernels/base/text.h"

namespace {

using fp4t::AppOptions;

// An empty name, as an unset variable leaves it, is not the same as no name.
CLI::Validator not_empty() {
  return CLI::Validator(
      [](const std::string& text) -> std::string {
        return text.empty() ? "found an empty text, which names nothing" : "";
      },
      "");
}

void add_recipe_options(CLI::App* app, AppOptions& o) {
  app->add_option("-c,--config", o.recipe.config, "the recipe, a YAML file");
  app->add_option("--set", o.recipe.overrides, "key=value over the recipe, for example --set run.seed=2")
      ->type_name("A.B.C=VALUE")
      ->allow_extra_args(false)
      ->take_all();
}

// CLI11's own range lets NaN pass and writes its limits with three hundred digits.
CLI::Validator number_from(double low, double high, bool or_zero = false) {
  return CLI::Validator(
      [=](const std::string& text) -> std::string {
        double value = 0;
        const std::string why = fp4t::read_double(text, value);
        const bool good = why.empty() && ((value >= low && value <= high) || (or_zero && value == 0));
        if (good) return "";
        return "found " + fp4t::printable(text) + "; allowed: " + (or_zero ? "0, or " : "") +
               "a number from " + fp4t::write_double(low) + " to " + fp4t::write_double(high);
      },
      "NUMBER");
}

// As whole numbers of a recipe: 1e3 is one. CLI11's own conversion takes digits alone.
CLI::Validator whole_number_from(int64_t low, int64_t high) {
  return CLI::Validator(
      [=](std::string& text) -> std::string {
        int64_t value = 0;
        const std::string why = fp4t::read_int(text, value);
        if (!why.empty() || value < low || value > high) {
          return "found " + fp4t::printable(text) + (why.empty() ? "" : " (" + why + ")") +
                 "; allowed: a whole number from " + std::to_string(low) + " to " + std::to_string(high);
        }
        text = std::to_string(value);
        return "";
      },
      "WHOLE NUMBER");
}

CLI::Validator seed() {
  return CLI::Validator(
      [](const std::string& text) -> std::string {
        uint64_t value = 0;
        const std::string why = fp4t::read_uint(text, value);
        return why.empty()
                   ? ""
                   : "found " + fp4t::printable(text) + " (" + why + "); allowed: a whole number of 64 bits";
      },
      "WHOLE NUMBER");
}

// `fp4train evaluate`: files and how they are read.
void add_evaluate_options(CLI::App* app, AppOptions& o) {
  app->add_option("--checkpoint", o.checkpoint, "a checkpoint, or a run folder: its latest")->required();
  app->add_option(
         "--table", o.table,
         "whose formats compute: pretrain.forward, rl.sampler or rl.trainer.forward (the first; of a "
         "run without pretraining the last)")
      ->check(CLI::IsMember({"pretrain.forward", "rl.sampler", "rl.trainer.forward"}));
  app->add_option("--tokenizer", o.tokenizer, "the tokenizer's file, if it has moved");
  app->add_option("--text", o.text, "perplexity of this file; .jsonl: of the texts in it");
  app->add_option("--field", o.field, "key of the text in --text FILE.jsonl (text)");
  app->add_option("--separator", o.separator, "a line that separates the documents of --text FILE");
  app->add_option("--context", o.context, "tokens that a window reads (model.max_positions)")
      ->transform(whole_number_from(1, 1'000'000'000));
  app->add_option("--stride", o.stride, "tokens from window to window (half the context)")
      ->transform(whole_number_from(1, 1'000'000'000));
  app->add_option("--choices", o.choices, "multiple-choice questions, JSON lines");
  app->add_option("--before", o.before, "text in front of every question");
  app->add_option("--after", o.after, "text behind every question");
  app->add_flag("--details", o.details, "also how every question came out");
  app->add_option("--prompts", o.prompts, "prompts to complete greedily, JSON lines");
  app->add_option("--stop", o.stop, "a completion ends before this text; several may be given")
      ->check(CLI::Validator(
          [](const std::string& text) -> std::string {
            return text.empty() ? "found an empty text, which stands everywhere" : "";
          },
          ""))
      ->allow_extra_args(false)
      ->take_all();
  app->add_option("--max-tokens", o.max_tokens, "a completion has at most so many tokens (128)")
      ->transform(whole_number_from(1, 1'000'000'000));
  app->add_option("--batch-tokens", o.batch_tokens, "tokens that are scored together (4096)")
      ->transform(whole_number_from(1, 1'000'000'000));
  app->add_option("--out", o.out, "write the result into this file, too");
}

struct Entry {
  CLI::App* app;
  int (*body)(const AppOptions&);
  bool reads_recipe = false;
};

void add_tokenize(CLI::App* app, AppOptions& o) {
  add_recipe_options(app, o);
  app->add_option("--tokenizer", o.tokenizer,
                  "a tokenizer.json or a .model, or bytes, instead of a recipe's");
  app->add_option("--in", o.inputs, "files or folders, globs allowed")->required();
  app->add_option("--out", o.out, "prefix of PREFIX.bin, PREFIX.idx and PREFIX.tokens.json")->required();
  app->add_flag("--replace", o.replace, "write over files that are there");
  app->add_option("--kind", o.kind, "of the files: text or jsonl")->check(CLI::IsMember({"text", "jsonl"}));
  app->add_option("--field", o.field, "jsonl: key that holds the text");
  app->add_option("--separator", o.separator, "text: line that separates documents; without it one a file");
  app->add_flag("--no-end-of-document", o.no_end_of_document, "append no <eod> to documents");
  app->add_flag("--special-tokens", o.special_tokens, "texts of special tokens are those tokens");
  app->add_option("--threads", o.threads, "0: one a core")->transform(whole_number_from(0, 1024));
}

void add_generate(CLI::App* app, AppOptions& o) {
  app->add_option("--checkpoint", o.checkpoint, "a checkpoint, or a run folder: its latest")->required();
  app->add_option("--prompt", o.prompt, "the text to continue")->required();
  app->add_flag(
      "--chat", o.chat,
      "the prompt is a user's message, in the form of the recipe's tokenizer.chat, or of the template "
      "beside the tokenizer's file");
  app->add_option("--system", o.system, "message in front of it");
  app->add_option("--tokenizer", o.tokenizer, "the tokenizer's file, if it has moved");
  app->add_option("--max-tokens", o.max_tokens, "at most so many tokens (128, or what fits)")
      ->transform(whole_number_from(1, 1'000'000'000));
  app->add_option("--temperature", o.temperature, "0: greedy")->check(number_from(1e-3, 1e3, true));
  app->add_option("--top-p", o.top_p, "probability mass to draw from")->check(number_from(1e-6, 1));
  app->add_option("--seed", o.seed, "seed of the draws")->check(seed());
  app->add_option("--samples", o.samples, "how many continuations")
      ->transform(whole_number_from(1, 1'000'000));
}

void add_export(CLI::App* app, AppOptions& o) {
  app->add_option("--checkpoint", o.checkpoint, "a checkpoint, or a run folder: its latest")->required();
  app->add_option("--format", o.format, "hf: numbers; the others: codes and scales of a forward table")
      ->check(CLI::IsMember(
          std::vector<std::string>(std::begin(fp4t::kExportLayouts), std::end(fp4t::kExportLayouts))));
  app->add_option("--numbers", o.numbers,
                  "exact: bf16 where it holds every value, else fp32; fp32; or bf16: rounded")
      ->check(CLI::IsMember({"exact", "fp32", "bf16"}));
  app->add_option("--table", o.export_table,
                  "whose codes: rl.sampler (if not given), pretrain.forward or rl.trainer.forward")
      ->check(CLI::IsMember({"rl.sampler", "pretrain.forward", "rl.trainer.forward"}));
  app->add_option("--preset", o.preset, "tables of this preset instead of the checkpoint's own");
  app->add_option("--shard-size", o.shard_bytes,
                  "at most so many bytes a file, as 500MB or 4GB (the default)")
      ->transform(CLI::AsSizeValue(false))
      ->check(whole_number_from(1, INT64_MAX));
  app->add_option("--tokenizer", o.tokenizer,
                  "folder whose tokenizer files are copied; else the recipe's model.from");
  app->add_option(
      "--calibrate", o.calibrate,
      "a text, a sequence a line, for the scales of activations in NVFP4 layouts; else the recipe's data");
}

// Names of files, folders and keys: wherever one is asked for, an empty one is no name.
void refuse_empty_names(CLI::App& app) {
  const std::set<std::string> names = {"--calibrate", "--checkpoint", "--choices", "--config",  "--field",
                                       "--from",      "--golden",     "--in",      "--machine", "--out",
                                       "--preset",    "--prompts",    "--text",    "--to",      "--tokenizer",
                                       "--tokens",    "dir"};
  for (CLI::Option* option : app.get_options()) {
    if (names.count(option->get_name()) > 0) option->check(not_empty());
  }
}

std::vector<Entry> add_commands(CLI::App& app, AppOptions& o) {
  std::vector<Entry> entries;
  auto add = [&](const char* name, const char* help, int (*body)(const AppOptions&)) {
    entries.push_back({app.add_subcommand(name, help), body});
    return entries.back().app;
  };
  const auto reads_recipe = [&](CLI::App* command) {
    add_recipe_options(command, o);
    entries.back().reads_recipe = true;
  };
  reads_recipe(add("validate", "check a recipe, and the data that it names", fp4t::cmd_validate));
  reads_recipe(add("print-config", "print the resolved recipe as YAML", fp4t::cmd_print_config));
  CLI::App* plan = add("plan", "print what a recipe will do, and compute nothing", fp4t::cmd_plan);
  reads_recipe(plan);
  plan->add_option("--ranks", o.ranks, "for so many ranks; memory is that of one")
      ->transform(whole_number_from(1, 100'000));
  plan->add_option(
      "--machine", o.machine,
      "for another machine: a name (gb300, gb200, h200, cpu) or a file; predicts time and traffic");
  plan->add_flag("--json", o.json, "print plan.json instead of text");
  add("schema", "print the JSON schema of recipes", fp4t::cmd_schema);
  CLI::App* inspect = add("inspect", "list a checkpoint", fp4t::cmd_inspect);
  inspect->add_option("dir", o.checkpoint, "a checkpoint, or a run folder: its latest")->required();
  inspect->add_flag("--verify", o.verify, "check every hash");
  add_generate(add("generate", "continue a text from a checkpoint", fp4t::cmd_generate), o);
  add_evaluate_options(
      add("evaluate", "measure a checkpoint on files of text, questions or prompts", fp4t::cmd_evaluate), o);
  add_tokenize(add("tokenize", "write text as files of tokens", fp4t::cmd_tokenize), o);
  CLI::App* selfcheck = add("selfcheck", "check this machine's numerics", fp4t::cmd_selfcheck);
  selfcheck->add_option("--golden", o.golden, "oracle vectors (JSON lines) to compare the quantisers with")
      ->required();
  selfcheck->add_option("--device", o.device, "what computes: auto, cpu or cuda")
      ->check(CLI::IsMember({"auto", "cpu", "cuda"}));
  CLI::App* report =
      add("report", "draw the report of a run, or of several beside each other", fp4t::cmd_report);
  report->add_option("dir", o.run_dirs, "run folders")->required();
  report->add_option("--out", o.out,
                     "the page (one run: report.html in its folder; several: report.html here)");
  const auto goes_to = [&](CLI::App* command, const char* what) {
    command->add_option("--to", o.to, what)->required();
    command->add_flag("--replace", o.replace, "write over one that is there");
  };
  CLI::App* from = add("import", "make a checkpoint of a Hugging Face folder", fp4t::cmd_import);
  from->add_option("--from", o.from, "folder with config.json and *.safetensors")->required();
  goes_to(from, "the checkpoint to make");
  from->add_flag("--no-tokenizer", o.no_tokenizer,
                 "leave the folder's tokenizer out: texts are numbers of tokens");
  CLI::App* to = add("export", "write a checkpoint's weights as a Hugging Face folder", fp4t::cmd_export);
  goes_to(to, "the folder to make");
  add_export(to, o);
  CLI::App* logits = add("logits", "write the FP32 logits of token sequences", fp4t::cmd_logits);
  logits->add_option("--checkpoint", o.checkpoint, "a checkpoint, or a run folder: its latest")->required();
  logits->add_option("--tokens", o.tokens, "a file: the token numbers of one sequence a line")->required();
  logits->add_option("--to", o.to, "the safetensors file to write: logits.0, logits.1, ...")->required();
  refuse_empty_names(app);
  for (const Entry& entry : entries) refuse_empty_names(*entry.app);
  return entries;
}

// "unexpected trian; did you mean train?": names of commands and options are what was meant most often.
std::string explain_extras(const CLI::App& app, const std::vector<Entry>& entries) {
  const CLI::App* parsed = &app;
  for (const Entry& entry : entries) {
    if (entry.app->parsed()) parsed = entry.app;
  }
  std::vector<std::string> known;
  for (const CLI::Option* option : parsed->get_options()) known.push_back(option->get_name());
  if (parsed == &app) {
    for (const Entry& entry : entries) known.push_back(entry.app->get_name());
  }
  const std::vector<std::string> extras = app.remaining(true);
  const std::string first = extras.empty() ? "" : fp4t::printable(extras.front());
  if (first.find('=') != std::string::npos && first[0] != '-') {
    return "unexpected " + first + "; keys of the recipe are set by --set " + first;
  }
  return "unexpected " + first + "; " + fp4t::suggestion(first, known);
}

// Options before a command belong to training and would be lost.
void refuse_options_before(const CLI::App& app, const Entry& command) {
  for (const CLI::Option* option : app.get_options()) {
    if (option->count() == 0) continue;
    throw fp4t::RecipeError(option->get_name() + " before the command " + command.app->get_name() +
                            " has no effect; write it behind the command, if it has that option");
  }
}

// What a command prints is its result: a full disk behind stdout is a failure.
int with_output(int code) {
  const bool flushed = std::fflush(stdout) == 0;
  if (flushed && !std::ferror(stdout)) return code;
  const std::string why = flushed ? "an earlier write failed" : std::strerror(errno);
  if (code == 0) throw fp4t::SaveError("cannot write the output: " + why);
  return code;
}

int run(int argc, char** argv) {
  CLI::App app{"fp4train: mixture-of-experts pretraining and reinforcement learning in 4 bits", "fp4train"};
  AppOptions o;
  for (int i = 0; i < argc; ++i) o.command_line += std::string(i ? " " : "") + argv[i];
  app.set_version_flag("--version", std::string("fp4train ") + FP4T_VERSION);
  add_recipe_options(&app, o);
  app.add_flag("--dry-run", o.dry_run, "print the plan and stop");
  app.add_flag("--accept-changes", o.accept_changes, "continue a run with changed course keys");
  const auto entries = add_commands(app, o);
  app.require_subcommand(0, 1);  // a second command word is an error, not a no-op
  try {
    app.parse(argc, argv);
  } catch (const CLI::ExtrasError&) {
    throw fp4t::RecipeError(explain_extras(app, entries) + "; fp4train --help lists the commands");
  } catch (const CLI::ParseError& e) {
    if (e.get_exit_code() == 0) return with_output(app.exit(e));  // --help, --version
    throw fp4t::RecipeError(fp4t::printable(e.what()) + "; fp4train --help lists the commands");
  }
  const auto missing = [&o] {
    if (o.recipe.config.empty())
      throw fp4t::RecipeError("--config is missing; fp4train --help lists the commands");
  };
  for (const Entry& entry : entries) {
    if (!entry.app->parsed()) continue;
    refuse_options_before(app, entry);
    if (entry.reads_recipe) missing();
    return with_output(entry.body(o));
  }
  missing();
  // A run has its log and its files; nobody needs to watch it.
  return o.dry_run ? with_output(fp4t::cmd_plan(o)) : fp4t::cmd_train(o);
}

int out_of_memory(const std::string& what) {
  return fp4t::end_after_error(
      static_cast<int>(fp4t::ExitCode::kRecipe),
      "out of memory: " + what +
          "; smaller batch.micro_sequences, objective.micro_tokens, sampling.max_batch, a smaller model or "
          "parallel.recompute: block need less, and so do smaller files of data");
}

// Lists of some megabytes are made anew in every layer (engine/model/trip.h: 65,536 guests of 8 choices):
// fresh pages from the kernel took 7 of 15 ms. What was freed is used again instead.
void keep_freed_memory() {
#ifdef __GLIBC__
  mallopt(M_MMAP_THRESHOLD, 64 << 20);
  mallopt(M_TRIM_THRESHOLD, 256 << 20);
#endif
}

}  // namespace

int main(int argc, char** argv) {
  keep_freed_memory();
  try {
    return run(argc, argv);
  } catch (const fp4t::MemoryError& e) {
    return out_of_memory(e.what());
  } catch (const fp4t::Error& e) {
    return fp4t::end_after_error(static_cast<int>(e.code()), e.what());
  } catch (const std::bad_alloc&) {
    return out_of_memory("the system gives no more");
  } catch (const std::filesystem::filesystem_error& e) {
    return fp4t::end_after_error(static_cast<int>(fp4t::ExitCode::kMissingInput), fp4t::printable(e.what()));
  } catch (const std::exception& e) {
    return fp4t::end_after_error(static_cast<int>(fp4t::ExitCode::kInternal),
                                 std::string("internal error: ") + e.what());
  }
}

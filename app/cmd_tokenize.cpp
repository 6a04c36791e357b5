#include <cstdio>
#include <thread>

#include "app/command.h"
#include "engine/recipe/load.h"
#include "engine/tokens/tokenize.h"
#include "kernels/base/check.h"
#include "kernels/base/text.h"

namespace fp4t {

namespace {

TokenizerSpec tokenizer_of(const AppOptions& options) {
  if (options.recipe.config.empty() == options.tokenizer.empty()) {
    throw RecipeError("tokenize: one of --config and --tokenizer says which tokenizer; found " +
                      std::string(options.tokenizer.empty() ? "neither" : "both"));
  }
  if (options.recipe.config.empty() && !options.recipe.overrides.empty()) {
    throw RecipeError("--set has no effect without --config");
  }
  if (!options.recipe.config.empty()) {
    return load_recipe(options.recipe.config, options.recipe.overrides).recipe.tokenizer;
  }
  TokenizerSpec spec;
  spec.kind = options.tokenizer == "bytes"            ? "bytes"
              : options.tokenizer.ends_with(".model") ? "sentencepiece"
                                                      : "json";
  if (spec.kind != "bytes") spec.path = options.tokenizer;
  return spec;
}

std::unique_ptr<Tokenizer> tokenizer_for(const AppOptions& options) {
  const TokenizerSpec spec = tokenizer_of(options);
  try {
    return make_tokenizer(spec);
  } catch (const RecipeError& e) {
    if (!options.recipe.config.empty()) throw;
    throw RecipeError(std::string(e.what()) + "; --config takes a recipe with such a key");
  }
}

}  // namespace

int cmd_tokenize(const AppOptions& options) {
  const bool is_json = options.kind == "jsonl";
  if (is_json && !options.separator.empty()) throw RecipeError("--separator has no effect with --kind jsonl");
  if (!is_json && options.field != AppOptions{}.field) {
    throw RecipeError("--field has no effect with --kind text");
  }
  DataSourceSpec source;
  source.name = "--in";
  source.paths = options.inputs;
  source.kind = options.kind;
  source.field = options.field;
  source.separator = options.separator;
  source.end_of_document = !options.no_end_of_document;
  source.special_tokens = options.special_tokens;
  const auto tokenizer = tokenizer_for(options);
  const int threads = options.threads > 0
                          ? static_cast<int>(options.threads)
                          : static_cast<int>(std::max(1u, std::thread::hardware_concurrency()));
  const TokenizeReport report = tokenize_files(source, *tokenizer, options.out, threads, options.replace);
  std::printf(
      "%s.bin: %lld tokens of %lld documents in %lld files, %.2f MB of text in %.2f s, %.2f MB/s, "
      "fingerprint %s\n",
      printable(options.out).c_str(), static_cast<long long>(report.tokens),
      static_cast<long long>(report.documents), static_cast<long long>(report.files),
      static_cast<double>(report.bytes) / 1e6, report.seconds,
      static_cast<double>(report.bytes) / 1e6 / report.seconds, report.fingerprint.c_str());
  return 0;
}

}  // namespace fp4t

#include <cstdio>

#include "app/command.h"
#include "engine/metrics/metrics.h"
#include "engine/stage/evaluate_checkpoint.h"
#include "kernels/base/check.h"

namespace fp4t {

namespace {

// An option that measures nothing is a mistake.
void refuse_without_effect(const AppOptions& o) {
  const AppOptions unset;
  const auto needs = [](bool given, const char* option, bool used, const char* what) {
    if (given && !used) throw RecipeError(std::string(option) + " has no effect without " + what);
  };
  const bool text = !o.text.empty(), lines = o.text.ends_with(".jsonl");
  needs(o.field != unset.field, "--field", text && lines, "--text FILE.jsonl");
  needs(!o.separator.empty(), "--separator", text && !lines, "--text FILE of plain text");
  needs(o.context > 0, "--context", text, "--text");
  needs(o.stride > 0, "--stride", text, "--text");
  needs(!o.before.empty(), "--before", !o.choices.empty(), "--choices");
  needs(!o.after.empty(), "--after", !o.choices.empty(), "--choices");
  needs(o.details, "--details", !o.choices.empty(), "--choices");
  needs(!o.stop.empty(), "--stop", !o.prompts.empty(), "--prompts");
  needs(o.max_tokens > 0, "--max-tokens", !o.prompts.empty(), "--prompts");
}

}  // namespace

int cmd_evaluate(const AppOptions& options) {
  refuse_without_effect(options);
  EvaluateRequest request;
  request.checkpoint = options.checkpoint;
  request.tokenizer = options.tokenizer;
  request.table = options.table;
  request.text = {options.text, options.field, options.separator};
  request.choices = options.choices;
  request.prompts = options.prompts;
  request.context = options.context;
  request.stride = options.stride;
  request.layout = {options.before, options.after};
  request.details = options.details;
  request.stop = options.stop;
  if (options.max_tokens > 0) request.max_tokens = options.max_tokens;
  request.batch_tokens = options.batch_tokens;
  const std::string json = evaluate_checkpoint(request);
  std::fputs(json.c_str(), stdout);  // first: it is not lost when the file cannot be written
  if (!options.out.empty()) write_text_file(options.out, json);
  return 0;
}

}  // namespace fp4t

#include <cstdio>

#include "app/command.h"
#include "engine/metrics/metrics.h"
#include "engine/stage/evaluate_checkpoint.h"

namespace fp4t {

int cmd_evaluate(const AppOptions& options) {
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
  if (!options.out.empty()) write_text_file(options.out, json);
  std::fputs(json.c_str(), stdout);
  return 0;
}

}  // namespace fp4t

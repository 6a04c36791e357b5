#include <algorithm>
#include <nlohmann/json.hpp>
#include <sstream>

#include "engine/metrics/json_line.h"
#include "engine/metrics/metrics.h"
#include "engine/stage/benchmarks.h"
#include "kernels/base/text.h"

namespace fp4t {

namespace {

PromptLine prompt_of(const nlohmann::json& object, PromptLine line) {
  const auto refuse = [&](const std::string& what) {
    throw BadDataError(detail::concat(printable(line.path), ":", line.line, ": ", what));
  };
  if (!object.is_object()) refuse("no JSON object");
  if (!object.contains("prompt") || !object["prompt"].is_string()) refuse("no text under the key 'prompt'");
  line.text = object["prompt"];
  if (line.text.empty()) refuse("an empty prompt has no token to continue");
  if (object.contains("stop")) {
    line.stop.clear();
    const nlohmann::json list =
        object["stop"].is_array() ? object["stop"] : nlohmann::json::array({object["stop"]});
    for (const auto& text : list) {
      if (!text.is_string() || text == "") refuse("'stop' is no text, and no list of texts");
      line.stop.push_back(text);
    }
  }
  if (object.contains("max_tokens")) {
    const auto& n = object["max_tokens"];
    if (!n.is_number_unsigned() || n < 1 || n > 1000000000)
      refuse("'max_tokens' is no whole number from 1 to 1e9");
    line.max_tokens = n;
  }
  return line;
}

}  // namespace

std::vector<PromptLine> read_prompts(const std::string& path, const std::vector<std::string>& stop,
                                     int64_t max_tokens) {
  std::istringstream in(read_text_file(path));
  std::vector<PromptLine> prompts;
  std::string line;
  for (int64_t number = 1; std::getline(in, line); ++number) {
    if (line.find_first_not_of(" \t\r") == std::string::npos) continue;
    prompts.push_back(
        prompt_of(parse_json_line<nlohmann::json>(line, path, number), {path, number, "", stop, max_tokens}));
  }
  if (prompts.empty()) throw BadDataError(printable(path) + ": no prompt");
  return prompts;
}

size_t first_stop(const std::string& text, const std::vector<std::string>& stop) {
  size_t first = std::string::npos;
  for (const std::string& s : stop) first = std::min(first, text.find(s));
  return first;
}

std::vector<PromptCompletion> complete_prompts(Transformer& model, const Pass& pass,
                                               const Tokenizer& tokenizer,
                                               const std::vector<PromptLine>& prompts) {
  std::vector<GenerateRequest> requests;
  GenerateOptions options;
  options.temperature = 0;
  options.max_tokens = 1;
  options.max_batch = model.plan().max_cache_slots;
  options.end_tokens = {tokenizer.end_of_document()};
  options.key = site_key(0, Purpose::kGenerate, 0, 0, 0, 0);
  for (const PromptLine& p : prompts) {
    requests.push_back({tokenizer.prompt(p.text), static_cast<int64_t>(requests.size())});
    options.max_tokens = std::max(options.max_tokens, p.max_tokens);
  }
  std::vector<PromptCompletion> results;
  for (const Completion& c : generate(model, pass, requests, options)) {
    const PromptLine& prompt = prompts[results.size()];
    std::vector<int32_t> tokens = c.tokens;
    // All ran as long as the longest may; the text of a greedy completion does not depend on what follows.
    const bool longer = static_cast<int64_t>(tokens.size()) > prompt.max_tokens;
    if (longer) tokens.resize(static_cast<size_t>(prompt.max_tokens));
    PromptCompletion result;
    result.tokens = static_cast<int64_t>(tokens.size());
    for (const int32_t t : tokens) result.text += tokenizer.piece(t);
    result.ending = c.finished && !longer ? "end" : "length";
    const size_t stop = first_stop(result.text, prompt.stop);
    if (stop != std::string::npos) {
      result.text.resize(stop);
      result.ending = "stop";
    }
    results.push_back(std::move(result));
  }
  return results;
}

}  // namespace fp4t

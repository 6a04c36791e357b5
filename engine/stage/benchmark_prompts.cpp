#include <algorithm>
#include <nlohmann/json.hpp>
#include <sstream>

#include "engine/metrics/json_line.h"
#include "engine/stage/benchmarks.h"
#include "kernels/base/text.h"
#include "kernels/base/text_file.h"

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

size_t first_stop(const std::string& text, const std::vector<std::string>& stop, size_t searched) {
  size_t first = std::string::npos;
  for (const std::string& s : stop) {
    const size_t open = s.empty() ? 0 : s.size() - 1;  // of it may stand before what is new
    first = std::min(first, text.find(s, searched - std::min(searched, open)));
  }
  return first;
}

std::vector<PromptCompletion> complete_prompts(Transformer& model, const Pass& pass,
                                               const Tokenizer& tokenizer,
                                               const std::vector<PromptLine>& prompts) {
  std::vector<GenerateRequest> requests;
  std::vector<PromptCompletion> results(prompts.size());
  GenerateOptions options;
  options.temperature = 0;
  options.max_tokens = 1;
  options.max_batch = model.plan().max_cache_slots;
  options.end_tokens = {tokenizer.end_of_document()};
  options.key = site_key(0, Purpose::kGenerate, 0, 0, 0, 0);
  for (const PromptLine& p : prompts) {
    requests.push_back({tokenizer.prompt(p.text), static_cast<int64_t>(requests.size()), p.max_tokens});
    options.max_tokens = std::max(options.max_tokens, p.max_tokens);
  }
  options.watch = [&](size_t request, int32_t token) {
    PromptCompletion& result = results[request];
    const size_t before = result.text.size();
    result.tokens += 1;
    result.text += tokenizer.piece(token);
    const size_t stop = first_stop(result.text, prompts[request].stop, before);
    if (stop == std::string::npos) return false;
    result.text.resize(stop);
    result.ending = "stop";
    return true;
  };
  const std::vector<Completion> completions = generate(model, pass, requests, options);
  for (size_t i = 0; i < results.size(); ++i) {
    if (results[i].ending.empty()) results[i].ending = completions[i].finished ? "end" : "length";
  }
  return results;
}

}  // namespace fp4t

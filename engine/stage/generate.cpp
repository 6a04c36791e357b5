#include "engine/stage/generate.h"

#include <algorithm>

#include "engine/rl/sampler.h"
#include "engine/stage/checkpoint_model.h"
#include "engine/tokens/chat.h"

namespace fp4t {

namespace {

// The recipe's, or the one of the template beside the vocabulary's file, which an imported model has.
Chat chat_of(const CheckpointModel& source) {
  const std::string& form = source.tokenizer->chat();
  const std::string& file = source.plan.tokenizer.path;
  if (form.empty() && file.empty()) throw RecipeError("--chat: the run's recipe has no tokenizer.chat");
  return {form.empty() ? chat_form_beside(file) : form, *source.tokenizer};
}

std::vector<int32_t> prompt_of(const TextRequest& request, const CheckpointModel& source) {
  if (!request.chat) {
    if (!request.system.empty()) throw RecipeError("--system: has no effect without --chat");
    return source.tokenizer->prompt(request.prompt);
  }
  std::vector<Message> messages = {{"user", request.prompt}};
  if (!request.system.empty()) messages.insert(messages.begin(), {"system", request.system});
  return chat_of(source).tokens(messages, true);
}

}  // namespace

std::vector<std::string> generate_text(const TextRequest& request) {
  CheckpointModel source(request.checkpoint, request.tokenizer);
  const std::vector<int32_t> prompt = prompt_of(request, source);
  if (request.prompt.empty()) throw RecipeError("--prompt: an empty text has no token to continue");
  constexpr int64_t kUsualTokens = 128;
  const int64_t positions = source.plan.model.max_positions;
  const int64_t room = positions - static_cast<int64_t>(prompt.size());
  const int64_t max_tokens =
      request.max_tokens > 0 ? request.max_tokens : std::max<int64_t>(1, std::min(kUsualTokens, room));
  const auto length = static_cast<int64_t>(prompt.size()) + max_tokens;
  if (length > positions) {
    throw RecipeError(detail::concat("--prompt of ", prompt.size(), " tokens and --max-tokens ", max_tokens,
                                     " exceed model.max_positions ", positions));
  }
  size_for_generation(source.plan, static_cast<int64_t>(prompt.size()), length, request.samples);
  LoadedModel loaded(source);

  GenerateOptions options;
  options.temperature = request.temperature;
  options.top_p = request.top_p;
  options.max_tokens = max_tokens;
  options.max_batch = source.plan.max_cache_slots;
  options.end_tokens = {source.tokenizer->end_of_document()};
  if (request.chat) options.end_tokens = chat_of(source).end_tokens();
  options.key = site_key(request.seed, Purpose::kGenerate, 0, 0, 0, 0);
  std::vector<GenerateRequest> requests;
  for (int64_t s = 0; s < request.samples; ++s) requests.push_back({prompt, s});
  StreamDecoder decoder(*source.tokenizer);
  const auto show = [&](const std::string& text) {
    if (request.stream && !text.empty()) request.stream(text);
  };
  options.watch = [&](size_t sample, int32_t token) {
    if (sample == 0) show(decoder.push(token));
    return false;
  };
  std::vector<std::string> texts;
  for (const Completion& c : generate(loaded.model, source.pass("rl.sampler"), requests, options))
    texts.push_back(source.tokenizer->continuation(c.tokens));
  show(decoder.finish());
  return texts;
}

}  // namespace fp4t

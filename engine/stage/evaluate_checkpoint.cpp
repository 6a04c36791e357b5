#include "engine/stage/evaluate_checkpoint.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <ctime>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "engine/stage/checkpoint_model.h"
#include "engine/tokens/hash.h"
#include "kernels/base/text.h"
#include "kernels/base/text_file.h"

namespace fp4t {

namespace {

using Json = nlohmann::ordered_json;

// The files, read and encoded: what decides how large the model must be.
struct Inputs {
  Documents documents;
  TextWindows windows;
  std::vector<ChoiceQuestion> questions;
  std::vector<ChoiceSequences> sequences;
  std::vector<PromptLine> prompts;
  int64_t batch_tokens = 0;    // rows of a scoring forward
  int64_t longest_prompt = 0;  // tokens
  int64_t longest_text = 0;    // of a prompt and its completion
};

TextWindows windows_for(const EvaluateRequest& request, int64_t positions) {
  TextWindows windows;
  windows.context = request.context > 0 ? request.context : positions;
  windows.stride = request.stride > 0 ? request.stride : std::max<int64_t>(1, windows.context / 2);
  if (windows.context > positions) {
    throw RecipeError(
        detail::concat("--context ", windows.context, " exceeds model.max_positions ", positions));
  }
  if (windows.stride > windows.context) {
    throw RecipeError(detail::concat("--stride ", windows.stride, " exceeds the context ", windows.context,
                                     ": tokens between two windows would not be scored"));
  }
  return windows;
}

void read_prompt_file(const EvaluateRequest& request, const CheckpointModel& source, Inputs& in) {
  in.prompts = read_prompts(request.prompts, request.stop, request.max_tokens);
  const int64_t positions = source.plan.model.max_positions;
  for (const PromptLine& p : in.prompts) {
    int64_t n = 0;
    try {
      n = static_cast<int64_t>(source.tokenizer->prompt(p.text).size());
    } catch (const NoTokenError& e) {
      throw BadDataError(detail::concat(printable(p.path), ":", p.line, ": ", e.what()));
    }
    if (n == 0 || n > positions) {
      throw BadDataError(detail::concat(printable(p.path), ":", p.line, ": a prompt of ", n,
                                        " tokens; model.max_positions is ", positions));
    }
    in.longest_prompt = std::max(in.longest_prompt, n);
    in.longest_text = std::max(in.longest_text, std::min(positions, n + p.max_tokens));
  }
}

Inputs read_inputs(const EvaluateRequest& request, const CheckpointModel& source) {
  Inputs in;
  const int64_t positions = source.plan.model.max_positions;
  int64_t longest = 0;
  if (!request.text.path.empty()) {
    in.windows = windows_for(request, positions);
    in.documents = read_text_documents(request.text);
    longest = in.windows.context;
  }
  if (!request.choices.empty()) {
    in.questions = read_questions(request.choices);
    for (const ChoiceQuestion& q : in.questions) {
      in.sequences.push_back(choice_sequences(q, request.layout, *source.tokenizer, positions));
      for (const ScoredTokens& s : in.sequences.back().of_choice) longest = std::max(longest, s.rows());
    }
  }
  if (longest > 0) in.batch_tokens = std::max(longest, request.batch_tokens);
  if (!request.prompts.empty()) read_prompt_file(request, source, in);
  return in;
}

void size_plan_for(Plan& plan, const Inputs& in) {
  constexpr int64_t kMostTogether = 32;
  const auto together =
      std::min<int64_t>(kMostTogether, std::max<int64_t>(1, static_cast<int64_t>(in.prompts.size())));
  size_for_generation(plan, std::max({int64_t{1}, in.batch_tokens, in.longest_prompt}),
                      std::max<int64_t>(1, in.longest_text), together);
}

// Base name and content: the same file elsewhere is the same.
Json file_json(const std::string& path) {
  return {{"file", std::filesystem::path(path).filename().string()},
          {"hash", xxh3_hex(read_text_file(path))}};
}

Json text_json(const EvaluateRequest& request, const Inputs& in, const Perplexity& p) {
  Json j = file_json(request.text.path);
  j["context"] = in.windows.context;
  j["stride"] = in.windows.stride;
  j["documents"] = p.documents;
  j["tokens"] = p.tokens;
  j["scored_tokens"] = p.scored_tokens;
  j["scored_bytes"] = p.scored_bytes;
  j["nats_per_token"] = p.nats_per_token();
  j["bits_per_byte"] = p.bits_per_byte();
  j["perplexity"] = p.perplexity();
  return j;
}

Json choices_json(const EvaluateRequest& request, const Inputs& in, const ChoiceResult& result) {
  const auto n = static_cast<double>(in.questions.size());
  const auto share = [&](int64_t right) { return static_cast<double>(right) / n; };
  const auto error = [&](int64_t right) { return std::sqrt(share(right) * (1 - share(right)) / n); };
  Json j = file_json(request.choices);
  j["before"] = request.layout.before;
  j["after"] = request.layout.after;
  j["questions"] = in.questions.size();
  j["questions_cut"] = result.cut;
  j["accuracy"] = share(result.right);
  j["accuracy_standard_error"] = error(result.right);
  j["accuracy_by_bytes"] = share(result.right_by_bytes);
  j["accuracy_by_bytes_standard_error"] = error(result.right_by_bytes);
  if (!request.details) return j;
  j["details"] = Json::array();
  for (size_t q = 0; q < in.questions.size(); ++q) {
    const ChoiceOutcome& o = result.outcomes[q];
    j["details"].push_back({{"line", in.questions[q].line},
                            {"answer", in.questions[q].answer},
                            {"chosen", o.chosen},
                            {"chosen_by_bytes", o.chosen_by_bytes},
                            {"log_probabilities", o.log_probabilities}});
  }
  return j;
}

Json prompts_json(const EvaluateRequest& request, const Inputs& in,
                  const std::vector<PromptCompletion>& completions) {
  Json j = file_json(request.prompts);
  j["completions"] = Json::array();
  for (size_t i = 0; i < completions.size(); ++i) {
    j["completions"].push_back({{"line", in.prompts[i].line},
                                {"prompt", in.prompts[i].text},
                                {"completion", completions[i].text},
                                {"ending", completions[i].ending},
                                {"tokens", completions[i].tokens}});
  }
  return j;
}

Json identity_json(const EvaluateRequest& request, const CheckpointModel& source) {
  const RunState& state = source.info.state;
  return {{"kind", "evaluation"},
          {"format", 1},
          {"checkpoint",
           {{"content_hash", source.info.content_hash},
            {"run", source.plan.run.name},
            {"stage", source.plan.stages[static_cast<size_t>(state.stage)].name},
            {"step", state.step}}},
          {"precision", {{"table", request.table}, {"hash", source.plan.precision_hash}}},
          {"tokenizer",
           {{"kind", source.plan.tokenizer.kind},
            {"fingerprint", source.tokenizer->fingerprint()},
            {"vocabulary", source.tokenizer->vocabulary()}}}};
}

std::string utc_now() {
  const std::time_t now = std::time(nullptr);
  std::tm parts{};
  ::gmtime_r(&now, &parts);
  char text[32];
  std::strftime(text, sizeof(text), "%Y-%m-%dT%H:%M:%SZ", &parts);
  return text;
}

// As held-out loss is measured in a run.
std::string usual_table(const CheckpointModel& source) {
  for (size_t i = 0; i <= static_cast<size_t>(source.info.state.stage); ++i) {
    if (!source.plan.stages[i].is_rl) return name_of(Table::kPretrainForward);
  }
  return name_of(Table::kTrainerForward);
}

}  // namespace

std::string evaluate_checkpoint(const EvaluateRequest& asked) {
  EvaluateRequest request = asked;
  const auto begin = std::chrono::steady_clock::now();
  if (request.text.path.empty() && request.choices.empty() && request.prompts.empty()) {
    throw RecipeError("nothing to evaluate on: --text, --choices or --prompts names a file");
  }
  CheckpointModel source(request.checkpoint, request.tokenizer);
  if (request.table.empty()) request.table = usual_table(source);
  const Pass pass = source.pass(request.table);
  const Inputs in = read_inputs(request, source);
  size_plan_for(source.plan, in);
  LoadedModel loaded(source);
  Json j = identity_json(request, source);
  if (in.batch_tokens > 0) {
    j["batch_tokens"] = in.batch_tokens;
    Scorer scorer(loaded.model, pass, in.batch_tokens);
    if (!request.text.path.empty()) {
      j["text"] =
          text_json(request, in, measure_perplexity(scorer, *source.tokenizer, in.documents, in.windows));
    }
    if (!request.choices.empty()) {
      j["choices"] = choices_json(request, in, answer_questions(scorer, in.questions, in.sequences));
    }
  }
  if (!request.prompts.empty()) {
    j["prompts"] =
        prompts_json(request, in, complete_prompts(loaded.model, pass, *source.tokenizer, in.prompts));
  }
  const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - begin;
  j["made"] = {{"date", utc_now()},
               {"seconds", seconds.count()},
               {"device", source.machine.device_name},
               {"checkpoint", source.path}};
  return j.dump(2, ' ', false, nlohmann::json::error_handler_t::replace) + "\n";
}

}  // namespace fp4t

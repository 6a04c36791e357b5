// What `fp4train evaluate` measures of a model: perplexity of a text, multiple-choice questions, greedy
// completions. Each reads its file whole first, so that whatever is wrong with it is told, by file and line,
// before the model computes anything.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "engine/rl/sampler.h"
#include "engine/stage/scorer.h"
#include "engine/tokens/source.h"
#include "engine/tokens/tokenizer.h"

namespace fp4t {

// Perplexity (benchmark_text.cpp) ------------------------------------------------------------------------

// How a document longer than the model's view is cut: windows of `context` tokens that begin every `stride`
// tokens. Every token of a document but its first is scored once, by the first window that reaches it, given
// the tokens of that window before it: at least context - stride + 1 of them where the document has so many.
struct TextWindows {
  int64_t context = 0, stride = 0;  // 1 <= stride <= context
};
std::vector<ScoredTokens> windows_of(const std::vector<int32_t>& document, const TextWindows& windows);

struct Perplexity {
  int64_t documents = 0;
  int64_t tokens = 0;         // all
  int64_t scored_tokens = 0;  // without the first of each document
  int64_t scored_bytes = 0;   // of the text that they stand for
  double nats = 0;            // sum of -log p
  double nats_per_token() const;
  double bits_per_byte() const;
  double perplexity() const;  // exp(nats a token)
};
// A file whose name ends in .jsonl holds a text an object, under `field`; another is one document, or several
// with a line `separator` between. Throws as read_documents does; BadDataError when no token can be scored.
struct TextFile {
  std::string path, field = "text", separator;
};
Documents read_text_documents(const TextFile& file);
Perplexity measure_perplexity(Scorer& scorer, const Tokenizer& tokenizer, const Documents& documents,
                              const TextWindows& windows);

// Multiple choice (benchmark_choices.cpp) ----------------------------------------------------------------

struct ChoiceQuestion {
  std::string path;
  int64_t line = 0;
  std::string text;  // what comes before every choice
  std::vector<std::string> choices;
  size_t answer = 0;  // index of the right one
};
// JSON lines in the layouts of common benchmarks: the question under `question`, `ctx`, `query`, `goal` or
// `prompt`; choices as a list of texts under `choices` or `endings`, or {"text": [...], "label": [...]} under
// `choices`; the answer under `answer`, `answerKey`, `label` or `gold` as an index from 0 or a label. Throws
// BadDataError naming file and line.
std::vector<ChoiceQuestion> read_questions(const std::string& path);

// Text around every question ("Question: ", "\nAnswer:").
struct ChoiceLayout {
  std::string before, after;
};
// The choices of a question as sequences, their own tokens scored: question and choice are encoded together,
// with a space between them unless the question ends in white space, and what both have in common with the
// question alone is not scored. A question too long for `positions` loses its beginning (`cut`), but not what
// the tokenizer begins a document with; a choice that leaves it no token is BadDataError.
struct ChoiceSequences {
  std::vector<ScoredTokens> of_choice;
  bool cut = false;
};
ChoiceSequences choice_sequences(const ChoiceQuestion& question, const ChoiceLayout& layout,
                                 const Tokenizer& tokenizer, int64_t positions);

struct ChoiceOutcome {
  std::vector<double> log_probabilities;  // sums over each choice's tokens
  size_t chosen = 0;                      // the most likely; of equal ones the first
  size_t chosen_by_bytes = 0;             // by log-probability over the choice's bytes
};
struct ChoiceResult {
  std::vector<ChoiceOutcome> outcomes;  // of each question
  int64_t right = 0, right_by_bytes = 0, cut = 0;
};
ChoiceResult answer_questions(Scorer& scorer, const std::vector<ChoiceQuestion>& questions,
                              const std::vector<ChoiceSequences>& sequences);

// Completions (benchmark_prompts.cpp) ----------------------------------------------------------------------

struct PromptLine {
  std::string path;
  int64_t line = 0;
  std::string text;
  std::vector<std::string> stop;  // the line's own, else the command's
  int64_t max_tokens = 0;
};
// JSON lines {"prompt": text, "stop": text or texts, "max_tokens": number}; the last two may be missing.
std::vector<PromptLine> read_prompts(const std::string& path, const std::vector<std::string>& stop,
                                     int64_t max_tokens);

struct PromptCompletion {
  std::string text;    // up to the first stop string, which is left out
  std::string ending;  // "stop": a stop string; "end": <eod>; "length": max_tokens or the model's positions
  int64_t tokens = 0;  // that were drawn: none behind the one with which a stop string is complete
};
// Where the first of the stop strings begins that is not within the first `searched` bytes; npos.
size_t first_stop(const std::string& text, const std::vector<std::string>& stop, size_t searched = 0);
std::vector<PromptCompletion> complete_prompts(Transformer& model, const Pass& pass,
                                               const Tokenizer& tokenizer,
                                               const std::vector<PromptLine>& prompts);

}  // namespace fp4t

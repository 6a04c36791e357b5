#include <algorithm>
#include <nlohmann/json.hpp>
#include <sstream>

#include "engine/metrics/json_line.h"
#include "engine/stage/benchmarks.h"
#include "kernels/base/text.h"
#include "kernels/base/text_file.h"

namespace fp4t {

namespace {

[[noreturn]] void refuse(const std::string& path, int64_t line, const std::string& what) {
  throw BadDataError(detail::concat(printable(path), ":", line, ": ", what));
}

// The first of the keys that the object has.
const nlohmann::json* first_of(const nlohmann::json& object, std::initializer_list<const char*> keys) {
  for (const char* key : keys) {
    if (object.contains(key)) return &object[key];
  }
  return nullptr;
}

class QuestionReader {
 public:
  QuestionReader(const std::string& path, int64_t line, const nlohmann::json& object)
      : path_(path), line_(line), object_(object) {}

  ChoiceQuestion read() const {
    if (!object_.is_object()) refuse(path_, line_, "no JSON object");
    ChoiceQuestion q;
    q.path = path_;
    q.line = line_;
    const nlohmann::json* text = first_of(object_, {"question", "ctx", "query", "goal", "prompt"});
    if (!text || !text->is_string() || text->get_ref<const std::string&>().empty()) {
      refuse(path_, line_, "no text under 'question' (or ctx, query, goal, prompt)");
    }
    q.text = *text;
    const nlohmann::json* choices = first_of(object_, {"choices", "endings"});
    if (!choices) refuse(path_, line_, "no 'choices' (or endings)");
    std::vector<std::string> labels;
    if (choices->is_object()) {
      if (!choices->contains("text")) refuse(path_, line_, "'choices' has no 'text'");
      if (choices->contains("label")) labels = texts((*choices)["label"], "choices.label");
      q.choices = texts((*choices)["text"], "choices.text");
      if (!labels.empty() && labels.size() != q.choices.size()) {
        refuse(path_, line_, detail::concat(q.choices.size(), " choices and ", labels.size(), " labels"));
      }
    } else {
      q.choices = texts(*choices, "choices");
    }
    if (q.choices.size() < 2) refuse(path_, line_, "fewer than two choices");
    for (const std::string& choice : q.choices) {
      if (choice.empty()) refuse(path_, line_, "an empty choice");
    }
    q.answer = answer(q, labels);
    return q;
  }

 private:
  std::vector<std::string> texts(const nlohmann::json& list, const char* key) const {
    if (!list.is_array()) refuse(path_, line_, detail::concat("'", key, "' is no list"));
    std::vector<std::string> out;
    for (const nlohmann::json& text : list) {
      if (!text.is_string()) refuse(path_, line_, detail::concat("'", key, "' holds what is no text"));
      out.push_back(text);
    }
    return out;
  }

  // A label where there are labels, else a number (also as text) from 0, or a letter from A.
  size_t answer(const ChoiceQuestion& q, const std::vector<std::string>& labels) const {
    const nlohmann::json* value = first_of(object_, {"answerKey", "answer", "label", "gold"});
    if (!value) refuse(path_, line_, "no 'answer' (or answerKey, label, gold)");
    const bool is_text = value->is_string();
    const std::string text = is_text ? value->get<std::string>() : value->dump();
    const auto labelled = std::find(labels.begin(), labels.end(), text);
    if (labelled != labels.end()) return static_cast<size_t>(labelled - labels.begin());
    const bool digits =
        !text.empty() && text.size() < 4 && text.find_first_not_of("0123456789") == std::string::npos;
    size_t index = q.choices.size();
    if (digits && (labels.empty() || !is_text)) index = static_cast<size_t>(std::stoi(text));
    if (is_text && labels.empty() && text.size() == 1 && text[0] >= 'A' && text[0] <= 'Z') {
      index = static_cast<size_t>(text[0] - 'A');
    }
    if (index >= q.choices.size()) {
      refuse(path_, line_,
             detail::concat("the answer ", value->dump(), " is none of the ", q.choices.size(), " choices",
                            labels.empty() ? ": an index from 0, or a letter from A" : ": a label"));
    }
    return index;
  }

  const std::string& path_;
  int64_t line_;
  const nlohmann::json& object_;
};

std::vector<int32_t> encode_at(const ChoiceQuestion& q, const std::string& text, const Tokenizer& tokenizer) {
  try {
    return tokenizer.prompt(text);
  } catch (const NoTokenError& e) {
    refuse(q.path, q.line, e.what());
  }
}

// Index of the largest; of equal ones the first.
size_t largest(const std::vector<double>& values) {
  return static_cast<size_t>(std::max_element(values.begin(), values.end()) - values.begin());
}

}  // namespace

std::vector<ChoiceQuestion> read_questions(const std::string& path) {
  std::istringstream in(read_text_file(path));
  std::vector<ChoiceQuestion> questions;
  std::string line;
  for (int64_t number = 1; std::getline(in, line); ++number) {
    if (line.find_first_not_of(" \t\r") == std::string::npos) continue;
    questions.push_back(
        QuestionReader(path, number, parse_json_line<nlohmann::json>(line, path, number)).read());
  }
  if (questions.empty()) throw BadDataError(printable(path) + ": no question");
  return questions;
}

ChoiceSequences choice_sequences(const ChoiceQuestion& question, const ChoiceLayout& layout,
                                 const Tokenizer& tokenizer, int64_t positions) {
  const std::string context = layout.before + question.text + layout.after;
  const std::string space = context.find_last_not_of(" \t\n") + 1 < context.size() ? "" : " ";
  const std::vector<int32_t> alone = encode_at(question, context, tokenizer);
  ChoiceSequences result;
  for (const std::string& choice : question.choices) {
    ScoredTokens s;
    s.tokens = encode_at(question, context + space + choice, tokenizer);
    const size_t most = std::min(alone.size(), s.tokens.size());
    s.first = 0;
    while (s.first < most && s.tokens[s.first] == alone[s.first]) ++s.first;
    const int64_t beyond = s.rows() - positions;
    if (beyond > 0) {  // what begins a document stays
      result.cut = true;
      const int64_t kept = tokenizer.begin_of_document() >= 0 ? 1 : 0;
      const auto cut = std::min<int64_t>(beyond, static_cast<int64_t>(s.first) - kept);
      s.tokens.erase(s.tokens.begin() + kept, s.tokens.begin() + kept + cut);
      s.first -= static_cast<size_t>(cut);
    }
    if (s.first == 0 || s.first >= s.tokens.size() || s.rows() > positions) {
      refuse(question.path, question.line,
             detail::concat("the choice '", printable(choice, 60),
                            "' and a token of the question before it do not fit into ", positions,
                            " positions, or share all their tokens"));
    }
    result.of_choice.push_back(std::move(s));
  }
  return result;
}

ChoiceResult answer_questions(Scorer& scorer, const std::vector<ChoiceQuestion>& questions,
                              const std::vector<ChoiceSequences>& sequences) {
  ChoiceResult result;
  result.outcomes.resize(questions.size());
  for (size_t q = 0; q < questions.size(); ++q) {
    for (const ScoredTokens& s : sequences[q].of_choice) {
      scorer.add(s, [&outcome = result.outcomes[q]](const std::vector<float>& log_probs) {
        double sum = 0;
        for (const float p : log_probs) sum += static_cast<double>(p);
        outcome.log_probabilities.push_back(sum);
      });
    }
    result.cut += sequences[q].cut;
  }
  scorer.flush();
  for (size_t q = 0; q < questions.size(); ++q) {
    ChoiceOutcome& outcome = result.outcomes[q];
    std::vector<double> by_bytes;
    for (size_t c = 0; c < questions[q].choices.size(); ++c) {
      by_bytes.push_back(outcome.log_probabilities[c] / static_cast<double>(questions[q].choices[c].size()));
    }
    outcome.chosen = largest(outcome.log_probabilities);
    outcome.chosen_by_bytes = largest(by_bytes);
    result.right += outcome.chosen == questions[q].answer;
    result.right_by_bytes += outcome.chosen_by_bytes == questions[q].answer;
  }
  return result;
}

}  // namespace fp4t

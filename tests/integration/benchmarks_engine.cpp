// fp4train evaluate: what it measures against sums made by hand from the model's logits, and the files it
// reads.
#include "engine/stage/benchmarks.h"

#include <gtest/gtest.h>

#include <cmath>
#include <filesystem>

#include "kernels/base/check.h"
#include "tests/support/model_runs.h"
#include "tests/support/process.h"

namespace fp4t::test {
namespace {

TestModel bytes_model() {
  ModelSpec model = tiny_model();
  model.vocabulary = 257;
  return TestModel(make_plan_by_hand(model, fp32_cells()));
}

// Bytes, with <eod> in front of every document and prompt.
class Begun : public Tokenizer {
 public:
  int64_t vocabulary() const override { return bytes_->vocabulary(); }
  int32_t end_of_document() const override { return 256; }
  int32_t begin_of_document() const override { return 256; }
  std::vector<int32_t> encode(std::string_view text) const override { return bytes_->encode(text); }
  std::string decode(const std::vector<int32_t>& tokens) const override { return bytes_->decode(tokens); }
  std::string piece(int32_t token) const override { return bytes_->piece(token); }
  int32_t single_token(const std::string& text) const override { return bytes_->single_token(text); }
  std::vector<int32_t> line_ends() const override { return bytes_->line_ends(); }
  std::string fingerprint() const override { return "begun"; }

 private:
  std::unique_ptr<Tokenizer> bytes_ = make_tokenizer({});
};

class Benchmarks : public ::testing::Test {
 protected:
  Benchmarks() : m_(bytes_model()), tokenizer_(make_tokenizer({})) {}

  Pass pass() const {
    Pass p;
    p.forward = &m_.tables().forward.at(0);
    p.seed = 7;
    return p;
  }
  // Logits behind every token of a sequence that stands alone.
  std::vector<std::vector<double>> logits(const std::vector<int32_t>& tokens) {
    TokenBatch b;
    for (size_t t = 0; t < tokens.size(); ++t) {
      b.tokens.push_back(tokens[t]);
      b.targets.push_back(-1);
      b.positions.push_back(static_cast<int32_t>(t));
      b.doc_begin.push_back(0);
    }
    m_.model.forward(pass(), b);
    const TensorView v = m_.model.logits(pass());
    std::vector<std::vector<double>> rows;
    for (int64_t t = 0; t < v.dim(0); ++t) {
      const float* row = v.as<float>() + t * v.dim(1);
      rows.emplace_back(row, row + v.dim(1));
    }
    return rows;
  }
  // Sum over tokens[first..] of log p given all before, in double.
  double log_probability(const std::vector<int32_t>& tokens, size_t first) {
    const auto rows = logits({tokens.begin(), tokens.end() - 1});
    double sum = 0;
    for (size_t t = first; t < tokens.size(); ++t) {
      double total = 0;
      for (const double x : rows[t - 1]) total += std::exp(x);
      sum += rows[t - 1][static_cast<size_t>(tokens[t])] - std::log(total);
    }
    return sum;
  }
  std::string file(const std::string& name, const std::string& text) {
    write_text(folder_ / name, text);
    return folder_ / name;
  }

  TestModel m_;
  std::unique_ptr<Tokenizer> tokenizer_;
  ScratchFolder folder_;
};

TEST_F(Benchmarks, windows_score_every_token_but_the_first_once) {
  const std::vector<int32_t> ten = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9};
  using Windows = std::vector<std::pair<std::vector<int32_t>, size_t>>;
  const auto windows = [&](int64_t context, int64_t stride) {
    Windows list;
    for (const ScoredTokens& w : windows_of(ten, {context, stride})) list.emplace_back(w.tokens, w.first);
    return list;
  };
  EXPECT_EQ(windows(4, 2),
            (Windows{{{0, 1, 2, 3, 4}, 1}, {{2, 3, 4, 5, 6}, 3}, {{4, 5, 6, 7, 8}, 3}, {{6, 7, 8, 9}, 3}}));
  EXPECT_EQ(windows(4, 4), (Windows{{{0, 1, 2, 3, 4}, 1}, {{4, 5, 6, 7, 8}, 1}, {{8, 9}, 1}}));
  EXPECT_EQ(windows(9, 5), (Windows{{ten, 1}}));
  EXPECT_EQ(windows(1, 1).size(), 9u);
  EXPECT_TRUE(windows_of({5}, {4, 2}).empty());
  for (const auto& [context, stride] : {std::pair<int64_t, int64_t>{3, 1}, {3, 2}, {7, 3}, {64, 64}}) {
    size_t scored = 0;
    for (const auto& [tokens, first] : windows(context, stride)) scored += tokens.size() - first;
    EXPECT_EQ(scored, 9u) << context << " " << stride;
  }
}

TEST_F(Benchmarks, perplexity_is_the_sum_over_the_windows_by_hand) {
  const std::string words = "the cat sat on the mat and ran off", more = "so\xC3\xA9";
  const std::string path = file("a.txt", words + "\n%\n" + more + "\n%\nx");
  const Documents documents = read_text_documents({path, "text", "%"});
  ASSERT_EQ(documents.texts.size(), 3u);
  const TextWindows windows{8, 3};
  double nats = 0;
  int64_t tokens = 0;
  for (const std::string& text : {words + "\n", more + "\n"}) {
    for (const ScoredTokens& w : windows_of(tokenizer_->encode(text), windows)) {
      nats -= log_probability(w.tokens, w.first);
      tokens += static_cast<int64_t>(w.tokens.size() - w.first);
    }
  }
  nats -= log_probability(tokenizer_->encode(documents.texts[2]), 1);
  tokens += static_cast<int64_t>(documents.texts[2].size()) - 1;
  for (const int64_t batch : {8, 96}) {  // one window a forward, or many
    Scorer scorer(m_.model, pass(), batch);
    const Perplexity p = measure_perplexity(scorer, *tokenizer_, documents, windows);
    EXPECT_EQ(p.documents, 3);
    EXPECT_EQ(p.scored_tokens, tokens);
    EXPECT_EQ(p.scored_bytes, tokens);  // a token is a byte
    EXPECT_NEAR(p.nats, nats, 1e-4 * nats);
    EXPECT_NEAR(p.nats_per_token(), nats / static_cast<double>(tokens), 1e-4);
    EXPECT_NEAR(p.bits_per_byte(), nats / static_cast<double>(tokens) / 0.6931471805599453, 1e-4);
    EXPECT_NEAR(std::log(p.perplexity()), nats / static_cast<double>(tokens), 1e-4);
  }
  const std::string lines = file("a.jsonl", R"({"body":"the cat"})"
                                            "\n\n"
                                            R"({"body":"ab"})"
                                            "\n");
  Scorer scorer(m_.model, pass(), 96);
  EXPECT_EQ(
      measure_perplexity(scorer, *tokenizer_, read_text_documents({lines, "body", ""}), {64, 32}).tokens, 9);
  EXPECT_THROW(
      measure_perplexity(scorer, *tokenizer_, read_text_documents({file("b.txt", "x"), "", ""}), {8, 4}),
      BadDataError);
}

TEST_F(Benchmarks, choices_are_ranked_by_log_probabilities_summed_by_hand) {
  const std::string path =
      file("q.jsonl", R"({"question":"1+2","choices":["3","four","it is a long one"],"answer":0}
{"ctx":"the cat ","endings":["sat","ran away","x"],"label":"1"}
{"question":"odd","choices":{"text":["aa","b b b"],"label":["P","Q"]},"answerKey":"Q"}
)");
  const std::vector<ChoiceQuestion> questions = read_questions(path);
  ASSERT_EQ(questions.size(), 3u);
  EXPECT_EQ(questions[1].answer, 1u);
  EXPECT_EQ(questions[2].answer, 1u);
  const ChoiceLayout layout{"Q: ", "="};
  std::vector<ChoiceSequences> sequences;
  for (const ChoiceQuestion& q : questions) sequences.push_back(choice_sequences(q, layout, *tokenizer_, 64));
  Scorer scorer(m_.model, pass(), 96);
  const ChoiceResult result = answer_questions(scorer, questions, sequences);
  int64_t right = 0, right_by_bytes = 0;
  for (size_t q = 0; q < questions.size(); ++q) {
    const std::string context = "Q: " + questions[q].text + "=";
    size_t best = 0, best_by_bytes = 0;
    std::vector<double> sums, by_bytes;
    for (const std::string& choice : questions[q].choices) {
      const double sum = log_probability(tokenizer_->encode(context + " " + choice), context.size());
      EXPECT_NEAR(result.outcomes[q].log_probabilities[sums.size()], sum, 1e-4 * std::abs(sum));
      sums.push_back(sum);
      by_bytes.push_back(sum / static_cast<double>(choice.size()));
      if (sums.back() > sums[best]) best = sums.size() - 1;
      if (by_bytes.back() > by_bytes[best_by_bytes]) best_by_bytes = by_bytes.size() - 1;
    }
    EXPECT_EQ(result.outcomes[q].chosen, best);
    EXPECT_EQ(result.outcomes[q].chosen_by_bytes, best_by_bytes);
    right += best == questions[q].answer;
    right_by_bytes += best_by_bytes == questions[q].answer;
  }
  EXPECT_EQ(result.right, right);
  EXPECT_EQ(result.right_by_bytes, right_by_bytes);
  EXPECT_EQ(result.cut, 0);
}

TEST_F(Benchmarks, a_question_longer_than_the_model_loses_its_beginning) {
  ChoiceQuestion q{"f", 3, std::string(100, 'x') + "yz ", {"ab", "cde"}, 0};
  const ChoiceSequences s = choice_sequences(q, {}, *tokenizer_, 10);
  EXPECT_TRUE(s.cut);
  // Ten rows: eleven tokens, of which the last predicts nothing. A space ends the question: none is added.
  EXPECT_EQ(tokenizer_->decode(s.of_choice[0].tokens), "xxxxxxyz ab");
  EXPECT_EQ(s.of_choice[0].first, 9u);
  EXPECT_EQ(tokenizer_->decode(s.of_choice[1].tokens), "xxxxxyz cde");
  EXPECT_EQ(s.of_choice[1].first, 8u);
  q.choices[1] = std::string(11, 'c');
  EXPECT_THROW(choice_sequences(q, {}, *tokenizer_, 10), BadDataError);
  q.choices[1] = std::string(10, 'c');
  EXPECT_EQ(choice_sequences(q, {}, *tokenizer_, 10).of_choice[1].first, 1u);
}

TEST_F(Benchmarks, what_begins_a_document_stands_before_questions_texts_and_prompts) {
  const Begun begun;
  ChoiceQuestion q{"f", 1, "abcdef=", {"xy", "z"}, 0};
  const ScoredTokens whole = choice_sequences(q, {}, begun, 64).of_choice[0];
  EXPECT_EQ(whole.tokens.front(), 256);
  EXPECT_EQ(begun.decode(whole.tokens), "abcdef= xy");
  EXPECT_EQ(whole.first, 8u);
  // It stays when the question is cut behind it.
  const ScoredTokens cut = choice_sequences(q, {}, begun, 6).of_choice[0];
  EXPECT_EQ(cut.tokens.front(), 256);
  EXPECT_EQ(begun.decode(cut.tokens), "ef= xy");
  EXPECT_EQ(cut.first, 4u);
  q.choices[0] = "123456";
  EXPECT_THROW(choice_sequences(q, {}, begun, 6), BadDataError);

  // So a text's first token is scored, too.
  const Documents documents = read_text_documents({file("a.txt", "the cat"), "", ""});
  Scorer scorer(m_.model, pass(), 96);
  const Perplexity p = measure_perplexity(scorer, begun, documents, {64, 64});
  EXPECT_EQ(p.scored_tokens, 7);
  EXPECT_EQ(p.scored_bytes, 7);
  std::vector<int32_t> tokens = tokenizer_->encode("the cat");
  tokens.insert(tokens.begin(), 256);
  EXPECT_NEAR(p.nats, -log_probability(tokens, 1), 1e-3);

  const std::vector<double> last = logits({256, 'a'}).back();
  const auto top = static_cast<int32_t>(std::max_element(last.begin(), last.end()) - last.begin());
  const PromptCompletion made = complete_prompts(m_.model, pass(), begun, {{"f", 1, "a", {}, 1}})[0];
  EXPECT_EQ(made.text, begun.piece(top));
}

TEST_F(Benchmarks, completions_are_greedy_and_end_before_a_stop_string) {
  const std::string prompt = "the cat";
  std::vector<int32_t> tokens = tokenizer_->encode(prompt);
  std::vector<int32_t> made;
  bool ended = false;
  while (made.size() < 12 && !ended) {
    const std::vector<double> last = logits(tokens).back();
    const auto top = static_cast<int32_t>(std::max_element(last.begin(), last.end()) - last.begin());
    tokens.push_back(top);
    made.push_back(top);
    ended = top == tokenizer_->end_of_document();
  }
  const std::string text = tokenizer_->decode(made);
  ASSERT_GE(text.size(), 4u) << "the seed makes too short a text for this test";
  const auto complete = [&](const std::vector<std::string>& stop, int64_t max_tokens) {
    return complete_prompts(m_.model, pass(), *tokenizer_,
                            {{"f", 1, prompt, stop, max_tokens}, {"f", 2, "a", {}, 12}})[0];
  };
  EXPECT_EQ(complete({}, 12).text, text);
  EXPECT_EQ(complete({}, 12).ending, ended ? "end" : "length");
  EXPECT_EQ(complete({}, 3).text, text.substr(0, 3));
  EXPECT_EQ(complete({}, 3).tokens, 3);
  const std::string stop = text.substr(2, 2);
  const PromptCompletion stopped = complete({"no such text", stop}, 12);
  EXPECT_EQ(stopped.text, text.substr(0, text.find(stop)));
  EXPECT_EQ(stopped.ending, "stop");
  // Nothing is drawn behind the token that completes it.
  EXPECT_EQ(static_cast<size_t>(stopped.tokens), text.find(stop) + stop.size());
  EXPECT_EQ(first_stop("abcabc", {"ca"}, 3), 2u);  // one that began before
  EXPECT_EQ(first_stop("abcabc", {"abc"}, 3), 3u);
  EXPECT_EQ(first_stop("abcabc", {"ca", "bc"}), 1u);
  EXPECT_EQ(first_stop("abc", {}), std::string::npos);
}

TEST_F(Benchmarks, what_is_wrong_with_a_file_is_told_by_its_line) {
  const auto refusal = [](const auto& read) {
    try {
      read();
    } catch (const Error& e) {
      return std::string(e.what());
    }
    return std::string("accepted");
  };
  const std::string good = R"({"question":"q","choices":["a","b"],"answer":"B"})"
                           "\n";
  for (const auto& [line, words] : std::vector<std::pair<std::string, std::string>>{
           {"{", "column 2"},
           {"[1]", "no JSON object"},
           {R"({"choices":["a","b"],"answer":0})", "no text under 'question'"},
           {R"({"question":"q","answer":0})", "no 'choices'"},
           {R"({"question":"q","choices":["a"],"answer":0})", "fewer than two"},
           {R"({"question":"q","choices":["a",""],"answer":0})", "an empty choice"},
           {R"({"question":"q","choices":["a",3],"answer":0})", "no text"},
           {R"({"question":"q","choices":["a","b"]})", "no 'answer'"},
           {R"({"question":"q","choices":["a","b"],"answer":2})", "the answer 2 is none of the 2"},
           {R"({"question":"q","choices":["a","b"],"answer":-1})", "the answer -1 is none"},
           {R"({"question":"q","choices":["a","b"],"answer":"C"})", "is none of the 2"},
           {R"({"question":"q","choices":["a","b"],"answer":0.5})", "is none of the 2"},
           {R"({"question":"q","choices":{"text":["a","b"],"label":["1"]},"answerKey":"1"})",
            "2 choices and 1 labels"},
           {R"({"question":"q","choices":{"text":["a","b"],"label":["1","2"]},"answerKey":"0"})",
            "a label"}}) {
    const std::string path = file("q.jsonl", good + "\n" + line + "\n");
    const std::string said = refusal([&] { read_questions(path); });
    EXPECT_EQ(said.rfind(path + ":3: ", 0), 0u) << said;
    EXPECT_NE(said.find(words), std::string::npos) << line << ": " << said;
  }
  // Labels that look like indices are labels.
  const std::string labelled =
      R"({"question":"q","choices":{"text":["a","b"],"label":["1","2"]},"answerKey":"2"})";
  EXPECT_EQ(read_questions(file("l.jsonl", labelled))[0].answer, 1u);
  for (const auto& [line, words] : std::vector<std::pair<std::string, std::string>>{
           {R"({"text":"a"})", "under the key 'prompt'"},
           {R"({"prompt":""})", "empty prompt"},
           {R"({"prompt":"a","stop":[1]})", "'stop'"},
           {R"({"prompt":"a","stop":""})", "'stop'"},
           {R"({"prompt":"a","max_tokens":0})", "'max_tokens'"}}) {
    const std::string path = file("p.jsonl", std::string(R"({"prompt":"a"})") + "\n" + line);
    const std::string said = refusal([&] { read_prompts(path, {}, 5); });
    EXPECT_EQ(said.rfind(path + ":2: ", 0), 0u) << said;
    EXPECT_NE(said.find(words), std::string::npos) << line << ": " << said;
  }
  EXPECT_NE(refusal([&] { read_questions(file("e.jsonl", "\n\n")); }).find("no question"), std::string::npos);
  EXPECT_NE(refusal([&] { read_questions(folder_ / "none"); }).find("none"), std::string::npos);
}

}  // namespace
}  // namespace fp4t::test

#include "engine/tokens/tokenizer.h"

#include <algorithm>
#include <charconv>

#include "engine/tokens/chat.h"
#include "engine/tokens/tokenizer_json.h"
#include "engine/tokens/tokenizer_sentencepiece.h"
#include "kernels/base/check.h"
#include "kernels/base/text.h"

namespace fp4t {

namespace {

class ByteTokenizer : public Tokenizer {
 public:
  int64_t vocabulary() const override { return 257; }
  int32_t end_of_document() const override { return 256; }

  std::vector<int32_t> encode(std::string_view text) const override {
    std::vector<int32_t> tokens(text.size());
    for (size_t i = 0; i < text.size(); ++i) tokens[i] = static_cast<uint8_t>(text[i]);
    return tokens;
  }

  std::string decode(const std::vector<int32_t>& tokens) const override {
    std::string text;
    for (int32_t t : tokens) {
      FP4T_CHECK(t >= 0, "token ", t);
      text += piece(t);
    }
    return text;
  }
  std::string piece(int32_t token) const override {
    if (token > end_of_document()) return "\xEF\xBF\xBD";
    return token == end_of_document() ? "" : std::string(1, static_cast<char>(static_cast<uint8_t>(token)));
  }

  int32_t single_token(const std::string& text) const override {
    if (text == "<eod>") return end_of_document();
    if (text.size() == 1) return static_cast<uint8_t>(text[0]);
    throw RecipeError(detail::concat("end token '", printable(text), "' is ", text.size(),
                                     " tokens of the byte tokenizer; allowed are single bytes and <eod>"));
  }

  std::vector<int32_t> line_ends() const override { return {'\n', end_of_document()}; }
  std::string fingerprint() const override { return "bytes-257"; }
};

class IdTokenizer : public Tokenizer {
 public:
  explicit IdTokenizer(int64_t vocabulary) : vocabulary_(vocabulary) {}
  int64_t vocabulary() const override { return vocabulary_; }
  int32_t end_of_document() const override { return static_cast<int32_t>(vocabulary_ - 1); }

  std::vector<int32_t> encode(std::string_view text) const override {
    constexpr std::string_view kSpace = " \t\r\n";
    std::vector<int32_t> tokens;
    for (size_t at = text.find_first_not_of(kSpace); at != std::string_view::npos;) {
      const size_t end = std::min(text.find_first_of(kSpace, at), text.size());
      const std::string_view word = text.substr(at, end - at);
      tokens.push_back(number(word));
      if (tokens.back() < 0) throw NoTokenError(refusal(word), at);
      at = text.find_first_not_of(kSpace, end);
    }
    return tokens;
  }

  std::string decode(const std::vector<int32_t>& tokens) const override {
    std::string text;
    for (int32_t t : tokens) {
      FP4T_CHECK(t >= 0, "token ", t);
      if (t != end_of_document()) text += (text.empty() ? "" : " ") + std::to_string(t);
    }
    return text;
  }
  std::string piece(int32_t token) const override {
    return token == end_of_document() ? "" : " " + std::to_string(token);
  }

  int32_t single_token(const std::string& text) const override {
    if (text == "<eod>") return end_of_document();
    const int32_t token = number(text);
    if (token < 0) throw RecipeError("end token: " + refusal(text));
    return token;
  }

  std::vector<int32_t> line_ends() const override { return {end_of_document()}; }
  std::string fingerprint() const override { return detail::concat("ids-", vocabulary_); }

 private:
  // -1 when the word is no token; <eod> is special: texts do not hold it.
  int32_t number(std::string_view word) const {
    int32_t token = -1;
    const auto [end, error] = std::from_chars(word.data(), word.data() + word.size(), token);
    const bool whole = error == std::errc() && end == word.data() + word.size();
    return whole && token >= 0 && token < end_of_document() ? token : -1;
  }
  std::string refusal(std::string_view word) const {
    return detail::concat("'", printable(word.substr(0, 40)),
                          "' is no token of tokenizer.kind ids; allowed: numbers ", "from 0 to ",
                          end_of_document() - 1);
  }

  int64_t vocabulary_;
};

}  // namespace

namespace {

std::unique_ptr<Tokenizer> make_and_complete(TokenizerSpec& spec) {
  if (spec.kind == "bytes") return std::make_unique<ByteTokenizer>();
  if (spec.kind == "ids") return std::make_unique<IdTokenizer>(spec.vocabulary);
  if (spec.kind == "sentencepiece") return make_sentencepiece_tokenizer(spec);
  FP4T_CHECK(spec.kind == "json", "tokenizer ", spec.kind);
  return make_json_tokenizer(spec);
}

std::unique_ptr<Tokenizer> make_with_chat(TokenizerSpec& spec) {
  std::unique_ptr<Tokenizer> tokenizer = make_and_complete(spec);
  if (spec.chat.empty()) return tokenizer;
  if (spec.chat == "auto") spec.chat = chat_form_beside(spec.path);
  const Chat check(spec.chat, *tokenizer);  // the vocabulary has what the form needs
  tokenizer->set_chat(spec.chat);
  return tokenizer;
}

// The message with the place of the key that it begins with, or of the file.
std::string with_place(const FieldPlaces& places, const std::string& message) {
  const size_t colon = message.find(": ");
  const bool names_key = message.starts_with("tokenizer.") && colon != std::string::npos;
  const std::string key = names_key ? message.substr(0, colon) : "tokenizer.path";
  const SourcePlace place = nearest_place(places, key);
  const std::string where = place.file.empty() ? "" : place_text(place) + ": ";
  return where + (names_key ? "" : key + ": ") + printable(message, 4000);
}

// Completions of conversations end where a message of theirs does, unless the recipe says where.
void end_at_messages(Recipe& recipe, const Tokenizer& tokenizer, const FieldPlaces& places) {
  const std::vector<std::string> untold = SamplingSpec{}.end_tokens;
  for (size_t i = 0; i < recipe.stages.size(); ++i) {
    auto* rl = std::get_if<RlSpec>(&recipe.stages[i]);
    const std::string key = detail::concat("stages[", i, "].rl.sampling.end_tokens");
    if (rl && rl->sampling.end_tokens == untold && places.count(key) == 0) {
      rl->sampling.end_tokens = Chat(tokenizer.chat(), tokenizer).end_texts();
    }
  }
}

}  // namespace

std::vector<int32_t> Tokenizer::prompt(std::string_view text) const {
  std::vector<int32_t> tokens = encode(text);
  if (begin_of_document() >= 0) tokens.insert(tokens.begin(), begin_of_document());
  return tokens;
}

std::string Tokenizer::continuation(const std::vector<int32_t>& tokens) const {
  std::string bytes;
  for (const int32_t t : tokens) bytes += piece(t);
  return with_replacements(bytes);
}

std::unique_ptr<Tokenizer> make_tokenizer(const TokenizerSpec& spec) {
  TokenizerSpec completed = spec;
  return make_with_chat(completed);
}

void complete_tokenizer(Recipe& recipe, const FieldPlaces& places) {
  if (recipe.tokenizer.path.empty()) return;
  try {
    const std::unique_ptr<Tokenizer> tokenizer = make_with_chat(recipe.tokenizer);
    if (!tokenizer->chat().empty()) end_at_messages(recipe, *tokenizer, places);
  } catch (const RecipeError& e) {
    throw RecipeError(with_place(places, e.what()));
  } catch (const MissingInputError& e) {
    throw MissingInputError(with_place(places, e.what()));
  } catch (const BadDataError& e) {
    throw BadDataError(with_place(places, e.what()));
  }
}

}  // namespace fp4t

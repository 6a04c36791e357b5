#include "engine/tokens/tokenizer.h"

#include "kernels/base/check.h"

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
      if (t < 256) text += static_cast<char>(static_cast<uint8_t>(t));
      // A model may have more rows than there are tokens (model.vocabulary): U+FFFD, no answer to any task.
      if (t > 256) text += "\xEF\xBF\xBD";
    }
    return text;
  }

  int32_t single_token(const std::string& text) const override {
    if (text == "<eod>") return end_of_document();
    if (text.size() == 1) return static_cast<uint8_t>(text[0]);
    throw RecipeError(detail::concat("end token '", text, "' is ", text.size(),
                                     " tokens of the byte tokenizer; allowed are single bytes and <eod>"));
  }

  std::string fingerprint() const override { return "bytes-257"; }
};

}  // namespace

std::unique_ptr<Tokenizer> make_tokenizer(const TokenizerSpec& spec) {
  if (spec.kind == "bytes") return std::make_unique<ByteTokenizer>();
  throw RecipeError("tokenizer.kind: '" + spec.kind + "' is not known; allowed is bytes");
}

}  // namespace fp4t

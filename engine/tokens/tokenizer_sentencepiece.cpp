#include "engine/tokens/tokenizer_sentencepiece.h"

#include <sentencepiece_processor.h>

#include <algorithm>
#include <map>

#include "engine/tokens/added_tokens.h"
#include "engine/tokens/hash.h"
#include "engine/tokens/special_tokens.h"
#include "engine/tokens/utf8.h"
#include "kernels/base/text.h"
#include "kernels/base/text_file.h"

namespace fp4t {

namespace {

constexpr std::string_view kSpaceMark = "\xE2\x96\x81";  // U+2581 stands for a space
constexpr const char* kUnknown = " \xE2\x81\x87 ";       // as the library writes unknown pieces
constexpr const char* kReplacement = "\xEF\xBF\xBD";

class SentencePieceTokenizer : public Tokenizer {
 public:
  explicit SentencePieceTokenizer(const std::string& content) : hash_(xxh3_hex(content)) {
    const auto status = processor_.LoadFromSerializedProto(content);
    if (!status.ok()) throw BadDataError("no SentencePiece model: " + status.ToString());
    const int size = processor_.GetPieceSize();
    pieces_.resize(static_cast<size_t>(size));
    for (int id = 0; id < size; ++id) {
      const std::string text = processor_.IdToPiece(id);
      pieces_[static_cast<size_t>(id)] = bytes_of(id, text);
      if (!processor_.IsControl(id)) continue;
      control_.emplace(text, id);
      AddedToken token;
      token.id = id;
      token.content = text;
      token.special = true;
      finder_.add(token, text);
    }
    std::vector<int> ids;
    processor_.Encode("a", &ids).IgnoreError();
    has_prefix_ = !ids.empty() && processor_.IdToPiece(ids[0]).starts_with(kSpaceMark);
  }

  void set_document_tokens(int32_t begin, int32_t end) {
    begin_ = begin;
    end_ = end;
  }
  const std::string& hash() const { return hash_; }
  std::string piece_text(int id) const { return id < 0 ? "" : processor_.IdToPiece(id); }
  int bos() const { return processor_.bos_id(); }
  int eos() const { return processor_.eos_id(); }

  int64_t vocabulary() const override { return static_cast<int64_t>(pieces_.size()); }
  bool puts_a_space_in_front() const override { return has_prefix_; }
  int32_t end_of_document() const override { return end_; }
  int32_t begin_of_document() const override { return begin_; }

  std::vector<int32_t> encode(std::string_view text) const override {
    std::vector<int> ids;
    const auto status = processor_.Encode(text, &ids);
    if (!status.ok()) throw BadDataError("text that SentencePiece refuses: " + status.ToString());
    return {ids.begin(), ids.end()};
  }
  // Every stretch between special tokens is a text of its own to the library.
  std::vector<int32_t> encode_marked(std::string_view text) const override {
    std::vector<int32_t> out;
    const std::string whole = with_replacements(text);
    finder_.split(
        whole, true,
        [&](size_t begin, size_t end) {
          const std::vector<int32_t> ids = encode(std::string_view(whole).substr(begin, end - begin));
          out.insert(out.end(), ids.begin(), ids.end());
        },
        [&](int32_t id) { out.push_back(id); });
    return out;
  }

  std::string piece(int32_t token) const override {
    FP4T_CHECK(token >= 0, "token ", token);
    return token < vocabulary() ? pieces_[static_cast<size_t>(token)] : kReplacement;
  }
  // The space that the library puts in front of a text does not belong to it.
  std::string decode(const std::vector<int32_t>& tokens) const override {
    std::string text;
    for (const int32_t t : tokens) text += piece(t);
    if (has_prefix_ && text.starts_with(' ')) text.erase(0, 1);
    return text;
  }

  int32_t single_token(const std::string& text) const override {
    const auto control = control_.find(text);
    if (control != control_.end()) return control->second;
    if (text == "<eod>") return end_;
    std::vector<int32_t> tokens = encode(text);
    if (tokens.size() == 2 && piece(tokens[0]) == " ") tokens.erase(tokens.begin());  // the prefix
    if (tokens.size() == 1) return tokens[0];
    throw RecipeError(
        detail::concat("'", printable(text), "' is ", tokens.size(), " tokens of the tokenizer, not one"));
  }

  std::vector<int32_t> line_ends() const override {
    std::vector<int32_t> ends = {end_};
    for (size_t i = 0; i < pieces_.size(); ++i) {
      const std::string& p = pieces_[i];
      const bool breaks =
          p.find('\n') != std::string::npos && p.find_first_not_of("\r\n") == std::string::npos;
      if (breaks && static_cast<int32_t>(i) != end_) ends.push_back(static_cast<int32_t>(i));
    }
    return ends;
  }

  std::string fingerprint() const override {
    return detail::concat("sentencepiece-", hash_, "-", begin_, "-", end_);
  }

 private:
  std::string bytes_of(int id, const std::string& text) const {
    if (processor_.IsControl(id)) return "";
    if (processor_.IsUnknown(id)) return kUnknown;
    if (processor_.IsByte(id)) {  // "<0x0A>"
      return std::string(1,
                         static_cast<char>(static_cast<uint8_t>(std::stoul(text.substr(3, 2), nullptr, 16))));
    }
    std::string bytes = text;
    for (size_t at = bytes.find(kSpaceMark); at != std::string::npos; at = bytes.find(kSpaceMark, at + 1)) {
      bytes.replace(at, kSpaceMark.size(), " ");
    }
    return bytes;
  }

  sentencepiece::SentencePieceProcessor processor_;
  std::string hash_;
  std::vector<std::string> pieces_;  // bytes of each id
  std::map<std::string, int32_t> control_;
  AddedTokenFinder finder_;
  bool has_prefix_ = false;  // a space in front of every text
  int32_t begin_ = -1, end_ = -1;
};

}  // namespace

std::unique_ptr<Tokenizer> make_sentencepiece_tokenizer(TokenizerSpec& spec) {
  const std::string content = read_text_file(spec.path);
  std::unique_ptr<SentencePieceTokenizer> tokenizer;
  try {
    tokenizer = std::make_unique<SentencePieceTokenizer>(content);
  } catch (const BadDataError& e) {
    throw BadDataError(printable(spec.path) + ": " + printable(e.what()));
  }
  std::vector<std::string> names(static_cast<size_t>(tokenizer->vocabulary()));
  for (size_t i = 0; i < names.size(); ++i) names[i] = tokenizer->piece_text(static_cast<int>(i));
  if (spec.end_of_document.empty()) spec.end_of_document = tokenizer->piece_text(tokenizer->eos());
  std::vector<int32_t> prefix;
  if (tokenizer->bos() >= 0) prefix.push_back(tokenizer->bos());
  const auto [begin, end] = choose_document_tokens(spec, names, prefix, *tokenizer);
  tokenizer->set_document_tokens(begin, end);
  check_file_facts(spec, tokenizer->vocabulary(), tokenizer->hash());
  return tokenizer;
}

}  // namespace fp4t

#include "engine/tokens/tokenizer_json.h"

#include <algorithm>
#include <mutex>
#include <optional>
#include <unordered_map>

#include "engine/tokens/added_tokens.h"
#include "engine/tokens/bpe.h"
#include "engine/tokens/hash.h"
#include "engine/tokens/normalise.h"
#include "engine/tokens/special_tokens.h"
#include "engine/tokens/split_pattern.h"
#include "engine/tokens/tokenizer_file.h"
#include "engine/tokens/utf8.h"
#include "kernels/base/text.h"

namespace fp4t {

namespace {

// Everything that decides ids, and nothing else: how a file is laid out does not matter.
std::string hash_of_file(const TokenizerFile& file) {
  std::string all = "bpe 1";
  const auto number = [&all](int64_t value) { all += "|" + std::to_string(value); };
  const auto text = [&](const std::string& value) {
    number(static_cast<int64_t>(value.size()));
    all += value;
  };
  number(file.ignore_merges);
  number(file.composes);
  number(static_cast<int64_t>(file.tokens.size()));
  for (const std::string& token : file.tokens) text(token);
  for (const std::string& token : file.spelling) text(token);
  number(static_cast<int64_t>(file.merges.size()));
  for (const Merge& m : file.merges) {
    for (const int32_t id : {m.left, m.right, m.result}) number(id);
  }
  for (const AddedToken& t : file.added) {
    for (const int64_t value : {int64_t{t.id}, int64_t{t.special}, int64_t{t.single_word}, int64_t{t.lstrip},
                                int64_t{t.rstrip}, int64_t{t.normalized}}) {
      number(value);
    }
    text(t.content);
  }
  for (const CutStep& step : file.steps) {
    number(static_cast<int64_t>(step.kind));
    number(step.keeps_gaps);
    text(step.pattern);
  }
  return xxh3_hex(all);
}

class JsonTokenizer : public Tokenizer {
 public:
  explicit JsonTokenizer(TokenizerFile file)
      : hash_(hash_of_file(file)),
        composes_(file.composes),
        tokens_(std::move(file.tokens)),
        steps_(std::move(file.steps)),
        bpe_(std::move(file.spelling), file.merges, file.ignore_merges) {
    for (const CutStep& step : steps_) {
      patterns_.push_back(step.pattern.empty() ? nullptr : std::make_unique<SplitPattern>(step.pattern));
    }
    is_special_.resize(tokens_.size());
    for (const AddedToken& token : file.added) {
      added_.emplace(token.content, token.id);
      is_special_[static_cast<size_t>(token.id)] = token.special;
      if (token.normalized) {
        normalized_finder_.add(token, composes_ ? nfc(token.content) : token.content);
      } else {
        finder_.add(token, token.content);
      }
    }
  }

  void set_document_tokens(int32_t begin, int32_t end) {
    begin_ = begin;
    end_ = end;
  }
  const std::string& hash() const { return hash_; }

  int64_t vocabulary() const override { return static_cast<int64_t>(tokens_.size()); }
  int32_t end_of_document() const override { return end_; }
  int32_t begin_of_document() const override { return begin_; }
  std::vector<int32_t> encode(std::string_view text) const override { return encode_text(text, false); }
  std::vector<int32_t> encode_marked(std::string_view text) const override { return encode_text(text, true); }

  std::string piece(int32_t token) const override {
    FP4T_CHECK(token >= 0, "token ", token);
    const auto i = static_cast<size_t>(token);
    if (i >= tokens_.size() || tokens_[i].empty()) return "\xEF\xBF\xBD";
    return is_special_[i] ? "" : tokens_[i];
  }
  std::string decode(const std::vector<int32_t>& tokens) const override {
    std::string text;
    for (const int32_t t : tokens) text += piece(t);
    return text;
  }

  int32_t single_token(const std::string& text) const override {
    const auto known = added_.find(text);
    if (known != added_.end()) return known->second;
    if (text == "<eod>") return end_;
    const std::vector<int32_t> tokens = encode(text);
    if (tokens.size() == 1) return tokens[0];
    throw RecipeError(
        detail::concat("'", printable(text), "' is ", tokens.size(), " tokens of the tokenizer, not one"));
  }

  // Tokens that are line breaks and nothing else: one with other characters before the break belongs to the
  // text.
  std::vector<int32_t> line_ends() const override {
    std::vector<int32_t> ends = {end_};
    for (size_t i = 0; i < tokens_.size(); ++i) {
      const std::string& token = tokens_[i];
      const bool breaks = token.find('\n') != std::string::npos &&
                          token.find_first_not_of("\r\n") == std::string::npos && !is_special_[i];
      if (breaks && static_cast<int32_t>(i) != end_) ends.push_back(static_cast<int32_t>(i));
    }
    return ends;
  }

  std::string fingerprint() const override { return detail::concat("json-", hash_, "-", begin_, "-", end_); }

 private:
  // What one thread works with.
  struct Worker {
    BpeModel::Scratch scratch;
    std::vector<std::optional<SplitPattern::Matcher>> matchers;  // of each step
  };

  std::unique_ptr<Worker> take_worker() const {
    {
      const std::lock_guard lock(mutex_);
      if (!idle_.empty()) {
        std::unique_ptr<Worker> worker = std::move(idle_.back());
        idle_.pop_back();
        return worker;
      }
    }
    auto worker = std::make_unique<Worker>();
    for (const auto& pattern : patterns_) {
      worker->matchers.emplace_back();
      if (pattern) worker->matchers.back().emplace(*pattern);
    }
    return worker;
  }
  void give_back(std::unique_ptr<Worker> worker) const {
    const std::lock_guard lock(mutex_);
    idle_.push_back(std::move(worker));
  }

  std::vector<int32_t> encode_text(std::string_view text, bool specials) const {
    std::unique_ptr<Worker> worker = take_worker();
    std::vector<int32_t> out;
    out.reserve(text.size() / 3 + 8);
    for (size_t at = 0; at < text.size();) {
      const size_t end = well_formed_end(text, at);
      if (end > at) encode_well_formed(text.substr(at, end - at), specials, *worker, out);
      at = end;
      if (at == text.size()) break;
      const size_t next = ill_formed_end(text, at);
      bpe_.encode(text.substr(at, next - at), worker->scratch, out);
      at = next;
    }
    give_back(std::move(worker));
    return out;
  }

  void encode_well_formed(std::string_view text, bool specials, Worker& worker,
                          std::vector<int32_t>& out) const {
    const auto token = [&out](int32_t id) { out.push_back(id); };
    const auto words = [&](std::string_view piece) {
      normalized_finder_.split(
          piece, specials,
          [&](size_t begin, size_t end) { cut(0, piece.substr(begin, end - begin), worker, out); }, token);
    };
    finder_.split(
        text, specials,
        [&](size_t begin, size_t end) {
          const std::string_view piece = text.substr(begin, end - begin);
          composes_ ? words(nfc(piece)) : words(piece);
        },
        token);
  }

  // Cuts a piece by the steps from `step` on, and encodes the words that come out.
  void cut(size_t step, std::string_view piece, Worker& worker, std::vector<int32_t>& out) const {
    if (piece.empty()) return;
    if (step == steps_.size()) return bpe_.encode(piece, worker.scratch, out);
    if (steps_[step].kind == CutStep::Kind::kPrefixSpace) {
      if (piece[0] == ' ') return cut(step + 1, piece, worker, out);
      return cut(step + 1, " " + std::string(piece), worker, out);
    }
    size_t done = 0, begin, end;
    while (done < piece.size() && worker.matchers[step]->find(piece, done, begin, end)) {
      if (steps_[step].keeps_gaps) cut(step + 1, piece.substr(done, begin - done), worker, out);
      cut(step + 1, piece.substr(begin, end - begin), worker, out);
      done = end;
    }
    if (steps_[step].keeps_gaps) cut(step + 1, piece.substr(done), worker, out);
  }

  std::string hash_;
  bool composes_;
  std::vector<std::string> tokens_;
  std::vector<CutStep> steps_;
  std::vector<std::unique_ptr<SplitPattern>> patterns_;  // of each step; null where it has none
  BpeModel bpe_;
  AddedTokenFinder finder_, normalized_finder_;
  std::unordered_map<std::string, int32_t> added_;
  std::vector<bool> is_special_;
  int32_t begin_ = -1, end_ = -1;
  mutable std::mutex mutex_;
  mutable std::vector<std::unique_ptr<Worker>> idle_;
};

}  // namespace

std::unique_ptr<Tokenizer> make_json_tokenizer(TokenizerSpec& spec) {
  TokenizerFile file = read_tokenizer_file(spec.path);
  std::vector<std::string> names(file.tokens.size());
  for (const AddedToken& token : file.added) names[static_cast<size_t>(token.id)] = token.content;
  const std::vector<int32_t> prefix = file.prefix;
  std::unique_ptr<JsonTokenizer> tokenizer;
  try {
    tokenizer = std::make_unique<JsonTokenizer>(std::move(file));
  } catch (const BadDataError& e) {
    throw BadDataError(printable(spec.path) + ": model.vocab: " + e.what());
  }
  const auto [begin, end] = choose_document_tokens(spec, names, prefix, *tokenizer);
  tokenizer->set_document_tokens(begin, end);
  check_file_facts(spec, tokenizer->vocabulary(), tokenizer->hash());
  return tokenizer;
}

}  // namespace fp4t

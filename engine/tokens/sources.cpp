#include <algorithm>
#include <optional>

#include "engine/tokens/documents.h"
#include "engine/tokens/hash.h"
#include "engine/tokens/packed.h"
#include "engine/tokens/permutation.h"
#include "engine/tokens/source.h"
#include "engine/tokens/tasks.h"
#include "engine/tokens/token_store.h"
#include "kernels/base/check.h"
#include "kernels/base/numeric.h"

namespace fp4t {

namespace {

class DocumentSource : public DataSource {
 public:
  DocumentSource(const DataSourceSpec& spec, int64_t length, uint64_t seed, uint32_t index,
                 const Tokenizer& tokenizer)
      : name_(spec.name),
        length_(length),
        seed_(seed),
        index_(index),
        store_(open_token_store(spec, tokenizer)) {
    const std::vector<bool> out = held_out_documents(spec, static_cast<size_t>(store_->documents()));
    std::vector<int64_t> training, held_out;
    for (size_t i = 0; i < out.size(); ++i) (out[i] ? held_out : training).push_back(static_cast<int64_t>(i));
    // The order of documents, and so what shares a sequence, belongs to the seed.
    const PhiloxKey order = site_key(seed, Purpose::kDataOrder, 0, index, 0, 0);
    std::vector<int64_t> shuffled(training.size());
    for (size_t i = 0; i < training.size(); ++i) {
      shuffled[static_cast<size_t>(permuted_index(order, static_cast<int64_t>(training.size()),
                                                  static_cast<int64_t>(i)))] = training[i];
    }
    training_.emplace(*store_, std::move(shuffled), length, tokenizer.end_of_document());
    held_out_.emplace(*store_, std::move(held_out), length, tokenizer.end_of_document());
    if (training_->tokens() == 0 && spec.weight > 0)
      throw BadDataError("source '" + name_ + "' has no token to train on");
    fingerprint_ = xxh3_hex(detail::concat(store_->hash(), "|", spec.held_out.fraction, "|",
                                           spec.held_out.seed, "|", length, "|", spec.end_of_document,
                                           spec.special_tokens ? "|marked|" : "|", tokenizer.fingerprint()));
    description_ =
        detail::concat(name_, ": ", store_->documents(), " documents in ", store_->files(), " files, ",
                       training_->tokens(), " tokens to train on, ", held_out_->tokens(), " held out, ",
                       training_->sequences(), " sequences an epoch");
  }

  Sequence sequence(int64_t n) const override {
    const int64_t count = training_->sequences();
    FP4T_CHECK(count > 0, name_, " is only measured");
    const PhiloxKey epoch =
        site_key(seed_, Purpose::kDataOrder, 2, index_, static_cast<uint32_t>(n / count), 0);
    return training_->sequence(permuted_index(epoch, count, n % count));
  }

  std::vector<Sequence> held_out(int64_t max_tokens) const override {
    std::vector<Sequence> all;
    const int64_t count = std::min(held_out_->sequences(), ceil_div(max_tokens, length_));
    for (int64_t n = 0; n < count; ++n) all.push_back(held_out_->sequence(n));
    return all;
  }

  std::string fingerprint() const override { return fingerprint_; }
  std::string describe() const override { return description_; }

 private:
  std::string name_, fingerprint_, description_;
  int64_t length_;
  uint64_t seed_;
  uint32_t index_;
  std::unique_ptr<TokenStore> store_;
  std::optional<PackedDocuments> training_, held_out_;
};

class GeneratedSource : public DataSource {
 public:
  GeneratedSource(const DataSourceSpec& spec, int64_t length, uint64_t seed, uint32_t index,
                  const Tokenizer& tokenizer)
      : spec_(spec), length_(length), tokenizer_(tokenizer) {
    task_ = make_task(task_of(spec));
    problems_ = site_key(seed, Purpose::kDataGenerate, 0, index, 0, 0);
    flaws_ = site_key(seed, Purpose::kDataGenerate, 1, index, 0, 0);
  }

  Sequence sequence(int64_t n) const override {
    Sequence s;
    for (int64_t k = 0; static_cast<int64_t>(s.tokens.size()) < length_; ++k) {
      const int64_t i = n * length_ + k;  // a sequence holds fewer documents than tokens
      const PhiloxBits bits = site_draw(flaws_, static_cast<uint64_t>(i));
      const bool wrong = static_cast<double>(bits.word[0]) * 0x1p-32 < spec_.wrong_fraction;
      append_document(s, task_->document(task_->training(problems_, i), wrong, bits.word[1]));
    }
    return s;
  }

  std::vector<Sequence> held_out(int64_t max_tokens) const override {
    std::vector<std::vector<int32_t>> documents;
    for (const Problem& p : task_->held_out()) documents.push_back(tokens_of(task_->document(p, false, 0)));
    std::vector<Sequence> all = pack_documents(documents, length_, tokenizer_.end_of_document());
    all.resize(std::min<size_t>(all.size(), static_cast<size_t>(ceil_div(max_tokens, length_))));
    return all;
  }

  std::string fingerprint() const override {
    return xxh3_hex(detail::concat(spec_.kind, "|", spec_.low, "|", spec_.high, "|", spec_.numbers, "|",
                                   spec_.wrong_fraction, "|", task_->held_out_hash(), "|", length_, "|",
                                   spec_.end_of_document, "|", tokenizer_.fingerprint()));
  }

  std::string describe() const override {
    return detail::concat(spec_.name, ": ", task_->name(), ", generated, ", task_->held_out().size(),
                          " problems held out (", task_->held_out_hash(), "), ", spec_.wrong_fraction * 100,
                          "% of the answers wrong on purpose");
  }

 private:
  std::vector<int32_t> tokens_of(const std::string& document) const {
    std::vector<int32_t> tokens = tokenizer_.prompt(document);
    if (spec_.end_of_document) tokens.push_back(tokenizer_.end_of_document());
    return tokens;
  }

  void append_document(Sequence& s, const std::string& document) const {
    const std::vector<int32_t> tokens = tokens_of(document);
    const size_t count = std::min(tokens.size(), static_cast<size_t>(length_) - s.tokens.size());
    append_piece(s, tokens.data(), count, count < tokens.size() ? tokens[count] : -1);
  }

  DataSourceSpec spec_;
  int64_t length_;
  const Tokenizer& tokenizer_;
  std::unique_ptr<Task> task_;
  PhiloxKey problems_, flaws_;
};

}  // namespace

std::vector<Sequence> pack_documents(const std::vector<std::vector<int32_t>>& documents, int64_t length,
                                     int32_t end_of_document) {
  std::vector<Sequence> sequences;
  const auto room = static_cast<size_t>(length);
  for (const auto& document : documents) {
    for (size_t at = 0; at < document.size();) {
      if (sequences.empty() || sequences.back().tokens.size() == room) sequences.emplace_back();
      Sequence& s = sequences.back();
      const size_t end = std::min(document.size(), at + room - s.tokens.size());
      append_piece(s, document.data() + at, end - at, end < document.size() ? document[end] : -1);
      at = end;
    }
  }
  if (!sequences.empty()) fill_up(sequences.back(), length, end_of_document);
  return sequences;
}

std::unique_ptr<DataSource> make_document_source(const DataSourceSpec& spec, int64_t length, uint64_t seed,
                                                 uint32_t index, const Tokenizer& tokenizer) {
  return std::make_unique<DocumentSource>(spec, length, seed, index, tokenizer);
}

std::unique_ptr<DataSource> make_generated_source(const DataSourceSpec& spec, int64_t length, uint64_t seed,
                                                  uint32_t index, const Tokenizer& tokenizer) {
  return std::make_unique<GeneratedSource>(spec, length, seed, index, tokenizer);
}

}  // namespace fp4t

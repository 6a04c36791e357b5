#include <algorithm>
#include <numeric>

#include "engine/tokens/hash.h"
#include "engine/tokens/permutation.h"
#include "engine/tokens/source.h"
#include "engine/tokens/tasks.h"
#include "kernels/base/check.h"
#include "kernels/base/numeric.h"

namespace fp4t {

namespace {

// Appends tokens [begin, end) of a document; the target of the last is the token after it, if there is one.
void append_piece(Sequence& s, const std::vector<int32_t>& document, size_t begin, size_t end) {
  const auto first = static_cast<int32_t>(s.tokens.size());
  for (size_t i = begin; i < end; ++i) {
    s.tokens.push_back(document[i]);
    s.targets.push_back(i + 1 < document.size() ? document[i + 1] : -1);
    s.positions.push_back(static_cast<int32_t>(i - begin));
    s.doc_begin.push_back(first);
  }
}

void fill_up(Sequence& s, int64_t length, int32_t end_of_document) {
  const auto missing = static_cast<size_t>(length) - s.tokens.size();
  const std::vector<int32_t> filler(missing, end_of_document);
  const size_t before = s.tokens.size();
  append_piece(s, filler, 0, missing);
  std::fill(s.targets.begin() + static_cast<int64_t>(before), s.targets.end(), -1);
}

class DocumentSource : public DataSource {
 public:
  DocumentSource(const DataSourceSpec& spec, int64_t length, uint64_t seed, uint32_t index,
                 const Tokenizer& tokenizer)
      : name_(spec.name), length_(length), eod_(tokenizer.end_of_document()), seed_(seed), index_(index) {
    const Documents documents = read_documents(spec);
    const std::vector<bool> out = held_out_documents(spec, documents.texts.size());
    std::vector<std::vector<int32_t>> training, held_out;
    for (size_t i = 0; i < documents.texts.size(); ++i) {
      std::vector<int32_t> tokens = documents.tokens(i, tokenizer);
      if (tokenizer.begin_of_document() >= 0) tokens.insert(tokens.begin(), tokenizer.begin_of_document());
      if (spec.end_of_document) tokens.push_back(eod_);
      (out[i] ? held_out_tokens_ : tokens_) += static_cast<int64_t>(tokens.size());
      (out[i] ? held_out : training).push_back(std::move(tokens));
    }
    // The order of documents, and so what shares a sequence, belongs to the seed.
    const PhiloxKey order = site_key(seed, Purpose::kDataOrder, 0, index, 0, 0);
    std::vector<std::vector<int32_t>> shuffled(training.size());
    for (size_t i = 0; i < training.size(); ++i) {
      shuffled[static_cast<size_t>(permuted_index(order, static_cast<int64_t>(training.size()),
                                                  static_cast<int64_t>(i)))] = std::move(training[i]);
    }
    sequences_ = pack_documents(shuffled, length, eod_);
    held_out_ = pack_documents(held_out, length, eod_);
    fingerprint_ =
        xxh3_hex(detail::concat(documents.hash, "|", spec.held_out.fraction, "|", spec.held_out.seed, "|",
                                length, "|", spec.end_of_document, "|", tokenizer.fingerprint()));
    description_ = detail::concat(name_, ": ", documents.texts.size(), " documents in ",
                                  documents.files.size(), " files, ", tokens_, " tokens to train on, ",
                                  held_out_tokens_, " held out, ", sequences_.size(), " sequences an epoch");
  }

  Sequence sequence(int64_t n) const override {
    const auto count = static_cast<int64_t>(sequences_.size());
    const PhiloxKey epoch =
        site_key(seed_, Purpose::kDataOrder, 2, index_, static_cast<uint32_t>(n / count), 0);
    return sequences_[static_cast<size_t>(permuted_index(epoch, count, n % count))];
  }

  std::vector<Sequence> held_out(int64_t max_tokens) const override {
    const auto count = std::min<size_t>(held_out_.size(), static_cast<size_t>(ceil_div(max_tokens, length_)));
    return {held_out_.begin(), held_out_.begin() + static_cast<int64_t>(count)};
  }

  std::string fingerprint() const override { return fingerprint_; }
  std::string describe() const override { return description_; }

 private:
  std::string name_, fingerprint_, description_;
  int64_t length_;
  int32_t eod_;
  uint64_t seed_;
  uint32_t index_;
  int64_t tokens_ = 0, held_out_tokens_ = 0;
  std::vector<Sequence> sequences_, held_out_;
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
    append_piece(s, tokens, 0, std::min(tokens.size(), static_cast<size_t>(length_) - s.tokens.size()));
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
      append_piece(s, document, at, end);
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

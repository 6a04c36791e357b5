#include "engine/tokens/token_store.h"

#include <algorithm>

#include "engine/tokens/documents.h"
#include "engine/tokens/hash.h"
#include "engine/tokens/inputs.h"
#include "engine/tokens/token_files.h"
#include "kernels/base/check.h"

namespace fp4t {

namespace {

class TextStore : public TokenStore {
 public:
  TextStore(const DataSourceSpec& spec, const Tokenizer& tokenizer) {
    constexpr size_t kBatchBytes = size_t{8} << 20;
    DocumentReader reader(spec, Conversations::kTaken);
    bool any_conversation = false;
    for (auto batch = reader.next(kBatchBytes); !batch.empty(); batch = reader.next(kBatchBytes)) {
      for (const Document& document : batch) {
        add(document_tokens(spec, tokenizer, document, reader.files()[document.file]));
        any_conversation |= !document.messages.empty();
      }
    }
    files_ = static_cast<int64_t>(reader.files().size());
    hash_ = reader.hash();
    if (any_conversation) hash_ = xxh3_hex(hash_ + "|" + tokenizer.chat() + "|" + spec.loss_on);
  }

  std::string hash() const override { return hash_; }
  int64_t files() const override { return files_; }

 private:
  void add(const DocumentTokens& document) {
    if (trained_.empty() && !document.trained.empty()) trained_.assign(tokens_.size(), 1);
    tokens_.insert(tokens_.end(), document.ids.begin(), document.ids.end());
    begins_.push_back(static_cast<int64_t>(tokens_.size()));
    if (trained_.empty() && document.trained.empty()) return;
    trained_.insert(trained_.end(), document.trained.begin(), document.trained.end());
    trained_.resize(tokens_.size(), 1);
  }
  void read_tokens(int64_t from, int64_t count, int32_t* out) const override {
    std::copy_n(tokens_.begin() + from, count, out);
  }

  std::vector<int32_t> tokens_;
  std::string hash_;
  int64_t files_;
};

class FileStore : public TokenStore {
 public:
  FileStore(const DataSourceSpec& spec, const Tokenizer& tokenizer) : vocabulary_(tokenizer.vocabulary()) {
    std::vector<std::string> paths = input_files(spec);
    if (spec.kind == "megatron") paths = megatron_indices(paths);
    std::string digest = spec.kind;
    for (const std::string& path : paths) {
      TokenFile file = open(spec, path, tokenizer);
      if (spec.kind != "megatron") find_documents(file, tokenizer.end_of_document(), spec.kind == "llmc");
      firsts_.push_back(begins_.back());
      for (const int64_t end : file.document_ends) begins_.push_back(firsts_.back() + end);
      file.document_ends.clear();
      file.document_ends.shrink_to_fit();
      digest += "|" + file.hash;
      files_.push_back(std::move(file));
    }
    hash_ = xxh3_hex(digest);
    if (tokens() == 0)
      throw BadDataError("source '" + spec.name + "' holds no tokens; " + paths.front() +
                         " is the first of its files");
  }

  void check_tokens() const override {
    for (const TokenFile& file : files_) file.check(vocabulary_);
  }
  std::string hash() const override { return hash_; }
  int64_t files() const override { return static_cast<int64_t>(files_.size()); }

 private:
  static TokenFile open(const DataSourceSpec& spec, const std::string& path, const Tokenizer& tokenizer) {
    if (spec.kind == "llmc") return open_llmc(path);
    if (spec.kind == "nanogpt") return open_nanogpt(path, spec.dtype);
    FP4T_CHECK(spec.kind == "megatron", spec.kind);
    return open_megatron(path, tokenizer.fingerprint());
  }

  // Where the mark stands: the first token of a document, or the last.
  void find_documents(TokenFile& file, int32_t mark, bool mark_begins) const {
    std::vector<int32_t> room(size_t{1} << 16);
    for (int64_t at = 0; at < file.count; at += static_cast<int64_t>(room.size())) {
      const int64_t n = std::min(file.count - at, static_cast<int64_t>(room.size()));
      file.read(at, n, vocabulary_, room.data());
      for (int64_t i = 0; i < n; ++i) {
        if (room[static_cast<size_t>(i)] != mark) continue;
        const int64_t end = at + i + (mark_begins ? 0 : 1);
        if (end > 0) file.document_ends.push_back(end);
      }
    }
    const bool closed = !file.document_ends.empty() && file.document_ends.back() == file.count;
    if (file.count > 0 && !closed) file.document_ends.push_back(file.count);
  }

  void read_tokens(int64_t from, int64_t count, int32_t* out) const override {
    if (count == 0) return;
    // Documents lie in one file; of empty files that begin at the same token the last is not empty.
    const auto after = std::upper_bound(firsts_.begin(), firsts_.end(), from);
    const auto i = static_cast<size_t>(after - firsts_.begin()) - 1;
    files_[i].read(from - firsts_[i], count, vocabulary_, out);
  }

  int64_t vocabulary_;
  std::vector<TokenFile> files_;
  std::vector<int64_t> firsts_;  // of each file, its first token in the row of all
  std::string hash_;
};

}  // namespace

bool is_token_file_kind(const std::string& kind) {
  return kind == "megatron" || kind == "llmc" || kind == "nanogpt";
}

bool has_documents(const std::string& kind) {
  return kind == "text" || kind == "jsonl" || is_token_file_kind(kind);
}

std::unique_ptr<TokenStore> open_token_store(const DataSourceSpec& spec, const Tokenizer& tokenizer) {
  if (is_token_file_kind(spec.kind)) return std::make_unique<FileStore>(spec, tokenizer);
  return std::make_unique<TextStore>(spec, tokenizer);
}

}  // namespace fp4t

#include "engine/tokens/tokenize.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstring>
#include <filesystem>
#include <limits>
#include <memory>
#include <nlohmann/json.hpp>

#include "engine/metrics/metrics.h"
#include "engine/tokens/documents.h"
#include "engine/tokens/hash.h"
#include "engine/tokens/token_files.h"
#include "kernels/base/check.h"
#include "kernels/base/text.h"
#include "kernels/base/threads.h"

namespace fp4t {

namespace {

// A file that has its name when it is whole.
class TokenWriter {
 public:
  explicit TokenWriter(const std::string& path) : path_(path), temporary_(path + ".partial") {
    fd_ = ::open(temporary_.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
    if (fd_ < 0) fail("cannot create ");
  }
  ~TokenWriter() {
    if (fd_ < 0) return;
    ::close(fd_);
    ::unlink(temporary_.c_str());
  }
  TokenWriter(const TokenWriter&) = delete;
  TokenWriter& operator=(const TokenWriter&) = delete;

  void append(const std::string& bytes) {
    hash_.add(bytes.data(), bytes.size());
    for (size_t at = 0; at < bytes.size();) {
      const ssize_t n = ::write(fd_, bytes.data() + at, bytes.size() - at);
      if (n < 0 && errno != EINTR) fail("cannot write ");
      if (n > 0) at += static_cast<size_t>(n);
    }
  }
  // Gives the file its name; its hash.
  std::string finish() {
    if (::fsync(fd_) != 0 || ::close(std::exchange(fd_, -1)) != 0) fail("cannot write ");
    if (::rename(temporary_.c_str(), path_.c_str()) != 0) fail("cannot name ");
    return hash_.hex();
  }

 private:
  [[noreturn]] void fail(const char* what) const {
    throw SaveError(what + printable(path_) + ": " + std::strerror(errno));
  }

  std::string path_, temporary_;
  Xxh3Stream hash_;
  int fd_ = -1;
};

std::string packed(const std::vector<int32_t>& tokens, TokenType type) {
  std::string bytes(tokens.size() * static_cast<size_t>(token_bytes(type)), '\0');
  if (type == TokenType::kI32) {
    std::memcpy(bytes.data(), tokens.data(), bytes.size());
  } else {
    for (size_t i = 0; i < tokens.size(); ++i) {
      const auto narrow = static_cast<uint16_t>(tokens[i]);
      std::memcpy(bytes.data() + 2 * i, &narrow, sizeof(narrow));
    }
  }
  return bytes;
}

void refuse_to_overwrite(const std::string& prefix, bool replace) {
  if (std::filesystem::path(prefix).filename().empty()) {
    throw RecipeError("--out: '" + printable(prefix) +
                      "' names no file; allowed: what PREFIX.bin begins with");
  }
  for (const char* ending : {".bin", ".idx", ".tokens.json"}) {
    std::error_code ignored;
    if (replace || !std::filesystem::exists(prefix + ending, ignored)) continue;
    throw RecipeError("--out: '" + printable(prefix + ending) + "' is there; --replace writes over it");
  }
}

// An index that was there before must not stand beside other tokens, however this ends.
void remove_index(const std::string& prefix) {
  std::error_code error;
  std::filesystem::remove(prefix + ".idx", error);
  if (error) throw SaveError("cannot remove " + printable(prefix + ".idx") + ": " + error.message());
}

}  // namespace

TokenizeReport tokenize_files(const DataSourceSpec& source, const Tokenizer& tokenizer,
                              const std::string& prefix, int threads, bool replace) {
  refuse_to_overwrite(prefix, replace);
  constexpr size_t kBatchBytes = size_t{16} << 20;
  const auto start = std::chrono::steady_clock::now();
  const TokenType type = megatron_type(tokenizer.vocabulary());
  DocumentReader reader(source);
  TokenWriter data(prefix + ".bin");
  ThreadPool pool(threads);
  TokenizeReport report;
  std::vector<int32_t> lengths;
  std::vector<std::string> encoded;
  for (auto batch = reader.next(kBatchBytes); !batch.empty(); batch = reader.next(kBatchBytes)) {
    encoded.assign(batch.size(), "");
    lengths.resize(lengths.size() + batch.size());
    const size_t first = lengths.size() - batch.size();
    pool.run(static_cast<int64_t>(batch.size()), 1, [&](int64_t begin, int64_t end) {
      for (auto i = static_cast<size_t>(begin); i < static_cast<size_t>(end); ++i) {
        const std::string& file = reader.files()[batch[i].file];
        const std::vector<int32_t> tokens = document_tokens(source, tokenizer, batch[i], file).ids;
        if (tokens.size() > std::numeric_limits<int32_t>::max()) {
          throw BadDataError(detail::concat(printable(file), ":", batch[i].line, ": a document of ",
                                            tokens.size(), " tokens"));
        }
        lengths[first + i] = static_cast<int32_t>(tokens.size());
        encoded[i] = packed(tokens, type);
      }
    });
    for (const std::string& bytes : encoded) {
      data.append(bytes);
      report.tokens += static_cast<int64_t>(bytes.size()) / token_bytes(type);
    }
  }
  const std::string index_bytes = megatron_index(type, lengths);
  remove_index(prefix);
  const std::string data_hash = data.finish();
  report.files = static_cast<int64_t>(reader.files().size());
  report.documents = static_cast<int64_t>(lengths.size());
  report.bytes = reader.bytes();
  report.fingerprint = xxh3_hex(detail::concat(tokenizer.fingerprint(), "|", reader.hash(), "|",
                                               source.end_of_document, "|", source.special_tokens));
  nlohmann::ordered_json note = {{"format", "fp4train tokens 1"},
                                 {"fingerprint", report.fingerprint},
                                 {"tokenizer", tokenizer.fingerprint()},
                                 {"inputs", reader.hash()},
                                 {"end_of_document", source.end_of_document},
                                 {"special_tokens", source.special_tokens},
                                 {"documents", report.documents},
                                 {"tokens", report.tokens},
                                 {"data_hash", data_hash},
                                 {"index_hash", xxh3_hex(index_bytes)}};
  // The index last: without it there are no tokens to be found, and what is found has its note.
  write_text_file(prefix + ".tokens.json", note.dump() + "\n");
  TokenWriter index(prefix + ".idx");
  index.append(index_bytes);
  index.finish();
  report.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  return report;
}

}  // namespace fp4t

#include "engine/tokens/documents.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <limits>
#include <string_view>

#include "engine/metrics/json_line.h"
#include "engine/tokens/conversation.h"
#include "engine/tokens/hash.h"
#include "engine/tokens/inputs.h"
#include "kernels/base/check.h"
#include "kernels/base/philox.h"
#include "kernels/base/text.h"

namespace fp4t {

namespace {

constexpr size_t kReadBytes = size_t{1} << 20;

int64_t lines_before(std::string_view text, size_t at) {
  return std::count(text.begin(), text.begin() + static_cast<std::ptrdiff_t>(at), '\n');
}

[[noreturn]] void refuse_nul(const std::string& path, int64_t line) {
  throw BadDataError(detail::concat(printable(path), ":", line, ": no text: it holds a NUL character"));
}

}  // namespace

// Lines of one file, and the hash of what was read of it, a byte order mark left out.
class DocumentReader::File {
 public:
  explicit File(const std::string& path) : path_(path) {
    fd_ = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);  // a FIFO must not hang the run
    if (fd_ < 0) throw MissingInputError("cannot open " + printable(path) + ": " + std::strerror(errno));
    struct stat status {};
    if (::fstat(fd_, &status) != 0 || !S_ISREG(status.st_mode)) {
      ::close(fd_);
      throw BadDataError("'" + printable(path) + "' is no regular file");
    }
  }
  ~File() { ::close(fd_); }
  File(const File&) = delete;
  File& operator=(const File&) = delete;

  // The next line without its '\n'; false at the end.
  bool line(std::string& out) {
    out.clear();
    for (;;) {
      const size_t end = buffer_.find('\n', at_);
      if (end != std::string::npos) {
        out.append(buffer_, at_, end - at_);
        at_ = end + 1;
        break;
      }
      out.append(buffer_, at_);
      at_ = buffer_.size();
      if (fill()) continue;
      if (out.empty()) return false;
      break;
    }
    ++number_;
    if (out.find('\0') != std::string::npos) refuse_nul(path_, number_);
    return true;
  }
  // All that is left.
  std::string rest() {
    std::string out(buffer_, at_);
    at_ = buffer_.size();
    while (fill()) {
      out += buffer_;
      at_ = buffer_.size();
    }
    const size_t nul = out.find('\0');
    if (nul != std::string::npos) refuse_nul(path_, 1 + lines_before(out, nul));
    return out;
  }

  const std::string& path() const { return path_; }
  int64_t number() const { return number_; }  // of the last line
  int64_t bytes() const { return bytes_; }
  std::string hash() const { return hash_.hex(); }

 private:
  bool fill() {
    buffer_.resize(kReadBytes);
    ssize_t n;
    do {
      n = ::read(fd_, buffer_.data(), buffer_.size());
    } while (n < 0 && errno == EINTR);
    if (n < 0) throw BadDataError("cannot read " + printable(path_) + ": " + std::strerror(errno));
    buffer_.resize(static_cast<size_t>(n));
    if (is_new_ && buffer_.starts_with("\xEF\xBB\xBF")) buffer_.erase(0, 3);  // a byte order mark is no text
    is_new_ = false;
    at_ = 0;
    hash_.add(buffer_.data(), buffer_.size());
    bytes_ += static_cast<int64_t>(buffer_.size());
    return n > 0;
  }

  std::string path_, buffer_;
  Xxh3Stream hash_;
  int fd_ = -1;
  size_t at_ = 0;
  bool is_new_ = true;
  int64_t number_ = 0, bytes_ = 0;
};

DocumentReader::DocumentReader(const DataSourceSpec& spec, Conversations conversations)
    : spec_(spec), conversations_(conversations), files_(input_files(spec)) {}
DocumentReader::~DocumentReader() = default;

void DocumentReader::take(Document document, std::vector<Document>& out) {
  if (document.text.empty() && document.messages.empty()) return;
  document.file = next_file_ - 1;
  taken_bytes_ += document.text.size();
  for (const Message& m : document.messages) taken_bytes_ += m.content.size();
  any_ = true;
  out.push_back(std::move(document));
}

// The next document of a text file; false at its end.
bool DocumentReader::more_text(std::vector<Document>& out) {
  Document document;
  document.line = file_->number() + 1;
  if (spec_.separator.empty()) {
    document.text = file_->rest();
    take(std::move(document), out);
    return false;
  }
  std::string line;
  while (file_->line(line)) {
    const bool ends = line.size() == spec_.separator.size() + 1 && line.back() == '\r';
    if (line == spec_.separator || (ends && line.starts_with(spec_.separator))) {
      take(std::move(document), out);
      return true;
    }
    document.text += line + "\n";
  }
  take(std::move(document), out);
  return false;
}

bool DocumentReader::more_json(std::vector<Document>& out) {
  std::string line;
  if (!file_->line(line)) return false;
  if (!line.empty() && line.back() == '\r') line.pop_back();
  if (line.find_first_not_of(" \t") == std::string::npos) return true;
  const auto object = parse_json_line(line, file_->path(), file_->number());
  const auto refuse = [&](const std::string& what) {
    throw BadDataError(detail::concat(printable(file_->path()), ":", file_->number(), ": ", what));
  };
  const bool there = object.is_object() && object.contains(spec_.field);
  Document document;
  document.line = file_->number();
  if (there && object[spec_.field].is_string()) {
    document.text = object[spec_.field].get<std::string>();
    if (document.text.find('\0') != std::string::npos)
      refuse_nul(file_->path(), file_->number());  // as an escape
  } else if (there && object[spec_.field].is_array() && conversations_ == Conversations::kTaken) {
    try {
      document.messages = messages_of(object[spec_.field]);
    } catch (const BadDataError& e) {
      refuse("'" + printable(spec_.field) + "': " + e.what());
    }
    for (const Message& m : document.messages) {
      if (m.content.find('\0') != std::string::npos) refuse_nul(file_->path(), file_->number());
    }
  } else {
    const bool list = there && object[spec_.field].is_array();
    refuse("no text under the key '" + printable(spec_.field) + "'" +
           (list ? ", but a list; conversations are taken as data to train on alone" : ""));
  }
  take(std::move(document), out);
  return true;
}

void DocumentReader::end_file() {
  digest_ += std::filesystem::path(file_->path()).filename().string() + " " + std::to_string(file_->bytes()) +
             " " + file_->hash() + "\n";
  bytes_ += file_->bytes();
  file_.reset();
}

std::vector<Document> DocumentReader::next(size_t bytes) {
  std::vector<Document> out;
  taken_bytes_ = 0;
  while (taken_bytes_ < std::max<size_t>(bytes, 1)) {
    if (!file_) {
      if (next_file_ == files_.size()) break;
      file_ = std::make_unique<File>(files_[next_file_++]);
    }
    if (!(spec_.kind == "jsonl" ? more_json(out) : more_text(out))) end_file();
  }
  if (out.empty() && !any_) {
    throw BadDataError(detail::concat("source '", printable(spec_.name), "' holds no document in its ",
                                      files_.size(), " files, of which ", printable(files_.front()),
                                      " is the first"));
  }
  return out;
}

std::string DocumentReader::hash() const {
  return xxh3_hex(digest_ + spec_.kind + "|" + spec_.separator + "|" + spec_.field);
}

namespace {

DocumentTokens conversation_tokens(const DataSourceSpec& spec, const Tokenizer& tokenizer,
                                   const Document& document) {
  if (tokenizer.chat().empty()) {
    throw BadDataError("a conversation, which needs a form of conversations (tokenizer.chat)");
  }
  ChatTokens chat = Chat(tokenizer.chat(), tokenizer).conversation(document.messages);
  DocumentTokens tokens{std::move(chat.ids), {}};
  if (spec.loss_on == "assistant") {
    tokens.trained = std::move(chat.spoken);
    if (std::count(tokens.trained.begin(), tokens.trained.end(), 1) == 0) {
      throw BadDataError("a conversation without an assistant's message: nothing of it is trained (loss_on)");
    }
  }
  const int32_t end = tokenizer.end_of_document();
  if (spec.end_of_document && tokens.ids.back() != end) {
    tokens.ids.push_back(end);
    if (!tokens.trained.empty()) tokens.trained.push_back(0);
  }
  return tokens;
}

}  // namespace

DocumentTokens document_tokens(const DataSourceSpec& spec, const Tokenizer& tokenizer,
                               const Document& document, const std::string& file) {
  const auto refuse = [&](int64_t line, const std::string& what) {
    throw BadDataError(detail::concat(printable(file), ":", line, ": ", what));
  };
  DocumentTokens tokens;
  try {
    if (!document.messages.empty()) return conversation_tokens(spec, tokenizer, document);
    tokens.ids =
        spec.special_tokens ? tokenizer.encode_marked(document.text) : tokenizer.encode(document.text);
  } catch (const NoTokenError& e) {
    // A line break of a text is one of its file; not so in JSON.
    refuse(document.line + (spec.kind == "text" ? lines_before(document.text, e.at) : 0), e.what());
  } catch (const BadDataError& e) {
    refuse(document.line, e.what());
  }
  if (tokenizer.begin_of_document() >= 0)
    tokens.ids.insert(tokens.ids.begin(), tokenizer.begin_of_document());
  if (spec.end_of_document) tokens.ids.push_back(tokenizer.end_of_document());
  return tokens;
}

std::vector<int32_t> Documents::tokens(size_t document, const Tokenizer& tokenizer) const {
  const Document whole{texts[document], {}, places[document].file, places[document].line};
  return document_tokens(spec, tokenizer, whole, files[whole.file]).ids;
}

Documents read_documents(const DataSourceSpec& spec) {
  Documents all;
  all.spec = spec;
  all.spec.end_of_document = false;
  DocumentReader reader(spec);
  for (Document& document : reader.next(std::numeric_limits<size_t>::max())) {
    all.texts.push_back(std::move(document.text));
    all.places.push_back({"", {}, document.file, document.line});
  }
  all.files = reader.files();
  return all;
}

std::vector<bool> held_out_documents(const DataSourceSpec& spec, size_t documents) {
  const PhiloxKey split = site_key(spec.held_out.seed, Purpose::kDataOrder, 1, 0, 0, 0);
  std::vector<bool> out(documents);
  for (size_t i = 0; i < documents; ++i) {
    out[i] = static_cast<double>(site_draw(split, i).word[0]) * 0x1p-32 < spec.held_out.fraction;
  }
  const auto count = static_cast<size_t>(std::count(out.begin(), out.end(), true));
  if (count == documents && spec.held_out.fraction < 1) {
    throw BadDataError(detail::concat("held_out.fraction ", spec.held_out.fraction,
                                      " holds out every document of '", printable(spec.name), "' (",
                                      documents, "); give less, or another held_out.seed"));
  }
  if (count == 0 && spec.held_out.fraction > 0) {
    throw BadDataError(detail::concat("held_out.fraction ", spec.held_out.fraction, " holds out none of the ",
                                      documents, " documents of '", printable(spec.name),
                                      "'; give more, or another held_out.seed"));
  }
  return out;
}

}  // namespace fp4t

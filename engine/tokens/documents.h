// Text files and JSON lines as documents, read piece by piece.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "engine/recipe/recipe.h"
#include "engine/tokens/chat.h"
#include "engine/tokens/tokenizer.h"

namespace fp4t {

// Whether rows of JSON lines may be conversations.
enum class Conversations : uint8_t { kRefused, kTaken };

struct Document {
  std::string text;
  std::vector<Message> messages;  // a conversation instead of a text
  size_t file = 0;                // index in DocumentReader::files()
  int64_t line = 1;               // where it begins
};

class DocumentReader {
 public:
  // Of a source of kind text or jsonl. Throws MissingInputError, BadDataError.
  explicit DocumentReader(const DataSourceSpec& spec, Conversations conversations = Conversations::kRefused);
  ~DocumentReader();

  // The next documents in file order, none of them empty: at least one, and no more once they have `bytes`
  // bytes. Empty at the end. Neither a byte order mark nor a NUL is in them. Throws BadDataError naming file
  // and line.
  std::vector<Document> next(size_t bytes);

  const std::vector<std::string>& files() const { return files_; }
  // Over names without folders, contents and options; after the last document.
  std::string hash() const;
  int64_t bytes() const { return bytes_; }  // read so far

 private:
  class File;
  void take(Document document, std::vector<Document>& out);
  bool more_text(std::vector<Document>& out);
  bool more_json(std::vector<Document>& out);
  void end_file();

  DataSourceSpec spec_;
  Conversations conversations_;
  std::vector<std::string> files_;
  std::unique_ptr<File> file_;  // the one at hand
  size_t next_file_ = 0;
  size_t taken_bytes_ = 0;
  bool any_ = false;
  std::string digest_;
  int64_t bytes_ = 0;
};

struct DocumentTokens {
  std::vector<int32_t> ids;
  std::vector<uint8_t> trained;  // of each whether it is a target; empty: all are
};

// Tokens of a document as a model is trained on them: with what begins and ends documents, by the source's
// options; of a conversation in the form of the tokenizer. Throws BadDataError naming file and line.
DocumentTokens document_tokens(const DataSourceSpec& spec, const Tokenizer& tokenizer,
                               const Document& document, const std::string& file);

// All documents of a source at once, to measure on.
struct Documents {
  DataSourceSpec spec;
  std::vector<std::string> texts;
  std::vector<Document> places;  // of each text; the texts themselves are above
  std::vector<std::string> files;

  // With what begins a document, without what ends it. Throws BadDataError naming file and line.
  std::vector<int32_t> tokens(size_t document, const Tokenizer& tokenizer) const;
};
// Throws as DocumentReader does.
Documents read_documents(const DataSourceSpec& spec);

// By document, whether training never sees it. Throws BadDataError when that is all of them though the
// fraction is below 1, or none though one is given.
std::vector<bool> held_out_documents(const DataSourceSpec& spec, size_t documents);

}  // namespace fp4t

// Reading text and JSONL files into documents.
#include <algorithm>
#include <filesystem>
#include <sstream>
#include <string_view>

#include "engine/metrics/json_line.h"
#include "engine/metrics/metrics.h"
#include "engine/tokens/hash.h"
#include "engine/tokens/inputs.h"
#include "engine/tokens/source.h"
#include "kernels/base/check.h"
#include "kernels/base/philox.h"
#include "kernels/base/text.h"

namespace fp4t {

namespace {

namespace fs = std::filesystem;

std::string without_carriage_return(std::string line) {
  if (!line.empty() && line.back() == '\r') line.pop_back();
  return line;
}

int64_t lines_before(std::string_view text, size_t at) {
  return std::count(text.begin(), text.begin() + static_cast<std::ptrdiff_t>(at), '\n');
}

[[noreturn]] void refuse_nul(const std::string& path, int64_t line) {
  throw BadDataError(detail::concat(printable(path), ":", line, ": no text: it holds a NUL character"));
}

// Takes the documents of one file.
class Taker {
 public:
  Taker(const std::string& path, Documents* out) : path_(path), out_(out) { out->files.push_back(path); }

  void take(std::string text, int64_t line) {
    if (text.empty()) return;
    out_->texts.push_back(std::move(text));
    out_->places.push_back({out_->files.size() - 1, line});
  }

  void split_text(const std::string& content, const std::string& separator) {
    if (separator.empty()) return take(content, 1);
    std::istringstream lines(content);
    std::string line, document;
    int64_t number = 1, first = 1;
    for (; std::getline(lines, line); ++number) {
      if (without_carriage_return(line) != separator) {
        document += line + "\n";
        continue;
      }
      take(std::move(document), first);
      document.clear();
      first = number + 1;
    }
    take(std::move(document), first);
  }

  void split_jsonl(const std::string& content, const std::string& field) {
    std::istringstream lines(content);
    std::string line;
    for (int64_t number = 1; std::getline(lines, line); ++number) {
      line = without_carriage_return(line);
      if (line.find_first_not_of(" \t") == std::string::npos) continue;
      const auto object = parse_json_line(line, path_, number);
      if (!object.is_object() || !object.contains(field) || !object[field].is_string()) {
        throw BadDataError(detail::concat(printable(path_), ":", number, ": no text under the key '",
                                          printable(field), "'"));
      }
      std::string text = object[field].get<std::string>();
      if (text.find('\0') != std::string::npos) refuse_nul(path_, number);  // written as an escape
      take(std::move(text), number);
    }
  }

 private:
  std::string path_;
  Documents* out_;
};

}  // namespace

std::vector<int32_t> Documents::tokens(size_t document, const Tokenizer& tokenizer) const {
  const std::string& text = texts[document];
  try {
    return tokenizer.encode(text);
  } catch (const NoTokenError& e) {
    const Place& place = places[document];
    const int64_t line = place.line + (breaks_count ? lines_before(text, e.at) : 0);
    throw BadDataError(detail::concat(printable(files[place.file]), ":", line, ": ", e.what()));
  }
}

Documents read_documents(const DataSourceSpec& spec) {
  Documents result;
  result.breaks_count = spec.kind == "text";
  std::string digest;
  for (const std::string& path : input_files(spec)) {
    std::string content = read_text_file(path);
    const size_t nul = content.find('\0');
    if (nul != std::string::npos) refuse_nul(path, 1 + lines_before(content, nul));
    if (content.rfind("\xEF\xBB\xBF", 0) == 0) content.erase(0, 3);  // a byte order mark is no text
    Taker taker(path, &result);
    if (spec.kind == "jsonl") {
      taker.split_jsonl(content, spec.field);
    } else {
      taker.split_text(content, spec.separator);
    }
    digest += fs::path(path).filename().string() + " " + std::to_string(content.size()) + " " +
              xxh3_hex(content) + "\n";
    result.bytes += static_cast<int64_t>(content.size());
  }
  if (result.texts.empty()) {
    throw BadDataError(detail::concat("source '", printable(spec.name), "' holds no document in its ",
                                      result.files.size(), " files, of which ",
                                      printable(result.files.front()), " is the first"));
  }
  result.hash = xxh3_hex(digest + spec.kind + "|" + spec.separator + "|" + spec.field);
  return result;
}

std::vector<bool> held_out_documents(const DataSourceSpec& spec, size_t documents) {
  const PhiloxKey split = site_key(spec.held_out.seed, Purpose::kDataOrder, 1, 0, 0, 0);
  std::vector<bool> out(documents);
  for (size_t i = 0; i < documents; ++i) {
    out[i] = static_cast<double>(site_draw(split, i).word[0]) * 0x1p-32 < spec.held_out.fraction;
  }
  const auto count = static_cast<size_t>(std::count(out.begin(), out.end(), true));
  if (count == documents) {
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

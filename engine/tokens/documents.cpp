// Reading text and JSONL files into documents.
#include <algorithm>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <sstream>

#include "engine/tokens/hash.h"
#include "engine/tokens/inputs.h"
#include "engine/tokens/source.h"
#include "kernels/base/check.h"

namespace fp4t {

namespace {

namespace fs = std::filesystem;

std::string read_file(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  if (!in) throw MissingInputError("data: cannot open '" + path + "'");
  std::ostringstream out;
  out << in.rdbuf();
  if (in.bad()) throw BadDataError("data: cannot read '" + path + "'");
  return std::move(out).str();
}

std::string without_carriage_return(std::string line) {
  if (!line.empty() && line.back() == '\r') line.pop_back();
  return line;
}

void split_text(const std::string& content, const std::string& separator, std::vector<std::string>& out) {
  if (separator.empty()) {
    if (!content.empty()) out.push_back(content);
    return;
  }
  std::istringstream lines(content);
  std::string line, document;
  while (std::getline(lines, line)) {
    if (without_carriage_return(line) == separator) {
      if (!document.empty()) out.push_back(std::move(document));
      document.clear();
    } else {
      document += line + "\n";
    }
  }
  if (!document.empty()) out.push_back(std::move(document));
}

void split_jsonl(const std::string& content, const std::string& path, const std::string& field,
                 std::vector<std::string>& out) {
  std::istringstream lines(content);
  std::string line;
  for (int64_t number = 1; std::getline(lines, line); ++number) {
    line = without_carriage_return(line);
    if (number == 1 && line.rfind("\xEF\xBB\xBF", 0) == 0) line.erase(0, 3);
    if (line.find_first_not_of(" \t") == std::string::npos) continue;
    nlohmann::json object;
    try {
      object = nlohmann::json::parse(line);
    } catch (const nlohmann::json::exception& e) {
      throw BadDataError(detail::concat(path, ":", number, ": ", e.what()));
    }
    if (!object.is_object() || !object.contains(field) || !object[field].is_string()) {
      throw BadDataError(detail::concat(path, ":", number, ": no text under the key '", field, "'"));
    }
    std::string text = object[field].get<std::string>();
    if (!text.empty()) out.push_back(std::move(text));
  }
}

}  // namespace

Documents read_documents(const DataSourceSpec& spec) {
  Documents result;
  std::string digest;
  for (const std::string& path : input_files(spec)) {
    const std::string content = read_file(path);
    if (content.find('\0') != std::string::npos) {
      throw BadDataError("data: '" + path + "' is not text (it holds NUL bytes)");
    }
    if (spec.kind == "jsonl") {
      split_jsonl(content, path, spec.field, result.texts);
    } else {
      split_text(content, spec.separator, result.texts);
    }
    digest += fs::path(path).filename().string() + " " + std::to_string(content.size()) + " " +
              xxh3_hex(content) + "\n";
    result.bytes += static_cast<int64_t>(content.size());
    result.files += 1;
  }
  if (result.texts.empty()) throw BadDataError("data: source '" + spec.name + "' holds no document");
  result.hash = xxh3_hex(digest + spec.kind + "|" + spec.separator + "|" + spec.field);
  return result;
}

}  // namespace fp4t

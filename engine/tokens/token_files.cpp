#include "engine/tokens/token_files.h"

#include <algorithm>
#include <filesystem>
#include <limits>
#include <nlohmann/json.hpp>
#include <set>

#include "engine/metrics/json_line.h"
#include "engine/tokens/hash.h"
#include "kernels/base/text.h"
#include "kernels/base/text_file.h"

namespace fp4t {

namespace {

namespace fs = std::filesystem;
using detail::concat;

constexpr std::string_view kMegatronMagic{"MMIDIDX\0\0", 9};
constexpr int64_t kMegatronHeader = 34, kLlmcHeader = 1024;

[[noreturn]] void fail(const std::string& path, int64_t byte, const std::string& what) {
  throw BadDataError(concat(printable(path), ": byte ", byte, ": ", printable(what, 4000)));
}

TokenType type_of_code(const std::string& path, uint8_t code) {
  switch (code) {
    case 1:
      return TokenType::kU8;
    case 2:
      return TokenType::kI8;
    case 3:
      return TokenType::kI16;
    case 4:
      return TokenType::kI32;
    case 5:
      return TokenType::kI64;
    case 8:
      return TokenType::kU16;
    default:
      fail(path, 17, concat("dtype ", int{code}, "; allowed: 1 to 5 and 8, which are whole numbers"));
  }
}

// Where `get` gives a value of the file's type.
template <class Body>
void with_type(TokenType type, const Body& body) {
  switch (type) {
    case TokenType::kU8:
      return body(uint8_t{});
    case TokenType::kI8:
      return body(int8_t{});
    case TokenType::kI16:
      return body(int16_t{});
    case TokenType::kI32:
      return body(int32_t{});
    case TokenType::kI64:
      return body(int64_t{});
    case TokenType::kU16:
      return body(uint16_t{});
    case TokenType::kU32:
      return body(uint32_t{});
  }
}

// Of a large file: its size and pages spread over it.
std::string sampled_hash(std::string_view bytes) {
  constexpr size_t kPages = 64, kPage = size_t{64} << 10;
  if (bytes.size() <= kPages * kPage) return xxh3_hex(bytes);
  std::string all = std::to_string(bytes.size());
  for (size_t i = 0; i < kPages; ++i) {
    all += xxh3_hex(bytes.substr((bytes.size() - kPage) / (kPages - 1) * i, kPage));
  }
  return xxh3_hex(all);
}

struct MegatronCounts {
  int64_t sequences, documents;  // the latter entries of the index, one more than there are documents
};

MegatronCounts read_counts(const MappedFile& index) {
  const std::string& path = index.path();
  if (index.size() < kMegatronHeader || index.bytes().substr(0, kMegatronMagic.size()) != kMegatronMagic) {
    fail(path, 0, "no Megatron index: it does not begin with MMIDIDX");
  }
  const auto version = index.at<uint64_t>(9);
  if (version != 1) fail(path, 9, concat("version ", version, "; allowed: 1"));
  const auto sequences = index.at<uint64_t>(18), documents = index.at<uint64_t>(26);
  const auto room = static_cast<uint64_t>(index.size() - kMegatronHeader);
  if (sequences > room || documents > room) {
    fail(path, 18,
         concat(sequences, " sequences and ", documents, " document entries in a file of ", index.size(),
                " bytes"));
  }
  const uint64_t needed = 12 * sequences + 8 * documents;
  if (room != needed && room != needed + sequences) {
    fail(path, 18,
         concat(sequences, " sequences and ", documents, " document entries take ",
                needed + static_cast<uint64_t>(kMegatronHeader), " bytes, the file has ", index.size()));
  }
  if (documents == 0) fail(path, 26, "no document entries; allowed: one more than there are documents");
  return {static_cast<int64_t>(sequences), static_cast<int64_t>(documents)};
}

// Ends of the sequences in tokens; they must lie one behind another and fill the .bin.
std::vector<int64_t> sequence_ends(const MappedFile& index, const MegatronCounts& counts, int64_t width,
                                   const MappedFile& data) {
  const int64_t lengths = kMegatronHeader, pointers = lengths + 4 * counts.sequences;
  std::vector<int64_t> ends(static_cast<size_t>(counts.sequences));
  int64_t tokens = 0;
  for (int64_t i = 0; i < counts.sequences; ++i) {
    const auto length = index.at<int32_t>(lengths + 4 * i);
    const auto pointer = index.at<int64_t>(pointers + 8 * i);
    if (length < 0) fail(index.path(), lengths + 4 * i, concat("sequence ", i, " has the length ", length));
    if (pointer != tokens * width) {
      fail(index.path(), pointers + 8 * i,
           concat("sequence ", i, " begins at byte ", pointer, " of ", data.path(),
                  ", and those before it end at ", tokens * width));
    }
    tokens += length;
    ends[static_cast<size_t>(i)] = tokens;
  }
  if (tokens * width != data.size()) {
    throw BadDataError(concat(data.path(), ": has ", data.size(), " bytes; its index means ", tokens,
                              " tokens of ", width, " bytes, ", tokens * width));
  }
  return ends;
}

std::vector<int64_t> megatron_documents(const MappedFile& index, const MegatronCounts& counts,
                                        const std::vector<int64_t>& ends) {
  const int64_t at = kMegatronHeader + 12 * counts.sequences;
  std::vector<int64_t> documents;
  int64_t before = 0;
  for (int64_t i = 0; i < counts.documents; ++i) {
    const auto sequence = index.at<int64_t>(at + 8 * i);
    const bool last = i + 1 == counts.documents;
    if (sequence < before || (i == 0 && sequence != 0) || (last && sequence != counts.sequences)) {
      fail(index.path(), at + 8 * i,
           concat("document entry ", i, " is sequence ", sequence, "; allowed: 0 for the first, ",
                  counts.sequences, " for the last, none below the one before (", before, ")"));
    }
    before = sequence;
    if (i > 0) documents.push_back(sequence == 0 ? 0 : ends[static_cast<size_t>(sequence - 1)]);
  }
  return documents;
}

// What `fp4train tokenize` wrote beside the index; "" when there is nothing.
std::string check_origin_note(const std::string& index, const std::string& index_hash,
                              const std::string& fingerprint) {
  const std::string path = fs::path(index).replace_extension(".tokens.json").string();
  // Another program's file of that name may be of any size and form.
  constexpr size_t kMostBytes = 4096;
  const std::string content = read_text_file_if_there(path, kMostBytes).value_or("");
  if (!content.starts_with("{\"format\":\"fp4train tokens 1\"")) return "";
  const auto note = parse_json_line(content, path, 1);
  const auto text = [&](const char* key) {
    if (!note.contains(key) || !note[key].is_string())
      throw BadDataError(printable(path) + ": has no text '" + key + "'");
    return note[key].get<std::string>();
  };
  if (text("index_hash") != index_hash) {
    throw BadDataError(concat(index, ": has the hash ", index_hash, ", ", path, " was written for one with ",
                              text("index_hash")));
  }
  if (text("tokenizer") != fingerprint) {
    throw BadDataError(concat(printable(path), ": made with the tokenizer ", printable(text("tokenizer")),
                              ", this run has ", fingerprint));
  }
  return text("data_hash");
}

}  // namespace

int64_t token_bytes(TokenType type) {
  int64_t bytes = 0;
  with_type(type, [&](auto value) { bytes = sizeof(value); });
  return bytes;
}

void TokenFile::read(int64_t from, int64_t tokens, int64_t vocabulary, int32_t* out) const {
  FP4T_CHECK(from >= 0 && tokens >= 0 && from + tokens <= count, file.path(), " ", from, " ", tokens);
  with_type(type, [&]<class T>(T) {
    const char* data = file.bytes().data() + byte_of(from);
    bool good = true;
    for (int64_t i = 0; i < tokens; ++i) {
      T value;
      std::memcpy(&value, data + i * static_cast<int64_t>(sizeof(T)), sizeof(T));
      good &= static_cast<int64_t>(value) >= 0 && static_cast<int64_t>(value) < vocabulary;
      out[i] = static_cast<int32_t>(value);
    }
    for (int64_t i = 0; !good && i < tokens; ++i) {
      T value;
      std::memcpy(&value, data + i * static_cast<int64_t>(sizeof(T)), sizeof(T));
      if (static_cast<int64_t>(value) >= 0 && static_cast<int64_t>(value) < vocabulary) continue;
      fail(file.path(), byte_of(from + i),
           concat("token ", static_cast<int64_t>(value), "; the tokenizer has ", vocabulary));
    }
  });
}

void TokenFile::check(int64_t vocabulary) const {
  Xxh3Stream hash_now;
  std::vector<int32_t> room(size_t{1} << 16);
  for (int64_t at = 0; at < count; at += static_cast<int64_t>(room.size())) {
    const int64_t n = std::min(count - at, static_cast<int64_t>(room.size()));
    read(at, n, vocabulary, room.data());
    hash_now.add(file.bytes().data() + byte_of(at), static_cast<size_t>(byte_of(at + n) - byte_of(at)));
  }
  const std::string found = hash_now.hex();
  if (noted_hash.empty() || noted_hash == found) return;
  throw BadDataError(concat(printable(file.path()), ": has the hash ", found, ", and was written with ",
                            printable(noted_hash), ": it has been changed since"));
}

TokenFile open_megatron(const std::string& index_path, const std::string& fingerprint) {
  const MappedFile index(index_path);
  const MegatronCounts counts = read_counts(index);
  const TokenType type = type_of_code(index_path, index.at<uint8_t>(17));
  MappedFile data(fs::path(index_path).replace_extension(".bin").string());
  const std::vector<int64_t> ends = sequence_ends(index, counts, token_bytes(type), data);
  const std::string index_hash = xxh3_hex(index.bytes());
  const std::string noted = check_origin_note(index_path, index_hash, fingerprint);
  const std::string hash = index_hash + " " + (noted.empty() ? sampled_hash(data.bytes()) : noted);
  const int64_t tokens = data.size() / token_bytes(type);
  return {std::move(data), type, 0, tokens, megatron_documents(index, counts, ends), hash, noted};
}

TokenFile open_llmc(const std::string& path) {
  MappedFile file(path);
  if (file.size() < kLlmcHeader)
    fail(path, 0, concat("no llm.c tokens: ", file.size(), " bytes, a header has 1024"));
  const auto magic = file.at<int32_t>(0), version = file.at<int32_t>(4);
  const bool narrow = magic == 20240520 && version == 1, wide = magic == 20240801 && version == 7;
  if (!narrow && !wide) {
    fail(path, 0,
         concat("magic ", magic, " and version ", version, "; allowed: 20240520 and 1, 20240801 and 7"));
  }
  const TokenType type = narrow ? TokenType::kU16 : TokenType::kU32;
  const auto count = file.at<int32_t>(8);
  if (count < 0 || kLlmcHeader + count * token_bytes(type) != file.size()) {
    fail(path, 8,
         concat("the header means ", count, " tokens of ", token_bytes(type), " bytes; behind it are ",
                file.size() - kLlmcHeader, " bytes"));
  }
  std::string hash = xxh3_hex(file.bytes());
  return {std::move(file), type, kLlmcHeader, count, {}, std::move(hash), ""};
}

TokenFile open_nanogpt(const std::string& path, const std::string& dtype) {
  MappedFile file(path);
  const TokenType type = dtype == "uint32" ? TokenType::kU32 : TokenType::kU16;
  if (file.size() == 0 || file.size() % token_bytes(type) != 0) {
    throw BadDataError(concat(printable(path), ": has ", file.size(), " bytes; allowed: a whole number of ",
                              dtype, " tokens, one or more"));
  }
  const int64_t count = file.size() / token_bytes(type);
  std::string hash = xxh3_hex(file.bytes());
  return {std::move(file), type, 0, count, {}, std::move(hash), ""};
}

std::vector<std::string> megatron_indices(const std::vector<std::string>& paths) {
  std::vector<std::string> indices;
  std::set<std::string> seen;
  for (const std::string& path : paths) {
    fs::path index(path);
    const std::string extension = index.extension().string();
    index.replace_extension(".idx");
    std::error_code ignored;
    const bool has_index = fs::exists(index, ignored);
    if (extension == ".json" && has_index) continue;  // a note beside it
    if (extension != ".idx" && extension != ".bin") {
      throw BadDataError("'" + printable(path) + "' is neither .idx nor .bin, which a megatron source has");
    }
    if (!has_index)
      throw MissingInputError("'" + printable(path) + "' has no '" + printable(index.string()) +
                              "' beside it");
    if (seen.insert(index.string()).second) indices.push_back(index.string());
  }
  return indices;
}

TokenType megatron_type(int64_t vocabulary) { return vocabulary < 65500 ? TokenType::kU16 : TokenType::kI32; }

std::string megatron_index(TokenType type, const std::vector<int32_t>& lengths) {
  const int64_t count = static_cast<int64_t>(lengths.size()), width = token_bytes(type);
  std::string out(kMegatronMagic);
  const auto put = [&out](auto value) { out.append(reinterpret_cast<const char*>(&value), sizeof(value)); };
  out.reserve(static_cast<size_t>(kMegatronHeader + 20 * count + 8));
  put(uint64_t{1});
  put(static_cast<uint8_t>(type == TokenType::kU16 ? 8 : 4));
  put(static_cast<uint64_t>(count));
  put(static_cast<uint64_t>(count + 1));
  for (const int32_t length : lengths) put(length);
  int64_t at = 0;
  for (const int32_t length : lengths) {
    put(at);
    at += length * width;
  }
  for (int64_t i = 0; i <= count; ++i) put(i);
  return out;
}

}  // namespace fp4t

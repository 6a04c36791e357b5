#include "engine/tokens/utf8.h"

#include <algorithm>
#include <cstring>
#include <unordered_map>

#include "kernels/base/text.h"
#include "kernels/base/utf8.h"

namespace fp4t {

namespace {

constexpr const char* kReplacement = "\xEF\xBF\xBD";  // U+FFFD

uint8_t byte_at(std::string_view text, size_t at) { return static_cast<uint8_t>(text[at]); }
size_t ascii_end(std::string_view text, size_t at) {
  for (uint64_t eight; at + sizeof(eight) <= text.size(); at += sizeof(eight)) {
    std::memcpy(&eight, text.data() + at, sizeof(eight));
    if ((eight & 0x8080808080808080u) != 0) break;
  }
  while (at < text.size() && byte_at(text, at) < 0x80) ++at;
  return at;
}

std::unordered_map<uint32_t, char> alphabet_bytes() {
  std::unordered_map<uint32_t, char> map;
  for (uint32_t b = 0; b < 256; ++b) map.emplace(byte_alphabet()[b], static_cast<char>(b));
  return map;
}

}  // namespace

size_t well_formed_end(std::string_view text, size_t at) {
  while (at < text.size()) {
    at = ascii_end(text, at);
    if (at == text.size()) break;
    const Utf8Part part = utf8_part(text, at);
    if (!part.whole()) break;
    at += part.bytes;
  }
  return at;
}

size_t ill_formed_end(std::string_view text, size_t at) {
  while (at < text.size() && !utf8_part(text, at).whole()) ++at;
  return at;
}

bool is_well_formed(std::string_view text) { return well_formed_end(text, 0) == text.size(); }

void append_character(std::string& text, uint32_t code_point) {
  const auto push = [&](uint32_t byte) { text += static_cast<char>(static_cast<uint8_t>(byte)); };
  if (code_point < 0x80) return push(code_point);
  if (code_point < 0x800) {
    push(0xC0 | code_point >> 6);
  } else if (code_point < 0x10000) {
    push(0xE0 | code_point >> 12);
    push(0x80 | (code_point >> 6 & 0x3F));
  } else {
    push(0xF0 | code_point >> 18);
    push(0x80 | (code_point >> 12 & 0x3F));
    push(0x80 | (code_point >> 6 & 0x3F));
  }
  push(0x80 | (code_point & 0x3F));
}

uint32_t code_point_at(std::string_view text, size_t at) {
  const size_t n = utf8_length(text, at);
  const uint32_t lead = byte_at(text, at);
  if (n <= 1) return lead;
  uint32_t code_point = lead & (0xFFu >> (n + 1));
  for (size_t i = 1; i < n; ++i) code_point = code_point << 6 | (byte_at(text, at + i) & 0x3Fu);
  return code_point;
}

std::string CharacterStream::push(std::string_view bytes) {
  pending_ += bytes;
  std::string out;
  size_t at = 0;
  while (at < pending_.size()) {
    const size_t end = well_formed_end(pending_, at);
    out.append(pending_, at, end - at);
    at = end;
    if (at == pending_.size()) break;
    const Utf8Part part = utf8_part(pending_, at);
    const bool may_grow = part.needed > part.bytes;
    if (at + part.bytes == pending_.size() && may_grow) break;
    out += kReplacement;
    at += part.bytes;
  }
  pending_.erase(0, at);
  return out;
}

std::string CharacterStream::finish() {
  const std::string out = pending_.empty() ? "" : kReplacement;  // one part of one character is kept, at most
  pending_.clear();
  return out;
}

std::string with_replacements(std::string_view bytes) {
  CharacterStream stream;
  std::string text = stream.push(bytes);
  return text + stream.finish();
}

const std::array<uint32_t, 256>& byte_alphabet() {
  static const std::array<uint32_t, 256> alphabet = [] {
    std::array<uint32_t, 256> table{};
    uint32_t next = 0x100;
    for (uint32_t b = 0; b < 256; ++b) {
      const bool prints = (b >= 0x21 && b <= 0x7E) || (b >= 0xA1 && b <= 0xAC) || b >= 0xAE;
      table[b] = prints ? b : next++;
    }
    return table;
  }();
  return alphabet;
}

bool bytes_of_alphabet(std::string_view text, std::string& bytes) {
  static const std::unordered_map<uint32_t, char> map = alphabet_bytes();
  bytes.clear();
  for (size_t at = 0; at < text.size();) {
    const size_t n = utf8_length(text, at);
    const auto found = n == 0 ? map.end() : map.find(code_point_at(text, at));
    if (found == map.end()) return false;
    bytes += found->second;
    at += n;
  }
  return true;
}

}  // namespace fp4t

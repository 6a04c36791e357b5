#include "kernels/base/text.h"

#include <cstdint>
#include <cstdio>

#include "kernels/base/utf8.h"

namespace fp4t {

namespace {

uint32_t code_point(std::string_view text, size_t at, size_t length) {
  const auto byte = [&](size_t i) { return static_cast<uint32_t>(static_cast<unsigned char>(text[at + i])); };
  if (length == 1) return byte(0);
  uint32_t point = byte(0) & (0x7Fu >> length);
  for (size_t i = 1; i < length; ++i) point = point << 6 | (byte(i) & 0x3F);
  return point;
}

bool moves_text(uint32_t point) {
  const bool control = point < 0x20 || (point >= 0x7F && point < 0xA0);
  const bool separator = point == 0x2028 || point == 0x2029;
  const bool direction = point == 0x061C || point == 0x200E || point == 0x200F ||
                         (point >= 0x202A && point <= 0x202E) || (point >= 0x2066 && point <= 0x2069);
  return control || separator || direction;
}

void append_escape(std::string& out, uint32_t value, bool is_byte) {
  if (value == '\n') {
    out += "\\n";
  } else if (value == '\r') {
    out += "\\r";
  } else if (value == '\t') {
    out += "\\t";
  } else {
    char escape[16];
    std::snprintf(escape, sizeof escape, is_byte || value < 0x80 ? "\\x%02x" : "\\u%04x", value);
    out += escape;
  }
}

std::string escaped(std::string_view text, size_t most, std::string_view kept) {
  std::string out;
  for (size_t at = 0; at < text.size();) {
    const size_t length = utf8_length(text, at);
    const size_t taken = length == 0 ? 1 : length;
    if (at + taken > most) return out + "...";
    const uint32_t value = length == 0 ? static_cast<unsigned char>(text[at]) : code_point(text, at, length);
    const bool keeps = length == 1 && kept.find(text[at]) != std::string_view::npos;
    if (length > 0 && (keeps || !moves_text(value))) {
      out += text.substr(at, length);
    } else {
      append_escape(out, value, length == 0);
    }
    at += taken;
  }
  return out;
}

}  // namespace

size_t utf8_length(std::string_view text, size_t at) {
  if (at >= text.size()) return 0;
  const Utf8Part part = utf8_part(text, at);
  return part.whole() ? part.bytes : 0;
}

std::string printable(std::string_view text, size_t most) { return escaped(text, most, ""); }

std::string printable_lines(std::string_view text) { return escaped(text, std::string_view::npos, "\n\t"); }

}  // namespace fp4t

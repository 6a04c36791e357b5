// Numbers, booleans and texts of a recipe, as text: stricter than YAML where YAML surprises (RELIABILITY.md
// B6), wider where it is pedantic (1e3 and 1_000 are whole numbers).
#pragma once

#include <cstdint>
#include <string>

namespace fp4t {

// Each returns "" and sets `out`, or says why not (a hint; may repeat nothing of the text itself).
std::string read_int(const std::string& text, int64_t& out);
std::string read_uint(const std::string& text, uint64_t& out);
std::string read_double(const std::string& text, double& out);
std::string read_bool(const std::string& text, bool& out);

// The shortest text that reads back as the same value.
std::string write_double(double v);
// A text as YAML scalar: plain where that reads back as the same text for any reader, else in double quotes.
std::string write_text(const std::string& v);

}  // namespace fp4t

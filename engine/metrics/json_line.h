// JSON that others may have written, whole files and lines of files: what is wrong with it is told by its
// place.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

#include "kernels/base/check.h"
#include "kernels/base/text.h"

namespace fp4t {

// The parser's message without its own name and its line, which is always 1: "column 9: syntax error ...".
std::string json_problem(const nlohmann::json::exception& error);

// Whether brackets stand inside each other beyond what is taken: values are copied, walked and printed by
// recursion, and a file of nothing but brackets must not end the process.
bool is_nested_too_deeply(std::string_view text);

// `place`: what stands in front of the problem. Throws BadDataError.
template <class Json = nlohmann::json>
Json parse_json(const std::string& text, const std::string& place) {
  if (is_nested_too_deeply(text)) throw BadDataError(place + ": nested too deeply");
  try {
    return Json::parse(text);
  } catch (const nlohmann::json::exception& e) {
    throw BadDataError(place + ": " + json_problem(e));
  }
}

// Throws BadDataError.
template <class Json = nlohmann::json>
Json parse_json_line(const std::string& line, const std::string& file, int64_t number) {
  return parse_json<Json>(line, detail::concat(printable(file), ":", number));
}

// A line of metrics.jsonl: an object with a kind, and lines of steps and evaluations say of which. Throws
// BadDataError.
nlohmann::ordered_json parse_metrics_line(const std::string& line, const std::string& file, int64_t number);

}  // namespace fp4t

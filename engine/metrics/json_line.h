// One line of a file of JSON lines, maybe written by others: what is wrong with it is told by file and line.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>

#include "kernels/base/check.h"
#include "kernels/base/text.h"

namespace fp4t {

// The parser's message without its own name and its line, which is always 1: "column 9: syntax error ...".
std::string json_problem(const nlohmann::json::exception& error);

// Throws BadDataError.
template <class Json = nlohmann::json>
Json parse_json_line(const std::string& line, const std::string& file, int64_t number) {
  try {
    return Json::parse(line);
  } catch (const nlohmann::json::exception& e) {
    throw BadDataError(detail::concat(printable(file), ":", number, ": ", json_problem(e)));
  }
}

// A line of metrics.jsonl: an object with a kind, and lines of steps and evaluations say of which. Throws
// BadDataError.
nlohmann::ordered_json parse_metrics_line(const std::string& line, const std::string& file, int64_t number);

}  // namespace fp4t

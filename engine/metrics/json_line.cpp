#include "engine/metrics/json_line.h"

#include "kernels/base/text.h"

namespace fp4t {

std::string json_problem(const nlohmann::json::exception& error) {
  std::string text = error.what();
  const size_t name = text.rfind('[', 0) == 0 ? text.find("] ") : std::string::npos;
  if (name != std::string::npos) text.erase(0, name + 2);
  const std::string place = "parse error at line 1, ";
  if (text.rfind(place, 0) == 0) text.erase(0, place.size());
  return printable(text);
}

bool is_nested_too_deeply(std::string_view text) {
  constexpr int kMostDepth = 100;
  int depth = 0;
  bool in_string = false;
  for (size_t i = 0; i < text.size(); ++i) {
    const char c = text[i];
    if (in_string) {
      if (c == '\\') ++i;
      in_string = c != '"';
    } else if (c == '"') {
      in_string = true;
    } else if (c == '[' || c == '{') {
      if (++depth > kMostDepth) return true;
    } else if (c == ']' || c == '}') {
      --depth;
    }
  }
  return false;
}

nlohmann::ordered_json parse_metrics_line(const std::string& line, const std::string& file, int64_t number) {
  auto object = parse_json_line<nlohmann::ordered_json>(line, file, number);
  const auto need = [&](bool good, const char* what) {
    if (!good)
      throw BadDataError(detail::concat(printable(file), ":", number, ": no line of metrics: ", what));
  };
  const auto is_text = [&](const char* key) { return object.contains(key) && object[key].is_string(); };
  need(object.is_object(), "it is no object");
  need(is_text("kind"), "'kind' is no text");
  if (object["kind"] != "step" && object["kind"] != "eval") return object;
  need(is_text("stage"), "'stage' is no text");
  need(object.contains("step") && object["step"].is_number(), "'step' is no number");
  return object;
}

}  // namespace fp4t

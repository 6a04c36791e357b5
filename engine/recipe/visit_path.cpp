#include "engine/recipe/visit_path.h"

#include <cmath>

#include "engine/recipe/scalars.h"

namespace fp4t {

std::string describe_numbers(const Field& field, bool whole) {
  const auto shown = [whole](double v) {
    return whole ? std::to_string(static_cast<int64_t>(v)) : write_double(v);
  };
  std::string text = whole ? "a whole number" : "a number";
  const bool low = std::isfinite(field.low), high = std::isfinite(field.high);
  if (low) text += (field.low_open ? " above " : " from ") + shown(field.low);
  if (low && !high && !field.low_open) text += " on";
  if (high)
    text += (low && !field.low_open ? " to " : low ? ", at most " : " of at most ") + shown(field.high);
  return text;
}

}  // namespace fp4t

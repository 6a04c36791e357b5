#include "engine/tokens/normalise.h"

#include <utf8proc.h>

#include <algorithm>
#include <cstdlib>
#include <memory>

#include "kernels/base/check.h"

namespace fp4t {

std::string nfc(std::string_view text) {
  // Nothing below U+0300 composes with what stands before it, and those characters' bytes are below 0xCC.
  const bool simple =
      std::all_of(text.begin(), text.end(), [](char c) { return static_cast<uint8_t>(c) < 0xCC; });
  if (simple) return std::string(text);
  uint8_t* composed = nullptr;
  const utf8proc_ssize_t size =
      utf8proc_map(reinterpret_cast<const uint8_t*>(text.data()), static_cast<utf8proc_ssize_t>(text.size()),
                   &composed, static_cast<utf8proc_option_t>(UTF8PROC_STABLE | UTF8PROC_COMPOSE));
  const std::unique_ptr<uint8_t, decltype(&std::free)> owner(composed, &std::free);
  FP4T_CHECK(size >= 0, "utf8proc: ", utf8proc_errmsg(size));
  return {reinterpret_cast<const char*>(composed), static_cast<size_t>(size)};
}

}  // namespace fp4t

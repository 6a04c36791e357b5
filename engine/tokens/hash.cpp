#include "engine/tokens/hash.h"

#include <xxhash.h>

#include <cstdio>

namespace fp4t {

std::string xxh3_hex(std::string_view bytes) {
  char text[17];
  std::snprintf(text, sizeof(text), "%016llx",
                static_cast<unsigned long long>(XXH3_64bits(bytes.data(), bytes.size())));
  return text;
}

}  // namespace fp4t

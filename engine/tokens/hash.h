// XXH3-64 as 16 hex digits: the form in which recipes and checkpoints name contents.
#pragma once

#include <string>
#include <string_view>

namespace fp4t {

std::string xxh3_hex(std::string_view bytes);

}  // namespace fp4t

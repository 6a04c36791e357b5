// Unicode normalisation.
#pragma once

#include <string>
#include <string_view>

namespace fp4t {

// Canonical composition (NFC) of well-formed text, by utf8proc's tables. It may be longer than the text: up
// to three times its bytes.
std::string nfc(std::string_view text);

}  // namespace fp4t

// Conversations as JSON has them: a list of objects {"role", "content"}.
#pragma once

#include <nlohmann/json.hpp>
#include <vector>

#include "engine/tokens/chat.h"

namespace fp4t {

// Other keys are refused: they would not be read. Throws BadDataError naming the message by its number.
std::vector<Message> messages_of(const nlohmann::json& list);

}  // namespace fp4t

// Conversations as JSON has them: a list of objects {"role", "content"}.
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "engine/tokens/chat.h"

namespace fp4t {

// Other keys are refused: they would not be read. Throws BadDataError naming the message by its number.
std::vector<Message> messages_of(const nlohmann::json& list);
// One that the assistant is to answer: what it has answered is refused, too. conversation_json writes it
// without white space, so equal conversations are equal texts.
std::vector<Message> read_conversation(const std::string& json);
std::string conversation_json(const std::vector<Message>& messages);

}  // namespace fp4t

#include "engine/tokens/conversation.h"

#include "kernels/base/check.h"
#include "kernels/base/text.h"

namespace fp4t {

std::vector<Message> messages_of(const nlohmann::json& list) {
  if (!list.is_array()) throw BadDataError("no list of messages");
  std::vector<Message> messages;
  for (const nlohmann::json& object : list) {
    const auto refuse = [&](const std::string& what) {
      throw BadDataError(detail::concat("message ", messages.size(), " ", what));
    };
    if (!object.is_object()) refuse("is no object");
    for (const auto& [key, value] : object.items()) {
      if (key != "role" && key != "content") {
        refuse("has a key '" + printable(key) + "'; allowed: role and content");
      }
      if (!value.is_string()) refuse("has a '" + key + "' that is no text");
    }
    for (const char* key : {"role", "content"}) {
      if (!object.contains(key)) refuse(std::string("has no ") + key);
    }
    messages.push_back({object["role"], object["content"]});
    if (messages.back().role.empty())
      throw BadDataError(detail::concat("message ", messages.size() - 1, " has no role"));
  }
  if (messages.empty()) throw BadDataError("a conversation without messages");
  return messages;
}

std::vector<Message> read_conversation(const std::string& json) {
  std::vector<Message> messages = messages_of(nlohmann::json::parse(json, nullptr, false));
  if (messages.back().role == "assistant") {
    throw BadDataError("a conversation that ends with the assistant's answer");
  }
  return messages;
}

std::string conversation_json(const std::vector<Message>& messages) {
  auto list = nlohmann::ordered_json::array();
  for (const Message& m : messages) list.push_back({{"role", m.role}, {"content", m.content}});
  return list.dump();
}

}  // namespace fp4t

#include "engine/tokens/chat.h"

#include <algorithm>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "engine/metrics/json_line.h"
#include "kernels/base/check.h"
#include "kernels/base/text.h"
#include "kernels/base/text_file.h"

namespace fp4t {

namespace {

namespace fs = std::filesystem;

std::string trimmed(const std::string& text) {
  constexpr const char* kBlanks = " \t\r\n\v\f";
  const size_t begin = text.find_first_not_of(kBlanks);
  if (begin == std::string::npos) return "";
  return text.substr(begin, text.find_last_not_of(kBlanks) - begin + 1);
}

int32_t special(const Tokenizer& tokenizer, const std::string& form, const char* text) {
  try {
    return tokenizer.single_token(text);
  } catch (const RecipeError&) {
    throw RecipeError(detail::concat("tokenizer.chat: ", form, ", and the tokenizer has no token ", text));
  }
}

int32_t special_or_none(const Tokenizer& tokenizer, const char* text) {
  try {
    return tokenizer.single_token(text);
  } catch (const RecipeError&) {
    return -1;
  }
}

// Of a tokenizer_config.json; "" when it has none.
std::string template_of(const std::string& path) {
  const nlohmann::json config = parse_json(read_text_file(path), printable(path));
  if (!config.is_object() || !config.contains("chat_template")) return "";
  const auto text_of = [](const nlohmann::json& object, const char* key) -> std::string {
    return object.contains(key) && object[key].is_string() ? object[key] : "";
  };
  const auto& found = config["chat_template"];
  if (found.is_string()) return found.get<std::string>();
  for (const auto& entry : found) {  // several, by name
    if (entry.is_object() && text_of(entry, "name") == "default") return text_of(entry, "template");
  }
  return "";
}

}  // namespace

class Chat::Line {
 public:
  explicit Line(const Tokenizer& tokenizer) : tokenizer_(tokenizer) {}
  // `spoken`: the assistant's. Up to the next token no text follows that is not.
  Line& text(const std::string& more, bool spoken = false) {
    if (spoken) answer_ = std::min(answer_, text_.size());
    text_ += more;
    return *this;
  }
  Line& token(int32_t id, bool spoken = false) {
    flush();
    out_.ids.push_back(id);
    out_.spoken.push_back(spoken);
    return *this;
  }
  ChatTokens finish() {
    flush();
    return std::move(out_);
  }

 private:
  void flush() {
    std::string_view text = text_;
    if (tokenizer_.puts_a_space_in_front() && text.starts_with(' ')) {
      text.remove_prefix(1);
      if (answer_ > 0 && answer_ != std::string::npos) --answer_;
    }
    const std::vector<int32_t> ids = tokenizer_.encode(text);
    size_t before = ids.size();  // tokens that the text has without the answer, too
    if (answer_ != std::string::npos) {
      const std::vector<int32_t> alone = tokenizer_.encode(text.substr(0, answer_));
      const auto [mine, its] = std::mismatch(ids.begin(), ids.end(), alone.begin(), alone.end());
      before = static_cast<size_t>(mine - ids.begin());
    }
    out_.ids.insert(out_.ids.end(), ids.begin(), ids.end());
    for (size_t i = 0; i < ids.size(); ++i) out_.spoken.push_back(i >= before);
    text_.clear();
    answer_ = std::string::npos;
  }
  const Tokenizer& tokenizer_;
  std::string text_;
  size_t answer_ = std::string::npos;  // where it begins in the text
  ChatTokens out_;
};

Chat::Chat(const std::string& form, const Tokenizer& tokenizer) : form_(form), tokenizer_(tokenizer) {
  if (form == "chatml") {
    start_ = special(tokenizer, form, "<|im_start|>");
    end_ = special(tokenizer, form, "<|im_end|>");
  } else if (form == "llama3") {
    begin_ = special(tokenizer, form, "<|begin_of_text|>");
    start_ = special(tokenizer, form, "<|start_header_id|>");
    header_end_ = special(tokenizer, form, "<|end_header_id|>");
    end_ = special(tokenizer, form, "<|eot_id|>");
  } else if (form == "mistral") {
    begin_ = special(tokenizer, form, "<s>");
    end_ = special(tokenizer, form, "</s>");
    // Later vocabularies have tokens of their own for the marks.
    inst_ = special_or_none(tokenizer, "[INST]");
    inst_end_ = special_or_none(tokenizer, "[/INST]");
  } else {
    throw RecipeError("tokenizer.chat: '" + printable(form) +
                      "' is not known; allowed: chatml, llama3, mistral");
  }
}

namespace {

bool is_spoken(const Message& m) { return m.role == "assistant"; }

}  // namespace

std::vector<int32_t> Chat::tokens(const std::vector<Message>& messages, bool answer) const {
  return rendered(messages, answer).ids;
}

ChatTokens Chat::conversation(const std::vector<Message>& messages) const {
  return rendered(messages, false);
}

ChatTokens Chat::rendered(const std::vector<Message>& messages, bool answer) const {
  if (messages.empty()) throw BadDataError("a conversation without messages");
  for (const Message& m : messages) {
    if (m.role.empty()) throw BadDataError("a message without a role");
  }
  Line line(tokenizer_);
  if (form_ == "chatml") chatml(messages, answer, line);
  if (form_ == "llama3") llama3(messages, answer, line);
  if (form_ == "mistral") {
    if (answer != (messages.back().role == "user")) {
      throw BadDataError(answer ? "an answer to a conversation that does not end with the user"
                                : "a conversation that ends with the user");
    }
    mistral(messages, line);
  }
  return line.finish();
}

std::vector<int32_t> Chat::end_tokens() const {
  if (end_ == tokenizer_.end_of_document()) return {end_};
  return {end_, tokenizer_.end_of_document()};
}

std::vector<std::string> Chat::end_texts() const {
  const std::string end = form_ == "chatml" ? "<|im_end|>" : form_ == "llama3" ? "<|eot_id|>" : "</s>";
  if (end_ == tokenizer_.end_of_document()) return {end};
  return {end, "<eod>"};
}

void Chat::chatml(const std::vector<Message>& messages, bool answer, Line& line) const {
  for (const Message& m : messages) {
    const bool spoken = is_spoken(m);
    line.token(start_).text(m.role + "\n").text(m.content, spoken).token(end_, spoken).text("\n");
  }
  if (answer) line.token(start_).text("assistant\n");
}

void Chat::llama3(const std::vector<Message>& messages, bool answer, Line& line) const {
  const auto header = [&](const std::string& role) {
    line.token(start_).text(role).token(header_end_).text("\n\n");
  };
  line.token(begin_);
  for (const Message& m : messages) {
    header(m.role);
    line.text(trimmed(m.content), is_spoken(m)).token(end_, is_spoken(m));
  }
  if (answer) header("assistant");
}

void Chat::mistral(const std::vector<Message>& messages, Line& line) const {
  line.token(begin_);
  const bool has_system = messages.front().role == "system";
  for (size_t i = has_system; i < messages.size(); ++i) {
    const bool is_user = (i - has_system) % 2 == 0;
    const Message& m = messages[i];
    if (m.role != (is_user ? "user" : "assistant")) {
      throw BadDataError(
          detail::concat("message ", i, " has the role ", m.role,
                         "; allowed: user and assistant in turn, after one system message or none"));
    }
    if (!is_user) {
      line.text(" " + m.content, true).token(end_, true);
      continue;
    }
    const std::string before = has_system && i == 1 ? messages.front().content + "\n\n" : "";
    if (inst_ >= 0 && inst_end_ >= 0) {
      line.token(inst_).text(" " + before + m.content).token(inst_end_);
    } else {
      line.text(" [INST] " + before + m.content + " [/INST]");
    }
  }
}

std::string chat_form_beside(const std::string& tokenizer_path) {
  const fs::path folder = fs::path(tokenizer_path).parent_path();
  std::error_code ignored;
  const std::string jinja = (folder / "chat_template.jinja").string();
  const bool is_file = fs::exists(jinja, ignored);
  const std::string path = is_file ? jinja : (folder / "tokenizer_config.json").string();
  const std::string text = is_file ? read_text_file(jinja) : template_of(path);
  if (text.empty()) throw BadDataError(printable(path) + ": has no chat_template");
  const auto has = [&](const char* mark) { return text.find(mark) != std::string::npos; };
  std::vector<std::string> forms;
  if (has("<|im_start|>") && has("<|im_end|>")) forms.push_back("chatml");
  if (has("<|start_header_id|>") && has("<|eot_id|>")) forms.push_back("llama3");
  if (has("[INST]") && has("[/INST]")) forms.push_back("mistral");
  if (forms.size() == 1) return forms[0];
  throw BadDataError(detail::concat(path,
                                    ": its chat_template is none of chatml, llama3 and mistral; it begins '",
                                    printable(text.substr(0, 80)), "'"));
}

}  // namespace fp4t

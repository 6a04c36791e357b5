// Conversations as tokens, in the forms of the families that this program trains. No template language is
// run: a form is a few lines of code here, and a template that is none of them is refused.
//   chatml   Qwen2, Qwen3:  <|im_start|>ROLE\nTEXT<|im_end|>\n for each message; no system message is made up
//   llama3   Llama 3:       <|begin_of_text|>, and <|start_header_id|>ROLE<|end_header_id|>\n\nTEXT<|eot_id|>
//                           for each message, white space around TEXT left out
//   mistral  Mixtral:       <s>, and [INST] TEXT [/INST] for the user's, TEXT</s> for the answers, which take
//                           turns; a system message goes in front of the first of the user's, an empty line
//                           between
// What a message says is text: special tokens are never made from it.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "engine/tokens/tokenizer.h"

namespace fp4t {

struct Message {
  std::string role;  // system, user, assistant; chatml and llama3 take any
  std::string content;
  bool operator==(const Message&) const = default;
};

// Ids, and of each whether it is the assistant's: of what a message of that role says, and what ends it.
struct ChatTokens {
  std::vector<int32_t> ids;
  std::vector<uint8_t> spoken;
};

class Chat {
 public:
  // Throws RecipeError when the tokenizer lacks a token of the form.
  Chat(const std::string& form, const Tokenizer& tokenizer);

  // `answer`: up to where the assistant's answer begins. Throws BadDataError for messages that the form has
  // no place for.
  std::vector<int32_t> tokens(const std::vector<Message>& messages, bool answer) const;
  // A whole conversation. A token that holds the end of what goes before an answer and its beginning is the
  // answer's. Throws as tokens().
  ChatTokens conversation(const std::vector<Message>& messages) const;
  // At which an answer ends; end_texts names the same tokens as a recipe does.
  std::vector<int32_t> end_tokens() const;
  std::vector<std::string> end_texts() const;

 private:
  // Text and special tokens one behind another; neighbouring texts are tokenised as one.
  class Line;
  ChatTokens rendered(const std::vector<Message>& messages, bool answer) const;
  void chatml(const std::vector<Message>& messages, bool answer, Line& line) const;
  void llama3(const std::vector<Message>& messages, bool answer, Line& line) const;
  void mistral(const std::vector<Message>& messages, Line& line) const;

  std::string form_;
  const Tokenizer& tokenizer_;
  int32_t begin_ = -1, start_ = -1, end_ = -1, header_end_ = -1, inst_ = -1, inst_end_ = -1;
};

// The form that the tokenizer_config.json (or chat_template.jinja) beside a tokenizer's file has. Throws
// MissingInputError; BadDataError for a template that is no form of these.
std::string chat_form_beside(const std::string& tokenizer_path);

}  // namespace fp4t

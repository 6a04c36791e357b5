// Conversations in JSON lines as data to train on: what is rendered, what of it is a target, what is refused.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <nlohmann/json.hpp>
#include <set>

#include "engine/tokens/chat.h"
#include "engine/tokens/corpus.h"
#include "engine/tokens/documents.h"
#include "engine/tokens/inputs.h"
#include "engine/tokens/tokenize.h"
#include "kernels/base/check.h"
#include "tests/support/process.h"

namespace fp4t {
namespace {

using Json = nlohmann::json;

std::unique_ptr<Tokenizer> tokenizer_of(const std::string& name, const std::string& form) {
  TokenizerSpec spec;
  spec.kind = "json";
  spec.path = std::string(std::getenv("FP4T_TEST_SOURCE")) + "/tests/golden/tokenizers/" + name + ".json";
  spec.chat = form;
  return make_tokenizer(spec);
}

// The texts between targets, of those that are none in brackets.
std::string marked(const Tokenizer& tokenizer, const ChatTokens& chat) {
  std::string out;
  for (size_t i = 0; i < chat.ids.size(); ++i) {
    const bool begins = i == 0 || chat.spoken[i] != chat.spoken[i - 1];
    if (begins && i > 0) out += chat.spoken[i] != 0 ? "]" : "";
    if (begins && chat.spoken[i] == 0) out += "[";
    out += tokenizer.decode({chat.ids[i]});
    if (tokenizer.decode({chat.ids[i]}).empty()) out += "*";  // a special token
  }
  return out;
}

const std::vector<Message> kTalk = {
    {"system", "Be brief."}, {"user", "1+1?"}, {"assistant", "2"}, {"user", "sure?"}, {"assistant", "yes\n"}};

TEST(Conversations, what_the_assistant_says_and_what_ends_it_is_spoken) {
  const auto qwen = tokenizer_of("qwen", "chatml");
  const ChatTokens chatml = Chat("chatml", *qwen).conversation(kTalk);
  EXPECT_EQ(chatml.ids, Chat("chatml", *qwen).tokens(kTalk, false));
  EXPECT_EQ(marked(*qwen, chatml),
            "[*system\nBe brief.*\n*user\n1+1?*\n*assistant\n]2*[\n*user\nsure?*\n*assistant\n]yes\n*[\n");
  const auto llama = tokenizer_of("llama3", "llama3");
  const ChatTokens llama3 = Chat("llama3", *llama).conversation(kTalk);
  EXPECT_EQ(llama3.ids, Chat("llama3", *llama).tokens(kTalk, false));
  EXPECT_EQ(marked(*llama, llama3),
            "[**system*\n\nBe brief.**user*\n\n1+1?**assistant*\n\n]2*[*user*\n\nsure?**assistant*\n\n]yes*");
}

// Line feeds of the form and of the answer are one token: the answer's, as a model that writes it finds out.
TEST(Conversations, a_token_across_the_beginning_of_an_answer_is_the_answers) {
  const auto tokenizer = tokenizer_of("qwen", "chatml");
  const std::vector<Message> talk = {{"user", "x"}, {"assistant", "\n\nyes"}};
  const ChatTokens chat = Chat("chatml", *tokenizer).conversation(talk);
  std::vector<int32_t> spoken;
  for (size_t i = 0; i < chat.ids.size(); ++i) {
    if (chat.spoken[i] != 0) spoken.push_back(chat.ids[i]);
  }
  const std::string text = tokenizer->decode(spoken);
  EXPECT_NE(text.find("yes"), std::string::npos) << text;
  EXPECT_EQ(text.find("assistant"), std::string::npos) << text;
  EXPECT_NE(text.find("\n\n"), std::string::npos) << text;
}

class Rows : public ::testing::Test {
 protected:
  DataSourceSpec source(const std::string& rows) {
    test::write_text(folder_ / "rows.jsonl", rows);
    DataSourceSpec s;
    s.name = "talk";
    s.kind = "jsonl";
    s.field = "messages";
    s.paths = {folder_ / "rows.jsonl"};
    return s;
  }
  static std::string row(const std::vector<Message>& messages) {
    Json list = Json::array();
    for (const Message& m : messages) list.push_back({{"role", m.role}, {"content", m.content}});
    return Json{{"messages", list}}.dump() + "\n";
  }
  std::string refusal(const std::string& rows) {
    try {
      make_corpus({source(rows)}, 32, 1, *tokenizer_);
    } catch (const BadDataError& e) {
      return e.what();
    }
    return "not refused";
  }
  void expect_refused(const std::string& rows, const std::string& why) {
    const std::string said = refusal(rows);
    EXPECT_NE(said.find("rows.jsonl:"), std::string::npos) << said;
    EXPECT_NE(said.find(why), std::string::npos) << said;
  }

  test::ScratchFolder folder_;
  std::unique_ptr<Tokenizer> tokenizer_ = tokenizer_of("qwen", "chatml");
};

// Every target of a corpus of one sequence, in order.
std::vector<int32_t> targets_of(const Corpus& corpus) {
  std::vector<int32_t> targets;
  for (const int32_t t : corpus.sample(0).targets) {
    if (t >= 0) targets.push_back(t);
  }
  return targets;
}

TEST_F(Rows, targets_are_the_assistants_tokens_or_all) {
  const ChatTokens chat = Chat("chatml", *tokenizer_).conversation(kTalk);
  std::vector<int32_t> spoken;
  for (size_t i = 1; i < chat.ids.size(); ++i) {
    if (chat.spoken[i] != 0) spoken.push_back(chat.ids[i]);
  }
  DataSourceSpec spec = source(row(kTalk));
  const auto assistant = make_corpus({spec}, 256, 1, *tokenizer_);
  EXPECT_EQ(targets_of(*assistant), spoken);
  spec.loss_on = "all";
  const auto all = make_corpus({spec}, 256, 1, *tokenizer_);
  EXPECT_EQ(targets_of(*all).size(), chat.ids.size());  // <eod> is one, the first token none
  EXPECT_EQ(all->sample(0).tokens, assistant->sample(0).tokens);
  EXPECT_NE(all->fingerprint(), assistant->fingerprint());
  // Sequences cut anywhere train the same tokens.
  spec.loss_on = "assistant";
  for (const int64_t length : {2, 3, 5, 7}) {
    const auto cut = make_corpus({spec}, length, 1, *tokenizer_);
    std::multiset<int32_t> found;
    const int64_t sequences = (static_cast<int64_t>(chat.ids.size()) + 1 + length - 1) / length;
    for (int64_t n = 0; n < sequences; ++n) {
      for (const int32_t t : cut->sample(n).targets) {
        if (t >= 0) found.insert(t);
      }
    }
    EXPECT_EQ(found, std::multiset<int32_t>(spoken.begin(), spoken.end())) << length;
  }
}

TEST_F(Rows, conversations_and_texts_may_take_turns) {
  const std::string text = Json{{"messages", "plain words"}}.dump() + "\n";
  const auto plain = tokenizer_->encode("plain words");
  for (const std::string& rows : {text + row(kTalk), row(kTalk) + text}) {
    const auto corpus = make_corpus({source(rows)}, 512, 1, *tokenizer_);
    const std::vector<int32_t> targets = targets_of(*corpus);
    // Of the text all but its first token, and what ends it.
    EXPECT_NE(std::search(targets.begin(), targets.end(), plain.begin() + 1, plain.end()), targets.end());
    EXPECT_EQ(std::count(targets.begin(), targets.end(), tokenizer_->single_token("<|im_end|>")), 2);
  }
}

TEST_F(Rows, what_is_no_conversation_is_refused_by_file_and_line) {
  expect_refused("{\"messages\": []}\n", "a conversation without messages");
  expect_refused("{\"messages\": [5]}\n", "message 0 is no object");
  expect_refused(row({{"user", "x"}}), "without an assistant's message");
  expect_refused("{\"messages\": [{\"role\": \"user\"}]}\n", "message 0 has no content");
  expect_refused("{\"messages\": [{\"content\": \"x\"}]}\n", "message 0 has no role");
  expect_refused("{\"messages\": [{\"role\": \"user\", \"content\": [1]}]}\n", "'content' that is no text");
  expect_refused("{\"messages\": [{\"role\": \"user\", \"content\": \"x\", \"name\": \"y\"}]}\n",
                 "a key 'name'");
  expect_refused("{\"messages\": [{\"role\": \"user\", \"content\": \"a\\u0000\"}]}\n", "NUL");
  tokenizer_ = tokenizer_of("qwen", "");
  expect_refused(row(kTalk), "needs a form of conversations (tokenizer.chat)");
}

TEST_F(Rows, files_of_tokens_hold_no_conversations) {
  const DataSourceSpec spec = source(row(kTalk));
  try {
    tokenize_files(spec, *tokenizer_, folder_ / "out", 1, false);
    FAIL();
  } catch (const BadDataError& e) {
    EXPECT_NE(std::string(e.what()).find("rows.jsonl:1: no text under the key 'messages', but a list"),
              std::string::npos)
        << e.what();
  }
}

}  // namespace
}  // namespace fp4t

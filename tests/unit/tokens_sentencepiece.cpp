// SentencePiece models against the ids of the library's own Python package
// (tests/reference/tokenizer_fixtures.py).
#include <gtest/gtest.h>

#include <cstdlib>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>

#include "engine/tokens/chat.h"
#include "engine/tokens/tasks.h"
#include "engine/tokens/tokenizer.h"
#include "engine/tokens/utf8.h"
#include "kernels/base/check.h"
#include "tests/support/process.h"

namespace fp4t {
namespace {

std::string golden_path(const std::string& name) {
  return std::string(std::getenv("FP4T_TEST_SOURCE")) + "/tests/golden/tokenizers/" + name;
}

TokenizerSpec spec_of(const std::string& name) {
  TokenizerSpec spec;
  spec.kind = "sentencepiece";
  spec.path = golden_path(name + ".model");
  return spec;
}

std::string from_hex(const std::string& hex) {
  std::string text;
  for (size_t i = 0; i < hex.size(); i += 2) {
    text += static_cast<char>(static_cast<uint8_t>(std::stoul(hex.substr(i, 2), nullptr, 16)));
  }
  return text;
}

std::vector<nlohmann::json> rows_of(const std::string& name) {
  std::ifstream in(golden_path(name));
  std::vector<nlohmann::json> rows;
  for (std::string line; std::getline(in, line);) rows.push_back(nlohmann::json::parse(line));
  return rows;
}

// Null in a build without the library, whose message is checked then.
std::unique_ptr<Tokenizer> open(const std::string& name) {
  try {
    return make_tokenizer(spec_of(name));
  } catch (const RecipeError& e) {
    EXPECT_NE(std::string(e.what()).find("built without SentencePiece (libsentencepiece-dev)"),
              std::string::npos)
        << e.what();
    return nullptr;
  }
}

TEST(SentencePiece, ids_and_texts_are_the_librarys) {
  std::map<std::string, std::string> texts;
  for (const auto& row : rows_of("hostile.jsonl")) {
    texts[row["name"].get<std::string>()] = from_hex(row["hex"].get<std::string>());
  }
  std::map<std::string, std::unique_ptr<Tokenizer>> tokenizers;
  tokenizers["llama2"] = open("llama2");
  if (!tokenizers["llama2"]) return;
  tokenizers["unigram"] = open("unigram");
  int compared = 0;
  for (const auto& row : rows_of("expected.jsonl")) {
    const auto found = tokenizers.find(row["tokenizer"].get<std::string>());
    if (found == tokenizers.end()) continue;
    const Tokenizer& tokenizer = *found->second;
    const auto name = row["text"].get<std::string>();
    const std::vector<int32_t> ids = tokenizer.encode(texts.at(name));
    EXPECT_EQ(ids, row["plain"].get<std::vector<int32_t>>()) << found->first << ", " << name;
    EXPECT_EQ(with_replacements(tokenizer.decode(ids)), from_hex(row["decoded"].get<std::string>()))
        << found->first << ", " << name;
    StreamDecoder stream(tokenizer);
    std::string all;
    for (const int32_t id : ids) {
      const std::string part = stream.push(id);
      EXPECT_TRUE(is_well_formed(part)) << name;
      all += part;
    }
    EXPECT_EQ(all + stream.finish(), tokenizer.continuation(ids)) << name;
    ++compared;
  }
  EXPECT_EQ(compared, static_cast<int>(2 * texts.size()));
}

TEST(SentencePiece, control_pieces_mark_documents_and_are_never_made_from_text) {
  Recipe recipe;
  recipe.tokenizer = spec_of("llama2");
  if (!open("llama2")) return;
  complete_tokenizer(recipe);
  EXPECT_EQ(recipe.tokenizer.begin_of_document, "<s>");
  EXPECT_EQ(recipe.tokenizer.end_of_document, "</s>");
  EXPECT_EQ(recipe.tokenizer.vocabulary, 420);
  const auto tokenizer = make_tokenizer(recipe.tokenizer);
  EXPECT_EQ(tokenizer->begin_of_document(), 1);
  EXPECT_EQ(tokenizer->end_of_document(), 2);
  for (const int32_t id : tokenizer->encode("a<s>b</s>")) EXPECT_GT(id, 2);
  std::vector<int32_t> marked = tokenizer->encode("a");
  marked.insert(marked.begin(), 1);
  marked.push_back(2);
  EXPECT_EQ(tokenizer->encode_marked("<s>a</s>"), marked);
  EXPECT_EQ(tokenizer->decode(marked), "a");
  EXPECT_EQ(tokenizer->prompt("a"), (std::vector<int32_t>(marked.begin(), marked.end() - 1)));
  EXPECT_EQ(tokenizer->decode({tokenizer->single_token("\n")}), "\n");
  EXPECT_EQ(tokenizer->decode({420, 100000}), "\xEF\xBF\xBD\xEF\xBF\xBD");
  // What goes on with a text keeps its space.
  EXPECT_EQ(tokenizer->continuation(tokenizer->encode("the")), " the");
}

// As mistral-common has it: one space before the mark, the question and the answer, which the library puts
// there.
TEST(SentencePiece, conversations_have_no_space_twice) {
  const auto tokenizer = open("llama2");
  if (!tokenizer) return;
  std::vector<int32_t> expected = {tokenizer->begin_of_document()};
  const auto add = [&](const std::string& text) {
    const std::vector<int32_t> ids = tokenizer->encode(text);
    expected.insert(expected.end(), ids.begin(), ids.end());
  };
  add("[INST] 1+2? [/INST] 3");
  expected.push_back(tokenizer->end_of_document());
  add("[INST] why? [/INST]");
  EXPECT_EQ(
      Chat("mistral", *tokenizer).tokens({{"user", "1+2?"}, {"assistant", "3"}, {"user", "why?"}}, true),
      expected);
}

// A vocabulary that drops spaces makes nothing of a prompt of spaces: a completion has nothing to continue.
TEST(SentencePiece, a_prompt_of_no_token_is_refused_by_its_row) {
  if (!open("unigram")) return;
  TokenizerSpec spec = spec_of("unigram");
  spec.begin_of_document = "none";
  const auto tokenizer = make_tokenizer(spec);
  ASSERT_TRUE(tokenizer->prompt("   ").empty());
  test::ScratchFolder folder;
  test::write_text(folder / "rows.jsonl",
                   "{\"prompt\": \"a\", \"answer\": 1}\n{\"prompt\": \"   \", \"answer\": 1}\n");
  TaskSpec task;
  task.kind = "jsonl";
  task.paths = {folder / "rows.jsonl"};
  try {
    check_rows(task, *tokenizer);
    FAIL() << "accepted";
  } catch (const BadDataError& e) {
    EXPECT_EQ(std::string(e.what()), folder / "rows.jsonl:2: a prompt of no token");
  }
}

TEST(SentencePiece, files_that_are_no_models_are_refused_by_name) {
  if (!open("llama2")) return;
  TokenizerSpec spec = spec_of("llama2");
  spec.path = golden_path("gpt2.json");
  try {
    make_tokenizer(spec);
    FAIL() << "accepted";
  } catch (const BadDataError& e) {
    EXPECT_NE(std::string(e.what()).find("gpt2.json: no SentencePiece model"), std::string::npos) << e.what();
  }
  spec.path = golden_path("none.model");
  EXPECT_THROW(make_tokenizer(spec), MissingInputError);
  spec = spec_of("llama2");
  spec.hash = "0123456789abcdef";
  EXPECT_THROW(make_tokenizer(spec), BadDataError);
}

}  // namespace
}  // namespace fp4t

// Byte-level BPE of tokenizer.json against the ids of the library that the files come from
// (tests/reference/tokenizer_fixtures.py), and what such a file may not hold.
#include <gtest/gtest.h>

#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <thread>

#include "engine/metrics/metrics.h"
#include "engine/tokens/split_pattern.h"
#include "engine/tokens/tokenizer.h"
#include "engine/tokens/utf8.h"
#include "kernels/base/check.h"
#include "kernels/base/text.h"
#include "kernels/base/text_file.h"
#include "tests/support/messages.h"

namespace fp4t {
namespace {

namespace fs = std::filesystem;
using test::message_of;
using Json = nlohmann::json;

const std::vector<std::string> kNames = {"gpt2", "cl100k", "qwen", "llama3", "flags"};

std::string golden_path(const std::string& name) {
  return std::string(std::getenv("FP4T_TEST_SOURCE")) + "/tests/golden/" + name;
}

std::string file_of(const std::string& name) { return golden_path("tokenizers/" + name + ".json"); }

std::vector<Json> json_lines(const std::string& path) {
  std::ifstream in(path);
  std::vector<Json> rows;
  for (std::string line; std::getline(in, line);) rows.push_back(Json::parse(line));
  return rows;
}

std::map<std::string, std::string> hostile_texts() {
  std::map<std::string, std::string> texts;
  for (const Json& row : json_lines(golden_path("tokenizers/hostile.jsonl"))) {
    const auto hex = row["hex"].get<std::string>();
    std::string text;
    for (size_t i = 0; i < hex.size(); i += 2) {
      text += static_cast<char>(static_cast<uint8_t>(std::stoul(hex.substr(i, 2), nullptr, 16)));
    }
    texts[row["name"].get<std::string>()] = text;
  }
  return texts;
}

TokenizerSpec spec_of(const std::string& name) {
  TokenizerSpec spec;
  spec.kind = "json";
  spec.path = file_of(name);
  return spec;
}

std::unique_ptr<Tokenizer> open(const std::string& name) { return make_tokenizer(spec_of(name)); }

TEST(Bpe, ids_are_the_librarys_on_hostile_strings) {
  const auto texts = hostile_texts();
  std::map<std::string, std::unique_ptr<Tokenizer>> tokenizers;
  for (const std::string& name : kNames) tokenizers[name] = open(name);
  int compared = 0;
  for (const Json& row : json_lines(golden_path("tokenizers/expected.jsonl"))) {
    const auto name = row["tokenizer"].get<std::string>(), text = row["text"].get<std::string>();
    if (tokenizers.count(name) == 0) continue;  // a SentencePiece model's row
    const Tokenizer& tokenizer = *tokenizers.at(name);
    EXPECT_EQ(tokenizer.encode(texts.at(text)), row["plain"].get<std::vector<int32_t>>())
        << name << ", " << text;
    EXPECT_EQ(tokenizer.encode_marked(texts.at(text)), row["marked"].get<std::vector<int32_t>>())
        << name << ", " << text;
    compared += 2;
  }
  EXPECT_EQ(compared, static_cast<int>(2 * kNames.size() * texts.size()));
}

TEST(Bpe, every_text_comes_back_byte_by_byte) {
  for (const std::string name : {"gpt2", "cl100k", "llama3"}) {  // which neither normalise nor add spaces
    const auto tokenizer = open(name);
    for (const auto& [text_name, text] : hostile_texts()) {
      EXPECT_EQ(tokenizer->decode(tokenizer->encode(text)), text) << name << ", " << text_name;
    }
  }
}

TEST(Bpe, streams_emit_whole_characters_only) {
  for (const std::string& name : kNames) {
    const auto tokenizer = open(name);
    for (const auto& [text_name, text] : hostile_texts()) {
      const std::vector<int32_t> ids = tokenizer->encode(text);
      StreamDecoder stream(*tokenizer);
      std::string all;
      for (const int32_t id : ids) {
        const std::string part = stream.push(id);
        EXPECT_TRUE(is_well_formed(part)) << name << ", " << text_name;
        all += part;
      }
      all += stream.finish();
      EXPECT_EQ(all, with_replacements(tokenizer->decode(ids))) << name << ", " << text_name;
      EXPECT_EQ(all, tokenizer->continuation(ids));
    }
  }
  // A character of four bytes, one token each, comes out with the last.
  const auto tokenizer = open("gpt2");
  StreamDecoder stream(*tokenizer);
  const std::string fox = "\xF0\x9F\xA6\x8A";
  for (int i = 0; i < 3; ++i)
    EXPECT_EQ(stream.push(tokenizer->encode(fox.substr(static_cast<size_t>(i), 1))[0]), "");
  EXPECT_EQ(stream.push(tokenizer->encode(fox.substr(3))[0]), fox);
}

TEST(Bpe, special_tokens_are_never_made_from_text_and_left_out_of_it) {
  for (const std::string& name : kNames) {
    const auto tokenizer = open(name);
    const Json file = Json::parse(read_text_file(file_of(name)));
    std::set<int32_t> special;
    std::string all = "x";
    std::vector<int32_t> ids = tokenizer->encode("x");
    for (const Json& token : file["added_tokens"]) {
      if (!token["special"].get<bool>()) continue;
      special.insert(token["id"].get<int32_t>());
      all += token["content"].get<std::string>();
      ids.push_back(token["id"].get<int32_t>());
    }
    for (const int32_t id : tokenizer->encode(all)) EXPECT_EQ(special.count(id), 0u) << name;
    EXPECT_EQ(tokenizer->encode_marked(all).size(), special.size() + tokenizer->encode("x").size()) << name;
    EXPECT_EQ(tokenizer->decode(ids), tokenizer->decode(tokenizer->encode("x"))) << name;
  }
  // Added tokens that are not special belong to the text.
  const auto qwen = open("qwen");
  EXPECT_EQ(qwen->decode({qwen->single_token("<think>"), qwen->single_token("<|im_end|>")}), "<think>");
}

TEST(Bpe, threads_share_a_tokenizer) {
  const auto tokenizer = open("qwen");
  const auto texts = hostile_texts();
  std::map<std::string, std::vector<int32_t>> expected;
  for (const auto& [name, text] : texts) expected[name] = tokenizer->encode(text);
  std::vector<std::thread> threads;
  std::vector<int> wrong(4);
  for (size_t t = 0; t < wrong.size(); ++t) {
    threads.emplace_back([&, t] {
      for (int round = 0; round < 20; ++round) {
        for (const auto& [name, text] : texts) wrong[t] += tokenizer->encode(text) != expected.at(name);
      }
    });
  }
  for (std::thread& t : threads) t.join();
  EXPECT_EQ(wrong, std::vector<int>(4, 0));
}

TEST(Bpe, ids_beyond_the_tokens_are_replacement_characters) {
  const auto tokenizer = open("gpt2");
  const auto rows = static_cast<int32_t>(tokenizer->vocabulary());
  EXPECT_EQ(tokenizer->decode({rows, rows + 500}), "\xEF\xBF\xBD\xEF\xBF\xBD");
}

TEST(Bpe, document_tokens_are_the_files_or_the_recipes) {
  TokenizerSpec spec = spec_of("llama3");
  Recipe recipe;
  recipe.tokenizer = spec;
  complete_tokenizer(recipe);
  EXPECT_EQ(recipe.tokenizer.begin_of_document, "<|begin_of_text|>");  // the post_processor's
  EXPECT_EQ(recipe.tokenizer.end_of_document, "<|end_of_text|>");
  EXPECT_EQ(recipe.tokenizer.hash.size(), 16u);
  auto tokenizer = make_tokenizer(recipe.tokenizer);
  EXPECT_EQ(recipe.tokenizer.vocabulary, tokenizer->vocabulary());
  EXPECT_EQ(tokenizer->prompt("a"), tokenizer->encode_marked("<|begin_of_text|>a"));
  EXPECT_EQ(tokenizer->end_of_document(), tokenizer->single_token("<|end_of_text|>"));
  EXPECT_EQ(tokenizer->single_token("<eod>"), tokenizer->end_of_document());
  EXPECT_THROW(tokenizer->single_token("a b c"), RecipeError);

  spec.begin_of_document = "none";
  spec.end_of_document = "<|eot_id|>";
  const auto other = make_tokenizer(spec);
  EXPECT_EQ(other->prompt("a"), other->encode("a"));
  EXPECT_EQ(other->end_of_document(), other->single_token("<|eot_id|>"));
  EXPECT_NE(other->fingerprint(), tokenizer->fingerprint());

  spec.end_of_document = "no token";
  EXPECT_NE(
      message_of<RecipeError>([&] { make_tokenizer(spec); }).find("tokenizer.end_of_document: 'no token' is"),
      std::string::npos);
}

TEST(Bpe, line_ends_are_the_end_of_a_document_and_breaks_alone) {
  const auto tokenizer = open("gpt2");
  std::set<std::string> texts;
  for (const int32_t id : tokenizer->line_ends()) texts.insert(tokenizer->decode({id}));
  EXPECT_EQ(texts.count(""), 1u);
  EXPECT_EQ(texts.count("\n"), 1u);
  for (const std::string& text : texts) EXPECT_EQ(text.find_first_not_of("\r\n"), std::string::npos) << text;
}

class BpeFile : public ::testing::Test {
 protected:
  void SetUp() override {
    dir_ = fs::temp_directory_path() / ("fp4t_bpe_" + std::to_string(::getpid()));
    fs::create_directories(dir_);
  }
  void TearDown() override { fs::remove_all(dir_); }

  std::string write(const Json& file) {
    std::ofstream(dir_ / "tokenizer.json") << file.dump();
    return (dir_ / "tokenizer.json").string();
  }
  std::string refusal(const Json& file) {
    TokenizerSpec spec;
    spec.kind = "json";
    spec.path = write(file);
    return message_of<BadDataError>([&] { make_tokenizer(spec); });
  }
  // What is said of the fixture `name` after `edit`.
  template <class Edit>
  std::string refusal(const std::string& name, const Edit& edit) {
    Json file = Json::parse(read_text_file(file_of(name)));
    edit(file);
    return refusal(file);
  }

  fs::path dir_;
};

TEST_F(BpeFile, unsupported_parts_are_refused_by_their_place) {
  EXPECT_SAYS(refusal("gpt2", [](Json& f) { f["model"]["type"] = "WordPiece"; }), "model.type: WordPiece",
              "supported");
  EXPECT_SAYS(refusal("gpt2", [](Json& f) { f["model"]["dropout"] = 0.1; }), "model.dropout: 0.1");
  EXPECT_SAYS(refusal("gpt2", [](Json& f) { f["model"]["byte_fallback"] = true; }), "model.byte_fallback",
              "SentencePiece");
  EXPECT_SAYS(refusal("gpt2", [](Json& f) { f["model"]["end_of_word_suffix"] = "</w>"; }),
              "model.end_of_word_suffix: \"</w>\"");
  EXPECT_SAYS(refusal("gpt2", [](Json& f) { f["model"]["more"] = 1; }), "model.more: this key");
  EXPECT_SAYS(refusal("gpt2", [](Json& f) { f["more"] = 1; }), "more: this key");
  EXPECT_SAYS(refusal("gpt2",
                      [](Json& f) {
                        f["normalizer"] = {{"type", "Lowercase"}};
                      }),
              "normalizer.type: Lowercase");
  EXPECT_SAYS(refusal("flags",
                      [](Json& f) {
                        f["normalizer"]["normalizers"].push_back({{"type", "NFKC"}});
                      }),
              "normalizer.normalizers[1].type: NFKC");
  EXPECT_SAYS(refusal("flags",
                      [](Json& f) {
                        f["pre_tokenizer"]["pretokenizers"][0] = {{"type", "Whitespace"}};
                      }),
              "pre_tokenizer.pretokenizers[0].type: Whitespace");
  EXPECT_SAYS(refusal("qwen", [](Json& f) { f["pre_tokenizer"]["pretokenizers"].erase(1); }), "pre_tokenizer",
              "must end in a ByteLevel");
  EXPECT_SAYS(refusal("qwen",
                      [](Json& f) {
                        Json& steps = f["pre_tokenizer"]["pretokenizers"];
                        std::swap(steps[0], steps[1]);
                      }),
              "pre_tokenizer.pretokenizers[0]: a ByteLevel before other steps");
  EXPECT_SAYS(
      refusal("qwen",
              [](Json& f) { f["pre_tokenizer"]["pretokenizers"][0]["behavior"] = "MergedWithPrevious"; }),
      "pretokenizers[0].behavior: MergedWithPrevious");
  EXPECT_SAYS(refusal("qwen",
                      [](Json& f) {
                        f["pre_tokenizer"]["pretokenizers"][0]["pattern"] = {{"Regex", "\\w+|[a-z&&[b]]"}};
                      }),
              "pretokenizers[0].pattern.Regex", "\\w", "not supported");
  EXPECT_SAYS(refusal("gpt2",
                      [](Json& f) {
                        f["decoder"] = {{"type", "Metaspace"}};
                      }),
              "decoder.type: Metaspace");
  EXPECT_SAYS(refusal("gpt2",
                      [](Json& f) {
                        f["post_processor"] = {{"type", "BertProcessing"}};
                      }),
              "post_processor.type: BertProcessing");
}

TEST_F(BpeFile, contradictions_are_refused_by_their_place) {
  EXPECT_SAYS(refusal("gpt2", [](Json& f) { f["model"]["vocab"]["!!"] = f["model"]["vocab"]["a"]; }),
              "has the id", "another token");
  EXPECT_SAYS(refusal("gpt2", [](Json& f) { f["model"]["vocab"]["a"] = -1; }), "model.vocab['a']: is -1");
  EXPECT_SAYS(refusal("gpt2", [](Json& f) { f["model"]["vocab"]["a"] = "b"; }),
              "model.vocab['a']: is no whole number");
  EXPECT_SAYS(refusal("gpt2", [](Json& f) { f["model"]["vocab"]["a"] = 1 << 30; }), "allowed: 0 to");
  EXPECT_SAYS(refusal("gpt2", [](Json& f) { f["model"]["vocab"].erase("a"); }), "model.merges[", "'a'");
  EXPECT_SAYS(refusal("gpt2",
                      [](Json& f) {
                        f["model"]["merges"] = Json::array();
                        f["model"]["vocab"].erase("a");
                      }),
              "model.vocab", "no token for the byte 97");
  EXPECT_SAYS(refusal("gpt2", [](Json& f) { f["model"]["merges"][3] = "ab"; }), "model.merges[3]");
  EXPECT_SAYS(refusal("cl100k",
                      [](Json& f) {
                        f["model"]["merges"][3] = {"a", "b", "c"};
                      }),
              "model.merges[3]");
  EXPECT_SAYS(refusal("gpt2", [](Json& f) { f["added_tokens"][0]["id"] = 5; }), "added_tokens[0]",
              "another token");
  EXPECT_SAYS(refusal("gpt2", [](Json& f) { f["added_tokens"][0]["special"] = "yes"; }),
              "added_tokens[0].special");
  EXPECT_SAYS(refusal("gpt2", [](Json& f) { f["added_tokens"][0].erase("content"); }), "added_tokens[0]",
              "'content'");
  EXPECT_SAYS(refusal("gpt2", [](Json& f) { f["model"].erase("vocab"); }), "model", "'vocab'");
  EXPECT_SAYS(refusal(Json::array()), "no tokenizer.json");
}

TEST_F(BpeFile, damaged_and_missing_files_are_named) {
  TokenizerSpec spec;
  spec.kind = "json";
  spec.path = (dir_ / "none.json").string();
  EXPECT_SAYS(message_of<MissingInputError>([&] { make_tokenizer(spec); }), "none.json");
  std::ofstream(dir_ / "cut.json") << read_text_file(file_of("gpt2")).substr(0, 700);
  spec.path = (dir_ / "cut.json").string();
  EXPECT_SAYS(message_of<BadDataError>([&] { make_tokenizer(spec); }), "cut.json");
}

// Parts are read by recursion.
TEST_F(BpeFile, parts_inside_parts_without_end_are_refused) {
  const std::string mark = "\"HERE\"";
  const std::map<std::string, std::string> lists = {{"normalizer", "normalizers"},
                                                    {"pre_tokenizer", "pretokenizers"},
                                                    {"decoder", "decoders"},
                                                    {"post_processor", "processors"}};
  for (const auto& [part, list] : lists) {
    Json file = Json::parse(read_text_file(file_of("gpt2")));
    file[part] = "HERE";
    std::string nested, end;
    for (int i = 0; i < 200000; ++i) {
      nested += "{\"type\":\"Sequence\",\"" + list + "\":[";
      end += "]}";
    }
    std::string text = file.dump();
    text.replace(text.find(mark), mark.size(), nested + end);
    TokenizerSpec spec;
    spec.kind = "json";
    spec.path = (dir_ / "deep.json").string();
    std::ofstream(spec.path) << text;
    EXPECT_THROW(make_tokenizer(spec), BadDataError) << part;
  }
}

TEST_F(BpeFile, the_hash_is_of_what_decides_ids) {
  Recipe recipe;
  recipe.tokenizer = spec_of("qwen");
  complete_tokenizer(recipe);
  TokenizerSpec spec = recipe.tokenizer;
  Json file = Json::parse(read_text_file(spec.path));
  // Another layout of the same vocabulary, elsewhere, is the same tokenizer.
  for (Json& merge : file["model"]["merges"]) {
    const auto text = merge.get<std::string>();
    merge = {text.substr(0, text.find(' ')), text.substr(text.find(' ') + 1)};
  }
  file["padding"] = {{"strategy", "BatchLongest"}};
  spec.path = write(file);
  EXPECT_EQ(make_tokenizer(spec)->fingerprint(), make_tokenizer(recipe.tokenizer)->fingerprint());
  std::swap(file["model"]["merges"][0], file["model"]["merges"][1]);
  write(file);
  EXPECT_SAYS(message_of<BadDataError>([&] { make_tokenizer(spec); }), "tokenizer.hash: found " + spec.hash,
              "another tokenizer");
  spec.hash.clear();
  spec.vocabulary = 5;
  EXPECT_SAYS(message_of<RecipeError>([&] { make_tokenizer(spec); }), "tokenizer.vocabulary: found 5");
}

TEST_F(BpeFile, an_end_of_document_without_a_usual_name_must_be_given) {
  Json file = Json::parse(read_text_file(file_of("gpt2")));
  file["added_tokens"][0]["content"] = "<|stop|>";
  TokenizerSpec spec;
  spec.kind = "json";
  spec.path = write(file);
  EXPECT_SAYS(message_of<RecipeError>([&] { make_tokenizer(spec); }), "tokenizer.end_of_document: missing");
  spec.end_of_document = "<|stop|>";
  EXPECT_EQ(make_tokenizer(spec)->end_of_document(), file["added_tokens"][0]["id"].get<int32_t>());
}

TEST(SplitPattern, constructs_that_engines_read_differently_are_refused) {
  for (const char* pattern :
       {"a.b", "^a", "a$", "\\w", "\\b", "(?<!a)b", "(?<n>a)", "[a[b]]", "[a&&b]", "\\p{Greek}", "\\pL",
        "a{,3}", "a{1,3}+", "[^]a]", "[a", "\\", "[\\S]", "(?i)a", "\\p{L"}) {
    EXPECT_THROW(translate_pattern(pattern), BadDataError) << pattern;
  }
  EXPECT_THROW(SplitPattern("a*"), BadDataError);  // matches nothing at all, everywhere
  EXPECT_THROW(SplitPattern("(a"), BadDataError);
}

TEST(SplitPattern, white_space_is_unicodes) {
  const SplitPattern pattern(translate_pattern("\\s+"));
  SplitPattern::Matcher matcher(pattern);
  size_t begin, end;
  EXPECT_TRUE(
      matcher.find("a\xE2\x80\xAF\xC2\x85"
                   "b",
                   0, begin, end));  // U+202F, U+0085
  EXPECT_EQ(begin, 1u);
  EXPECT_EQ(end, 6u);
  EXPECT_FALSE(
      matcher.find("a\xE1\xA0\x8E"
                   "b",
                   0, begin, end));  // U+180E is none any more
}

TEST(Utf8, character_streams_replace_what_cannot_become_a_character) {
  CharacterStream stream;
  EXPECT_EQ(stream.push("\xE7\x8B"), "");
  EXPECT_EQ(stream.push("\x90"), "\xE7\x8B\x90");
  EXPECT_EQ(stream.push("\xE7\x8B"), "");
  EXPECT_EQ(stream.push("a"),
            "\xEF\xBF\xBD"
            "a");
  EXPECT_EQ(stream.push("\xED\xA0\x80"), "\xEF\xBF\xBD\xEF\xBF\xBD\xEF\xBF\xBD");  // a surrogate: three parts
  EXPECT_EQ(stream.push("\xF0\x9F"), "");
  EXPECT_EQ(stream.finish(), "\xEF\xBF\xBD");
  EXPECT_EQ(stream.finish(), "");
  for (uint32_t c = 0; c < 0x110000; c += 7) {
    if (c >= 0xD800 && c < 0xE000) continue;
    std::string text;
    append_character(text, c);
    ASSERT_EQ(utf8_length(text, 0), text.size()) << c;
    ASSERT_EQ(code_point_at(text, 0), c);
  }
}

}  // namespace
}  // namespace fp4t

// Files of tokens: the forms of Megatron-LM, llm.c and nanoGPT, read and refused; and what `tokenize` writes.
#include <gtest/gtest.h>

#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <set>

#include "engine/metrics/metrics.h"
#include "engine/tokens/corpus.h"
#include "engine/tokens/documents.h"
#include "engine/tokens/inputs.h"
#include "engine/tokens/token_files.h"
#include "engine/tokens/token_store.h"
#include "engine/tokens/tokenize.h"
#include "kernels/base/check.h"
#include "kernels/base/text_file.h"
#include "tests/support/messages.h"

namespace fp4t {
namespace {

namespace fs = std::filesystem;

template <class... Values>
std::string bytes_of(Values... values) {
  std::string out;
  (out.append(reinterpret_cast<const char*>(&values), sizeof(values)), ...);
  return out;
}

template <class T>
std::string row_of(const std::vector<int64_t>& values) {
  std::string out;
  for (const int64_t v : values) out += bytes_of(static_cast<T>(v));
  return out;
}

// An index, byte by byte as Megatron-LM's IndexedDataset writes it.
std::string index_bytes(uint8_t dtype, int64_t width, const std::vector<int64_t>& lengths,
                        const std::vector<int64_t>& documents) {
  std::vector<int64_t> pointers;
  int64_t at = 0;
  for (const int64_t length : lengths) {
    pointers.push_back(at);
    at += length * width;
  }
  return std::string("MMIDIDX\0\0", 9) +
         bytes_of(uint64_t{1}, dtype, static_cast<uint64_t>(lengths.size()),
                  static_cast<uint64_t>(documents.size())) +
         row_of<int32_t>(lengths) + row_of<int64_t>(pointers) + row_of<int64_t>(documents);
}

class TokenFiles : public ::testing::Test {
 protected:
  void SetUp() override {
    dir_ = fs::temp_directory_path() / ("fp4t_token_files_" + std::to_string(::getpid()));
    fs::create_directories(dir_);
    tokenizer_ = make_tokenizer(ids_);
  }
  void TearDown() override { fs::remove_all(dir_); }

  std::string path(const std::string& name) const { return (dir_ / name).string(); }
  std::string write(const std::string& name, const std::string& bytes) const {
    std::ofstream(path(name), std::ios::binary) << bytes;
    return path(name);
  }
  DataSourceSpec source(const std::string& kind, const std::string& file) const {
    DataSourceSpec spec;
    spec.name = spec.kind = kind;
    spec.paths = {path(file)};
    return spec;
  }
  std::vector<std::vector<int32_t>> documents(const DataSourceSpec& spec) const {
    const auto store = open_token_store(spec, *tokenizer_);
    std::vector<std::vector<int32_t>> all;
    for (int64_t d = 0; d < store->documents(); ++d) {
      all.emplace_back(static_cast<size_t>(store->size(d)));
      store->read(d, 0, store->size(d), all.back().data());
    }
    return all;
  }
  template <class Error = BadDataError>
  std::string refusal(const DataSourceSpec& spec) const {
    try {
      open_token_store(spec, *tokenizer_)->check_tokens();
    } catch (const Error& e) {
      return e.what();
    }
    return "nothing was thrown";
  }
  // Two documents, of which the second has two sequences.
  void write_megatron() const {
    write("a.bin", row_of<uint16_t>({5, 6, 7, 8, 9, 10}));
    write("a.idx", index_bytes(8, 2, {2, 3, 1}, {0, 1, 3}));
  }

  static TokenizerSpec ids(int64_t vocabulary) {
    TokenizerSpec spec;
    spec.kind = "ids";
    spec.vocabulary = vocabulary;
    return spec;
  }

  fs::path dir_;
  TokenizerSpec ids_ = ids(100);  // <eod> is 99
  std::unique_ptr<Tokenizer> tokenizer_;
};

using Documents = std::vector<std::vector<int32_t>>;

TEST_F(TokenFiles, megatron_documents_are_their_sequences_joined) {
  write_megatron();
  const Documents expected = {{5, 6}, {7, 8, 9, 10}};
  for (const char* name : {"a", "a.idx", "a.bin", "*.idx", "*"}) {
    EXPECT_EQ(documents(source("megatron", name)), expected) << name;
  }
  EXPECT_EQ(documents(source("megatron", "")), expected);  // the folder
  const std::map<uint8_t, std::pair<int64_t, std::string>> forms = {
      {1, {1, row_of<uint8_t>({1, 2, 98})}}, {2, {1, row_of<int8_t>({1, 2, 98})}},
      {3, {2, row_of<int16_t>({1, 2, 98})}}, {4, {4, row_of<int32_t>({1, 2, 98})}},
      {5, {8, row_of<int64_t>({1, 2, 98})}},
  };
  for (const auto& [code, form] : forms) {
    write("b.bin", form.second);
    write("b.idx", index_bytes(code, form.first, {1, 2}, {0, 1, 2}));
    EXPECT_EQ(documents(source("megatron", "b")), (Documents{{1}, {2, 98}})) << int{code};
  }
  // Modes, one a sequence, may follow; documents may be empty.
  write("b.idx", index_bytes(5, 8, {1, 2}, {0, 1, 1, 2}) + std::string(2, '\0'));
  EXPECT_EQ(documents(source("megatron", "b")), (Documents{{1}, {}, {2, 98}}));
}

TEST_F(TokenFiles, megatron_files_that_contradict_themselves_are_refused_by_file_and_byte) {
  write_megatron();
  const std::string good = read_text_file(path("a.idx"));
  const auto with = [&](size_t at, const std::string& bytes) {
    std::string bad = good;
    bad.replace(at, bytes.size(), bytes);
    write("a.idx", bad);
    return refusal(source("megatron", "a"));
  };
  EXPECT_SAYS(with(0, "X"), "a.idx: byte 0", "MMIDIDX");
  EXPECT_SAYS(with(9, bytes_of(uint64_t{2})), "a.idx: byte 9", "version 2");
  EXPECT_SAYS(with(17, bytes_of(uint8_t{7})), "a.idx: byte 17", "dtype 7");
  EXPECT_SAYS(with(18, bytes_of(uint64_t{4})), "a.idx: byte 18", "4 sequences");
  EXPECT_SAYS(with(18, bytes_of(~uint64_t{0})), "a.idx: byte 18");
  EXPECT_SAYS(with(26, bytes_of(uint64_t{1} << 61)), "a.idx: byte 18");
  EXPECT_SAYS(with(34, bytes_of(int32_t{-2})), "a.idx: byte 34", "sequence 0 has the length -2");
  EXPECT_SAYS(with(34, bytes_of(int32_t{1})), "byte 54", "sequence 1 begins at byte 4", "end at 2");
  EXPECT_SAYS(with(46 + 8, bytes_of(int64_t{-4})), "byte 54", "sequence 1 begins at byte -4");
  EXPECT_SAYS(with(46 + 16, bytes_of(int64_t{1} << 40)), "byte 62",
              "sequence 2 begins at byte 1099511627776");
  EXPECT_SAYS(with(70, bytes_of(int64_t{1})), "byte 70", "document entry 0 is sequence 1");
  EXPECT_SAYS(with(78, bytes_of(int64_t{-1})), "byte 78", "document entry 1 is sequence -1");
  EXPECT_SAYS(with(86, bytes_of(int64_t{2})), "byte 86", "document entry 2 is sequence 2", "3 for the last");
  write("a.idx", good.substr(0, good.size() - 1));
  EXPECT_SAYS(refusal(source("megatron", "a")), "a.idx: byte 18");
  write("a.idx", good.substr(0, 20));
  EXPECT_SAYS(refusal(source("megatron", "a")), "a.idx: byte 0");
  write("a.idx", good);
  write("a.bin", row_of<uint16_t>({5, 6, 7, 8, 9}));
  EXPECT_SAYS(refusal(source("megatron", "a")), "a.bin: has 10 bytes", "6 tokens");
  fs::remove(path("a.bin"));
  EXPECT_SAYS(refusal<MissingInputError>(source("megatron", "a.idx")), "a.bin");
  write("c.bin", "");
  EXPECT_SAYS(refusal<MissingInputError>(source("megatron", "c.bin")), "c.bin", "c.idx");
  write("d.txt", "x");
  EXPECT_SAYS(refusal(source("megatron", "d.txt")), "d.txt", "neither .idx nor .bin");
}

// FAULTS.md 41: 32-bit arithmetic on byte pointers.
TEST_F(TokenFiles, positions_beyond_32_bits_are_exact) {
  constexpr int64_t kTokens = 800'000'000;
  write("big.bin", "");
  fs::resize_file(path("big.bin"),
                  static_cast<uintmax_t>(2 * kTokens * 4));  // 6.4 GB, of which nothing is stored
  {
    std::fstream file(path("big.bin"), std::ios::binary | std::ios::in | std::ios::out);
    file.seekp((2 * kTokens - 2) * 4);
    file << row_of<int32_t>({41, 42});
  }
  write("big.idx", index_bytes(4, 4, {kTokens, kTokens}, {0, 1, 2}));
  const auto store = open_token_store(source("megatron", "big"), *tokenizer_);
  EXPECT_EQ(store->tokens(), 2 * kTokens);
  int32_t last[3];
  store->read(1, kTokens - 3, kTokens, last);
  EXPECT_EQ(std::vector<int32_t>(last, last + 3), (std::vector<int32_t>{0, 41, 42}));
}

TEST_F(TokenFiles, llmc_documents_begin_with_the_end_token) {
  const auto header = [](int32_t magic, int32_t version, int32_t tokens) {
    std::string out = bytes_of(magic, version, tokens);
    out.resize(1024, '\0');
    return out;
  };
  write("a.bin", header(20240520, 1, 6) + row_of<uint16_t>({99, 1, 2, 99, 3, 99}));
  const Documents expected = {{99, 1, 2}, {99, 3}, {99}};
  EXPECT_EQ(documents(source("llmc", "a.bin")), expected);
  write("b.bin", header(20240801, 7, 6) + row_of<uint32_t>({99, 1, 2, 99, 3, 99}));
  EXPECT_EQ(documents(source("llmc", "b.bin")), expected);
  write("c.bin", header(20240520, 1, 3) + row_of<uint16_t>({1, 2, 99}));
  EXPECT_EQ(documents(source("llmc", "c.bin")), (Documents{{1, 2}, {99}}));

  write("d.bin", header(20240520, 1, 5) + row_of<uint16_t>({99, 1, 2, 99, 3, 99}));
  EXPECT_SAYS(refusal(source("llmc", "d.bin")), "d.bin: byte 8", "5 tokens", "12 bytes");
  write("d.bin", header(20240520, 1, -1));
  EXPECT_SAYS(refusal(source("llmc", "d.bin")), "d.bin: byte 8");
  write("d.bin", header(20240520, 7, 0));
  EXPECT_SAYS(refusal(source("llmc", "d.bin")), "d.bin: byte 0", "magic 20240520 and version 7");
  write("d.bin", "short");
  EXPECT_SAYS(refusal(source("llmc", "d.bin")), "d.bin: byte 0", "5 bytes");
}

TEST_F(TokenFiles, nanogpt_documents_end_with_the_end_token) {
  write("a.bin", row_of<uint16_t>({1, 2, 99, 3, 99, 4}));
  EXPECT_EQ(documents(source("nanogpt", "a.bin")), (Documents{{1, 2, 99}, {3, 99}, {4}}));
  DataSourceSpec wide = source("nanogpt", "b.bin");
  wide.dtype = "uint32";
  write("b.bin", row_of<uint32_t>({1, 99}));
  EXPECT_EQ(documents(wide), (Documents{{1, 99}}));
  write("b.bin", "123456");
  EXPECT_SAYS(refusal(wide), "b.bin: has 6 bytes", "uint32");
  write("b.bin", "");
  EXPECT_SAYS(refusal(wide), "b.bin: has 0 bytes");
}

TEST_F(TokenFiles, ids_beyond_the_vocabulary_are_named_by_file_and_byte) {
  write("a.bin", row_of<uint16_t>({5, 6, 7, 100, 9, 10}));
  write("a.idx", index_bytes(8, 2, {2, 3, 1}, {0, 1, 3}));
  EXPECT_SAYS(refusal(source("megatron", "a")), "a.bin: byte 6: token 100; the tokenizer has 100");
  write("b.bin", row_of<int32_t>({5, -6}));
  write("b.idx", index_bytes(4, 4, {2}, {0, 1}));
  EXPECT_SAYS(refusal(source("megatron", "b")), "b.bin: byte 4: token -6");
  write("c.bin", row_of<uint16_t>({1, 65535}));
  EXPECT_SAYS(refusal(source("nanogpt", "c.bin")), "c.bin: byte 2: token 65535");
  // Training does not trust that somebody looked before.
  const auto corpus = make_corpus({source("megatron", "b")}, 2, 1, *tokenizer_);
  EXPECT_THROW(corpus->sample(0), BadDataError);
}

TEST_F(TokenFiles, recipes_are_checked_before_the_first_step) {
  write("a.bin", row_of<uint16_t>({5, 6, 7, 100, 9, 10}));
  write("a.idx", index_bytes(8, 2, {2, 3, 1}, {0, 1, 3}));
  Recipe recipe;
  recipe.tokenizer = ids_;
  PretrainSpec stage;
  stage.data = {source("megatron", "a")};
  recipe.stages = {stage};
  try {
    check_inputs(recipe);
    FAIL() << "accepted";
  } catch (const BadDataError& e) {
    EXPECT_SAYS(e.what(), "stages[0].pretrain.data[0]: ", "a.bin: byte 6: token 100");
  }
}

// Documents of an epoch, by their first token; sequences of one document each.
TEST_F(TokenFiles, epochs_see_every_sequence_once_and_held_out_documents_never) {
  std::vector<int64_t> tokens, lengths, entries = {0};
  for (int64_t d = 0; d < 90; ++d) {
    for (int64_t k = 0; k < 4; ++k) tokens.push_back(d);
    lengths.push_back(4);
    entries.push_back(d + 1);
  }
  write("a.bin", row_of<uint16_t>(tokens));
  write("a.idx", index_bytes(8, 2, lengths, entries));
  DataSourceSpec spec = source("megatron", "a");
  spec.held_out = {.fraction = 0.2, .seed = 5, .hash = ""};
  const auto corpus = make_corpus({spec}, 4, 1, *tokenizer_);
  std::set<int32_t> held_out;
  for (const Sequence& s : corpus->held_out(0, 1000)) held_out.insert(s.tokens[0]);
  ASSERT_GT(held_out.size(), 5u);
  const int64_t epoch = 90 - static_cast<int64_t>(held_out.size());
  std::vector<int32_t> first, second;
  for (int64_t i = 0; i < 2 * epoch; ++i) (i < epoch ? first : second).push_back(corpus->sample(i).tokens[0]);
  EXPECT_NE(first, second);
  std::set<int32_t> all(first.begin(), first.end());
  EXPECT_EQ(all, std::set<int32_t>(second.begin(), second.end()));
  EXPECT_EQ(static_cast<int64_t>(all.size()), epoch);
  for (const int32_t d : held_out) EXPECT_EQ(all.count(d), 0u);
}

class Tokenize : public TokenFiles {
 protected:
  void SetUp() override {
    TokenFiles::SetUp();
    TokenizerSpec spec;
    spec.kind = "json";
    spec.path = std::string(std::getenv("FP4T_TEST_SOURCE")) + "/tests/golden/tokenizers/qwen.json";
    tokenizer_ = make_tokenizer(spec);
    std::string text;
    for (int i = 0; i < 300; ++i) {
      text += "The cat number " + std::to_string(i * 7919 % 1000) + " sat on \xE7\x8B\x90\n\n it's\n%\n";
    }
    write("a.txt", text);
    write("b.txt", "one\n%\r\ntwo");
    text_ = source("text", "*.txt");
    text_.separator = "%";
  }
  DataSourceSpec text_;
};

TEST_F(Tokenize, training_on_the_files_is_training_on_the_text) {
  const TokenizeReport report = tokenize_files(text_, *tokenizer_, path("out"), 3, false);
  EXPECT_EQ(report.documents, 302);
  EXPECT_EQ(report.files, 2);
  DataSourceSpec files = source("megatron", "out");
  for (DataSourceSpec* spec : {&text_, &files}) spec->held_out = {.fraction = 0.1, .seed = 3, .hash = ""};
  const auto a = make_corpus({text_}, 32, 9, *tokenizer_), b = make_corpus({files}, 32, 9, *tokenizer_);
  for (int64_t i = 0; i < 500; ++i) {
    const Sequence x = a->sample(i), y = b->sample(i);
    ASSERT_EQ(x.tokens, y.tokens) << i;
    ASSERT_EQ(x.targets, y.targets) << i;
    ASSERT_EQ(x.positions, y.positions) << i;
    ASSERT_EQ(x.doc_begin, y.doc_begin) << i;
  }
  EXPECT_EQ(a->held_out(0, 1 << 20).size(), b->held_out(0, 1 << 20).size());
  EXPECT_NE(a->fingerprint(), b->fingerprint());
}

// The reader takes a MiB at a time, callers as much as they want.
TEST_F(Tokenize, documents_do_not_depend_on_the_pieces_they_are_read_in) {
  std::string text, json;
  for (int i = 0; i < 60; ++i) {
    const std::string line(static_cast<size_t>(i * 2311 % 90000), static_cast<char>('a' + i % 26));
    text += line + "\n" + std::to_string(i) + (i % 3 == 0 ? "\n%\r\n" : "\n");
    json += "{\"text\": \"" + line + "x\"}\n";
  }
  fs::create_directories(dir_ / "big");
  write("big/a.txt", text);
  write("big/b.jsonl", json);
  DataSourceSpec one = source("text", "big/a.txt");
  one.separator = "%";
  for (const DataSourceSpec& spec : {one, source("jsonl", "big/b.jsonl")}) {
    DocumentReader whole(spec), pieces(spec);
    const std::vector<Document> all = whole.next(size_t{1} << 30);
    ASSERT_GT(all.size(), 19u);
    size_t n = 0;
    for (auto batch = pieces.next(1); !batch.empty(); batch = pieces.next(1), ++n) {
      ASSERT_EQ(batch.size(), 1u);
      ASSERT_LT(n, all.size());
      EXPECT_EQ(batch[0].text, all[n].text) << n;
      EXPECT_EQ(batch[0].line, all[n].line) << n;
    }
    EXPECT_EQ(n, all.size());
    EXPECT_TRUE(whole.next(1).empty());
    EXPECT_EQ(whole.hash(), pieces.hash());
    std::string joined;
    for (const Document& document : all) joined += document.text + (spec.kind == "text" ? "%\r\n" : "");
    if (spec.kind == "text") {
      EXPECT_EQ(joined, text + "%\r\n");
    }
  }
}

TEST_F(Tokenize, any_number_of_threads_writes_the_same_bytes) {
  tokenize_files(text_, *tokenizer_, path("one"), 1, false);
  tokenize_files(text_, *tokenizer_, path("four"), 4, false);
  for (const char* part : {".bin", ".idx", ".tokens.json"}) {
    EXPECT_EQ(read_text_file(path("one") + part), read_text_file(path("four") + part)) << part;
  }
}

TEST_F(Tokenize, options_and_json_lines_decide_what_is_written) {
  write("c.jsonl", "{\"t\": \"a<|im_end|>b\"}\n\n{\"t\": \"c\"}\n");
  DataSourceSpec json = source("jsonl", "c.jsonl");
  json.field = "t";
  json.end_of_document = false;
  tokenize_files(json, *tokenizer_, path("plain"), 1, false);
  EXPECT_EQ(documents(source("megatron", "plain")),
            (Documents{tokenizer_->encode("a<|im_end|>b"), tokenizer_->encode("c")}));
  json.special_tokens = true;
  const TokenizeReport report = tokenize_files(json, *tokenizer_, path("marked"), 1, false);
  EXPECT_EQ(documents(source("megatron", "marked"))[0], tokenizer_->encode_marked("a<|im_end|>b"));
  EXPECT_NE(report.fingerprint,
            tokenize_files(json, *make_tokenizer(TokenizerSpec{}), path("bytes"), 1, false).fingerprint);
}

TEST_F(Tokenize, files_of_another_tokenizer_or_of_another_time_are_refused) {
  tokenize_files(text_, *tokenizer_, path("out"), 1, false);
  const DataSourceSpec files = source("megatron", "out");
  EXPECT_EQ(refusal(files), "nothing was thrown");
  tokenizer_ = make_tokenizer(TokenizerSpec{});
  EXPECT_SAYS(refusal(files), "out.tokens.json: made with the tokenizer json-", "bytes-257");
  DataSourceSpec other = text_;
  other.paths = {path("b.txt")};
  tokenize_files(other, *tokenizer_, path("other"), 1, false);
  for (const char* part : {".bin", ".idx"}) {
    fs::copy_file(path("other") + part, path("out") + part, fs::copy_options::overwrite_existing);
  }
  EXPECT_SAYS(refusal(files), "out.idx: has the hash", "out.tokens.json was written for");
  // A file of that name which is no note says nothing.
  write("out.tokens.json", "{\"text\": \"raw data, not of tokenize\"}\n{\"text\": \"more\"}\n");
  EXPECT_EQ(refusal(files), "nothing was thrown");
}

TEST_F(Tokenize, tokens_that_have_been_changed_since_are_refused_before_the_first_step) {
  tokenize_files(text_, *tokenizer_, path("out"), 1, false);
  const auto store = [&] { return open_token_store(source("megatron", "out"), *tokenizer_); };
  EXPECT_NO_THROW(store()->check_tokens());
  std::string tokens = read_text_file(path("out.bin"));
  std::swap(tokens[0], tokens[2]);  // still tokens, and as many
  ASSERT_NE(tokens, read_text_file(path("out.bin")));
  write("out.bin", tokens);
  try {
    store()->check_tokens();
    FAIL() << "taken";
  } catch (const BadDataError& e) {
    EXPECT_SAYS(e.what(), "out.bin: has the hash", "changed since");
  }
  fs::remove(path("out.tokens.json"));
  fs::create_symlink("/proc/self/mem", path("out.tokens.json"));  // reading fails, as on a failing disk
  EXPECT_SAYS(test::message_of<BadDataError>([&] { store()->check_tokens(); }), "cannot read ",
              "out.tokens.json");
  fs::remove(path("out.tokens.json"));  // of other programs' files nothing is known
  EXPECT_NO_THROW(store()->check_tokens());
}

// A process killed before the end must not leave the old index beside the new tokens.
TEST_F(Tokenize, an_index_that_is_replaced_goes_before_its_tokens) {
  tokenize_files(text_, *tokenizer_, path("out"), 1, false);
  fs::remove(path("out.tokens.json"));
  fs::create_directory(path("out.tokens.json"));  // writing the note fails, between .bin and .idx
  EXPECT_THROW(tokenize_files(text_, *tokenizer_, path("out"), 1, true), SaveError);
  EXPECT_FALSE(fs::exists(path("out.idx")));
}

TEST_F(Tokenize, files_that_are_there_are_written_over_only_if_asked_for) {
  for (const std::string ending : {".bin", ".idx", ".tokens.json"}) {
    write("out" + ending, "precious");
    try {
      tokenize_files(text_, *tokenizer_, path("out"), 1, false);
      FAIL() << ending;
    } catch (const RecipeError& e) {
      EXPECT_SAYS(e.what(), "out" + ending + "' is there; --replace");
    }
    EXPECT_EQ(read_text_file(path("out" + ending)), "precious");
    fs::remove(path("out" + ending));
  }
  tokenize_files(text_, *tokenizer_, path("out"), 1, false);
  EXPECT_EQ(tokenize_files(text_, *tokenizer_, path("out"), 1, true).documents, 302);
}

TEST_F(Tokenize, a_failure_leaves_no_files) {
  write("z.txt", std::string("a\0b", 3));
  EXPECT_THROW(tokenize_files(text_, *tokenizer_, path("out"), 2, false), BadDataError);
  EXPECT_THROW(tokenize_files(source("text", "none*"), *tokenizer_, path("out"), 2, false),
               MissingInputError);
  EXPECT_THROW(tokenize_files(source("text", "b.txt"), *tokenizer_, path("no folder/out"), 2, false),
               SaveError);
  for (const auto& entry : fs::directory_iterator(dir_)) {
    EXPECT_NE(entry.path().filename().string().substr(0, 3), "out") << entry.path();
  }
}

}  // namespace
}  // namespace fp4t

#include <gtest/gtest.h>

#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <map>
#include <set>

#include "engine/tokens/corpus.h"
#include "engine/tokens/source.h"
#include "kernels/base/check.h"

namespace fp4t {
namespace {

namespace fs = std::filesystem;

class CorpusTest : public ::testing::Test {
 protected:
  void SetUp() override {
    dir_ = fs::temp_directory_path() / ("fp4t_corpus_" + std::to_string(::getpid()));
    fs::create_directories(dir_);
    tokenizer_ = make_tokenizer({});
  }
  void TearDown() override { fs::remove_all(dir_); }

  std::string write(const std::string& name, const std::string& text) {
    std::ofstream(dir_ / name, std::ios::binary) << text;
    return (dir_ / name).string();
  }

  DataSourceSpec text_source(const std::string& path) {
    DataSourceSpec s;
    s.name = "text";
    s.paths = {path};
    s.separator = "%";
    return s;
  }
  // `count` documents of growing length, each of its own letter pair.
  std::string documents(int count) {
    std::string text;
    for (int i = 0; i < count; ++i) {
      text += std::string(static_cast<size_t>(3 + i % 11), static_cast<char>('a' + i % 26)) +
              std::to_string(i) + "\n%\n";
    }
    return text;
  }

  fs::path dir_;
  std::unique_ptr<Tokenizer> tokenizer_;
};

TokenizerSpec ids_of(int64_t vocabulary) {
  TokenizerSpec spec;
  spec.kind = "ids";
  spec.vocabulary = vocabulary;
  return spec;
}

std::string key_of(const Sequence& s) {
  std::string key;
  for (int32_t t : s.tokens) key += std::to_string(t) + ",";
  return key;
}

TEST_F(CorpusTest, an_epoch_visits_every_sequence_once_and_the_next_in_another_order) {
  const auto corpus = make_corpus({text_source(write("a.txt", documents(200)))}, 16, 1, *tokenizer_);
  std::vector<std::string> first;
  std::map<std::string, int> count;
  // The number of sequences is found by the first repetition.
  int64_t n = 0;
  while (count[key_of(corpus->sample(n))]++ == 0) first.push_back(key_of(corpus->sample(n++)));
  ASSERT_GT(n, 50);
  std::vector<std::string> second;
  for (int64_t i = n; i < 2 * n; ++i) second.push_back(key_of(corpus->sample(i)));
  EXPECT_NE(first, second);
  std::sort(first.begin(), first.end());
  std::sort(second.begin(), second.end());
  EXPECT_EQ(first, second);
}

TEST_F(CorpusTest, order_depends_on_the_seed_and_not_on_the_folder) {
  const std::string here = write("a.txt", documents(100));
  fs::create_directories(dir_ / "other");
  fs::copy_file(here, dir_ / "other" / "a.txt");
  const auto a = make_corpus({text_source(here)}, 16, 1, *tokenizer_);
  const auto b = make_corpus({text_source((dir_ / "other" / "a.txt").string())}, 16, 1, *tokenizer_);
  const auto c = make_corpus({text_source(here)}, 16, 2, *tokenizer_);
  EXPECT_EQ(a->fingerprint(), b->fingerprint());
  int differing = 0;
  for (int64_t i = 0; i < 20; ++i) {
    EXPECT_EQ(key_of(a->sample(i)), key_of(b->sample(i)));
    differing += key_of(a->sample(i)) != key_of(c->sample(i));
  }
  EXPECT_GT(differing, 10);
  std::ofstream(here, std::ios::app) << "one more\n";
  EXPECT_NE(make_corpus({text_source(here)}, 16, 1, *tokenizer_)->fingerprint(), a->fingerprint());
}

TEST_F(CorpusTest, sequences_mask_documents_and_train_every_token_but_the_first_of_each) {
  const std::vector<std::vector<int32_t>> docs = {{1, 2, 3}, {4, 5}, {6, 7, 8, 9, 10, 11}};
  const auto sequences = pack_documents(docs, 8, 256);
  ASSERT_EQ(sequences.size(), 2u);
  EXPECT_EQ(sequences[0].tokens, (std::vector<int32_t>{1, 2, 3, 4, 5, 6, 7, 8}));
  EXPECT_EQ(sequences[0].targets, (std::vector<int32_t>{2, 3, -1, 5, -1, 7, 8, 9}));
  EXPECT_EQ(sequences[0].positions, (std::vector<int32_t>{0, 1, 2, 0, 1, 0, 1, 2}));
  EXPECT_EQ(sequences[0].doc_begin, (std::vector<int32_t>{0, 0, 0, 3, 3, 5, 5, 5}));
  EXPECT_EQ(sequences[1].tokens, (std::vector<int32_t>{9, 10, 11, 256, 256, 256, 256, 256}));
  EXPECT_EQ(sequences[1].targets, (std::vector<int32_t>{10, 11, -1, -1, -1, -1, -1, -1}));
}

TEST_F(CorpusTest, held_out_documents_never_appear_in_training) {
  DataSourceSpec spec = text_source(write("a.txt", documents(300)));
  spec.held_out = {0.2, 3, ""};
  const auto corpus = make_corpus({spec}, 16, 1, *tokenizer_);
  std::map<std::string, int> where;  // first tokens of whole documents -> side
  auto starts = [](const Sequence& s) {
    std::vector<std::string> list;
    for (size_t t = 0; t < s.tokens.size(); ++t) {
      if (s.positions[t] != 0) continue;
      std::string text;
      size_t u = t;
      while (u < s.tokens.size() && s.doc_begin[u] == static_cast<int32_t>(t) && s.tokens[u] != 256) {
        text += static_cast<char>(s.tokens[u++]);
      }
      if (u < s.tokens.size() && s.tokens[u] == 256 && text.size() > 4) list.push_back(text);
    }
    return list;
  };
  std::set<std::string> held_out, training;
  for (const Sequence& s : corpus->held_out(0, 1 << 20)) {
    for (const auto& d : starts(s)) held_out.insert(d);
  }
  for (int64_t i = 0; i < 400; ++i) {
    for (const auto& d : starts(corpus->sample(i))) training.insert(d);
  }
  ASSERT_GT(held_out.size(), 15u);
  ASSERT_GT(training.size(), 80u);
  // A whole document starts with a letter; pieces that continue one may share digits.
  for (const auto& d : held_out) {
    if (d.size() > 5 && d[0] >= 'a') {
      EXPECT_EQ(training.count(d), 0u) << d;
    }
  }
}

TEST_F(CorpusTest, a_source_may_be_files_that_are_only_measured) {
  DataSourceSpec trained = text_source(write("train.txt", "one\n%\ntwo\n"));
  trained.held_out = {};
  DataSourceSpec measured = text_source(write("valid.txt", "three\n%\nfour\n"));
  measured.name = "valid";
  measured.weight = 0;
  measured.held_out.fraction = 1;
  const auto corpus = make_corpus({trained, measured}, 8, 1, *tokenizer_);
  for (int64_t i = 0; i < 1000; ++i) ASSERT_EQ(corpus->source_of(i), 0) << i;
  EXPECT_TRUE(corpus->held_out(0, 100).empty());
  std::string all;
  for (const Sequence& s : corpus->held_out(1, 100)) all += tokenizer_->decode(s.tokens);
  EXPECT_NE(all.find("three"), std::string::npos) << all;
  EXPECT_NE(all.find("four"), std::string::npos) << all;
  EXPECT_NE(corpus->describe().find("valid: 2 documents in 1 files, 0 tokens to train on"), std::string::npos)
      << corpus->describe();
}

TEST_F(CorpusTest, sources_get_their_share_of_the_samples) {
  DataSourceSpec sums;
  sums.name = "sums";
  sums.kind = "sums";
  sums.weight = 0.6;
  DataSourceSpec text = text_source(write("a.txt", documents(50)));
  text.weight = 0.4;
  const auto corpus = make_corpus({text, sums}, 32, 1, *tokenizer_);
  int count = 0;
  for (int64_t i = 0; i < 1000; ++i) count += corpus->source_of(i);
  EXPECT_EQ(count, 600);
  EXPECT_EQ(corpus->sample(17).tokens.size(), 32u);
}

TEST_F(CorpusTest, generated_documents_are_wrong_as_often_as_asked) {
  DataSourceSpec sums;
  sums.name = "sums";
  sums.kind = "sums";
  sums.wrong_fraction = 0.5;
  sums.end_of_document = false;
  const auto corpus = make_corpus({sums}, 256, 1, *tokenizer_);
  int right = 0, all = 0;
  for (int64_t i = 0; i < 100; ++i) {
    const std::string text = tokenizer_->decode(corpus->sample(i).tokens);
    size_t at = 0;
    for (size_t end; (end = text.find('\n', at)) != std::string::npos; at = end + 1) {
      const std::string line = text.substr(at, end - at);
      const size_t plus = line.find('+'), equals = line.find('=');
      const int64_t sum = std::stoll(line) + std::stoll(line.substr(plus + 1));
      const int64_t said = std::stoll(line.substr(equals + 1));
      EXPECT_LE(std::abs(sum - said), 1) << line;
      right += sum == said;
      ++all;
    }
  }
  EXPECT_GT(all, 2000);
  EXPECT_NEAR(static_cast<double>(right) / all, 0.5, 0.04);
}

TEST_F(CorpusTest, damaged_or_missing_files_are_named) {
  DataSourceSpec jsonl;
  jsonl.name = "j";
  jsonl.kind = "jsonl";
  jsonl.paths = {write("a.jsonl", "\xEF\xBB\xBF{\"text\": \"good\"}\r\n\n{\"text\": 3}\n")};
  try {
    make_corpus({jsonl}, 16, 1, *tokenizer_);
    FAIL();
  } catch (const BadDataError& e) {
    EXPECT_NE(std::string(e.what()).find("a.jsonl:3"), std::string::npos) << e.what();
  }
  EXPECT_THROW(make_corpus({text_source((dir_ / "none*").string())}, 16, 1, *tokenizer_), MissingInputError);
  EXPECT_THROW(make_corpus({text_source(write("b.txt", std::string("a\0b", 3)))}, 16, 1, *tokenizer_),
               BadDataError);
  EXPECT_THROW(make_corpus({text_source(write("c.txt", "%\n%\n"))}, 16, 1, *tokenizer_), BadDataError);
}

TEST_F(CorpusTest, texts_of_token_numbers_are_those_tokens) {
  const auto ids = make_tokenizer(ids_of(5000));
  EXPECT_EQ(ids->encode(" 0\t17\n4998 "), (std::vector<int32_t>{0, 17, 4998}));
  EXPECT_EQ(ids->encode(" \n"), std::vector<int32_t>{});
  EXPECT_EQ(ids->decode({0, 17, 4999, 4998}), "0 17 4998");
  EXPECT_EQ(ids->single_token("<eod>"), 4999);
  EXPECT_EQ(ids->single_token("42"), 42);
  for (const char* bad : {"4999", "-1", "1.5", "word", "99999999999"}) {
    EXPECT_THROW(ids->encode(bad), BadDataError) << bad;
  }
  const auto corpus = make_corpus({text_source(write("ids.txt", "1 2 3\n%\n4 5\n"))}, 8, 1, *ids);
  EXPECT_EQ(std::multiset<int32_t>({1, 2, 3, 4, 5, 4999, 4999, 4999}), [&] {
    const auto t = corpus->sample(0).tokens;
    return std::multiset<int32_t>(t.begin(), t.end());
  }());
}

TEST_F(CorpusTest, random_sequences_are_whole_documents_that_use_the_vocabulary_evenly) {
  const auto ids = make_tokenizer(ids_of(11));
  DataSourceSpec random;
  random.name = random.kind = "random";
  const auto corpus = make_corpus({random}, 1000, 3, *ids);
  const Sequence s = corpus->sample(5);
  EXPECT_EQ(s.tokens, corpus->sample(5).tokens);
  EXPECT_NE(s.tokens, corpus->sample(6).tokens);
  std::vector<int> count(11);
  for (int32_t t : s.tokens) ++count[static_cast<size_t>(t)];
  EXPECT_EQ(count[10], 0);  // <eod>
  // 1000 draws of ten: a standard deviation of 9.5 around 100.
  for (int t = 0; t < 10; ++t) EXPECT_NEAR(count[static_cast<size_t>(t)], 100, 50) << t;
  EXPECT_EQ(std::vector<int32_t>(s.targets.begin(), s.targets.end() - 1),
            std::vector<int32_t>(s.tokens.begin() + 1, s.tokens.end()));
  EXPECT_EQ(s.targets.back(), -1);
  EXPECT_EQ(s.doc_begin, std::vector<int32_t>(1000, 0));
  EXPECT_EQ(s.positions.back(), 999);
}

TEST_F(CorpusTest, bytes_round_trip_through_the_tokenizer) {
  std::string all;
  for (int i = 0; i < 256; ++i) all += static_cast<char>(i);
  EXPECT_EQ(tokenizer_->decode(tokenizer_->encode(all)), all);
  EXPECT_EQ(tokenizer_->encode("<eod>").size(), 5u);  // text never makes a special token
  EXPECT_EQ(tokenizer_->single_token("<eod>"), 256);
  EXPECT_THROW(tokenizer_->single_token("ab"), RecipeError);
  // Rows of the embedding beyond the tokens can be sampled: they are shown, not fatal.
  EXPECT_EQ(tokenizer_->decode({97, 256, 257, 400, 98}),
            "a\xEF\xBF\xBD\xEF\xBF\xBD"
            "b");
}

}  // namespace
}  // namespace fp4t

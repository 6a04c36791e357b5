// What a path of a data source may be, and how inputs that are not there are answered.
#include "engine/tokens/inputs.h"

#include <gtest/gtest.h>
#include <sys/stat.h>

#include <filesystem>

#include "engine/tokens/corpus.h"
#include "engine/tokens/documents.h"
#include "kernels/base/check.h"
#include "tests/support/messages.h"
#include "tests/support/process.h"

namespace fp4t {
namespace {

namespace fs = std::filesystem;
using test::message_of;

class Inputs : public ::testing::Test {
 protected:
  void SetUp() override {
    for (const char* name : {"a.txt", "b.txt", "c.md", "with space/f [1].txt", "with space/deep/g.txt"}) {
      fs::create_directories(fs::path(folder_ / name).parent_path());
      test::write_text(folder_ / name, "one\n%\ntwo\n");
    }
  }
  DataSourceSpec source(const std::vector<std::string>& names) {
    DataSourceSpec s;
    s.name = "s";
    s.separator = "%";
    for (const std::string& name : names) s.paths.push_back(folder_ / name);
    return s;
  }
  // Names below the folder, in the order in which they are read.
  std::vector<std::string> files(const std::vector<std::string>& names) {
    std::vector<std::string> all;
    for (const std::string& f : input_files(source(names)))
      all.push_back(f.substr(folder_.path().size() + 1));
    return all;
  }

  test::ScratchFolder folder_;
};

using Names = std::vector<std::string>;

TEST_F(Inputs, paths_are_files_folders_and_globs) {
  EXPECT_EQ(files({"a.txt"}), (Names{"a.txt"}));
  EXPECT_EQ(files({"*.txt"}), (Names{"a.txt", "b.txt"}));
  EXPECT_EQ(files({"c.md", "[ab].txt"}), (Names{"c.md", "a.txt", "b.txt"}));
  // A name with the characters of a pattern is the file of that name.
  EXPECT_EQ(files({"with space/f [1].txt"}), (Names{"with space/f [1].txt"}));
  EXPECT_EQ(files({"with space"}), (Names{"with space/deep/g.txt", "with space/f [1].txt"}));
  EXPECT_EQ(files({"with*"}), (Names{"with space/deep/g.txt", "with space/f [1].txt"}));
}

TEST_F(Inputs, what_is_not_there_is_named) {
  for (const char* name : {"none.txt", "*.none", "a.txt/below", "none/*.txt"}) {
    const std::string text = message_of<MissingInputError>([&] { files({"a.txt", name}); });
    EXPECT_NE(text.find(folder_ / name), std::string::npos) << text;
  }
  fs::create_directory(folder_ / "empty");
  message_of<MissingInputError>([&] { files({"empty"}); });
}

TEST_F(Inputs, links_that_lead_nowhere_and_pipes_do_not_stop_the_program) {
  fs::create_directory(folder_ / "links");
  fs::create_symlink("loop", folder_ / "links/loop");
  for (const char* name : {"links", "links/loop", "links/*"}) {
    const std::string text = message_of<MissingInputError>([&] { files({name}); });
    EXPECT_NE(text.find("links/loop"), std::string::npos) << text;
  }
  fs::create_directory(folder_ / "pipes");
  ASSERT_EQ(::mkfifo((folder_ / "pipes/pipe").c_str(), 0600), 0);
  for (const char* name : {"pipes", "pipes/pipe"}) {
    const std::string text = message_of<BadDataError>([&] { files({name}); });
    EXPECT_NE(text.find("no regular file"), std::string::npos) << text;
  }
}

TEST_F(Inputs, a_file_that_is_matched_twice_is_refused) {
  fs::create_symlink(folder_ / "a.txt", folder_ / "again.txt");
  for (const Names& names : {Names{"a.txt", "a.txt"}, Names{"*.txt", "b.txt"}, Names{"a.txt", "again.txt"}}) {
    const std::string text = message_of<BadDataError>([&] { files(names); });
    EXPECT_NE(text.find("one file twice"), std::string::npos) << text;
  }
}

TEST_F(Inputs, of_all_stages_are_looked_for_at_once) {
  Recipe recipe;
  PretrainSpec first, second;
  DataSourceSpec sums;
  sums.name = sums.kind = "sums";
  first.data = {source({"a.txt"}), source({"gone.txt"})};
  second.data = {source({"b.txt"}), sums, source({"lost/*"})};
  recipe.stages = {first, RlSpec{}, second};
  const std::string text = message_of<MissingInputError>([&] { check_inputs(recipe); });
  for (const char* part :
       {"stages[0].pretrain.data[1].paths: ", "gone.txt", "stages[2].pretrain.data[2].paths: ", "lost/*"}) {
    EXPECT_NE(text.find(part), std::string::npos) << part << " in\n" << text;
  }
  first.data.pop_back();
  second.data.pop_back();
  recipe.stages = {first, RlSpec{}, second};
  EXPECT_NO_THROW(check_inputs(recipe));
}

// Recipe of two stages, the second one as given.
Recipe with_later(const DataSourceSpec& first, const StageSpec& later) {
  Recipe recipe;
  PretrainSpec pretrain;
  pretrain.data = {first};
  recipe.stages = {pretrain, later};
  return recipe;
}

void expect_parts(const std::string& text, const Names& parts) {
  for (const std::string& part : parts) {
    EXPECT_NE(text.find(part), std::string::npos) << "no '" << part << "' in\n" << text;
  }
}

TEST_F(Inputs, problems_and_splits_of_later_stages_are_made_early) {
  RlSpec rl;
  rl.task.held_out = {.fraction = 0.1, .seed = 7, .hash = "0000000000000000"};
  rl.eval.task = rl.task;
  DataSourceSpec sums;
  sums.name = sums.kind = "sums";
  sums.held_out = rl.task.held_out;
  Recipe recipe = with_later(sums, rl);
  expect_parts(message_of<BadDataError>([&] { check_inputs(recipe); }),
               {"stages[0].pretrain.data[0].held_out.hash: the recipe says 0000000000000000",
                "\nstages[1].rl.task.held_out.hash: ", "\nstages[1].rl.eval.task.held_out.hash: "});
  FieldPlaces places;
  places["stages[1].rl.task.held_out"].value = {"r.yaml", 12, 5};
  expect_parts(message_of<BadDataError>([&] { check_inputs(recipe, places); }),
               {"\nr.yaml:12:5: stages[1].rl.task.held_out.hash: the recipe says"});
  rl.task.held_out = {.fraction = 1e-9, .seed = 7, .hash = ""};
  rl.eval.task.reset();
  expect_parts(message_of<BadDataError>([&] { check_inputs(with_later(source({"a.txt"}), rl)); }),
               {"stages[1].rl.task: sums: held_out.fraction 1e-09 holds out none"});
  // Who is only measured needs no problem to train on.
  rl.task.held_out = {};
  rl.eval.task = rl.task;
  rl.eval.task->held_out.fraction = 1;
  EXPECT_NO_THROW(check_inputs(with_later(source({"a.txt"}), rl)));
}

TEST_F(Inputs, texts_of_later_stages_are_read_early) {
  test::write_text(folder_ / "empty.txt", "");
  test::write_text(folder_ / "separators.txt", "%\n%\r\n");
  test::write_text(folder_ / "nul.txt", std::string("one\ntw\0o\n", 9));
  test::write_text(folder_ / "lines.jsonl", "{\"text\": \"good\"}\n{\"text\": }\n");
  PretrainSpec later;
  for (const char* name : {"empty.txt", "separators.txt", "nul.txt", "lines.jsonl"}) {
    later.data.push_back(source({name}));
  }
  later.data[3].kind = "jsonl";
  later.data.push_back(source({"a.txt"}));
  later.data[4].held_out.fraction = 1e-9;
  const std::string text =
      message_of<BadDataError>([&] { check_inputs(with_later(source({"a.txt"}), later)); });
  expect_parts(text,
               {"stages[1].pretrain.data[0]: source 's' holds no document", folder_ / "empty.txt",
                "stages[1].pretrain.data[1]: source 's' holds no document",
                "stages[1].pretrain.data[2]: " + (folder_ / "nul.txt") + ":2: ", "NUL",
                "stages[1].pretrain.data[3]: " + (folder_ / "lines.jsonl") + ":2: column 10: ",
                "stages[1].pretrain.data[4].held_out: held_out.fraction 1e-09 holds out none of the 2"});
  EXPECT_EQ(text.find("line 1"), std::string::npos) << text;
}

TEST_F(Inputs, what_is_no_token_is_named_with_file_and_line) {
  test::write_text(folder_ / "a.txt", "1 2\n%\n3\n4 x9\n");
  test::write_text(folder_ / "b.jsonl", "{\"text\": \"1\"}\n\n{\"text\": \"2\\n3\\n-4\"}\n");
  PretrainSpec later;
  later.data = {source({"a.txt"}), source({"b.jsonl"})};
  later.data[1].kind = "jsonl";
  later.eval.prompts = {"5", "five", " "};
  test::write_text(folder_ / "good.txt", "6 7\n");
  Recipe recipe = with_later(source({"good.txt"}), later);
  recipe.tokenizer.kind = "ids";
  recipe.tokenizer.vocabulary = 10;
  expect_parts(message_of<RecipeError>([&] { check_inputs(recipe); }),
               {"stages[1].pretrain.data[0]: " + (folder_ / "a.txt") + ":4: 'x9' is no token",
                "stages[1].pretrain.data[1]: " + (folder_ / "b.jsonl") + ":3: '-4' is no token",
                "from 0 to 8", "stages[1].pretrain.eval.prompts[1]: 'five' is no token",
                "stages[1].pretrain.eval.prompts[2]: no token"});
  RlSpec rl;
  rl.sampling.end_tokens = {"<eod>", "stop"};
  recipe.stages[1] = rl;
  expect_parts(message_of<RecipeError>([&] { check_inputs(recipe); }),
               {"stages[1].rl.task: '", "=", "stages[1].rl.sampling.end_tokens[1]: ", "'stop'"});
}

Names texts_of(const DataSourceSpec& spec) {
  Names texts;
  for (const Document& document : DocumentReader(spec).next(1 << 20)) texts.push_back(document.text);
  return texts;
}

TEST_F(Inputs, both_kinds_have_one_rule_for_byte_order_marks_and_nul) {
  const std::string mark = "\xEF\xBB\xBF";
  test::write_text(folder_ / "a.txt", mark + "one" + mark);
  test::write_text(folder_ / "b.jsonl", mark + "{\"text\": \"one" + mark + "\"}\n");
  DataSourceSpec text = source({"a.txt"}), jsonl = source({"b.jsonl"});
  text.separator = "";
  jsonl.kind = "jsonl";
  for (const DataSourceSpec& spec : {text, jsonl}) {
    EXPECT_EQ(texts_of(spec), Names{"one" + mark}) << spec.kind;
  }
  test::write_text(folder_ / "a.txt", std::string("o\0e", 3));
  test::write_text(folder_ / "b.jsonl", "\n{\"text\": \"o\\u0000e\"}\n");
  expect_parts(message_of<BadDataError>([&] { texts_of(text); }), {folder_ / "a.txt:1: ", "NUL"});
  expect_parts(message_of<BadDataError>([&] { texts_of(jsonl); }), {folder_ / "b.jsonl:2: ", "NUL"});
}

TEST_F(Inputs, why_a_path_cannot_be_read_is_told) {
  fs::create_directory_symlink("round", folder_ / "round");
  for (const std::string& name : {std::string("round/x.txt"), "folder/" + std::string(5000, 'x')}) {
    const std::string text = message_of<MissingInputError>([&] { files({name}); });
    EXPECT_TRUE(text.find("oo many levels") != std::string::npos ||
                text.find("too long") != std::string::npos)
        << text;
  }
}

TEST_F(Inputs, a_file_that_one_source_holds_out_is_not_trained_on_by_another) {
  const auto recipe_of = [&](const DataSourceSpec& a, const DataSourceSpec& b) {
    Recipe recipe;
    PretrainSpec pretrain;
    pretrain.data = {a, b};
    recipe.stages = {pretrain};
    return recipe;
  };
  DataSourceSpec measured = source({"a.txt"});
  measured.weight = 0;
  measured.held_out.fraction = 1;
  EXPECT_NO_THROW(check_inputs(recipe_of(source({"with space"}), measured)));
  const std::string text = message_of<BadDataError>([&] {
    check_inputs(recipe_of(source({"b.txt", "a.txt"}), measured));
  });
  expect_parts(text, {"stages[0].pretrain.data[1].paths: ", "a.txt' is also a file of source 's'"});
  // Two that train on it see it twice as often.
  EXPECT_NO_THROW(check_inputs(recipe_of(source({"a.txt"}), source({"a.txt"}))));
}

TEST_F(Inputs, a_split_that_holds_nothing_out_is_refused) {
  const auto tokenizer = make_tokenizer({});
  DataSourceSpec text = source({"a.txt"});
  text.held_out = {.fraction = 1e-6, .seed = 1, .hash = ""};
  EXPECT_NE(message_of<BadDataError>([&] {
              make_corpus({text}, 8, 1, *tokenizer);
            }).find("none of the 2 documents"),
            std::string::npos);
  text.held_out.fraction = 0.999999;
  EXPECT_NE(message_of<BadDataError>([&] { make_corpus({text}, 8, 1, *tokenizer); }).find("every document"),
            std::string::npos);
}

TEST_F(Inputs, links_to_folders_are_followed_and_lead_to_no_folder_twice) {
  fs::create_directories(folder_ / "data");
  test::write_text(folder_ / "data/own.txt", "one\n");
  fs::create_directory_symlink(fs::absolute(folder_ / "with space"), folder_ / "data/linked");
  EXPECT_EQ(files({"data"}), (Names{"data/linked/deep/g.txt", "data/linked/f [1].txt", "data/own.txt"}));
  fs::create_directory_symlink(fs::absolute(folder_ / "data"), folder_ / "data/round");
  const std::string refusal = message_of<BadDataError>([&] { files({"data"}); });
  EXPECT_NE(refusal.find("data/round"), std::string::npos) << refusal;
  EXPECT_NE(refusal.find("reached twice"), std::string::npos) << refusal;
}

}  // namespace
}  // namespace fp4t

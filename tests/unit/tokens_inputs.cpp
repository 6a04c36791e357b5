// What a path of a data source may be, and how inputs that are not there are answered.
#include "engine/tokens/inputs.h"

#include <gtest/gtest.h>
#include <sys/stat.h>

#include <filesystem>

#include "engine/tokens/corpus.h"
#include "kernels/base/check.h"
#include "tests/support/process.h"

namespace fp4t {
namespace {

namespace fs = std::filesystem;

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

template <class ErrorType, class Body>
std::string message_of(const Body& body) {
  try {
    body();
  } catch (const ErrorType& e) {
    return e.what();
  }
  ADD_FAILURE() << "not refused";
  return "";
}

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
  recipe.model.init.kind = "import";
  recipe.model.init.path = folder_ / "weights";
  const std::string text = message_of<MissingInputError>([&] { check_inputs(recipe); });
  for (const char* part : {"model.init.path: '", "weights'", "stages[0].pretrain.data[1].paths: ", "gone.txt",
                           "stages[2].pretrain.data[2].paths: ", "lost/*"}) {
    EXPECT_NE(text.find(part), std::string::npos) << part << " in\n" << text;
  }
  recipe.model.init.kind = "normal";
  first.data.pop_back();
  second.data.pop_back();
  recipe.stages = {first, RlSpec{}, second};
  EXPECT_NO_THROW(check_inputs(recipe));
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

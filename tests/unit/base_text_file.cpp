// Files read whole: what is there comes, what the system refuses is told. /proc/self/mem is a regular file
// whose first bytes nobody may read (EIO), as of a failing disk.
#include "kernels/base/text_file.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>

#include "kernels/base/check.h"
#include "tests/support/messages.h"
#include "tests/support/process.h"

namespace fp4t::test {
namespace {

TEST(TextFile, what_is_there_comes_whole_or_as_far_as_is_asked) {
  const ScratchFolder folder;
  const std::string text = std::string(size_t{3} << 20, 'x') + '\0' + "last line, cut";
  std::ofstream(folder / "a", std::ios::binary) << text;
  EXPECT_EQ(read_text_file(folder / "a"), text);
  EXPECT_EQ(read_text_file_if_there(folder / "a"), text);
  EXPECT_EQ(read_text_file_if_there(folder / "a", 5), "xxxxx");
  EXPECT_EQ(read_text_file_if_there(folder / "a", 0), "");
  std::ofstream(folder / "b") << "";
  EXPECT_EQ(read_text_file_if_there(folder / "b"), "");
}

TEST(TextFile, what_is_not_there_is_an_error_only_where_it_must_be) {
  const ScratchFolder folder;
  std::ofstream(folder / "a") << "a";
  for (const std::string& path : {folder / "none", folder / "none/b", folder / "a/b"}) {
    EXPECT_EQ(read_text_file_if_there(path), std::nullopt);
    EXPECT_SAYS(message_of<MissingInputError>([&] { read_text_file(path); }), "cannot open " + path + ": ");
  }
}

TEST(TextFile, what_cannot_be_read_is_an_error_with_its_path) {
  const ScratchFolder folder;
  const std::string unreadable = "/proc/self/mem", no_file = folder.path();
  const auto both = [](const std::string& path, const std::string& words) {
    EXPECT_SAYS(message_of<BadDataError>([&] { read_text_file(path); }), path, words);
    EXPECT_SAYS(message_of<BadDataError>([&] { read_text_file_if_there(path); }), path, words);
  };
  both(unreadable, "cannot read ");
  both(no_file, " is no regular file");
}

}  // namespace
}  // namespace fp4t::test

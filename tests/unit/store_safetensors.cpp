#include "engine/store/safetensors.h"

#include <sys/stat.h>

#include <cstring>
#include <nlohmann/json.hpp>

#include "gtest/gtest.h"
#include "tests/unit/store_fixture.h"

namespace fp4t::test {
namespace {

std::string file_of(const std::string& header, const std::string& data) {
  std::string out;
  for (int i = 0; i < 8; ++i) out += static_cast<char>((header.size() >> (8 * i)) & 0xFF);
  return out + header + data;
}

TEST(Safetensors, every_type_and_shape_comes_back_as_written) {
  TempFolder dir;
  const float floats[] = {1.5f, -0.0f, 3e-39f, 4, 5, 6};
  const uint16_t halves[] = {0x3F80, 0x7FC0, 0x8000};
  const double doubles[] = {0.1};
  const int32_t ints[] = {-1, 2};
  const int64_t longs[] = {int64_t{-1} << 62};
  const uint8_t bytes[] = {0, 255, 7};
  const std::vector<TensorToStore> written = {{"floats", DType::kF32, {2, 3}, floats},
                                              {"halves", DType::kBf16, {3, 1}, halves},
                                              {"doubles", DType::kF64, {1}, doubles},
                                              {"ints", DType::kI32, {2}, ints},
                                              {"longs", DType::kI64, {1, 1, 1}, longs},
                                              {"bytes", DType::kU8, {3}, bytes},
                                              {"scalar", DType::kF32, {}, floats},
                                              {"none", DType::kF32, {4, 0}, nullptr},
                                              {"names may hold \"quotes\"\n", DType::kU8, {1}, bytes}};
  write_safetensors(dir / "a", written, {{"format", "pt"}});

  const SafetensorsFile file(dir / "a");
  ASSERT_EQ(file.tensors().size(), written.size());
  EXPECT_EQ(file.metadata().at("format"), "pt");
  for (const TensorToStore& t : written) {
    const StoredTensor& got = file.find(t.name);
    EXPECT_TRUE(got.dtype == t.dtype) << t.name;
    EXPECT_EQ(got.dims, t.dims) << t.name;
    const std::vector<uint8_t> data = file.read(got);
    ASSERT_EQ(static_cast<int64_t>(data.size()), stored_bytes(t.dtype, t.dims)) << t.name;
    EXPECT_TRUE(data.empty() || std::memcmp(data.data(), t.data, data.size()) == 0) << t.name;
  }
  EXPECT_FALSE(file.contains("absent"));
  EXPECT_THROW(file.find("absent"), BadDataError);
}

TEST(Safetensors, data_section_and_every_tensor_are_aligned) {
  TempFolder dir;
  const std::vector<uint8_t> zeros(64, 0);
  for (size_t name_length = 1; name_length < 10; ++name_length) {
    write_safetensors(dir / "a",
                      {{std::string(name_length, 'x'), DType::kU8, {3}, zeros.data()},
                       {"f64", DType::kF64, {1}, zeros.data()},
                       {"bf16", DType::kBf16, {5}, zeros.data()},
                       {"f32", DType::kF32, {3}, zeros.data()}},
                      {});
    const SafetensorsFile file(dir / "a");
    int64_t data_bytes = 0;
    for (const StoredTensor& t : file.tensors()) {
      EXPECT_EQ(t.begin % t.dtype.bytes(), 0) << t.name;
      data_bytes += t.bytes();
    }
    EXPECT_EQ((file.file_bytes() - data_bytes) % 8, 0) << name_length;
  }
}

TEST(Safetensors, equal_content_gives_equal_bytes_whatever_the_order) {
  TempFolder dir;
  const float x[] = {1, 2};
  const TensorToStore a{"a", DType::kF32, {2}, x}, b{"b", DType::kF32, {1}, x};
  write_safetensors(dir / "1", {a, b}, {});
  write_safetensors(dir / "2", {b, a}, {});
  EXPECT_EQ(file_text(dir / "1"), file_text(dir / "2"));
}

TEST(Safetensors, files_of_the_reference_writer_are_read) {
  const std::string folder = std::string(std::getenv("FP4T_TEST_SOURCE")) + "/tests/golden/hf/qwen3_moe/";
  const SafetensorsFile model(folder + "model.safetensors");
  EXPECT_EQ(model.metadata().at("format"), "pt");
  EXPECT_EQ(model.find("model.embed_tokens.weight").dims, (std::vector<int64_t>{257, 64}));
  const SafetensorsFile oracle(folder + "oracle.safetensors");
  EXPECT_TRUE(oracle.find("input_ids").dtype == FileType::kI64);
  EXPECT_EQ(oracle.find("logits").dims, (std::vector<int64_t>{4, 32, 257}));
}

struct HostileCase {
  const char* name;
  std::string contents;
  std::vector<std::string> said;  // parts of the message
};

const std::string kFour(4, '\0');
const std::string kEight(8, '\0');

std::string one(const std::string& dtype, const std::string& shape, const std::string& offsets) {
  return R"({"w":{"dtype":")" + dtype + R"(","shape":)" + shape + R"(,"data_offsets":)" + offsets + "}}";
}

std::vector<HostileCase> hostile_cases() {
  const std::string good = one("F32", "[1]", "[0,4]");
  const std::string deep(100000, '[');
  return {
      {"empty file", "", {"too few"}},
      {"cut length", std::string(5, '\0'), {"too few"}},
      {"zero header", kEight, {"does not begin"}},
      {"header beyond file", file_of(good, kFour).substr(0, 20), {"header of"}},
      {"huge header", std::string(8, '\xFF') + "{}", {"header of 18446744073709551615"}},
      {"header that would wrap", std::string(7, '\xFF') + "\x7F{}", {"header of"}},
      {"no JSON", file_of("{\"w\":", ""), {"no JSON"}},
      {"two roots", file_of("{}{}", ""), {"no JSON"}},
      {"not UTF-8", file_of("{\"\xFF\":1}", ""), {"no JSON"}},
      {"array", file_of("[]", ""), {"does not begin"}},
      {"leading space", file_of(" {}", ""), {"does not begin"}},
      {"deep nesting", file_of("{\"w\":" + deep, ""), {"'w'", "unexpected ["}},
      {"tensor is a number", file_of("{\"w\":3}", ""), {"'w'", "unexpected"}},
      {"tensor is null", file_of("{\"w\":null}", ""), {"'w'", "unexpected null"}},
      {"C64", file_of(one("C64", "[2]", "[0,4]"), kFour), {"'w'", "'C64'", "supported: F32, BF16"}},
      {"unknown type", file_of(one("F8_E5M2", "[4]", "[0,4]"), kFour), {"'w'", "'F8_E5M2'"}},
      {"type is a number", file_of(R"({"w":{"dtype":3}})", ""), {"'w'", "unexpected number 3 at dtype"}},
      {"negative dimension", file_of(one("F32", "[-1]", "[0,4]"), kFour), {"'w'", "-1"}},
      {"fractional dimension", file_of(one("F32", "[1.0]", "[0,4]"), kFour), {"'w'", "1.0"}},
      {"dimension beyond 63 bits", file_of(one("F32", "[9223372036854775808]", "[0,4]"), kFour), {"'w'"}},
      {"dimension beyond 64 bits", file_of(one("F32", "[18446744073709551617]", "[0,4]"), kFour), {"'w'"}},
      {"product wraps to 4",
       file_of(one("F32", "[4611686018427387905]", "[0,4]"), kFour),
       {"'w'", "impossible"}},
      {"product wraps to 0",
       file_of(one("F32", "[4294967296,4294967296]", "[0,0]"), ""),
       {"'w'", "impossible"}},
      {"negative offset", file_of(one("F32", "[1]", "[-4,0]"), kFour), {"'w'", "-4"}},
      {"offsets reversed", file_of(one("F32", "[1]", "[4,0]"), kFour), {"'w'", "[4, 0)"}},
      {"offsets beyond data", file_of(one("F32", "[2]", "[0,8]"), kFour), {"'w'", "[0, 8) of 4"}},
      {"one offset", file_of(one("F32", "[1]", "[0]"), kFour), {"'w'", "two data offsets"}},
      {"three offsets", file_of(one("F32", "[1]", "[0,4,8]"), kFour), {"'w'", "third"}},
      {"shape does not fit", file_of(one("F32", "[2]", "[0,4]"), kFour), {"'w'", "takes 4 bytes", "needs 8"}},
      {"no shape", file_of(R"({"w":{"dtype":"F32","data_offsets":[0,4]}})", kFour), {"'w'", "lacks"}},
      {"shape twice",
       file_of(R"({"w":{"dtype":"F32","shape":[1],"shape":[1],"data_offsets":[0,4]}})", kFour),
       {"'w'", "second 'shape'"}},
      {"unknown key",
       file_of(R"({"w":{"dtype":"F32","shape":[1],"data_offsets":[0,4],"x":1}})", kFour),
       {"'w'", "key 'x'"}},
      {"name twice",
       file_of(
           R"({"w":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"w":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}})",
           kEight),
       {"'w'", "twice"}},
      {"overlap",
       file_of(
           R"({"v":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"w":{"dtype":"F32","shape":[1],"data_offsets":[2,6]}})",
           kEight),
       {"'w'", "overlaps"}},
      {"same bytes twice",
       file_of(
           R"({"v":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"w":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}})",
           kFour),
       {"'w'", "overlaps"}},
      {"gap", file_of(one("F32", "[1]", "[4,8]"), kEight), {"'w'", "unused bytes"}},
      {"unused end", file_of(good, kEight), {"'w'", "4 bytes after"}},
      {"data without tensors", file_of("{}", kFour), {"4 bytes after"}},
      {"metadata of a number", file_of(R"({"__metadata__":{"format":1}})", ""), {"__metadata__"}},
      {"metadata twice", file_of(R"({"__metadata__":{},"__metadata__":{}})", ""), {"twice"}},
      {"control characters in a name", file_of("{\"\\u001b[2J\":3}", ""), {"'\\x1b[2J'"}},
  };
}

TEST(Safetensors, hostile_files_are_refused_with_file_and_tensor) {
  TempFolder dir;
  const std::string path = dir / "bad.safetensors";
  for (const HostileCase& c : hostile_cases()) {
    set_file(path, c.contents);
    try {
      const SafetensorsFile file(path);
      ADD_FAILURE() << c.name << " was accepted";
    } catch (const BadDataError& error) {
      const std::string message = error.what();
      EXPECT_NE(message.find(path), std::string::npos) << c.name << ": " << message;
      for (const std::string& part : c.said) {
        EXPECT_NE(message.find(part), std::string::npos) << c.name << ": " << message;
      }
    }
  }
}

TEST(Safetensors, well_formed_corner_cases_are_accepted) {
  TempFolder dir;
  set_file(dir / "a", file_of("{}", ""));
  EXPECT_TRUE(SafetensorsFile(dir / "a").tensors().empty());
  set_file(dir / "a", file_of(one("F32", "[1]", "[0,4]") + "     ", kFour));
  EXPECT_EQ(SafetensorsFile(dir / "a").tensors().size(), 1u);
  set_file(dir / "a", file_of(one("F32", "[0,3]", "[0,0]"), ""));
  EXPECT_EQ(SafetensorsFile(dir / "a").read(SafetensorsFile(dir / "a").find("w")).size(), 0u);
}

TEST(Safetensors, absent_files_folders_and_pipes_are_told_apart) {
  TempFolder dir;
  EXPECT_THROW(SafetensorsFile(dir / "absent"), MissingInputError);
  EXPECT_THROW(SafetensorsFile(dir.path()), BadDataError);
  ASSERT_EQ(::mkfifo((dir / "pipe").c_str(), 0600), 0);
  EXPECT_THROW(SafetensorsFile(dir / "pipe"), BadDataError);
}

TEST(Safetensors, a_file_cut_after_opening_is_an_error_not_garbage) {
  TempFolder dir;
  set_file(dir / "a", file_of(one("F32", "[1]", "[0,4]"), kFour));
  const SafetensorsFile file(dir / "a");
  std::filesystem::resize_file(dir / "a", static_cast<uintmax_t>(file.file_bytes() - 1));
  EXPECT_THROW(file.read(file.find("w")), BadDataError);
}

TEST(Safetensors, a_folder_that_is_not_there_is_a_save_error) {
  const float x = 1;
  EXPECT_THROW(write_safetensors("/nonexistent_folder/a", {{"x", DType::kF32, {1}, &x}}, {}), SaveError);
}

TEST(Safetensors, duplicate_names_are_not_written) {
  TempFolder dir;
  const float x = 1;
  const TensorToStore t{"x", DType::kF32, {1}, &x};
  EXPECT_THROW(write_safetensors(dir / "a", {t, t}, {}), InternalError);
}

}  // namespace
}  // namespace fp4t::test

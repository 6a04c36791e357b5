// Random damage never crashes the readers: they refuse, or what they accept can be read in full.
#include <random>

#include "engine/store/huggingface.h"
#include "engine/store/manifest.h"
#include "engine/store/safetensors.h"
#include "gtest/gtest.h"
#include "tests/unit/store_fixture.h"

namespace fp4t::test {
namespace {

// Bytes that mean something in a header, so that mutations get past the first check.
const std::string kDictionary[] = {"\"F32\"",     "\"F16\"",
                                   "\"BF16\"",    "[]",
                                   "{}",          "[0,0]",
                                   "-1",          "0",
                                   "1e9",         "null",
                                   "\"\"",        "__metadata__",
                                   ",",           "data_offsets",
                                   ":",           "[",
                                   "}",           "4611686018427387904",
                                   "\\u0000",     "9999999999999",
                                   "\xEF\xBB\xBF"};

std::string mutated(std::string text, std::mt19937_64& random) {
  const auto below = [&](size_t n) { return n == 0 ? 0 : static_cast<size_t>(random() % n); };
  for (size_t changes = 1 + below(4); changes > 0; --changes) {
    const size_t at = below(text.size());
    switch (below(7)) {
      case 0:
        if (!text.empty()) text[at] = static_cast<char>(text[at] ^ (1 << below(8)));
        break;
      case 1:
        if (!text.empty()) text[at] = static_cast<char>(random());
        break;
      case 2:
        text.resize(at);
        break;
      case 3:
        text.erase(at, 1 + below(8));
        break;
      case 4:
        text.insert(at, text.substr(below(text.size()), below(40)));
        break;
      case 5: {
        const std::string& word = kDictionary[below(std::size(kDictionary))];
        text.replace(at, std::min(below(12), text.size() - at), word);
        break;
      }
      default:
        text.append(below(16), static_cast<char>(random()));
    }
  }
  return text;
}

// Damage that keeps the length field right, so that it reaches the header's grammar.
std::string mutated_header(const std::string& file, std::mt19937_64& random) {
  size_t length = 0;
  for (size_t i = 0; i < 8; ++i) length |= static_cast<size_t>(static_cast<uint8_t>(file[i])) << (8 * i);
  const std::string header = mutated(file.substr(8, length), random);
  std::string out;
  for (size_t i = 0; i < 8; ++i) out += static_cast<char>((header.size() >> (8 * i)) & 0xFF);
  return out + header + file.substr(8 + length);
}

TEST(SafetensorsFuzz, random_mutations_are_refused_or_read_in_full) {
  TempFolder dir;
  const std::vector<uint8_t> data(64, 7);
  write_safetensors(dir / "good",
                    {{"a.weight", DType::kF32, {2, 3}, data.data()},
                     {"b", DType::kBf16, {5}, data.data()},
                     {"c", DType::kI64, {1, 1}, data.data()},
                     {"empty", DType::kU8, {0}, data.data()}},
                    {{"format", "pt"}});
  const std::string good = file_text(dir / "good");
  const uint64_t seed = std::random_device{}();
  std::mt19937_64 random(seed);
  int accepted = 0, refused = 0;
  for (int i = 0; i < 3000; ++i) {
    const std::string text = i % 2 ? mutated(good, random) : mutated_header(good, random);
    set_file(dir / "bad", text);
    try {
      const SafetensorsFile file(dir / "bad");
      int64_t bytes = 0;
      for (const StoredTensor& t : file.tensors()) {
        const std::vector<uint8_t> read = file.read(file.find(t.name));
        ASSERT_EQ(static_cast<int64_t>(read.size()), stored_bytes(t.dtype, t.dims)) << "seed " << seed;
        bytes += t.bytes();
      }
      ASSERT_LE(bytes, static_cast<int64_t>(text.size())) << "seed " << seed << ", mutation " << i;
      ++accepted;
    } catch (const BadDataError& error) {
      EXPECT_NE(std::string(error.what()).find(dir / "bad"), std::string::npos) << error.what();
      ++refused;
    }
  }
  EXPECT_GT(accepted, 20) << "seed " << seed;  // data bits and metadata may change
  EXPECT_GT(refused, 1500) << "seed " << seed;
}

TEST(SafetensorsFuzz, manifests_with_a_right_hash_but_any_text_are_refused_or_read) {
  Manifest manifest;
  SmallRun run(3);
  manifest.state = run.state();
  manifest.shards = {{shard_file_name(0), 100, 1}, {shard_file_name(1), 50, 2}};
  manifest.tensors = {{"a", DType::kF32, {2, 3}, 0, 5}, {"b", DType::kI64, {}, 1, 6}};
  const std::string good = manifest_text(manifest);
  EXPECT_EQ(manifest_text(parse_manifest("m", good)), good);
  const std::string tail = good.substr(good.rfind(",\n \"manifest_hash\""));
  const uint64_t seed = std::random_device{}();
  std::mt19937_64 random(seed);
  int accepted = 0, refused = 0;
  for (int i = 0; i < 3000; ++i) {
    std::string body = mutated(good.substr(0, good.size() - tail.size()), random);
    try {
      parse_manifest("m", with_manifest_hash(std::move(body)));
      ++accepted;
    } catch (const BadDataError&) {
      ++refused;
    }
  }
  EXPECT_GT(accepted, 5) << "seed " << seed;  // the recipe's text, say
  EXPECT_GT(refused, 1500) << "seed " << seed;
}

TEST(SafetensorsFuzz, random_configs_are_refused_or_read) {
  TempFolder dir;
  const std::string golden =
      file_text(std::string(std::getenv("FP4T_TEST_SOURCE")) + "/tests/golden/hf/qwen3_moe/config.json");
  ASSERT_FALSE(golden.empty());
  const uint64_t seed = std::random_device{}();
  std::mt19937_64 random(seed);
  int refused = 0;
  for (int i = 0; i < 1500; ++i) {
    set_file(dir / "config.json", mutated(golden, random));
    try {
      const ModelSpec m = model_from_config(dir.path());
      ASSERT_GT(m.layers, 0) << "seed " << seed;
      ASSERT_GT(m.head_dim, 0) << "seed " << seed;
    } catch (const BadDataError&) {
      ++refused;
    }
  }
  EXPECT_GT(refused, 400) << "seed " << seed;
}

}  // namespace
}  // namespace fp4t::test

// A folder of its own for each test, whole-file access, and a small run to save.
#pragma once

#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <limits>
#include <string>
#include <vector>

#include "engine/store/checkpoint.h"
#include "tests/support/tensors.h"

namespace fp4t::test {

class TempFolder {
 public:
  TempFolder() {
    std::string pattern = (std::filesystem::temp_directory_path() / "fp4t_store_XXXXXX").string();
    path_ = ::mkdtemp(pattern.data());
  }
  ~TempFolder() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  TempFolder(const TempFolder&) = delete;
  std::string operator/(const std::string& name) const { return path_ + "/" + name; }
  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

inline std::string file_text(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), std::istreambuf_iterator<char>()};
}

inline void set_file(const std::string& path, const std::string& text) {
  std::ofstream(path, std::ios::binary | std::ios::trunc) << text;
}

// What `body` throws, as text; "" when nothing. Other exceptions than ours pass.
template <class Body>
std::string error_of(const Body& body) {
  try {
    body();
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

// Four tensors of different types whose contents depend on the step alone.
class SmallRun {
 public:
  explicit SmallRun(int64_t step)
      : embed_(DType::kBf16, {33, 7}),
        experts_(DType::kF32, {3, 5, 4}),
        moments_(DType::kF32, {3, 5, 4}),
        load_(DType::kI64, {3}) {
    fill_normal(embed_, static_cast<uint64_t>(step) * 10 + 1);
    fill_normal(experts_, static_cast<uint64_t>(step) * 10 + 2);
    fill_normal(moments_, static_cast<uint64_t>(step) * 10 + 3);
    for (int i = 0; i < 3; ++i) load_.as<int64_t>()[i] = step * 100 + i;
    state_.stage = 0;
    state_.step = step;
    state_.attempted_updates = step + 1;
    state_.applied_updates = step;
    state_.next_sample = 64 * step;
    state_.metrics_lines = step + 1;
    state_.counters = {{"loss", 1.0 / (3.0 + static_cast<double>(step))}, {"skips", 0.0}};
    state_.texts = {{"data", "fingerprint 00ff"}};
    state_.recipe_yaml = "run: {seed: 1}\n";
    state_.precision_hash = "0123456789abcdef";
    state_.telemetry_json = "{\"seconds\": 1.5}";
  }
  std::vector<NamedTensor> tensors() {
    return {{"embed.weight", embed_.view()},
            {"layers.0.experts.gate_up.weight", experts_.view()},
            {"optimizer.m.layers.0.experts.gate_up.weight", moments_.view()},
            {"layers.0.router.load", load_.view()}};
  }
  RunState& state() { return state_; }
  bool same_tensors(SmallRun& other) {
    return embed_.same_bytes(other.embed_) && experts_.same_bytes(other.experts_) &&
           moments_.same_bytes(other.moments_) && load_.same_bytes(other.load_);
  }

 private:
  HostTensor embed_, experts_, moments_, load_;
  RunState state_;
};

}  // namespace fp4t::test

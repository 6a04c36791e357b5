// Folders of the small golden models, for tests to read and to spoil.
#pragma once

#include <cstdlib>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "engine/store/safetensors.h"
#include "tests/unit/store_fixture.h"

namespace fp4t::test {

inline std::string golden(const std::string& family) {
  return std::string(std::getenv("FP4T_TEST_SOURCE")) + "/tests/golden/hf/" + family;
}

// A writable copy of a golden folder whose config and tensors a test may change.
class HuggingFaceCopy {
 public:
  explicit HuggingFaceCopy(const std::string& family) {
    config = nlohmann::json::parse(file_text(golden(family) + "/config.json"));
    const SafetensorsFile file(golden(family) + "/model.safetensors");
    for (const StoredTensor& t : file.tensors()) tensors[t.name] = {t.dtype, t.dims, file.read(t)};
  }
  struct Tensor {
    FileType dtype = FileType::kF32;
    std::vector<int64_t> dims;
    std::vector<uint8_t> bytes;
  };

  const std::string& write() {
    set_file(dir_ / "config.json", config.dump());
    write_part("model.safetensors", [](const std::string&) { return true; });
    return dir_.path();
  }
  template <class Choice>
  void write_part(const std::string& file, const Choice& choose) {
    std::vector<TensorToStore> list;
    for (const auto& [name, t] : tensors) {
      if (choose(name)) list.push_back({name, t.dtype, t.dims, t.bytes.data()});
    }
    write_safetensors(dir_ / file, list, {{"format", "pt"}});
  }
  const std::string& path() const { return dir_.path(); }
  std::string operator/(const std::string& name) const { return dir_ / name; }

  nlohmann::json config;
  std::map<std::string, Tensor> tensors;

 private:
  TempFolder dir_;
};

}  // namespace fp4t::test

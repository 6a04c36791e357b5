// The weights of a Hugging Face folder (config.json, *.safetensors in one file or several) as our parameters.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "engine/store/huggingface_names.h"
#include "engine/store/safetensors.h"

namespace fp4t {

// Every tensor of both sides has found its partner once this is made; a tied head that is stored too must be
// the embedding. Throws MissingInputError; BadDataError with file and tensor.
class HuggingFaceFolder {
 public:
  HuggingFaceFolder(const std::string& folder, const ModelSpec& model,
                    const std::vector<ParamInfo>& parameters);

  // Values of parameters[index], whole: of F32, BF16 or F16 tensors, widened to FP32. NaN and infinities are
  // refused: nothing that is computed from them means anything.
  std::vector<float> read(size_t index) const;

 private:
  void open(const std::string& file);
  void open_indexed(const std::string& index);
  void match(const ModelSpec& model, const std::vector<ParamInfo>& parameters);
  void match_tied_head() const;
  std::vector<LibraryPiece> pieces_of(const ParamInfo& info, const ModelSpec& model) const;
  const SafetensorsFile& file_of(const std::string& name) const { return *files_.at(place_.at(name)); }

  std::string folder_;
  std::map<std::string, std::shared_ptr<SafetensorsFile>> files_;
  std::map<std::string, std::string> place_;       // tensor -> file
  std::vector<std::vector<LibraryPiece>> pieces_;  // by parameter
};

}  // namespace fp4t

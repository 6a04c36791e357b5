// A checkpoint's weights as the library has them: the one object from which every layout is written
// (export_layout.h). Each weight is a matrix of the library (q, k and v apart, gate and up apart, every
// expert by itself), as numbers, or as the very codes that fprop multiplies under a forward table: those of
// our fused matrix, so q, k and v share a tensor scale, and so do gate and up.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "engine/plan/plan.h"
#include "engine/store/checkpoint_read.h"
#include "engine/store/huggingface_names.h"
#include "kernels/formats/quant.h"

namespace fp4t {

// Codes and scales of a matrix [rows, cols] whose contraction runs along cols, without any padding.
struct WeightCodes {
  int64_t rows = 0, cols = 0;
  std::vector<uint8_t> codes;  // NVFP4: [rows, cols / 2], element 2i in the low nibble; MXFP8: [rows, cols]
  std::vector<uint8_t> block_scales;  // NVFP4: E4M3 [rows, cols / 16]; MXFP8: E8M0 [rows, cols / 32]
  float decode_scale = 1.0f;          // NVFP4: a value is code * block scale * this
};

struct ExportWeight {
  LibraryPiece piece;          // name, shape, and where it lies in the parameter
  size_t parameter;            // index in Plan::parameters
  Format format;               // kBf16: numbers; kNvfp4, kMxfp8: codes
  std::string module() const;  // the name without ".weight"
};

class ExportModel {
 public:
  // `table`: the forward whose codes weights become where its cell is `coded`; null: numbers alone. Throws
  // RecipeError for what no family has, by key or tensor; for a table whose codes no file can hold (drawn
  // anew, rotated, of a row that no block ends with, of another format), by cell; BadDataError.
  ExportModel(const std::string& checkpoint, const Plan& plan, const ForwardTable* table, Format coded);

  const ModelSpec& model() const { return plan_.model; }
  const Plan& plan() const { return plan_; }
  Family family() const { return family_; }
  const std::vector<ExportWeight>& weights() const { return weights_; }
  // In FP32: the master's own.
  std::vector<float> values(const ExportWeight& weight);
  WeightCodes codes(const ExportWeight& weight);
  // Largest magnitude of the activations that a weight is multiplied with, as set_act_amax recorded it;
  // negative where none was.
  float act_amax(const ExportWeight& weight) const;
  void set_act_amax(int64_t layer, Module module, float amax);

 private:
  void refuse_biases() const;
  QuantSpec spec_of(const ParamInfo& info, Format coded) const;
  const std::vector<float>& load(size_t parameter);
  const QuantView& load_codes(size_t parameter);
  const TensorEntry& entry(const std::string& name) const;

  CheckpointReader reader_;
  const Plan& plan_;
  const ForwardTable* table_;
  Family family_;
  std::vector<ExportWeight> weights_;
  std::vector<QuantSpec> specs_;              // by parameter
  std::vector<std::vector<float>> act_amax_;  // [layers + 1][modules]
  // The parameter in use: weights come in the order of their parameters.
  size_t loaded_ = SIZE_MAX, coded_ = SIZE_MAX;
  std::vector<float> values_;
  QuantView view_;
  std::vector<uint8_t> codes_, block_scales_;
  std::vector<float> tensor_scale_;
};

// The family that has all parts of this model. Throws RecipeError naming every key that keeps it from one.
Family exportable_family(const ModelSpec& model);

}  // namespace fp4t

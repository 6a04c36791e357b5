// Layouts of exported weights: which tensors one weight becomes, their bytes, and what config.json says of
// them. Sources: RELIABILITY.md B4; compressed-tensors' quantization scheme files; ModelOpt's exporter.
//
//   hf                        W.weight                              BF16 or F32
//   modelopt_nvfp4            W.weight U8 [out, in/2], W.weight_scale E4M3 [out, in/16],
//                             W.weight_scale_2 F32 []: value = code * scale * scale_2,
//                             W.input_scale F32 []: amax of the activations / (6 * 448)
//   compressed_tensors_nvfp4  W.weight_packed, W.weight_scale as above, W.weight_global_scale F32 [1]: the
//                             reciprocal of scale_2, W.input_global_scale F32 [1]: the reciprocal of
//                             input_scale
//   mxfp8                     W.weight E4M3 [out, in], W.weight_scale U8 (E8M0) [out, in/32]
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "engine/store/export_model.h"
#include "engine/store/safetensors.h"

namespace fp4t {

enum class ExportLayout : uint8_t { kHf, kModeloptNvfp4, kCompressedTensorsNvfp4, kMxfp8 };
inline constexpr const char* kExportLayouts[] = {"hf", "modelopt_nvfp4", "compressed_tensors_nvfp4", "mxfp8"};

// What the layout codes weights as; kBf16: it holds numbers.
Format coded_format(ExportLayout layout);
// Whether it has scales of activations, which only a run of the model can tell.
bool has_act_scales(ExportLayout layout);

struct ExportTensor {
  std::string name;
  FileType type;
  std::vector<int64_t> dims;
};
// `number`: the type of a weight that is not coded.
std::vector<ExportTensor> tensors_of(const ExportWeight& weight, ExportLayout layout, FileType number);
// Their bytes, in that order. Throws BadDataError where a scale of activations is needed and none is known.
std::vector<std::vector<uint8_t>> bytes_of(ExportModel& model, const ExportWeight& weight,
                                           ExportLayout layout, FileType number);

// `quantization_config` of config.json; null for hf.
nlohmann::ordered_json quantization_config(const ExportModel& model, ExportLayout layout);
// hf_quant_config.json of ModelOpt; null for the others.
nlohmann::ordered_json modelopt_config(const ExportModel& model, ExportLayout layout);

// x with 1 / x == decode in FP32, so that a reader that takes the reciprocal has the trainer's own scale.
// Throws InternalError when there is none, which a decode scale that is itself a rounded reciprocal rules
// out.
float encode_scale(float decode);

}  // namespace fp4t

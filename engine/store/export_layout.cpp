#include "engine/store/export_layout.h"

#include <cmath>
#include <cstring>

#include "kernels/base/check.h"
#include "kernels/formats/bf16.h"

namespace fp4t {

namespace {

using Json = nlohmann::ordered_json;
using Bytes = std::vector<uint8_t>;

Bytes as_bytes(float value) {
  Bytes out(sizeof value);
  std::memcpy(out.data(), &value, sizeof value);
  return out;
}

Bytes number_bytes(const std::vector<float>& values, FileType type) {
  Bytes out(values.size() * static_cast<size_t>(type.bytes()));
  if (type == FileType::kF32) {
    std::memcpy(out.data(), values.data(), out.size());
    return out;
  }
  FP4T_CHECK(type == FileType::kBf16, "numbers in ", type.name());
  for (size_t i = 0; i < values.size(); ++i) {
    const Bf16 x = f32_to_bf16(values[i]);
    std::memcpy(out.data() + 2 * i, &x, sizeof x);
  }
  return out;
}

// NUMERICS.md section 1.2: S_dec of a whole tensor with this amax.
float act_scale(const ExportModel& model, const ExportWeight& weight) {
  const float amax = model.act_amax(weight);
  if (!(amax > 0) || !std::isfinite(amax)) {
    throw BadDataError(detail::concat("the activations of '", weight.module(),
                                      "' have no known largest magnitude (", amax,
                                      "): no scale can be written"));
  }
  return 1.0f / ((6.0f * 448.0f) / amax);
}

// Modules that a loader would take for coded ones, and that hold numbers: every matrix of a linear layer.
std::vector<std::string> uncoded_modules(const ExportModel& model) {
  std::vector<std::string> names;
  for (const ExportWeight& w : model.weights()) {
    const ParamInfo& info = model.plan().parameters[w.parameter];
    const bool is_linear = info.role == ParamRole::kGemmWeight || info.role == ParamRole::kExpertWeight ||
                           info.role == ParamRole::kRouter;
    if (is_linear && w.format == Format::kBf16) names.push_back(w.module());
  }
  if (model.model().tied_head) names.push_back("lm_head");
  return names;
}

Json group_of(ExportLayout layout) {
  const bool nvfp4 = coded_format(layout) == Format::kNvfp4;
  Json weights = {{"num_bits", nvfp4 ? 4 : 8},
                  {"type", "float"},
                  {"strategy", nvfp4 ? "tensor_group" : "group"},
                  {"group_size", nvfp4 ? 16 : 32},
                  {"symmetric", true},
                  {"dynamic", false},
                  {"scale_dtype", nvfp4 ? "torch.float8_e4m3fn" : "torch.uint8"}};
  Json acts = weights;
  if (nvfp4) {
    acts["dynamic"] = "local";
  } else {
    acts["dynamic"] = true;
  }
  return {{"targets", {"Linear"}},
          {"weights", weights},
          {"input_activations", acts},
          {"output_activations", nullptr}};
}

}  // namespace

Format coded_format(ExportLayout layout) {
  if (layout == ExportLayout::kHf) return Format::kBf16;
  return layout == ExportLayout::kMxfp8 ? Format::kMxfp8 : Format::kNvfp4;
}

bool has_act_scales(ExportLayout layout) { return coded_format(layout) == Format::kNvfp4; }

float encode_scale(float decode) {
  float x = 1.0f / decode;
  for (int i = 0; i < 4; ++i) x = std::nextafter(x, 0.0f);
  for (int i = 0; i < 9; ++i, x = std::nextafter(x, INFINITY)) {
    if (1.0f / x == decode) return x;
  }
  throw InternalError(detail::concat("no FP32 number has the reciprocal ", decode));
}

std::vector<ExportTensor> tensors_of(const ExportWeight& weight, ExportLayout layout, FileType number) {
  const std::vector<int64_t>& dims = weight.piece.dims;
  if (weight.format == Format::kBf16) return {{weight.piece.name, number, dims}};
  const std::string m = weight.module();
  if (layout == ExportLayout::kMxfp8) {
    return {{m + ".weight", FileType::kF8E4m3, dims},
            {m + ".weight_scale", FileType::kU8, {dims[0], dims[1] / 32}}};
  }
  const bool modelopt = layout == ExportLayout::kModeloptNvfp4;
  const std::vector<int64_t> scalar = modelopt ? std::vector<int64_t>{} : std::vector<int64_t>{1};
  return {{m + (modelopt ? ".weight" : ".weight_packed"), FileType::kU8, {dims[0], dims[1] / 2}},
          {m + ".weight_scale", FileType::kF8E4m3, {dims[0], dims[1] / 16}},
          {m + (modelopt ? ".weight_scale_2" : ".weight_global_scale"), FileType::kF32, scalar},
          {m + (modelopt ? ".input_scale" : ".input_global_scale"), FileType::kF32, scalar}};
}

std::vector<Bytes> bytes_of(ExportModel& model, const ExportWeight& weight, ExportLayout layout,
                            FileType number) {
  if (weight.format == Format::kBf16) return {number_bytes(model.values(weight), number)};
  WeightCodes codes = model.codes(weight);
  std::vector<Bytes> out = {std::move(codes.codes), std::move(codes.block_scales)};
  if (layout == ExportLayout::kMxfp8) return out;
  const bool decode = layout == ExportLayout::kModeloptNvfp4;
  for (const float scale : {codes.decode_scale, act_scale(model, weight)}) {
    out.push_back(as_bytes(decode ? scale : encode_scale(scale)));
  }
  return out;
}

Json quantization_config(const ExportModel& model, ExportLayout layout) {
  if (layout == ExportLayout::kHf) return nullptr;
  if (layout == ExportLayout::kModeloptNvfp4) {
    const Json group = {{"dynamic", false}, {"num_bits", 4}, {"type", "float"}, {"group_size", 16}};
    return {{"quant_method", "modelopt"},
            {"quant_algo", "NVFP4"},
            {"config_groups",
             {{"group_0", {{"targets", {"Linear"}}, {"weights", group}, {"input_activations", group}}}}},
            {"ignore", uncoded_modules(model)},
            {"producer", {{"name", "fp4train"}, {"version", FP4T_VERSION}}}};
  }
  const char* format = layout == ExportLayout::kMxfp8 ? "mxfp8-quantized" : "nvfp4-pack-quantized";
  Json group = group_of(layout);
  group["format"] = format;
  return {{"quant_method", "compressed-tensors"}, {"format", format},
          {"quantization_status", "compressed"},  {"config_groups", {{"group_0", group}}},
          {"ignore", uncoded_modules(model)},     {"kv_cache_scheme", nullptr}};
}

Json modelopt_config(const ExportModel& model, ExportLayout layout) {
  if (layout != ExportLayout::kModeloptNvfp4) return nullptr;
  return {{"producer", {{"name", "fp4train"}, {"version", FP4T_VERSION}}},
          {"quantization",
           {{"quant_algo", "NVFP4"},
            {"kv_cache_quant_algo", nullptr},
            {"group_size", 16},
            {"exclude_modules", uncoded_modules(model)}}}};
}

}  // namespace fp4t

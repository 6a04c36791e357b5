#include "engine/store/export_model.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "engine/plan/operands.h"
#include "engine/plan/resolve.h"
#include "kernels/base/check.h"
#include "kernels/base/numeric.h"
#include "kernels/base/text.h"
#include "kernels/formats/bf16.h"
#include "kernels/ops/run.h"

namespace fp4t {

namespace {

// Cells of weights are those of fprop.
std::string cell_of(const ParamInfo& info) {
  const std::string layer = info.layer >= 0 ? "layers." + std::to_string(info.layer) + " " : "";
  return detail::concat(layer, name_of(info.module), " fprop weight");
}

GemmSite site_of_weight(const ParamInfo& info, const ModelSpec& model) {
  const bool experts = info.role == ParamRole::kExpertWeight;
  const int64_t layer = info.layer >= 0 ? info.layer : model.layers;
  const int axis = experts ? 1 : 0;
  return {layer, info.module, experts ? info.shape[0] : 0, info.shape[axis], info.shape[axis + 1]};
}

bool is_gemm_weight(const ParamInfo& info) {
  return info.role == ParamRole::kGemmWeight || info.role == ParamRole::kExpertWeight;
}

}  // namespace

std::string ExportWeight::module() const {
  const std::string end = ".weight";
  const std::string& name = piece.name;
  FP4T_CHECK(name.size() > end.size() && name.compare(name.size() - end.size(), end.size(), end) == 0, name);
  return name.substr(0, name.size() - end.size());
}

Family exportable_family(const ModelSpec& m) {
  const Family family = family_of(m);
  std::string amiss;
  const auto need = [&](bool holds, const std::string& what) {
    if (!holds) amiss += "\n  " + what;
  };
  using detail::concat;
  const std::string none = concat(": ", model_type_of(family), " has no such part");
  need(m.swiglu_clamp == 0, concat("model.swiglu_clamp is ", m.swiglu_clamp, none));
  if (m.moe.experts > 0) {
    need(m.moe.shared_experts == 0, concat("model.moe.shared_experts is ", m.moe.shared_experts, none));
    need(m.moe.router == "softmax", concat("model.moe.router is ", m.moe.router, none));
    need(m.moe.gate_scale == 1, concat("model.moe.gate_scale is ", m.moe.gate_scale, none));
  }
  if (family == Family::kMixtral) {
    need(m.moe.dense_layers == 0, concat("model.moe.dense_layers is ", m.moe.dense_layers, none));
    need(m.moe.normalise, "model.moe.normalise is false: mixtral's gates always sum to 1");
    need(amiss.empty(), "(experts without model.qk_norm make it mixtral; with it, qwen3_moe)");
  }
  if (!amiss.empty()) throw RecipeError("no Hugging Face family has this model:" + amiss);
  return family;
}

ExportModel::ExportModel(const std::string& checkpoint, const Plan& plan, const ForwardTable* table,
                         Format coded)
    : reader_(checkpoint), plan_(plan), table_(table), family_(exportable_family(plan.model)) {
  refuse_biases();
  const ModelSpec& m = plan.model;
  act_amax_.assign(static_cast<size_t>(m.layers + 1), std::vector<float>(kNumGemmModules, -1.0f));
  for (size_t i = 0; i < plan.parameters.size(); ++i) {
    const ParamInfo& info = plan.parameters[i];
    const TensorEntry& stored = entry("model." + info.name);
    if (stored.dims != dims_of(info.shape)) {
      throw BadDataError(detail::concat("tensor '", printable(stored.name), "' has shape ",
                                        dims_text(stored.dims), ", the checkpoint's recipe says ",
                                        info.shape));
    }
    specs_.push_back(spec_of(info, coded));
    for (const LibraryPiece& piece : library_pieces(info, m, ExpertLayout::kSeparate)) {
      weights_.push_back({piece, i, specs_.back().format});
    }
  }
  if (m.tied_head && table && table->head.weight.quantised()) {
    throw RecipeError(
        "the table codes the head's weight, but the head is tied to the embedding (model.tied_head), "
        "which no layout codes");
  }
  const bool any =
      std::any_of(weights_.begin(), weights_.end(), [&](const auto& w) { return w.format == coded; });
  if (table && !any) {
    throw RecipeError(detail::concat("no weight of the table is ", name_of(coded),
                                     "; --format hf writes numbers, --table chooses another table, --preset "
                                     "those of a preset"));
  }
}

const TensorEntry& ExportModel::entry(const std::string& name) const {
  const auto& list = reader_.manifest().tensors;
  const auto it =
      std::lower_bound(list.begin(), list.end(), name,
                       [](const TensorEntry& t, const std::string& wanted) { return t.name < wanted; });
  if (it == list.end() || it->name != name) throw BadDataError("the checkpoint has no tensor '" + name + "'");
  return *it;
}

// No family adds a bias to the scores by which experts are chosen.
void ExportModel::refuse_biases() const {
  for (const BufferInfo& b : plan_.buffers) {
    for (const uint8_t byte : reader_.read(entry("model." + b.name))) {
      if (byte == 0) continue;
      throw RecipeError(detail::concat("'", b.name, "' is not zero (model.moe.balance.bias_rate): ",
                                       model_type_of(family_), " chooses experts without a bias"));
    }
  }
}

QuantSpec ExportModel::spec_of(const ParamInfo& info, Format coded) const {
  if (!table_ || !is_gemm_weight(info)) return {};
  const GemmSite site = site_of_weight(info, plan_.model);
  QuantSpec spec = table_->cell(site.layer, info.module).weight;
  if (!spec.quantised()) return {};
  const auto refuse = [&](const std::string& why) {
    throw RecipeError(detail::concat(cell_of(info), " is ", describe(spec), ": ", why));
  };
  if (spec.format != coded) refuse(detail::concat("the layout holds ", name_of(coded), " alone"));
  if (spec.rounding != Rounding::kNearest) refuse("its codes are drawn anew for each product");
  if (spec.hadamard != 0) refuse("its codes are of rotated values, which no layout says");
  if (site.in % block_length(spec) != 0) {
    refuse(detail::concat("rows of ", site.in, " are no whole number of blocks of ", block_length(spec)));
  }
  return spec;
}

const std::vector<float>& ExportModel::load(size_t parameter) {
  if (loaded_ == parameter) return values_;
  const TensorEntry& t = entry("model." + plan_.parameters[parameter].name);
  const std::vector<uint8_t> bytes = reader_.read(t);
  values_.resize(bytes.size() / static_cast<size_t>(dtype_bytes(t.dtype)));
  if (t.dtype == DType::kF32) {
    std::memcpy(values_.data(), bytes.data(), bytes.size());
  } else if (t.dtype == DType::kBf16) {
    for (size_t i = 0; i < values_.size(); ++i) {
      Bf16 x;
      std::memcpy(&x, bytes.data() + 2 * i, sizeof x);
      values_[i] = bf16_to_f32(x);
    }
  } else {
    throw BadDataError(detail::concat("tensor '", t.name, "' is ", dtype_name(t.dtype)));
  }
  const auto bad = std::find_if(values_.begin(), values_.end(), [](float v) { return !std::isfinite(v); });
  if (bad != values_.end()) {
    throw BadDataError(detail::concat("tensor '", t.name, "' holds ", *bad, " as its element ",
                                      bad - values_.begin(), ": no other program could use it"));
  }
  loaded_ = parameter;
  return values_;
}

std::vector<float> ExportModel::values(const ExportWeight& weight) {
  const auto begin = load(weight.parameter).begin() + weight.piece.offset;
  return {begin, begin + weight.piece.elements()};
}

// As engine/model/linear.cpp makes them: of the BF16 copy, all experts at once.
const QuantView& ExportModel::load_codes(size_t parameter) {
  if (coded_ == parameter) return view_;
  const ParamInfo& info = plan_.parameters[parameter];
  const GemmSite site = site_of_weight(info, plan_.model);
  const std::vector<float>& values = load(parameter);
  std::vector<Bf16> copy(values.size());
  std::transform(values.begin(), values.end(), copy.begin(), [](float v) { return f32_to_bf16(v); });
  OperandForm form;
  form.operand = OperandRole::kWeight;
  form.spec = specs_[parameter];
  view_ = operand_layout(form, site, 0);
  codes_.assign(static_cast<size_t>(code_bytes(view_)), 0);
  block_scales_.assign(static_cast<size_t>(block_scale_bytes(view_)), 0);
  tensor_scale_.assign(static_cast<size_t>(tensor_scale_bytes(view_)) / sizeof(float), 0.0f);
  view_.codes.data = codes_.data();
  view_.block_scales.data = block_scales_.data();
  if (!tensor_scale_.empty()) view_.tensor_scale.data = tensor_scale_.data();
  Queue queue = Queue::cpu(plan_.machine.num_threads);
  Quantize op{};
  op.x = {copy.data(), DType::kBf16, {site.matrices() * site.out, site.in}};
  op.orientation = Orientation::kRow;
  op.out = view_;
  run(queue, op);
  coded_ = parameter;
  return view_;
}

WeightCodes ExportModel::codes(const ExportWeight& weight) {
  const QuantView& v = load_codes(weight.parameter);
  const int64_t outer = outer_padding(v.spec), block = block_length(v.spec);
  const bool nvfp4 = v.spec.format == Format::kNvfp4;
  const auto per_row = [&](int64_t cols) { return nvfp4 ? cols / 2 : cols; };
  WeightCodes out;
  out.rows = weight.piece.dims[0];
  out.cols = weight.piece.dims[1];
  const int64_t group_rows = v.rows / v.groups, first = weight.piece.offset / out.cols;
  const int64_t group = first / group_rows;
  const int64_t stored = group * align_up(group_rows, outer) + first % group_rows;
  const int64_t scales = v.padded_cols / block;  // of a stored row of tiles
  for (int64_t r = stored; r < stored + out.rows; ++r) {
    const auto codes = codes_.begin() + r * per_row(v.padded_cols);
    out.codes.insert(out.codes.end(), codes, codes + per_row(out.cols));
    const auto row_scales = block_scales_.begin() + r / outer * scales;
    out.block_scales.insert(out.block_scales.end(), row_scales, row_scales + out.cols / block);
  }
  if (nvfp4) out.decode_scale = tensor_scale_[static_cast<size_t>(group)];
  return out;
}

float ExportModel::act_amax(const ExportWeight& weight) const {
  const ParamInfo& info = plan_.parameters[weight.parameter];
  const int64_t layer = info.layer >= 0 ? info.layer : plan_.model.layers;
  return act_amax_[static_cast<size_t>(layer)][static_cast<size_t>(info.module)];
}

void ExportModel::set_act_amax(int64_t layer, Module module, float amax) {
  act_amax_[static_cast<size_t>(layer)][static_cast<size_t>(module)] = amax;
}

}  // namespace fp4t

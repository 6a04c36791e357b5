#include "engine/plan/operands.h"

#include <algorithm>

#include "kernels/base/arena.h"
#include "kernels/base/check.h"
#include "kernels/ops/quantize.h"

namespace fp4t {

GemmSite site_of(const ModelDims& d, int64_t layer, Module module) {
  switch (module) {
    case Module::kAttnQkv:
      return {layer, module, 0, d.qkv_width, d.hidden};
    case Module::kAttnOut:
      return {layer, module, 0, d.hidden, d.q_width};
    case Module::kMlpGateUp:
      return {layer, module, 0, 2 * d.mlp_hidden, d.hidden};
    case Module::kMlpDown:
      return {layer, module, 0, d.hidden, d.mlp_hidden};
    case Module::kExpertsGateUp:
      return {layer, module, d.local_experts, 2 * d.expert_hidden, d.hidden};
    case Module::kExpertsDown:
      return {layer, module, d.local_experts, d.hidden, d.expert_hidden};
    case Module::kSharedGateUp:
      return {layer, module, 0, 2 * d.shared_hidden, d.hidden};
    case Module::kSharedDown:
      return {layer, module, 0, d.hidden, d.shared_hidden};
    default:
      return {layer, Module::kHead, 0, d.vocabulary, d.hidden};
  }
}

std::vector<GemmSite> gemm_sites(const Plan& plan) {
  const ModelDims d = dims_of(plan);
  std::vector<GemmSite> sites;
  for (int64_t l = 0; l < d.layers; ++l) {
    for (int m = 0; m < kNumGemmModules; ++m) {
      const auto module = static_cast<Module>(m);
      if (layer_has(plan.model, l, module)) sites.push_back(site_of(d, l, module));
    }
  }
  sites.push_back(site_of(d, d.layers, Module::kHead));
  return sites;
}

int64_t site_rows(const ModelDims& dims, const GemmSite& site, int64_t tokens) {
  return site.groups > 0 ? expert_rows(dims, tokens) : tokens;
}

std::vector<TablePair> table_pairs(const Plan& plan) {
  std::vector<TablePair> pairs;
  for (const StagePlan& stage : plan.stages) {
    for (const auto& f : stage.precision.forward.spans) {
      for (const auto& b : stage.precision.backward.spans) {
        const bool meet = std::max(f.begin, b.begin) < std::min(f.end, b.end);
        // A stage without steps still evaluates with its last tables.
        if (meet || stage.steps == 0) pairs.push_back({&f.table, &b.table});
      }
    }
    for (const auto& s : stage.precision.sampler.spans) pairs.push_back({&s.table, nullptr});
  }
  return pairs;
}

namespace {

QuantSpec without_source(QuantSpec spec) {
  spec.source = Source::kTensor;
  return spec;
}

bool is_repeatable(const QuantSpec& spec) {
  if (spec.format != Format::kNvfp4) return true;
  const bool fresh = spec.hadamard != 0 && spec.signs == Signs::kFresh;
  return spec.rounding == Rounding::kNearest && !fresh;
}

const QuantSpec& backward_spec(GemmRole gemm, OperandRole operand, const BackwardCell& cell) {
  if (gemm == GemmRole::kDgrad) return operand == OperandRole::kGrad ? cell.dgrad_grad : cell.dgrad_weight;
  return operand == OperandRole::kGrad ? cell.wgrad_grad : cell.wgrad_act;
}

}  // namespace

OperandForm operand_form(GemmRole gemm, OperandRole operand, const ForwardCell& forward,
                         const BackwardCell* backward) {
  OperandForm form;
  form.gemm = gemm;
  form.operand = operand;
  const QuantSpec& of_forward = operand == OperandRole::kWeight ? forward.weight : forward.act;
  if (gemm == GemmRole::kFprop) {
    form.spec = without_source(of_forward);
    return form;
  }
  FP4T_CHECK(backward != nullptr, name_of(gemm), " without a backward table");
  const QuantSpec& spec = backward_spec(gemm, operand, *backward);
  form.spec = without_source(spec);
  form.from_forward =
      operand != OperandRole::kGrad && spec.source == Source::kForward && of_forward.quantised();
  if (form.from_forward) {
    form.forward = without_source(of_forward);
    FP4T_CHECK(form.forward.hadamard == 0, "source forward of a rotated operand");
    FP4T_CHECK(
        form.forward.scale_scope == ScaleScope::kTensor || form.forward.scale_round == ScaleRound::kPow2,
        "source forward with row scales needs powers of two");
  }
  return form;
}

OperandForm forward_form(const OperandForm& form) {
  OperandForm f;
  f.operand = form.operand;
  f.spec = form.forward;
  return f;
}

bool is_cacheable(const OperandForm& form) {
  return form.operand == OperandRole::kWeight && (form.spec.quantised() || form.from_forward) &&
         is_repeatable(form.spec) && (!form.from_forward || is_repeatable(form.forward));
}

std::vector<OperandForm> cached_forms(const Plan& plan, const GemmSite& site) {
  std::vector<OperandForm> forms;
  const auto add = [&](const OperandForm& form) {
    if (is_cacheable(form) && std::find(forms.begin(), forms.end(), form) == forms.end()) {
      forms.push_back(form);
    }
  };
  for (const TablePair& tables : table_pairs(plan)) {
    const ForwardCell& forward = tables.forward->cell(site.layer, site.module);
    add(operand_form(GemmRole::kFprop, OperandRole::kWeight, forward, nullptr));
    if (!tables.backward) continue;
    const BackwardCell& backward = tables.backward->cell(site.layer, site.module);
    add(operand_form(GemmRole::kDgrad, OperandRole::kWeight, forward, &backward));
  }
  return forms;
}

bool keeps_codes(const TablePair& tables, const GemmSite& site) {
  if (!tables.backward) return false;
  const ForwardCell& forward = tables.forward->cell(site.layer, site.module);
  const BackwardCell& backward = tables.backward->cell(site.layer, site.module);
  return operand_form(GemmRole::kWgrad, OperandRole::kAct, forward, &backward).from_forward;
}

bool codes_act_once(const TablePair& tables, const GemmSite& site) {
  if (!tables.backward) return false;
  const ForwardCell& forward = tables.forward->cell(site.layer, site.module);
  const BackwardCell& backward = tables.backward->cell(site.layer, site.module);
  const OperandForm fprop = operand_form(GemmRole::kFprop, OperandRole::kAct, forward, &backward);
  const OperandForm wgrad = operand_form(GemmRole::kWgrad, OperandRole::kAct, forward, &backward);
  return !wgrad.from_forward && fprop.spec.quantised() && wgrad.spec.quantised() &&
         share_a_reading(fprop.spec, wgrad.spec);
}

bool carries_forward_scale(const OperandForm& form) {
  return form.from_forward && form.forward.format == Format::kNvfp4 &&
         form.forward.scale_scope == ScaleScope::kTensor;
}

bool codes_gradient_once(const OperandForm& dgrad, const OperandForm& wgrad) {
  return dgrad.spec.quantised() && wgrad.spec.quantised() && share_a_reading(dgrad.spec, wgrad.spec);
}

bool rounds_by_row(const OperandForm& form, const GemmSite& site) {
  return form.gemm == GemmRole::kFprop && form.operand == OperandRole::kAct &&
         rounds_by_row(form.spec, site.in);
}

QuantView operand_layout(const OperandForm& form, const GemmSite& site, int64_t rows) {
  const int64_t n = site.matrices();
  QuantView v;
  if (form.gemm == GemmRole::kFprop) {
    v = form.operand == OperandRole::kWeight
            ? quant_layout(form.spec, GroupAxis::kRows, n, n * site.out, site.in)
            : quant_layout(form.spec, GroupAxis::kRows, n, rows, site.in);
  } else if (form.gemm == GemmRole::kDgrad) {
    v = form.operand == OperandRole::kWeight
            ? quant_layout(form.spec, GroupAxis::kRows, n, n * site.in, site.out)
            : quant_layout(form.spec, GroupAxis::kRows, n, rows, site.out);
  } else {
    const GroupAxis axis = site.groups > 0 ? GroupAxis::kCols : GroupAxis::kRows;
    v = quant_layout(form.spec, axis, n, form.operand == OperandRole::kGrad ? site.out : site.in, rows);
  }
  if (carries_forward_scale(form) && form.spec.format == Format::kMxfp8) {
    v.tensor_scale = {nullptr, DType::kF32, {n}};
  }
  return v;
}

Shape forward_values_shape(const OperandForm& form, const GemmSite& site, int64_t rows) {
  return form.operand == OperandRole::kWeight ? Shape{site.matrices() * site.out, site.in}
                                              : Shape{rows, site.in};
}

namespace {

int64_t quant_bytes(const QuantView& layout) {
  int64_t bytes = 0;
  take_quant("", layout, [&](const std::string&, DType dtype, const Shape& shape) {
    bytes += Arena::block_bytes(shape.elements() * dtype_bytes(dtype));
    return TensorView{nullptr, dtype, shape};
  });
  return bytes;
}

int64_t operand_scratch_bytes(const OperandForm& form, const GemmSite& site, int64_t rows) {
  int64_t bytes = 0;
  const bool cached = is_cacheable(form);
  if (form.from_forward) {
    const OperandForm f = forward_form(form);
    if (!is_cacheable(f)) bytes += quant_bytes(operand_layout(f, site, rows));
    if (!cached || form.spec.quantised()) {
      bytes += Arena::block_bytes(forward_values_shape(form, site, rows).elements() * 2);
    }
  }
  if (form.spec.quantised() && !cached) bytes += quant_bytes(operand_layout(form, site, rows));
  return bytes;
}

}  // namespace

int64_t gemm_scratch_bytes(const GemmSite& site, const TablePair& tables, int64_t rows) {
  const ForwardCell& forward = tables.forward->cell(site.layer, site.module);
  const BackwardCell* backward = tables.backward ? &tables.backward->cell(site.layer, site.module) : nullptr;
  const auto operand = [&](GemmRole gemm, OperandRole role) {
    return operand_scratch_bytes(operand_form(gemm, role, forward, backward), site, rows);
  };
  int64_t act = operand(GemmRole::kFprop, OperandRole::kAct);
  const OperandForm act_form = operand_form(GemmRole::kFprop, OperandRole::kAct, forward, nullptr);
  if (!backward && rounds_by_row(act_form, site)) {
    int64_t rounded = 0;
    take_rounded(act_form, site, rows, [&](const std::string&, DType dtype, const Shape& shape) {
      rounded += Arena::block_bytes(shape.elements() * dtype_bytes(dtype));
      return TensorView{nullptr, dtype, shape};
    });
    act = std::max(act, rounded);
  }
  const int64_t fprop = act + operand(GemmRole::kFprop, OperandRole::kWeight);
  if (!backward) return fprop;
  const int64_t dgrad_grad = operand(GemmRole::kDgrad, OperandRole::kGrad),
                wgrad_grad = operand(GemmRole::kWgrad, OperandRole::kGrad);
  const bool once =
      codes_gradient_once(operand_form(GemmRole::kDgrad, OperandRole::kGrad, forward, backward),
                          operand_form(GemmRole::kWgrad, OperandRole::kGrad, forward, backward));
  const int64_t both = once ? dgrad_grad + wgrad_grad : 0;
  const int64_t dgrad = std::max(both, dgrad_grad) + operand(GemmRole::kDgrad, OperandRole::kWeight);
  const int64_t wgrad = std::max(both, wgrad_grad) + operand(GemmRole::kWgrad, OperandRole::kAct);
  return std::max({fprop, dgrad, wgrad});
}

std::vector<ProductCodes> product_codes(const GemmSite& site, const TablePair& tables, int64_t rows) {
  const ForwardCell& forward = tables.forward->cell(site.layer, site.module);
  std::vector<ProductCodes> products;
  const auto add = [&](GemmRole gemm, OperandRole a, OperandRole b, const BackwardCell* backward) {
    const auto codes = [&](OperandRole operand) {
      const OperandForm form = operand_form(gemm, operand, forward, backward);
      return form.spec.quantised() ? operand_layout(form, site, rows) : QuantView{};
    };
    products.push_back({codes(a), codes(b)});
  };
  add(GemmRole::kFprop, OperandRole::kAct, OperandRole::kWeight, nullptr);
  if (tables.backward) {
    const BackwardCell& backward = tables.backward->cell(site.layer, site.module);
    add(GemmRole::kDgrad, OperandRole::kGrad, OperandRole::kWeight, &backward);
    add(GemmRole::kWgrad, OperandRole::kGrad, OperandRole::kAct, &backward);
  }
  return products;
}

}  // namespace fp4t

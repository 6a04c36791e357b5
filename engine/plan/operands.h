// The linear layers of a plan and the forms that their operands take: which codes a product multiplies, what
// they are made from, which of them are kept. engine/model/linear.cpp computes what stands here; memory.cpp
// and work.cpp price it. `take(block, dtype, shape) -> TensorView` is an arena's take, or a counter.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "engine/plan/dims.h"
#include "engine/plan/modules.h"
#include "engine/plan/plan.h"
#include "kernels/base/tensor.h"
#include "kernels/formats/quant.h"
#include "kernels/ops/capability.h"
#include "kernels/ops/quantize.h"

namespace fp4t {

// One linear layer: weight [out, in], or [groups, out, in] of experts (groups 0: not experts).
struct GemmSite {
  int64_t layer;  // the head: number of layers
  Module module;
  int64_t groups;
  int64_t out, in;
  int64_t matrices() const { return groups > 0 ? groups : 1; }
};
std::vector<GemmSite> gemm_sites(const Plan& plan);
GemmSite site_of(const ModelDims& dims, int64_t layer, Module module);
// Rows that a call of T tokens brings to a site.
int64_t site_rows(const ModelDims& dims, const GemmSite& site, int64_t tokens);

// A forward table and the backward table of the same steps (null for samplers).
struct TablePair {
  const ForwardTable* forward;
  const BackwardTable* backward;
};
std::vector<TablePair> table_pairs(const Plan& plan);

// How one operand reaches its product.
struct OperandForm {
  GemmRole gemm = GemmRole::kFprop;
  OperandRole operand = OperandRole::kAct;
  QuantSpec spec;             // `source` cleared: the next two say it
  bool from_forward = false;  // made from fprop's codes instead of the tensor
  QuantSpec forward;          // those codes; default when not from_forward
  bool operator==(const OperandForm&) const = default;
};
OperandForm operand_form(GemmRole gemm, OperandRole operand, const ForwardCell& forward,
                         const BackwardCell* backward);
// Fprop's own form of an operand that is made from fprop's codes.
OperandForm forward_form(const OperandForm& form);
// True for weights whose codes (or dequantised values) stay the same until the weights change.
bool is_cacheable(const OperandForm& form);
// The cacheable forms of a site over all stages, each once.
std::vector<OperandForm> cached_forms(const Plan& plan, const GemmSite& site);
// True when the old tensor scale enters as Quantize.input_scale or Operand.scale.
bool carries_forward_scale(const OperandForm& form);

// Whether backward codes dy for both of its products in one reading of it; the codes of the second wait for
// the first product then.
bool codes_gradient_once(const OperandForm& dgrad, const OperandForm& wgrad);

// True for an act that its producer may round row by row (kernels/ops/quantize.h, RoundedRows).
bool rounds_by_row(const OperandForm& form, const GemmSite& site);
template <class Take>
RoundedRows take_rounded(const OperandForm& form, const GemmSite& site, int64_t rows, Take&& take) {
  RoundedRows r;
  r.spec = form.spec;
  r.values = take("rounded rows", DType::kBf16, Shape{rows, site.in});
  r.scale = take("rounded rows", DType::kF32, Shape{rows});
  return r;
}

// Sizes of the codes of a quantised form; data pointers are null.
QuantView operand_layout(const OperandForm& form, const GemmSite& site, int64_t rows);
// Shape of the BF16 values that a form made from fprop's codes goes through.
Shape forward_values_shape(const OperandForm& form, const GemmSite& site, int64_t rows);

// Whether backward is made from the codes of fprop's act: worth keeping them.
bool keeps_codes(const TablePair& tables, const GemmSite& site);
// Whether fprop's reading of its act makes wgrad's codes too.
bool codes_act_once(const TablePair& tables, const GemmSite& site);

// Scratch of the largest of a site's products for a call of this many rows.
int64_t gemm_scratch_bytes(const GemmSite& site, const TablePair& tables, int64_t rows);
// The codes that each of a site's products meets in a call of this many rows.
std::vector<ProductCodes> product_codes(const GemmSite& site, const TablePair& tables, int64_t rows);

template <class Take>
QuantView take_quant(const std::string& block, QuantView layout, Take&& take) {
  layout.codes = take(block, DType::kU8, layout.codes.shape);
  layout.block_scales = take(block, DType::kU8, layout.block_scales.shape);
  if (layout.tensor_scale.shape.rank() > 0) {
    layout.tensor_scale = take(block, DType::kF32, layout.tensor_scale.shape);
  }
  return layout;
}

// What a cached form holds: codes, or values of a form that is multiplied as BF16.
struct CachedOperand {
  QuantView codes;
  TensorView values;
};
template <class Take>
CachedOperand take_cached(const OperandForm& form, const GemmSite& site, Take&& take) {
  CachedOperand c;
  if (form.spec.quantised()) {
    c.codes = take_quant("weight codes", operand_layout(form, site, 0), take);
  } else {
    c.values = take("weight codes", DType::kBf16, forward_values_shape(form, site, 0));
  }
  return c;
}

// Codes of a product's act that backward has no need to make. Empty: made when needed.
struct KeptCodes {
  QuantView fprop;  // where wgrad is made from them
  QuantView wgrad;  // where fprop's reading makes them too
};

}  // namespace fp4t

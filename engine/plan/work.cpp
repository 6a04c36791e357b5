#include "engine/plan/work.h"

#include <algorithm>
#include <cmath>

#include "engine/plan/run_layout.h"
#include "engine/plan/sizes.h"

namespace fp4t {

namespace {

// Bytes of one element: codes with their block scales.
double bytes_of(const QuantSpec& spec) {
  if (spec.format == Format::kFp32) return 4;
  if (!spec.quantised()) return 2;
  const double blocks = spec.block == BlockShape::k16x16 ? 256 : real(block_length(spec));
  return (spec.format == Format::kNvfp4 ? 0.5 : 1.0) + 1 / blocks;
}

Rate quantise_rate(const QuantSpec& spec, Rate plain) {
  if (spec.format == Format::kMxfp8) return Rate::kQuantiseMxfp8;
  if (spec.rounding == Rounding::kMsEden) return Rate::kQuantiseMsEden;
  if (spec.scale_rule == ScaleRule::kFourOverSix) return Rate::kQuantiseFourOverSix;
  return spec.block == BlockShape::k16x16 ? Rate::kQuantiseWeight : plain;
}

Rate product_rate(const GemmSite& site, GemmRole gemm) {
  if (site.groups == 0) return Rate::kDense;
  return gemm == GemmRole::kFprop   ? Rate::kGroupedFprop
         : gemm == GemmRole::kDgrad ? Rate::kGroupedDgrad
                                    : Rate::kGroupedWgrad;
}

// Collects the ops of one linear layer's products.
class SiteWork {
 public:
  SiteWork(const WorkCall& call, const GemmSite& site, WorkList& list)
      : call_(call), site_(site), list_(list), rows_(site_rows_of(call, site)) {}

  // Rows under even routing; a plan's rows of experts are a bound.
  static double site_rows_of(const WorkCall& call, const GemmSite& site) {
    return real(call.tokens) * real(site.groups > 0 ? call.plan.model.moe.top_k : 1);
  }

  void forward(double out_bytes) {
    const OperandForm act = form(GemmRole::kFprop, OperandRole::kAct),
                      weight = form(GemmRole::kFprop, OperandRole::kWeight);
    const double acts = rows_ * real(site_.in);
    if (act.spec.quantised()) {
      const bool both = codes_act_once(call_.tables, site_);
      const double written =
          bytes_of(act.spec) + (both ? bytes_of(form(GemmRole::kWgrad, OperandRole::kAct).spec) : 0);
      quantise(act.spec, both ? both_rate() : Rate::kQuantiseRow, acts, written);
    }
    weight_codes(weight);
    product(GemmRole::kFprop, act.spec, acts, weight.spec, weights(), rows_ * real(site_.out) * out_bytes);
  }

  void backward(bool begun) {
    const OperandForm dgrad_grad = form(GemmRole::kDgrad, OperandRole::kGrad),
                      wgrad_grad = form(GemmRole::kWgrad, OperandRole::kGrad),
                      weight = form(GemmRole::kDgrad, OperandRole::kWeight);
    const double grads = rows_ * real(site_.out), acts = rows_ * real(site_.in);
    gradients(dgrad_grad.spec, wgrad_grad.spec, codes_gradient_once(dgrad_grad, wgrad_grad), grads);
    weight_codes(weight);
    weight_gradient(begun);
    product(GemmRole::kDgrad, dgrad_grad.spec, grads, weight.spec, weights(), acts * act_bytes());
  }

  // Codes of the gradient are there.
  void weight_gradient(bool begun) {
    const OperandForm grad = form(GemmRole::kWgrad, OperandRole::kGrad),
                      act = form(GemmRole::kWgrad, OperandRole::kAct);
    const double grads = rows_ * real(site_.out), acts = rows_ * real(site_.in);
    if (act.from_forward) decode(act.forward, acts);
    if (act.spec.quantised() && !codes_act_once(call_.tables, site_)) {
      quantise(act.spec, Rate::kQuantiseColumn, acts, bytes_of(act.spec));
    }
    const double gradient = gradient_bytes();
    product(GemmRole::kWgrad, grad.spec, grads, act.spec, acts, weights() * std::min(gradient, 2.0));
    // Measured beside the product's own time: FP32 gradients that are written, or read and written.
    const double added = gradient == 4 ? (begun ? 6 : 2) : 0;
    if (added > 0) list_.push_back({Rate::kElementwise, Format::kBf16, 0, weights() * added, 0});
  }

  // Forms that stay until the weights change.
  void weights_once() {
    const OperandForm fprop = form(GemmRole::kFprop, OperandRole::kWeight);
    bool turned = false;
    if (is_cacheable(fprop) && fprop.spec.quantised()) {
      if (call_.tables.backward) {
        const OperandForm dgrad = form(GemmRole::kDgrad, OperandRole::kWeight);
        turned = is_cacheable(dgrad) && !dgrad.from_forward && share_a_reading(fprop.spec, dgrad.spec);
      }
      const double written = bytes_of(fprop.spec) * (turned ? 2 : 1);
      quantise(fprop.spec, turned ? Rate::kQuantiseBoth : Rate::kQuantiseRow, weights(), written);
    }
    if (!call_.tables.backward || turned) return;
    const OperandForm dgrad = form(GemmRole::kDgrad, OperandRole::kWeight);
    if (is_cacheable(dgrad)) make_weight(dgrad);
  }

 private:
  OperandForm form(GemmRole gemm, OperandRole operand) const {
    return operand_form(
        gemm, operand, call_.tables.forward->cell(site_.layer, site_.module),
        gemm == GemmRole::kFprop ? nullptr : &call_.tables.backward->cell(site_.layer, site_.module));
  }
  double weights() const { return real(site_.matrices()) * real(site_.out) * real(site_.in); }
  double act_bytes() const { return call_.plan.act == DType::kF32 ? 4 : 2; }
  Rate both_rate() const { return site_.groups > 0 ? Rate::kQuantiseGroups : Rate::kQuantiseBoth; }
  double gradient_bytes() const {
    for (const ParamInfo& p : call_.plan.parameters) {
      const int64_t layer = site_.module == Module::kHead ? -1 : site_.layer;
      if (p.module == site_.module && p.layer == layer && p.role != ParamRole::kNorm) {
        return real(dtype_bytes(p.gradient));
      }
    }
    return 4;  // of a tied head
  }

  void quantise(const QuantSpec& spec, Rate plain, double elements, double written) {
    list_.push_back({quantise_rate(spec, plain), spec.format, 0, elements * (2 + written)});
  }
  void decode(const QuantSpec& spec, double elements) {
    list_.push_back({Rate::kDecodeCodes, spec.format, 0, elements * (bytes_of(spec) + 2)});
  }
  void gradients(const QuantSpec& row, const QuantSpec& column, bool once, double elements) {
    if (once) return quantise(row, both_rate(), elements, bytes_of(row) + bytes_of(column));
    if (row.quantised()) quantise(row, Rate::kQuantiseRow, elements, bytes_of(row));
    if (column.quantised()) quantise(column, Rate::kQuantiseColumn, elements, bytes_of(column));
  }
  void make_weight(const OperandForm& weight) {
    if (weight.from_forward) decode(weight.forward, weights());
    const Rate plain = weight.gemm == GemmRole::kFprop ? Rate::kQuantiseRow : Rate::kQuantiseColumn;
    if (weight.spec.quantised()) quantise(weight.spec, plain, weights(), bytes_of(weight.spec));
  }
  // Of a product, where they are not kept.
  void weight_codes(const OperandForm& weight) {
    if (!is_cacheable(weight)) make_weight(weight);
  }

  void product(GemmRole gemm, const QuantSpec& a, double a_elements, const QuantSpec& b, double b_elements,
               double out_bytes) {
    const bool native = a.quantised() && a.format == b.format && call_.machine.peak(a.format) > 0;
    double bytes = out_bytes;
    for (const auto& [spec, elements] : {std::pair{&a, a_elements}, std::pair{&b, b_elements}}) {
      if (spec->quantised() && !native) decode(*spec, elements);
      bytes += elements * (native ? bytes_of(*spec) : spec->format == Format::kFp32 ? 4 : 2);
    }
    const double flops = 2 * rows_ * real(site_.out) * real(site_.in);
    const Format format = native || a.format == Format::kFp32 ? a.format : Format::kBf16;
    list_.push_back({native ? Rate::kCodedProducts : product_rate(site_, gemm), format, flops, bytes, 1,
                     a.quantised() || b.quantised()});
  }

  const WorkCall& call_;
  const GemmSite site_;
  WorkList& list_;
  const double rows_;
};

// A block's ops besides its products.
class BlockWork {
 public:
  BlockWork(const WorkCall& call, const ModelDims& d, int64_t layer, WorkList& list)
      : call_(call), d_(d), layer_(layer), is_moe_(is_moe_layer(call.plan.model, layer)), list_(list) {
    a_ = real(dtype_bytes(d.act));
    tokens_ = real(call.tokens);
    rows_ = tokens_ * real(d.top_k);
    stream_ = tokens_ * real(d.hidden);
    routed_ = rows_ * real(d.hidden);
    guests_ = d.spreads_experts()
                  ? tokens_ * real(d.expert_ranks) * share_of_guests(d, d.local_experts) * real(d.hidden)
                  : 0;
  }

  void forward() {
    move(Rate::kNormForward, stream_ * a_ * 2);
    site(Module::kAttnQkv).forward(a_);
    move(Rate::kRotary, tokens_ * real(d_.qkv_width) * a_ * 2);
    attention(Rate::kAttentionForward, 2, 2);
    site(Module::kAttnOut).forward(a_);
    move(Rate::kNormForward, stream_ * a_ * 4);  // with the residual
    if (!is_moe_) {
      site(Module::kMlpGateUp).forward(a_);
      swiglu(tokens_ * real(d_.mlp_hidden), 3);
      site(Module::kMlpDown).forward(a_);
      return move(Rate::kElementwise, stream_ * a_ * 3);
    }
    router(1);
    dispatch();
    site(Module::kExpertsGateUp).forward(a_);
    swiglu(rows_ * real(d_.expert_hidden), 3);
    site(Module::kExpertsDown).forward(a_);
    if (d_.shared_hidden > 0) {
      site(Module::kSharedGateUp).forward(a_);
      swiglu(tokens_ * real(d_.shared_hidden), 3);
      site(Module::kSharedDown).forward(a_);
    }
    combine(stream_ * a_ * (d_.shared_hidden > 0 ? 3 : 2));
  }

  void backward(bool begun) {
    if (is_moe_) {
      moe_backward(begun);
    } else {
      site(Module::kMlpDown).backward(begun);
      swiglu(tokens_ * real(d_.mlp_hidden), 5);
      site(Module::kMlpGateUp).backward(begun);
    }
    move(Rate::kNormBackward, stream_ * a_ * 4);
    site(Module::kAttnOut).backward(begun);
    attention(Rate::kAttentionBackward, 5, 4);
    move(Rate::kRotary, tokens_ * real(d_.qkv_width) * a_ * 3);
    site(Module::kAttnQkv).backward(begun);
    move(Rate::kNormBackward, stream_ * a_ * 4);
  }

  SiteWork site(Module module) { return SiteWork(call_, site_of(d_, layer_, module), list_); }

 private:
  void move(Rate rate, double bytes) { list_.push_back({rate, Format::kBf16, 0, bytes}); }
  void swiglu(double hidden, double times) { move(Rate::kElementwise, hidden * a_ * times); }

  // Forward: QK^T and PV; backward: five products. Each 2 FLOPs, over half the square.
  void attention(Rate rate, double products, double tensors) {
    const double flops = products * 2 * tokens_ * real(call_.length) / 2 * real(d_.q_width);
    const Format format = d_.act == DType::kF32 ? Format::kFp32 : Format::kBf16;
    list_.push_back({rate, format, flops, tokens_ * real(d_.qkv_width) * a_ * tensors});
  }

  // Logits in FP32 and the choice among them; backward has two products.
  void router(double products) {
    const double logits = tokens_ * real(d_.experts);
    list_.push_back(
        {Rate::kRouter, Format::kFp32, products * 2 * logits * real(d_.hidden), stream_ * a_ * products});
    move(Rate::kElementwise, logits * 4 * 3);
  }

  void dispatch() {
    const QuantSpec spec = dispatch_spec(call_.tables.forward->dispatch);
    if (spec.quantised()) {
      list_.push_back(
          {quantise_rate(spec, Rate::kQuantiseRow), spec.format, 0, stream_ * (2 + bytes_of(spec))});
      const double decoded = d_.spreads_experts() ? guests_ : stream_;
      list_.push_back({Rate::kDecodeCodes, spec.format, 0, decoded * (bytes_of(spec) + 2)});
    }
    if (d_.spreads_experts()) move(Rate::kPermute, guests_ * a_ * 2);  // on their way
    move(Rate::kPermute, (d_.spreads_experts() ? guests_ : stream_) * a_ + routed_ * a_);
  }

  // Sums at the experts, in FP32 on their way back, and at the root.
  void combine(double addends) { move(Rate::kCombine, routed_ * a_ + addends + guests_ * 4 * 2); }

  void moe_backward(bool begun) {
    if (d_.spreads_experts()) move(Rate::kPermute, guests_ * a_ * 2);
    move(Rate::kCombine, (d_.spreads_experts() ? routed_ : stream_) * a_ + routed_ * a_ * 2);
    site(Module::kExpertsDown).backward(begun);
    swiglu(rows_ * real(d_.expert_hidden), 5);
    if (!codes_act_once(call_.tables, site_of(d_, layer_, Module::kExpertsGateUp))) {
      move(Rate::kPermute, (d_.spreads_experts() ? guests_ : stream_) * a_ + routed_ * a_);
    }
    site(Module::kExpertsGateUp).backward(begun);
    router(2);
    if (d_.shared_hidden > 0) {
      site(Module::kSharedDown).backward(begun);
      swiglu(tokens_ * real(d_.shared_hidden), 5);
      site(Module::kSharedGateUp).backward(begun);
    }
    combine(stream_ * (4 + a_));  // the router's part in FP32, the sum
  }

  const WorkCall& call_;
  const ModelDims& d_;
  const int64_t layer_;
  const bool is_moe_;
  WorkList& list_;
  double a_, tokens_, rows_, stream_, routed_, guests_;
};

GemmSite head_site(const ModelDims& d) { return site_of(d, d.layers, Module::kHead); }

}  // namespace

const char* name_of(WorkKind kind) {
  constexpr const char* kNames[kNumWorkKinds] = {"products", "attention", "codes", "rest"};
  return kNames[static_cast<size_t>(kind)];
}

WorkKind kind_of(Rate rate) {
  if (rate <= Rate::kCodedProducts || rate == Rate::kFewRows || rate == Rate::kFewCodedRows ||
      rate == Rate::kSomeCodedRows) {
    return WorkKind::kProducts;
  }
  if (rate >= Rate::kQuantiseRow) return WorkKind::kCodes;
  const bool attention =
      rate == Rate::kAttentionForward || rate == Rate::kAttentionBackward || rate == Rate::kCachedAttention;
  return attention ? WorkKind::kAttention : WorkKind::kRest;
}

double share_of_guests(const ModelDims& d, int64_t experts) {
  // None of a token's experts, all different, among them: C(E - L, k) / C(E, k).
  double none = 1;
  for (int64_t i = 0; i < d.top_k; ++i) {
    none *= std::max(0.0, real(d.experts - experts - i)) / real(d.experts - i);
  }
  return 1 - none;
}

void add_forward(const WorkCall& call, WorkList& list) {
  const ModelDims d = dims_of(call.plan);
  const double a = real(dtype_bytes(d.act));
  list.push_back({Rate::kElementwise, Format::kBf16, 0, real(call.tokens * d.hidden) * a * 2});
  for (int64_t l = 0; l < d.layers; ++l) BlockWork(call, d, l, list).forward();
}

void add_backward(const WorkCall& call, bool begun, WorkList& list) {
  const ModelDims d = dims_of(call.plan);
  for (int64_t l = d.layers; l-- > 0;) BlockWork(call, d, l, list).backward(begun);
  const double a = real(dtype_bytes(d.act));
  list.push_back({Rate::kElementwise, Format::kBf16, 0, real(call.tokens * d.hidden) * (a + 8)});
}

void add_gate_up_gradients(const WorkCall& call, bool begun, WorkList& list) {
  const ModelDims d = dims_of(call.plan);
  for (int64_t l = 0; l < d.layers; ++l) {
    if (!is_moe_layer(call.plan.model, l)) continue;
    SiteWork(call, site_of(d, l, Module::kExpertsGateUp), list).weight_gradient(begun);
  }
}

void add_head(const WorkCall& call, bool begun, WorkList& list) {
  const ModelDims d = dims_of(call.plan);
  const double a = real(dtype_bytes(d.act)), stream = real(call.tokens * d.hidden) * a;
  const double logits = real(call.tokens) * real(d.vocabulary);
  list.push_back({Rate::kNormForward, Format::kBf16, 0, stream * 2});
  SiteWork head(call, head_site(d), list);
  head.forward(4);
  list.push_back({Rate::kLoss, Format::kBf16, 0, logits * 4});
  if (!call.tables.backward) return;
  list.push_back({Rate::kLoss, Format::kBf16, 0, logits * (4 + a)});
  head.backward(begun);
  // The weights' gradient is added to once a chunk.
  const double chunks = std::ceil(real(call.tokens) / real(call.plan.head_chunk)) - 1;
  list.push_back({Rate::kElementwise, Format::kBf16, 0, chunks * real(d.vocabulary * d.hidden) * 8, 0});
  list.push_back({Rate::kNormBackward, Format::kBf16, 0, stream * 3});
}

void add_weight_codes(const WorkCall& call, WorkList& list) {
  for (const GemmSite& site : gemm_sites(call.plan)) SiteWork(call, site, list).weights_once();
}

}  // namespace fp4t

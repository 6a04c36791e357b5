#include "engine/model/linear.h"

#include <algorithm>

#include "kernels/base/numeric.h"
#include "kernels/formats/groups.h"
#include "kernels/ops/run.h"

namespace fp4t {

int stats_row(GemmRole gemm, OperandRole operand) {
  // fprop act, weight; dgrad grad, weight; wgrad grad, act.
  const bool second =
      gemm == GemmRole::kWgrad ? operand == OperandRole::kAct : operand == OperandRole::kWeight;
  return static_cast<int>(gemm) * 2 + (second ? 1 : 0);
}

namespace {

// Rows [begin, begin + count) of an operand whose rows are not cut into groups.
QuantView rows_of(const QuantView& v, int64_t begin, int64_t count) {
  const int64_t outer = outer_padding(v.spec);
  FP4T_CHECK(v.group_axis == GroupAxis::kRows && v.groups == 1 && begin % outer == 0, "rows from ", begin);
  QuantView out = v;
  out.rows = count;
  out.padded_rows = align_up(count, outer);
  out.codes = v.codes.rows(begin, out.padded_rows);
  out.block_scales = v.block_scales.rows(begin / outer, out.padded_rows / outer);
  const bool by_row = v.spec.format == Format::kNvfp4 && v.spec.scale_scope == ScaleScope::kRow;
  if (by_row) out.tensor_scale = v.tensor_scale.rows(begin, count);
  return out;
}

Call of_all_experts(const Call& call) {
  Call all = call;
  all.experts = {};
  return all;
}

Operand rows_of(const Operand& operand, int64_t begin, int64_t count) {
  Operand out = operand;
  if (operand.codes.empty()) {
    out.values = operand.values.rows(begin, count);
  } else {
    out.codes = rows_of(operand.codes, begin, count);
  }
  return out;
}

}  // namespace

Linear::Linear(const Plan& plan, const GemmSite& site, Param& weight, Arena& run_arena,
               const TensorView& stats, int64_t first_expert)
    : site_(site),
      param_(weight),
      stats_(stats),
      first_expert_(first_expert),
      gradients_(static_cast<size_t>(site.matrices()), Gradient::kGiven) {
  FP4T_CHECK_EQ(operand_of(weight).elements(), site.matrices() * site.out * site.in, weight.info.name);
  for (const OperandForm& form : cached_forms(plan, site)) {
    Cached c{form, take_cached(form, site, ArenaTake{run_arena}), false};
    // For decoding; the other products read either order.
    const bool streams =
        plan.machine.backend == Backend::kCuda && plan.max_cache_slots > 0 && form.gemm == GemmRole::kFprop;
    if (streams && form.spec.format == Format::kNvfp4) c.held.codes.order = CodeOrder::kStream;
    cache_.push_back(std::move(c));
  }
}

void Linear::weights_changed() {
  for (Cached& c : cache_) c.valid = false;
}

void Linear::settle_gradient(Queue& queue) {
  const auto n = static_cast<int64_t>(gradients_.size());
  const TensorView all = param_.gradient.reshape({n, param_.gradient.elements() / n});
  for (size_t g = 0; g < gradients_.size();) {
    const auto end =
        static_cast<size_t>(std::find_if(gradients_.begin() + static_cast<int64_t>(g), gradients_.end(),
                                         [](Gradient state) { return state != Gradient::kToWrite; }) -
                            gradients_.begin());
    if (end > g) {
      const TensorView part = all.rows(static_cast<int64_t>(g), static_cast<int64_t>(end - g));
      queue.fill_bytes(part.data, 0, part.bytes());
      std::fill(gradients_.begin() + static_cast<int64_t>(g), gradients_.begin() + static_cast<int64_t>(end),
                Gradient::kGiven);
    }
    g = end + 1;
  }
}

Linear::Groups Linear::groups_of(const Call& call) const {
  if (site_.groups == 0 || call.experts.count == 0) return {0, site_.matrices()};
  return {call.experts.first, call.experts.count};
}

GemmSite Linear::site_of(const Call& call) const {
  GemmSite site = site_;
  if (site_.groups > 0) site.groups = groups_of(call).count;
  return site;
}

TensorView Linear::part_of(const Call& call, const TensorView& all) const {
  if (all.empty() || site_.groups == 0) return all;
  const Groups g = groups_of(call);
  return all.rows(g.first, g.count);
}

QuantView Linear::weights_of(const Call& call, const QuantView& all) const {
  const Groups g = groups_of(call);
  return g.count == all.groups ? all : part_of_groups(all, g.first, g.count, nullptr);
}

KeptCodes Linear::kept_of(const Call& call, const KeptCodes& all) const {
  if (site_.groups == 0 || call.experts.count == 0) return all;
  const auto part = [&](const QuantView& codes) {
    return codes.empty() ? codes
                         : part_of_groups(codes, call.experts.first, call.experts.count, call.experts.bounds);
  };
  KeptCodes kept = all;
  kept.fprop = part(all.fprop);
  kept.wgrad = part(all.wgrad);
  return kept;
}

void Linear::prepare_forward(const Call& call) {
  const OperandForm form = form_of(call, GemmRole::kFprop, OperandRole::kWeight);
  if (!is_cacheable(form)) return;
  ScratchScope scope(call.scratch);
  forward_weight(call, scope, form, false);
}

TensorView Linear::stacked_weight(const Call& call) const {
  const Groups g = groups_of(call);
  return operand_of(param_)
      .reshape({site_.matrices() * site_.out, site_.in})
      .rows(g.first * site_.out, g.count * site_.out);
}

OperandForm Linear::form_of(const Call& call, GemmRole gemm, OperandRole operand) const {
  const ForwardCell& forward = call.pass.forward->cell(site_.layer, site_.module);
  const BackwardCell* backward =
      gemm == GemmRole::kFprop ? nullptr : &call.pass.backward->cell(site_.layer, site_.module);
  return operand_form(gemm, operand, forward, backward);
}

Linear::Cached* Linear::cached(const OperandForm& form) {
  if (!is_cacheable(form)) return nullptr;
  for (Cached& c : cache_) {
    if (c.form == form) return &c;
  }
  throw InternalError(detail::concat(param_.info.name, ": the plan has no cell ", describe(form.spec),
                                     " for ", name_of(form.gemm), " ", name_of(form.operand)));
}

// Operands -------------------------------------------------------------------------------------------

Quantize Linear::quantising(const Call& call, const Quantising& what, const TensorView& x,
                            const TensorView& offsets, const TensorView& input_scale,
                            const QuantView& out) const {
  const Pass& pass = call.pass;
  const uint32_t copy = what.orientation == Orientation::kRow ? 0 : 1;
  // Every rank and micro-batch rounds a weight alike (NUMERICS.md 0.0, "Random bits").
  const uint32_t sample = what.operand == OperandRole::kWeight ? 0 : pass.sample_id;
  Quantize op{};
  op.x = x;
  op.offsets = offsets;
  op.orientation = what.orientation;
  op.draw_key = site_key(pass.seed, Purpose::kRounding, copy,
                         site_id(site_.layer, site_.module, what.gemm, what.operand), pass.step, sample);
  op.first_expert = site_.groups > 0 ? first_expert_ + groups_of(call).first : -1;
  op.signs_key =
      site_key(pass.seed, Purpose::kSigns, 0,
               site_id(site_.layer, site_.module, what.gemm, OperandRole::kAct), pass.step, pass.sample_id);
  op.input_scale = input_scale;
  if (what.counted) op.stats = stats_.rows(stats_row(what.gemm, what.operand), 1).reshape({kNumQuantStats});
  op.measure_error = pass.measure_error && what.counted;
  op.out = out;
  return op;
}

void Linear::quantise(const Call& call, const Quantising& what, const TensorView& x,
                      const TensorView& offsets, const TensorView& input_scale, const QuantView& out) {
  run(call.queue, quantising(call, what, x, offsets, input_scale, out));
}

TensorView Linear::dequantised(const Call& call, const OperandForm& form, const QuantView& codes,
                               const TensorView& offsets, const TensorView& into) {
  const bool row = form.forward.scale_scope == ScaleScope::kRow;
  run(call.queue, Dequantize{.x = codes,
                             .offsets = offsets,
                             .scale = row ? DecodeScale::kRow : DecodeScale::kBlock,
                             .out = into,
                             .inexact = {}});
  return into;
}

TensorView Linear::forward_values(const Call& call, ScratchScope& scope, const OperandForm& form,
                                  const TensorView& x, const TensorView& offsets, const QuantView& kept,
                                  TensorView& scale) {
  const auto take = [&](const std::string& block, DType dtype, const Shape& shape) {
    return scope.take(block, dtype, shape);
  };
  QuantView codes = kept;
  if (codes.empty()) {
    const OperandForm f = forward_form(form);
    codes = take_quant("fprop act codes", operand_layout(f, site_of(call), x.dim(0)), take);
    quantise(call, {GemmRole::kFprop, f.operand, Orientation::kRow, false}, x, offsets, {}, codes);
  }
  if (carries_forward_scale(form)) scale = codes.tensor_scale;
  return dequantised(
      call, form, codes, offsets,
      take("fprop act values", DType::kBf16, forward_values_shape(form, site_of(call), x.dim(0))));
}

Operand Linear::activation(const Call& call, ScratchScope& scope, const OperandForm& form,
                           const TensorView& x, const TensorView& offsets, const KeptCodes& kept) {
  const bool along_tokens = form.gemm == GemmRole::kWgrad;
  if (along_tokens && !kept.wgrad.empty()) return {{}, false, kept.wgrad, {}};
  TensorView source = x, scale;
  if (form.from_forward) source = forward_values(call, scope, form, x, offsets, kept.fprop, scale);
  if (!form.spec.quantised()) return {source, along_tokens, {}, scale};
  const bool fprop = form.gemm == GemmRole::kFprop;
  const QuantView codes = fprop && !kept.fprop.empty()
                              ? kept.fprop
                              : take_quant(along_tokens ? "column codes" : "row codes",
                                           operand_layout(form, site_of(call), x.dim(0)),
                                           [&](const std::string& block, DType dtype, const Shape& shape) {
                                             return scope.take(block, dtype, shape);
                                           });
  const Quantising what{form.gemm, form.operand, along_tokens ? Orientation::kColumn : Orientation::kRow,
                        call.counting};
  const Quantize op = quantising(call, what, source, offsets, scale, codes);
  if (fprop && !kept.wgrad.empty()) {
    const Quantising of_wgrad{GemmRole::kWgrad, OperandRole::kAct, Orientation::kColumn, call.counting};
    run(call.queue,
        QuantizeBoth{.row = op, .column = quantising(call, of_wgrad, source, offsets, {}, kept.wgrad)});
  } else {
    run(call.queue, op);
  }
  return {{}, false, codes, {}};
}

// What dgrad will multiply, where it can be made in one reading with fprop's codes and is not there yet.
Linear::Cached* Linear::transpose_to_make(const Call& call, const OperandForm& fprop) {
  if (call.pass.backward == nullptr) return nullptr;
  const OperandForm dgrad = form_of(call, GemmRole::kDgrad, OperandRole::kWeight);
  if (!is_cacheable(dgrad) || dgrad.from_forward || !share_a_reading(fprop.spec, dgrad.spec)) return nullptr;
  Cached* c = cached(dgrad);
  return c->valid ? nullptr : c;
}

QuantView Linear::forward_weight(const Call& call, ScratchScope& scope, const OperandForm& form,
                                 bool counted) {
  const Quantising what{GemmRole::kFprop, OperandRole::kWeight, Orientation::kRow, counted};
  if (Cached* c = cached(form)) {
    if (!c->valid) {
      const Call all = of_all_experts(call);
      const Quantize op = quantising(all, what, stacked_weight(all), {}, {}, c->held.codes);
      Cached* turned = counted ? transpose_to_make(call, form) : nullptr;
      if (turned) {
        const Quantising column{GemmRole::kDgrad, OperandRole::kWeight, Orientation::kColumn, counted};
        run(call.queue,
            QuantizeBoth{.row = op,
                         .column = quantising(all, column, stacked_weight(all), {}, {}, turned->held.codes)});
        turned->valid = true;
      } else {
        run(call.queue, op);
      }
      c->valid = true;
    }
    return weights_of(call, c->held.codes);
  }
  const QuantView codes = take_quant("weight codes", operand_layout(form, site_of(call), 0),
                                     [&](const std::string& block, DType dtype, const Shape& shape) {
                                       return scope.take(block, dtype, shape);
                                     });
  quantise(call, what, stacked_weight(call), {}, {}, codes);
  return codes;
}

// Fills what a dgrad weight is multiplied from: codes, or dequantised values with their old scale.
void Linear::make_weight(const Call& call, ScratchScope& scope, const OperandForm& form, CachedOperand& into,
                         TensorView& scale) {
  TensorView source = stacked_weight(call);
  if (form.from_forward) {
    const QuantView codes = forward_weight(call, scope, forward_form(form), false);
    if (into.values.empty()) {
      into.values =
          scope.take("fprop weight values", DType::kBf16, forward_values_shape(form, site_of(call), 0));
    }
    source = dequantised(call, form, codes, {}, into.values);
    if (carries_forward_scale(form)) scale = codes.tensor_scale;
  }
  if (form.spec.quantised()) {
    quantise(call, {form.gemm, form.operand, Orientation::kColumn, call.counting}, source, {}, scale,
             into.codes);
  }
}

Operand Linear::weight(const Call& call, ScratchScope& scope, const OperandForm& form) {
  const bool transposed = form.gemm == GemmRole::kDgrad;
  const TensorView plain = part_of(call, operand_of(param_));
  if (!form.spec.quantised() && !form.from_forward) return {plain, transposed, {}, {}};
  Cached* c = cached(form);
  if (!transposed) return {{}, false, forward_weight(call, scope, form, call.counting), {}};

  // What is kept, is of all experts.
  const Call making = c ? of_all_experts(call) : call;
  CachedOperand made;
  TensorView scale;
  if (c && c->valid) {
    made = c->held;
    // Kept only when fprop's codes are: their scale is still there.
    if (carries_forward_scale(form))
      scale = forward_weight(making, scope, forward_form(form), false).tensor_scale;
  } else {
    if (c) {
      made = c->held;
    } else if (form.spec.quantised()) {
      made.codes = take_quant("weight codes", operand_layout(form, site_of(call), 0),
                              [&](const std::string& block, DType dtype, const Shape& shape) {
                                return scope.take(block, dtype, shape);
                              });
    }
    make_weight(making, scope, form, made, scale);
    if (c) c->valid = true;
  }
  if (form.spec.quantised()) return {{}, false, c ? weights_of(call, made.codes) : made.codes, {}};
  if (!c) return {made.values.reshape(plain.shape), true, {}, scale};
  return {part_of(call, made.values.reshape(operand_of(param_).shape)), true, {}, part_of(call, scale)};
}

// Products -------------------------------------------------------------------------------------------

Linear::Fprop Linear::fprop(const Call& call, ScratchScope& scope, const TensorView& x,
                            const TensorView& offsets, const KeptCodes& keep) {
  if (call.pass.watcher) call.pass.watcher->saw(call.queue, site_.layer, site_.module, x);
  const Operand act =
      activation(call, scope, form_of(call, GemmRole::kFprop, OperandRole::kAct), x, offsets, keep);
  return {act, weight(call, scope, form_of(call, GemmRole::kFprop, OperandRole::kWeight))};
}

void Linear::forward_rows(const Call& call, const Fprop& operands, int64_t begin, const TensorView& out) {
  FP4T_CHECK(site_.groups == 0, param_.info.name, ": rows of experts have no range");
  const Operand a = rows_of(operands.act, begin, out.dim(0));
  run(call.queue, Gemm{.a = a, .b = operands.weight, .out = out, .accumulate = false});
  note(call.queue, GemmRole::kFprop, format_of(a), format_of(operands.weight));
}

void Linear::forward(const Call& call, const TensorView& x, const TensorView& offsets, const KeptCodes& keep,
                     const TensorView& out) {
  ScratchScope scope(call.scratch);
  const auto [a, b] = fprop(call, scope, x, offsets, kept_of(call, keep));
  if (site_.groups > 0) {
    run(call.queue, GroupedGemm{.a = a, .b = b, .offsets = offsets, .out = out});
  } else {
    run(call.queue, Gemm{.a = a, .b = b, .out = out, .accumulate = false});
  }
  note(call.queue, GemmRole::kFprop, format_of(a), format_of(b));
}

RoundedRows Linear::rounded(const Call& call, ScratchScope& scope, int64_t rows) const {
  const OperandForm form = form_of(call, GemmRole::kFprop, OperandRole::kAct);
  if (!rounds_by_row(form, site_)) return {};
  return take_rounded(form, site_, rows, [&](const std::string& block, DType dtype, const Shape& shape) {
    return scope.take(block, dtype, shape);
  });
}

void Linear::forward_rounded(const Call& call, const RoundedRows& x, const TensorView& offsets,
                             const TensorView& x_rows, const TensorView& out) {
  ScratchScope scope(call.scratch);
  const Operand a{x.values, false, {}, x.scale, ScaleScope::kRow};
  const Operand b = weight(call, scope, form_of(call, GemmRole::kFprop, OperandRole::kWeight));
  if (site_.groups > 0) {
    run(call.queue, GroupedGemm{.a = a, .b = b, .offsets = offsets, .out = out, .a_rows = x_rows});
  } else {
    run(call.queue, Gemm{.a = a, .b = b, .out = out, .accumulate = false});
  }
  note(call.queue, GemmRole::kFprop, x.spec.format, format_of(b));
}

void Linear::backward(const Call& call, const TensorView& x, const KeptCodes& kept, const TensorView& dy,
                      const TensorView& offsets, const TensorView& dx) {
  ScratchScope scope(call.scratch);
  const GradientCodes codes = gradient_codes(call, scope, dy, offsets);
  wgrad(call, x, kept_of(call, kept), dy, codes.wgrad, offsets);
  dgrad(call, dy, codes.dgrad, offsets, dx);
}

void Linear::backward_dx_first(const Call& call, const TensorView& x, const KeptCodes& kept,
                               const TensorView& dy, const TensorView& offsets, const TensorView& dx,
                               const std::function<void()>& between) {
  ScratchScope scope(call.scratch);
  const GradientCodes codes = gradient_codes(call, scope, dy, offsets);
  dgrad(call, dy, codes.dgrad, offsets, dx);
  between();
  wgrad(call, x, kept_of(call, kept), dy, codes.wgrad, offsets);
}

Linear::GradientCodes Linear::gradient_codes(const Call& call, ScratchScope& scope, const TensorView& dy,
                                             const TensorView& offsets) {
  const OperandForm rows = form_of(call, GemmRole::kDgrad, OperandRole::kGrad),
                    columns = form_of(call, GemmRole::kWgrad, OperandRole::kGrad);
  if (!codes_gradient_once(rows, columns)) return {};
  const auto make = [&](const OperandForm& form, Orientation orientation, const char* block, QuantView& out) {
    out = take_quant(block, operand_layout(form, site_of(call), dy.dim(0)),
                     [&](const std::string& name, DType dtype, const Shape& shape) {
                       return scope.take(name, dtype, shape);
                     });
    return quantising(call, {form.gemm, form.operand, orientation, call.counting}, dy, offsets, {}, out);
  };
  GradientCodes codes;
  const Quantize row = make(rows, Orientation::kRow, "row codes", codes.dgrad);
  const Quantize column = make(columns, Orientation::kColumn, "column codes", codes.wgrad);
  run(call.queue, QuantizeBoth{.row = row, .column = column});
  return codes;
}

void Linear::dgrad(const Call& call, const TensorView& dy, const QuantView& codes, const TensorView& offsets,
                   const TensorView& dx) {
  ScratchScope scope(call.scratch);
  const Operand a =
      codes.empty()
          ? activation(call, scope, form_of(call, GemmRole::kDgrad, OperandRole::kGrad), dy, offsets, {})
          : Operand{{}, false, codes, {}};
  const Operand b = weight(call, scope, form_of(call, GemmRole::kDgrad, OperandRole::kWeight));
  if (site_.groups > 0) {
    run(call.queue, GroupedGemm{.a = a, .b = b, .offsets = offsets, .out = dx});
  } else {
    run(call.queue, Gemm{.a = a, .b = b, .out = dx, .accumulate = false});
  }
  note(call.queue, GemmRole::kDgrad, format_of(a), format_of(b));
}

void Linear::wgrad(const Call& call, const TensorView& x, const KeptCodes& kept, const TensorView& dy,
                   const QuantView& codes, const TensorView& offsets) {
  // BF16 buffers hold one micro-batch; the plan widens them where several are summed.
  const bool wide = param_.gradient.dtype == DType::kF32;
  const Groups groups = groups_of(call);
  const auto states = gradients_.begin() + groups.first;
  const Gradient state = *states;
  FP4T_CHECK(std::all_of(states, states + groups.count, [&](Gradient s) { return s == state; }),
             param_.info.name, ": experts [", groups.first, ", ", groups.first + groups.count, ") part ways");
  FP4T_CHECK(wide || state != Gradient::kWritten, param_.info.name,
             ": a second micro-batch needs an FP32 gradient buffer");
  const bool accumulate = wide && state != Gradient::kToWrite;
  std::fill(states, states + groups.count, Gradient::kWritten);
  ScratchScope scope(call.scratch);
  const Operand a =
      codes.empty()
          ? activation(call, scope, form_of(call, GemmRole::kWgrad, OperandRole::kGrad), dy, offsets, {})
          : Operand{{}, false, codes, {}};
  const Operand b =
      activation(call, scope, form_of(call, GemmRole::kWgrad, OperandRole::kAct), x, offsets, kept);
  if (site_.groups > 0) {
    run(call.queue, GroupedGemmK{.a = a,
                                 .b = b,
                                 .offsets = offsets,
                                 .out = part_of(call, param_.gradient),
                                 .accumulate = accumulate});
  } else {
    run(call.queue, Gemm{.a = a, .b = b, .out = param_.gradient, .accumulate = accumulate});
  }
  note(call.queue, GemmRole::kWgrad, format_of(a), format_of(b));
}

// Log ------------------------------------------------------------------------------------------------

Format Linear::format_of(const Operand& o) {
  if (!o.codes.empty()) return o.codes.spec.format;
  return o.values.dtype == DType::kF32 ? Format::kFp32 : Format::kBf16;
}

void Linear::note(const Queue& queue, GemmRole gemm, Format a, Format b) {
  const Seen now{gemm, a, b, queue.product_kernel()};
  if (std::find(seen_.begin(), seen_.end(), now) == seen_.end()) seen_.push_back(now);
}

void Linear::append_kernels(std::vector<std::string>& lines) const {
  const std::string place =
      site_.module == Module::kHead ? "" : "layers." + std::to_string(site_.layer) + " ";
  const size_t first = lines.size();
  for (const Seen& s : seen_) {
    lines.push_back(detail::concat(place, name_of(site_.module), " ", name_of(s.gemm), " ", name_of(s.a),
                                   " x ", name_of(s.b), ": ", s.kernel));
  }
  // In an order that does not depend on what ran first.
  std::sort(lines.begin() + static_cast<int64_t>(first), lines.end());
}

}  // namespace fp4t

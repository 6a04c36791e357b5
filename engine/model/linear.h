// One linear layer, or the same layer of every expert: y = x W^T and its two gradients, each product with
// the operands that the precision table asks for. The only reader of the table's cells.
//
// Where a call names some of the experts (ExpertsOfCall), x, dy and their results are the rows of these, and
// so are the offsets, from 0; codes that are kept have the places that they would have if all were coded at
// once.
//
// Codes of weights are kept from one use to the next where the same inputs give the same codes; whatever
// is drawn anew (stochastic rounding, fresh rotation signs) is made for each product.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "engine/model/call.h"
#include "engine/model/params.h"
#include "engine/plan/operands.h"
#include "kernels/ops/gemm.h"
#include "kernels/ops/quantize.h"

namespace fp4t {

class Linear {
 public:
  // Takes the kept codes from `run_arena`; `stats` are the site's monitors, F64 [6, kNumQuantStats]. Of
  // experts `first_expert` is the number of the first that is here.
  Linear(const Plan& plan, const GemmSite& site, Param& weight, Arena& run_arena, const TensorView& stats,
         int64_t first_expert = 0);

  // out [rows, out] = x [rows, in] W^T. `offsets` I32 [E + 1] cuts the rows by expert; empty otherwise.
  // Codes of x go to `keep` where that is not empty, for backward.
  void forward(const Call& call, const TensorView& x, const TensorView& offsets, const KeptCodes& keep,
               const TensorView& out);

  // Where the op that makes x may round it for forward_rounded, in `scope`; empty where x must be quantised
  // as a whole, by its own op.
  RoundedRows rounded(const Call& call, ScratchScope& scope, int64_t rows) const;
  // forward of rows that were rounded so; `x_rows` I32, where not empty: the row of x that each row of `out`
  // is made from.
  void forward_rounded(const Call& call, const RoundedRows& x, const TensorView& offsets,
                       const TensorView& x_rows, const TensorView& out);

  // Operands of fprop for products over ranges of rows of one x: a scale domain is all of x.
  struct Fprop {
    Operand act, weight;
  };
  Fprop fprop(const Call& call, ScratchScope& scope, const TensorView& x, const TensorView& offsets,
              const KeptCodes& keep);
  // out [rows, out] from the rows of x that begin at `begin`; not of experts.
  void forward_rows(const Call& call, const Fprop& operands, int64_t begin, const TensorView& out);

  // dx [rows, in] = dy W, and W's gradient += dy^T x. x is forward's input, `kept` what it kept; x is not
  // read where wgrad's codes are there.
  void backward(const Call& call, const TensorView& x, const KeptCodes& kept, const TensorView& dy,
                const TensorView& offsets, const TensorView& dx);
  // The same, W's gradient last: `between` is called before it, when dx is made, to send dx on its way and to
  // put x where it is to be read.
  void backward_dx_first(const Call& call, const TensorView& x, const KeptCodes& kept, const TensorView& dy,
                         const TensorView& offsets, const TensorView& dx,
                         const std::function<void()>& between);

  void weights_changed();
  // Makes the codes that forward multiplies now, where they are kept, so that it need not.
  void prepare_forward(const Call& call);
  // An accumulation begins: the next wgrad writes over what the gradient holds.
  void begin_gradient() { gradients_.assign(gradients_.size(), Gradient::kToWrite); }
  // Zeros where an accumulation has begun and nothing was summed.
  void settle_gradient(Queue& queue);
  const Param& param() const { return param_; }

  const GemmSite& site() const { return site_; }
  // One line a kind of product that has run: "layers.0 attn.qkv fprop nvfp4 x nvfp4: cpu fp32 fma".
  void append_kernels(std::vector<std::string>& lines) const;

 private:
  struct Cached {
    OperandForm form;
    CachedOperand held;
    bool valid = false;
  };
  // What identifies an operand's draws, and where its monitors go.
  struct Quantising {
    GemmRole gemm;
    OperandRole operand;
    Orientation orientation;
    bool counted;
  };

  // Codes of dy for its two products, where one reading makes both; else empty.
  struct GradientCodes {
    QuantView dgrad, wgrad;
  };
  GradientCodes gradient_codes(const Call& call, ScratchScope& scope, const TensorView& dy,
                               const TensorView& offsets);
  // `codes` of dy, or empty.
  void dgrad(const Call& call, const TensorView& dy, const QuantView& codes, const TensorView& offsets,
             const TensorView& dx);
  void wgrad(const Call& call, const TensorView& x, const KeptCodes& kept, const TensorView& dy,
             const QuantView& codes, const TensorView& offsets);

  // The experts that a call is for; all of them, or the one matrix.
  struct Groups {
    int64_t first, count;
  };
  Groups groups_of(const Call& call) const;
  GemmSite site_of(const Call& call) const;
  // The call's part of what has a matrix for every expert in its first dimension, of codes of weights, of
  // codes that were kept of all rows.
  TensorView part_of(const Call& call, const TensorView& all) const;
  QuantView weights_of(const Call& call, const QuantView& all) const;
  KeptCodes kept_of(const Call& call, const KeptCodes& all) const;
  OperandForm form_of(const Call& call, GemmRole gemm, OperandRole operand) const;
  // `kept`: codes written by fprop and read by wgrad; empty: in scratch, made again.
  Operand activation(const Call& call, ScratchScope& scope, const OperandForm& form, const TensorView& x,
                     const TensorView& offsets, const KeptCodes& kept);
  // Values of fprop's act as it was multiplied, and the scale that they leave out.
  TensorView forward_values(const Call& call, ScratchScope& scope, const OperandForm& form,
                            const TensorView& x, const TensorView& offsets, const QuantView& kept,
                            TensorView& scale);
  Operand weight(const Call& call, ScratchScope& scope, const OperandForm& form);
  // Codes of a weight as fprop multiplies them.
  QuantView forward_weight(const Call& call, ScratchScope& scope, const OperandForm& form, bool counted);
  void make_weight(const Call& call, ScratchScope& scope, const OperandForm& form, CachedOperand& into,
                   TensorView& scale);
  TensorView dequantised(const Call& call, const OperandForm& form, const QuantView& codes,
                         const TensorView& offsets, const TensorView& into);
  Quantize quantising(const Call& call, const Quantising& what, const TensorView& x,
                      const TensorView& offsets, const TensorView& input_scale, const QuantView& out) const;
  void quantise(const Call& call, const Quantising& what, const TensorView& x, const TensorView& offsets,
                const TensorView& input_scale, const QuantView& out);

  Cached* cached(const OperandForm& form);
  Cached* transpose_to_make(const Call& call, const OperandForm& fprop);
  TensorView stacked_weight(const Call& call) const;  // [matrices * out, in]
  // Remembers as what a product ran; call after it.
  void note(const Queue& queue, GemmRole gemm, Format a, Format b);
  static Format format_of(const Operand& o);

  GemmSite site_;
  Param& param_;
  TensorView stats_;
  int64_t first_expert_;
  std::vector<Cached> cache_;
  enum class Gradient : uint8_t { kGiven, kToWrite, kWritten };  // kGiven: by whoever filled the buffer
  std::vector<Gradient> gradients_;                              // by expert
  struct Seen {
    GemmRole gemm;
    Format a, b;
    const char* kernel;
    bool operator==(const Seen&) const = default;
  };
  std::vector<Seen> seen_;  // every kind of product that ran, once
};

// Index of an operand among a site's monitors.
int stats_row(GemmRole gemm, OperandRole operand);

}  // namespace fp4t

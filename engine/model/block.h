// One transformer block: x + attention(norm(x)), then + FFN(norm(.)), where the FFN is dense or a mixture
// of experts. Forward and backward by hand (DESIGN.md sections 4 and 6).
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "engine/model/call.h"
#include "engine/model/linear.h"
#include "engine/model/params.h"
#include "kernels/ops/moe.h"

namespace fp4t {

// The sites of one layer by module; null where the layer has none.
struct BlockLinears {
  std::unique_ptr<Linear> qkv, out;       // attention
  std::unique_ptr<Linear> gate_up, down;  // dense or expert FFN
  std::unique_ptr<Linear> shared_gate_up, shared_down;
};

class Block {
 public:
  // `load` I64 [E]: the layer's counter of tokens by expert (MoE layers).
  Block(const Plan& plan, int64_t layer, ParamSet& params, BlockLinears linears, const TensorView& load);

  // out [T, D] from x [T, D]. With `cache` the keys and values go there and attention reads it.
  void forward(const Call& call, const TensorView& x, LayerActs& acts, const KvCacheView* cache,
               const TensorView& out);

  // `s.dstream` holds the gradient of the block's output and gets that of its input. Consumes `acts`.
  void backward(const Call& call, const TensorView& x, LayerActs& acts, const StreamScratch& s);

  std::vector<Linear*> linears() const;

 private:
  void attention_forward(const Call& call, const TensorView& x, LayerActs& acts, const KvCacheView* cache,
                         const ForwardScratch& s);
  // From the sum with attention's output to gate_up, and from there to `out`.
  void ffn_in(const Call& call, const TensorView& x, LayerActs& acts, const ForwardScratch& s, bool rounding);
  void ffn_out(const Call& call, Linear& down, const TensorView& gate_up, const TensorView& offsets,
               const LayerActs& acts, const TensorView& hidden, bool rounding, const TensorView& out);
  void route(const Call& call, LayerActs& acts);

  void dense_backward(const Call& call, LayerActs& acts, const StreamScratch& s);
  void moe_backward(const Call& call, LayerActs& acts, const StreamScratch& s);
  void router_backward(const Call& call, const LayerActs& acts, const FfnScratch& f);
  void attention_backward(const Call& call, const TensorView& x, LayerActs& acts, const StreamScratch& s);
  void swiglu_backward(const Call& call, const TensorView& gate_up, const TensorView& dout) const;

  const ModelSpec& model_;
  bool is_moe_;
  float eps_, clamp_, scale_;
  RouterKind router_kind_ = RouterKind::kSoftmax;
  Param &attn_norm_, &mlp_norm_;
  Param *q_norm_ = nullptr, *k_norm_ = nullptr, *router_ = nullptr;
  TensorView router_bias_, load_;
  BlockLinears linears_;
};

}  // namespace fp4t

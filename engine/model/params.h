// Parameters in memory: masters, the BF16 copies that products read, gradients; and the buffers that
// belong to the weights (selection biases). One list, walked by optimizer, checkpoint and import.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "engine/plan/plan.h"
#include "kernels/base/arena.h"
#include "kernels/base/tensor.h"

namespace fp4t {

struct Param {
  ParamInfo info;
  // F32 or BF16 (dtypes.masters); norms and routers always F32. Where several ranks share a parameter that
  // has a copy: only what this rank owns, [n].
  TensorView master;
  TensorView copy;      // BF16 copy that products read; empty under the fp32 format, for norms and routers,
                        // and when the master is BF16 itself
  TensorView gradient;  // F32 or BF16
  // The elements of the logical tensor that copy, gradient and whole masters have: of experts those of this
  // rank's place in its expert group, else all.
  Span held = {};
  // Where blocks share the memory of gradients: what this rank owns of this one, [n]
  // (engine/plan/run_layout.h).
  TensorView owned_gradient = {};
  // Blocks share the memory of copies, which the exchange makes from the owners' masters before each use.
  bool shares_copy = false;
};

struct Buffer {
  BufferInfo info;
  TensorView data;
};

class ShardExchange;

// Elements of the logical tensor in one of a parameter's views that has all that is held, [n].
inline TensorView elements_of(const Param& p, const TensorView& view, const Span& elements) {
  FP4T_CHECK_EQ(view.elements(), p.held.count(), p.info.name);
  return view.reshape({view.elements()}).rows(elements.begin - p.held.begin, elements.count());
}
// Elements of the gradient that a rank owns, [n].
inline TensorView owned_gradient(const Param& p, const Span& owned, const Span& elements) {
  if (p.owned_gradient.empty()) return elements_of(p, p.gradient, elements);
  return p.owned_gradient.rows(elements.begin - owned.begin, elements.count());
}
// The copy of the elements that a rank owns, [n]; empty where there is none that stays.
inline TensorView owned_copy(const Param& p, const Span& owned) {
  return p.copy.empty() || p.shares_copy ? TensorView{} : elements_of(p, p.copy, owned);
}
// The master of the elements that a rank owns, [n].
inline TensorView master_of(const Param& p, const Span& owned) {
  const bool is_part = p.master.elements() == owned.count();
  return is_part ? p.master.reshape({owned.count()}) : elements_of(p, p.master, owned);
}

class ParamSet {
 public:
  ParamSet(Arena& run_arena, const Plan& plan, int rank = 0);
  // With several ranks, before anything that follows is called.
  void connect(ShardExchange& exchange) { exchange_ = &exchange; }

  std::vector<Param>& params() { return params_; }
  std::vector<Buffer>& buffers() { return buffers_; }
  Param& find(const std::string& name);  // throws InternalError when absent
  Buffer& find_buffer(const std::string& name);
  // What this rank owns of a parameter.
  Span owned(const Param& p) const { return plan_.shards.owned(p.info, rank_); }

  // Normal(0, std) by FillNormal with keys (seed, kInit, tensor_id); norms 1; buffers 0.
  void initialise(Queue& queue, const Plan& plan);
  // Rounds every master to its copy, on all ranks.
  void refresh_copies(Queue& queue);

 private:
  const Plan& plan_;
  int rank_;
  ShardExchange* exchange_ = nullptr;
  std::vector<Param> params_;
  std::vector<Buffer> buffers_;
};

}  // namespace fp4t

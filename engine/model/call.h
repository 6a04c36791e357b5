// What one forward or backward hands down to blocks and linear layers.
#pragma once

#include "engine/model/transformer.h"
#include "engine/plan/dims.h"
#include "kernels/base/arena.h"
#include "kernels/base/queue.h"
#include "kernels/ops/attention.h"

namespace fp4t {

// Experts [first, first + count) of those that are here, for calls whose rows are theirs alone; count 0: all
// of them. `bounds` [L + 1] cuts the rows of all of them by expert.
struct ExpertsOfCall {
  int64_t first = 0, count = 0;
  const int32_t* bounds = nullptr;
};

struct Call {
  Queue& queue;
  Arena& scratch;
  const ModelDims& dims;
  const Pass& pass;
  // False while a block runs again for its backward: nothing is counted twice.
  bool counting;
  int64_t tokens;
  TensorView positions;  // I32 [T]
  TensorView groups;     // I32 [T]: first token of the document; when decoding, the slot
  // Where the router's statistics of a training forward go; empty: nowhere.
  TensorView router_sums;
  TensorView cos, sin;
  TensorView dispatch_stats = {};
  ExpertsOfCall experts = {};
};

// Takes blocks from an arena in the form that the layouts of engine/plan want.
struct ArenaTake {
  Arena& arena;
  TensorView operator()(const std::string& block, DType dtype, const Shape& shape) const {
    return arena.take(block, dtype, shape);
  }
};

// What products and look-ups read of a parameter.
inline TensorView operand_of(const Param& p) { return p.copy.empty() ? p.master : p.copy; }

}  // namespace fp4t

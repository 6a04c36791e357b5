// Gradients of a weight vector: every fixed chunk of tokens sums into its own row, the rows are then
// added to the gradient in chunk order.
#pragma once

#include <algorithm>
#include <cstdint>

#include "kernels/base/numeric.h"
#include "kernels/base/queue.h"
#include "kernels/cpu/rows.h"

namespace fp4t::cpu {

class Partials {
 public:
  Partials(int64_t tokens, int64_t width)
      : chunks_(ceil_div(tokens, kTokensPerPartial)), width_(width), rows_(chunks_ * width) {}

  // The row of the chunk that begins at this token, filled with zeros.
  float* zeroed(int64_t first_token) const {
    float* row = rows_.get() + first_token / kTokensPerPartial * width_;
    std::fill(row, row + width_, 0.0f);
    return row;
  }

  void add_to(Queue& queue, float* gradient) const { add_to(queue, 0, width_, gradient); }

  // Columns [first, first + count) only.
  void add_to(Queue& queue, int64_t first, int64_t count, float* gradient) const {
    constexpr int64_t kColumnsPerChunk = 1024;
    parallel_for(queue, count, kColumnsPerChunk, [&](int64_t begin, int64_t end) {
      for (int64_t c = 0; c < chunks_; ++c) {
        const float* row = rows_.get() + c * width_ + first;
        for (int64_t i = begin; i < end; ++i) gradient[i] = gradient[i] + row[i];
      }
    });
  }

 private:
  int64_t chunks_, width_;
  Scratch rows_;
};

}  // namespace fp4t::cpu

// Both orientations of a matrix in 16x16 blocks (quantize_squares.cu): a weight and its transpose.
#pragma once

#include "kernels/cuda/quantize_amax.cuh"

namespace fp4t::cuda {

struct SquareJob {
  QuantJob row, column;
  int32_t rows, rows_per_group;  // of x
};

// Whether the kernel here codes both: 16x16 blocks by rule amax, to nearest, in equal groups of whole tiles,
// in aligned memory. A pure function of the op and its jobs.
bool takes_squares(const QuantizeBoth& op, const QuantJob& row, const QuantJob& column);
void launch_squares(Queue& queue, const SquareJob& s);

}  // namespace fp4t::cuda

// Coding along the columns of x: the result is the transpose.
#include "kernels/cuda/quantize_encode.cuh"

namespace fp4t::cuda {

void launch_encode_column(Queue& queue, const QuantJob& job, Coder coder) {
  launch_encode_tiles<true>(queue, job, coder);
}

}  // namespace fp4t::cuda

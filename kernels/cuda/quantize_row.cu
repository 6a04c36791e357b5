// Coding along the rows of x.
#include "kernels/cuda/quantize_encode.cuh"

namespace fp4t::cuda {

void launch_encode_row(Queue& queue, const QuantJob& job, Coder coder) {
  launch_encode_tiles<false>(queue, job, coder);
}

}  // namespace fp4t::cuda

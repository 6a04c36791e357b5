#include "kernels/cuda/code_order.h"

#include <algorithm>

#include "kernels/base/numeric.h"
#include "kernels/cuda/context.h"
#include "kernels/formats/code_order.h"

namespace fp4t::cuda {

namespace {

constexpr int kThreads = 256;

__global__ void __launch_bounds__(kThreads) put_in_order(uint8_t* codes, int64_t pieces, bool wide) {
  const int64_t step = int64_t{gridDim.x} * kThreads;
  for (int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x; i < pieces; i += step) {
    uint8_t* p = codes + i * 16;
    uint32_t natural[4] = {}, stream[4];
    if (wide) {
      const uint4 q = *reinterpret_cast<const uint4*>(p);
      natural[0] = q.x, natural[1] = q.y, natural[2] = q.z, natural[3] = q.w;
    } else {
      for (int b = 0; b < 16; ++b) natural[b / 4] |= static_cast<uint32_t>(p[b]) << (b % 4 * 8);
    }
    to_stream(natural, stream);
    if (wide) {
      *reinterpret_cast<uint4*>(p) = make_uint4(stream[0], stream[1], stream[2], stream[3]);
    } else {
      for (int b = 0; b < 16; ++b) p[b] = static_cast<uint8_t>(stream[b / 4] >> (b % 4 * 8));
    }
  }
}

}  // namespace

void put_in_stream_order(Queue& queue, const QuantView& codes) {
  const int64_t pieces = code_bytes(codes) / 16;
  if (pieces == 0) return;
  const Context& c = context_of(queue);
  const int64_t blocks = std::min<int64_t>(ceil_div(pieces, kThreads), int64_t{c.sm_count} * 8);
  const bool wide = reinterpret_cast<uintptr_t>(codes.codes.data) % 16 == 0;
  put_in_order<<<static_cast<unsigned>(blocks), kThreads, 0, c.stream>>>(codes.codes.as<uint8_t>(), pieces,
                                                                         wide);
  check_launch("quantize: code order");
}

}  // namespace fp4t::cuda

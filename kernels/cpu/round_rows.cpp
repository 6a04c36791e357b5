#include "kernels/cpu/round_rows.h"

#include <vector>

#include "kernels/ops/run.h"

namespace fp4t::cpu {

void round_rows(Queue& queue, const TensorView& x, const RoundedRows& out) {
  if (x.dim(0) == 0) return;
  QuantView codes = quant_layout(out.spec, GroupAxis::kRows, 1, x.dim(0), x.dim(1));
  std::vector<uint8_t> bytes(static_cast<size_t>(code_bytes(codes)));
  std::vector<uint8_t> scales(static_cast<size_t>(block_scale_bytes(codes)));
  codes.codes.data = bytes.data();
  codes.block_scales.data = scales.data();
  codes.tensor_scale.data = out.scale.data;
  Quantize quantize{};
  quantize.x = x;
  quantize.orientation = Orientation::kRow;
  quantize.out = codes;
  run(queue, quantize);
  run(queue,
      Dequantize{.x = codes, .offsets = {}, .scale = DecodeScale::kBlock, .out = out.values, .inexact = {}});
}

}  // namespace fp4t::cpu

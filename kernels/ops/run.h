// The dispatcher: check the op, then call the body of the queue's backend. The declarations expand from
// op_list.inc; a forgotten body is a link error that names the op.
#pragma once

#include "kernels/base/queue.h"
#include "kernels/ops/attention.h"
#include "kernels/ops/dispatch.h"
#include "kernels/ops/elementwise.h"
#include "kernels/ops/embed.h"
#include "kernels/ops/gemm.h"
#include "kernels/ops/loss.h"
#include "kernels/ops/moe.h"
#include "kernels/ops/norm.h"
#include "kernels/ops/optimizer.h"
#include "kernels/ops/policy.h"
#include "kernels/ops/quantize.h"
#include "kernels/ops/random.h"
#include "kernels/ops/sample.h"

namespace fp4t {

#define FP4T_OP(op, exactness) void run(Queue& queue, const op& args);
namespace cpu {
#include "kernels/ops/op_list.inc"
}
namespace cuda {
#include "kernels/ops/op_list.inc"
}
#undef FP4T_OP

template <class Op>
void run(Queue& queue, const Op& op) {
  op.check();
  if (queue.backend() == Backend::kCpu) {
    cpu::run(queue, op);
  } else {
    cuda::run(queue, op);
  }
}

}  // namespace fp4t

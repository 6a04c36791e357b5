#include "kernels/base/check.h"
#include "kernels/cuda/gemm_problem.h"

namespace fp4t::cuda {

bool wgmma_takes(const Queue&, const GemmProblem&) { return false; }

void launch_wgmma(Queue&, const GemmProblem&) { throw InternalError("no product is taken by this core"); }

}  // namespace fp4t::cuda

// The fast column orientation, alone or with the row orientation of the same tensor (quantize_stripes.cu).
#pragma once

#include "kernels/cuda/quantize_amax.cuh"

namespace fp4t::cuda {

struct StripeJob {
  QuantJob column;
  QuantJob row;                     // read with the first, where both are asked for
  uint32_t flip[kQuantBlock];       // signs of the rotation, for two columns side by side
  uint32_t flip_high[kQuantBlock];  // for one, as FP32
};

// Whether the kernels here code `job`: rule amax in 1x16 blocks, no rotation longer than a block, aligned
// memory. A pure function of the job.
bool takes_stripes(const QuantJob& job, Coder coder);
StripeJob stripe_job(const QuantJob& column);
// `both`: the row job too, of the same x and the same groups.
void launch_stripes_amax(Queue& queue, const StripeJob& s, bool both);
void launch_stripes(Queue& queue, const StripeJob& s, bool both);

}  // namespace fp4t::cuda

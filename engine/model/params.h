// Parameters in memory: masters, the BF16 copies that products read, gradients; and the buffers that
// belong to the weights (selection biases). One list, walked by optimizer, checkpoint and import.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "engine/plan/plan.h"
#include "kernels/base/arena.h"
#include "kernels/base/tensor.h"

namespace fp4t {

struct Param {
  ParamInfo info;
  TensorView master;    // F32 or BF16 (dtypes.masters); norms and routers always F32
  TensorView copy;      // BF16 copy that products read; empty under the fp32 format, for norms and routers,
                        // and when the master is BF16 itself
  TensorView gradient;  // F32 or BF16
};

struct Buffer {
  BufferInfo info;
  TensorView data;
};

class ParamSet {
 public:
  ParamSet(Arena& run_arena, const Plan& plan);

  std::vector<Param>& params() { return params_; }
  std::vector<Buffer>& buffers() { return buffers_; }
  Param& find(const std::string& name);  // throws InternalError when absent
  Buffer& find_buffer(const std::string& name);

  // Normal(0, std) by FillNormal with keys (seed, kInit, tensor_id); norms 1; buffers 0.
  void initialise(Queue& queue, const Plan& plan);
  // Rounds every master to its copy.
  void refresh_copies(Queue& queue);

 private:
  std::vector<Param> params_;
  std::vector<Buffer> buffers_;
};

}  // namespace fp4t

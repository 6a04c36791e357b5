#include "kernels/cuda/attention_maps.cuh"

#include <cudaTypedefs.h>

#include "kernels/cuda/context.h"

namespace fp4t::cuda {

namespace {

// The driver's function through the runtime: nothing links the driver's library.
PFN_cuTensorMapEncodeTiled_v12000 encode_tiled() {
  static const auto function = [] {
    void* f = nullptr;
    cudaDriverEntryPointQueryResult found{};
    FP4T_CUDA(
        cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &f, 12000, cudaEnableDefault, &found));
    FP4T_CHECK(found == cudaDriverEntryPointSuccess, "the driver has no tensor maps");
    return reinterpret_cast<PFN_cuTensorMapEncodeTiled_v12000>(f);
  }();
  return function;
}

}  // namespace

CUtensorMap head_map(const Bf16* data, int64_t head_dim, int64_t heads, int64_t tokens, int rows) {
  CUtensorMap map;
  const auto size = [](int64_t n) { return static_cast<cuuint64_t>(n); };
  const cuuint64_t dims[3] = {size(head_dim), size(heads), size(tokens)};
  const cuuint64_t strides[2] = {size(head_dim * 2), size(heads * head_dim * 2)};
  const cuuint32_t box[3] = {64, 1, static_cast<cuuint32_t>(rows)}, steps[3] = {1, 1, 1};
  const CUresult status =
      encode_tiled()(&map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 3, const_cast<Bf16*>(data), dims, strides, box,
                     steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                     CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  FP4T_CHECK(status == CUDA_SUCCESS, "cuTensorMapEncodeTiled: error ", static_cast<int>(status), " for ",
             tokens, " x ", heads, " x ", head_dim);
  return map;
}

}  // namespace fp4t::cuda

#include "kernels/cuda/tensor_map.h"

#include <cudaTypedefs.h>

#include "kernels/base/check.h"
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

CUtensorMap tensor_map(const void* data, DType dtype, const TensorMapShape& shape) {
  FP4T_CHECK(dtype == DType::kBf16 || dtype == DType::kF32, "a tensor map of ", dtype_name(dtype));
  const auto bytes = [&](int64_t elements) { return static_cast<cuuint64_t>(elements * dtype_bytes(dtype)); };
  const auto size = [&](int i) { return static_cast<cuuint64_t>(shape.size[i]); };
  const auto side = [&](int i) { return static_cast<cuuint32_t>(shape.box[i]); };
  const cuuint64_t sizes[3] = {size(0), size(1), size(2)};
  const cuuint64_t strides[2] = {bytes(shape.stride[0]), bytes(shape.stride[1])};
  const cuuint32_t box[3] = {side(0), side(1), side(2)}, steps[3] = {1, 1, 1};
  CUtensorMap map;
  const CUresult status = encode_tiled()(
      &map, dtype == DType::kBf16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT32, 3,
      const_cast<void*>(data), sizes, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
      CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  FP4T_CHECK(status == CUDA_SUCCESS, "cuTensorMapEncodeTiled: error ", static_cast<int>(status), " for ",
             shape.size[0], " x ", shape.size[1], " x ", shape.size[2], ", strides ", shape.stride[0],
             " and ", shape.stride[1]);
  return map;
}

}  // namespace fp4t::cuda

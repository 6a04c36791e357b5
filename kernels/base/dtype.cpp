#include "kernels/base/dtype.h"

#include "kernels/base/check.h"

namespace fp4t {

const char* dtype_name(DType t) {
  switch (t) {
    case DType::kF32:
      return "fp32";
    case DType::kBf16:
      return "bf16";
    case DType::kF64:
      return "fp64";
    case DType::kI32:
      return "i32";
    case DType::kI64:
      return "i64";
    case DType::kU8:
      return "u8";
  }
  return "?";
}

const char* safetensors_name(DType t) {
  switch (t) {
    case DType::kF32:
      return "F32";
    case DType::kBf16:
      return "BF16";
    case DType::kF64:
      return "F64";
    case DType::kI32:
      return "I32";
    case DType::kI64:
      return "I64";
    case DType::kU8:
      return "U8";
  }
  return "?";
}

DType dtype_from_safetensors(std::string_view name) {
  for (DType t : {DType::kF32, DType::kBf16, DType::kF64, DType::kI32, DType::kI64, DType::kU8}) {
    if (name == safetensors_name(t)) return t;
  }
  throw BadDataError(
      detail::concat("unsupported tensor type '", name, "' (supported: F32, BF16, F64, I32, I64, U8)"));
}

}  // namespace fp4t

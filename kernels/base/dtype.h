// Element types of tensors in memory. Quantised tensors are described by QuantView, not by a DType.
#pragma once

#include <cstdint>
#include <string_view>

namespace fp4t {

enum class DType : uint8_t { kF32, kBf16, kF64, kI32, kI64, kU8 };

constexpr int64_t dtype_bytes(DType t) {
  switch (t) {
    case DType::kF32:
    case DType::kI32:
      return 4;
    case DType::kBf16:
      return 2;
    case DType::kF64:
    case DType::kI64:
      return 8;
    case DType::kU8:
      return 1;
  }
  return 0;
}

// Lower-case names as they appear in recipes and messages: "fp32", "bf16", "fp64", "i32", "i64", "u8".
const char* dtype_name(DType t);

// safetensors names: "F32", "BF16", "F64", "I32", "I64", "U8". Throws BadDataError when unknown.
const char* safetensors_name(DType t);
DType dtype_from_safetensors(std::string_view name);

// One BF16 number as stored; arithmetic happens in FP32 (conversions in kernels/formats/bf16.h).
struct Bf16 {
  uint16_t bits;
};
static_assert(sizeof(Bf16) == 2);

template <class T>
struct DTypeOf;
template <>
struct DTypeOf<float> {
  static constexpr DType value = DType::kF32;
};
template <>
struct DTypeOf<Bf16> {
  static constexpr DType value = DType::kBf16;
};
template <>
struct DTypeOf<double> {
  static constexpr DType value = DType::kF64;
};
template <>
struct DTypeOf<int32_t> {
  static constexpr DType value = DType::kI32;
};
template <>
struct DTypeOf<int64_t> {
  static constexpr DType value = DType::kI64;
};
template <>
struct DTypeOf<uint8_t> {
  static constexpr DType value = DType::kU8;
};

}  // namespace fp4t

// Elementary functions in FP32, one source for host and device. Every step is a single correctly rounded
// operation (add, multiply, divide, fma), so each result is the same bits on the CPU, on the GPU, in a
// scalar loop and in a vectorised one. Branch-free: compilers vectorise loops over them.
// Accuracy, checked by tests/formats/math.cpp over all of FP32, subnormal results included: exp_f32 and
// log_f32 within 1 ulp, sigmoid_f32 within 1.5, silu_f32 within 2.5 (for x < -87, where sigmoid is
// subnormal, within 2^-141), silu_grad_f32 within 2^-22 of max(1, |result|).
// Requires FP32 subnormals and no contraction: -ffp-contract=off on the host, -fmad=false -ftz=false on
// the device. NaN in, NaN out.
// Rejected: libm and CUDA's functions (other bits on each machine), tables (gathers are slow on the CPU).
#pragma once

#include <cmath>
#include <cstdint>

#include "kernels/base/host_device.h"
#include "kernels/formats/bf16.h"

namespace fp4t {

namespace detail {

FP4T_HD float fma_f32(float a, float b, float c) {
#if defined(__CUDA_ARCH__)
  return __fmaf_rn(a, b, c);
#else
  return std::fma(a, b, c);
#endif
}

// ln 2 in two parts; n * kLn2Hi - x is exact for every n and x that exp_f32 meets.
constexpr float kLn2Hi = 0x1.62e430p-1f;
constexpr float kLn2Lo = -0x1.05c610p-29f;

// e^x = p * 2^k, p in [0.7, 1.42].
struct ExpParts {
  float p;
  int32_t k;
};
FP4T_HD ExpParts exp_parts(float x) {
  // Adding 1.5 * 2^23 leaves round(x / ln 2) in the low mantissa bits. For NaN they are arbitrary.
  constexpr float kShift = 0x1.8p23f;
  const float shifted = fma_f32(x, 0x1.715476p0f, kShift);
  const float n = shifted - kShift;
  const int32_t k = static_cast<int32_t>(bits_of(shifted) - 0x4B400000u);
  float r = fma_f32(n, -kLn2Hi, x);
  r = fma_f32(n, -kLn2Lo, r);
  // (e^r - 1 - r) / r^2, minimax on |r| <= ln(2) / 2: relative error of e^r 2^-28.
  float q = 0x1.6a2444p-10f;
  q = fma_f32(q, r, 0x1.1239d6p-7f);
  q = fma_f32(q, r, 0x1.5558f2p-5f);
  q = fma_f32(q, r, 0x1.555492p-3f);
  q = fma_f32(q, r, 0x1.fffffcp-2f);
  // 1 + r loses bits of r; `lost` is exactly those.
  const float one_plus_r = 1.0f + r;
  const float lost = (1.0f - one_plus_r) + r;
  return {one_plus_r + fma_f32(r * r, q, lost), k};
}

}  // namespace detail

// e^x. exp(0) = 1, exp(-inf) = 0, below -103.98 exactly 0, above 88.73 +inf.
FP4T_HD float exp_f32(float x) {
  x = x < -104.0f ? -104.0f : x;
  x = x > 89.0f ? 89.0f : x;
  const detail::ExpParts e = detail::exp_parts(x);
  // Two factors, so that overflow and subnormal results are rounded by the last multiplication alone.
  const int32_t half = e.k >> 1;
  const float first = float_of(static_cast<uint32_t>(half + 127) << 23);
  const float second = float_of(static_cast<uint32_t>(e.k - half + 127) << 23);
  return e.p * first * second;
}

// exp_f32(x) where |x| <= 87, the same bits: the result is normal, so that its exponent can be added to.
FP4T_HD float exp_f32_87(float x) {
  const detail::ExpParts e = detail::exp_parts(x);
  return float_of(bits_of(e.p) + (static_cast<uint32_t>(e.k) << 23));
}

// Natural logarithm. log(1) = 0, log(+-0) = -inf, log(+inf) = +inf, NaN for negative numbers.
FP4T_HD float log_f32(float x) {
  using detail::fma_f32;
  const bool subnormal = x < 0x1p-126f;
  const uint32_t bits = bits_of(subnormal ? x * 0x1p23f : x);
  // x = 2^k * (1 + f) with 1 + f in [2/3, 4/3).
  const int32_t k = static_cast<int32_t>(bits - 0x3F2AAAABu) >> 23;
  const float f = float_of(bits - (static_cast<uint32_t>(k) << 23)) - 1.0f;
  const float n = static_cast<float>(k) - (subnormal ? 23.0f : 0.0f);
  // (log(1 + f) - f + f^2 / 2) / f^3, minimax: relative error of log(1 + f) 2^-27.7.
  float q = -0x1.08054cp-3f;
  q = fma_f32(q, f, 0x1.1e6696p-3f);
  q = fma_f32(q, f, -0x1.f3115ap-4f);
  q = fma_f32(q, f, 0x1.1ed71ep-3f);
  q = fma_f32(q, f, -0x1.559dcap-3f);
  q = fma_f32(q, f, 0x1.99d028p-3f);
  q = fma_f32(q, f, -0x1.fffef0p-3f);
  q = fma_f32(q, f, 0x1.555506p-2f);
  const float tail = fma_f32(q, f, -0.5f) * (f * f);
  float result = fma_f32(n, detail::kLn2Hi, f + fma_f32(n, detail::kLn2Lo, tail));
  const float inf = float_of(0x7F800000u);
  result = x == inf ? inf : result;
  result = x == 0.0f ? -inf : result;
  return x >= 0.0f ? result : float_of(0x7FC00000u);
}

namespace detail {

// 1 / d for d in [1, 2]. On the device without the branch to where a general division treats results near
// the ends of the range; the same two steps, the same bits (tests/gpu/elementwise.cpp).
FP4T_HD float inverse_1_2(float d) {
#if defined(__CUDA_ARCH__)
  float r;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(d));
  return __fmaf_rn(r, __fmaf_rn(-d, r, 1.0f), r);
#else
  return 1.0f / d;
#endif
}

// numerator / (1 + e) for e in [0, 1]: the division is corrected by the rounding error of 1 + e.
FP4T_HD float over_one_plus(float numerator, float e) {
  const float d = 1.0f + e;
  const float d_error = (1.0f - d) + e;
  const float inverse = inverse_1_2(d);
  const float quotient = numerator * inverse;
  const float rest = fma_f32(-quotient, d_error, fma_f32(-quotient, d, numerator));
  return fma_f32(rest, inverse, quotient);
}

}  // namespace detail

// 1 / (1 + e^-x), from the exponential that cannot overflow.
FP4T_HD float sigmoid_f32(float x) {
  const float e = exp_f32(x < 0.0f ? x : -x);
  return detail::over_one_plus(x < 0.0f ? e : 1.0f, e);
}

// x * sigmoid(x) (silu, swish). -inf gives NaN: a non-finite input stays visible.
FP4T_HD float silu_f32(float x) { return x * sigmoid_f32(x); }

// silu and its derivative s * (1 + x * (1 - s)) with s = sigmoid(x); 1 - s is sigmoid(-x), without
// cancellation.
struct SiluGrad {
  float value, grad;
};
// From e = e^-|x|.
FP4T_HD SiluGrad silu_and_grad(float x, float e) {
  const float small = detail::over_one_plus(e, e);
  const float large = detail::over_one_plus(1.0f, e);
  const bool negative = x < 0.0f;
  const float s = negative ? small : large;
  return {x * s, s * detail::fma_f32(x, negative ? large : small, 1.0f)};
}
FP4T_HD float silu_grad_f32(float x) { return silu_and_grad(x, exp_f32(x < 0.0f ? x : -x)).grad; }

}  // namespace fp4t

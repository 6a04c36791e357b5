// Warpgroup products (wgmma, sm_90a) on the fragments and tiles of kernels/cuda/attention_tile.cuh. Bit for
// bit what mma.sync.m16n8k16 gives for the same order of depth.
#pragma once

#include "kernels/cuda/attention_tile.cuh"
#include "kernels/cuda/gemm_wgmma_ptx.cuh"

namespace fp4t::cuda::sm90 {

#define FP4T_ACC(j) "+f"(d[j][0]), "+f"(d[j][1]), "+f"(d[j][2]), "+f"(d[j][3])

// d = a b + (keep ? d : 0), 64 rows of a, 16 of depth; a from shared memory, depth along its rows, or from
// registers. kTransposedB: depth along the columns of b's tile instead of its rows.
// clang-format off

template <int kTransposedB>
__device__ __forceinline__ void product_ss(Fragment<64>& d, uint64_t a, uint64_t b, int keep) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %34, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
      "}, %32, %33, p, 1, 1, 0, %35;\n}"
      : FP4T_ACC(0), FP4T_ACC(1), FP4T_ACC(2), FP4T_ACC(3), FP4T_ACC(4), FP4T_ACC(5), FP4T_ACC(6), FP4T_ACC(7)
      : "l"(a), "l"(b), "r"(keep), "n"(kTransposedB));
}

template <int kTransposedB>
__device__ __forceinline__ void product_rs(Fragment<64>& d, const uint32_t (&a)[4], uint64_t b, int keep) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %37, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
      "}, {%32, %33, %34, %35}, %36, p, 1, 1, %38;\n}"
      : FP4T_ACC(0), FP4T_ACC(1), FP4T_ACC(2), FP4T_ACC(3), FP4T_ACC(4), FP4T_ACC(5), FP4T_ACC(6), FP4T_ACC(7)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(keep), "n"(kTransposedB));
}

template <int kTransposedB>
__device__ __forceinline__ void product_ss(Fragment<128>& d, uint64_t a, uint64_t b, int keep) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %66, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
      "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
      "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
      "}, %64, %65, p, 1, 1, 0, %67;\n}"
      : FP4T_ACC(0), FP4T_ACC(1), FP4T_ACC(2), FP4T_ACC(3), FP4T_ACC(4), FP4T_ACC(5), FP4T_ACC(6), FP4T_ACC(7), FP4T_ACC(8), FP4T_ACC(9), FP4T_ACC(10), FP4T_ACC(11), FP4T_ACC(12), FP4T_ACC(13), FP4T_ACC(14), FP4T_ACC(15)
      : "l"(a), "l"(b), "r"(keep), "n"(kTransposedB));
}

template <int kTransposedB>
__device__ __forceinline__ void product_rs(Fragment<128>& d, const uint32_t (&a)[4], uint64_t b, int keep) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %69, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
      "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
      "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
      "}, {%64, %65, %66, %67}, %68, p, 1, 1, %70;\n}"
      : FP4T_ACC(0), FP4T_ACC(1), FP4T_ACC(2), FP4T_ACC(3), FP4T_ACC(4), FP4T_ACC(5), FP4T_ACC(6), FP4T_ACC(7), FP4T_ACC(8), FP4T_ACC(9), FP4T_ACC(10), FP4T_ACC(11), FP4T_ACC(12), FP4T_ACC(13), FP4T_ACC(14), FP4T_ACC(15)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(keep), "n"(kTransposedB));
}

// clang-format on
#undef FP4T_ACC

// Counts this thread in at named barrier `id` of `threads` threads, without waiting.
__device__ __forceinline__ void named_barrier_arrive(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// Keeps the compiler from moving uses of registers across an asynchronous product's start or end.
template <int kN>
__device__ __forceinline__ void pin(float (&x)[kN][4]) {
#pragma unroll
  for (int j = 0; j < kN; ++j)
    asm volatile("" : "+f"(x[j][0]), "+f"(x[j][1]), "+f"(x[j][2]), "+f"(x[j][3])::"memory");
}
template <int kN>
__device__ __forceinline__ void pin(uint32_t (&x)[kN][4]) {
#pragma unroll
  for (int j = 0; j < kN; ++j)
    asm volatile("" : "+r"(x[j][0]), "+r"(x[j][1]), "+r"(x[j][2]), "+r"(x[j][3])::"memory");
}

// out[64][kN] (+)= A[64][kD] B[kN][kD]^T: tiles of a_rows and b_rows rows.
template <int kD, int kN>
__device__ __forceinline__ void start_rows(uint32_t a, int a_rows, uint32_t b, int b_rows,
                                           Fragment<kN>& out) {
  constexpr uint64_t kDescriptor = wgmma_descriptor(16, 1024);
#pragma unroll
  for (int k = 0; k < kD / 16; ++k) {
    const uint32_t panel = static_cast<uint32_t>(k / 4), column = static_cast<uint32_t>(k % 4) * 32;
    product_ss<0>(out, at_address(kDescriptor, a + panel * static_cast<uint32_t>(a_rows) * 128 + column),
                  at_address(kDescriptor, b + panel * static_cast<uint32_t>(b_rows) * 128 + column), k > 0);
  }
}

// out[64][kD] += A[64][kK] B[kK][kD]: A from registers, B rows `first` on of a tile of b_rows.
template <int kD, int kK>
__device__ __forceinline__ void start_columns(const uint32_t (&a)[kK / 16][4], uint32_t b, int b_rows,
                                              Fragment<kD>& out) {
  const uint64_t descriptor = wgmma_descriptor(static_cast<uint32_t>(b_rows) * 128, 1024);
#pragma unroll
  for (int k = 0; k < kK / 16; ++k) {
    product_rs<1>(out, a[k], at_address(descriptor, b + static_cast<uint32_t>(k) * 16 * 128), 1);
  }
}

}  // namespace fp4t::cuda::sm90

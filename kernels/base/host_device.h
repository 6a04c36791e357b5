// The one macro that lets a function of kernels/base and kernels/formats compile for host and device.
#pragma once

#if defined(__CUDACC__)
#define FP4T_HD __host__ __device__ inline
#else
#define FP4T_HD inline
#endif

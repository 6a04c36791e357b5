// A kernel that holds more values than the 24 registers that it is compiled with: tests/CMakeLists.txt
// expects the compiler to refuse it, with the options of the tensor-core kernels.
extern "C" __global__ void spilling(float* x) {
  float v[64];
  for (int i = 0; i < 64; ++i) v[i] = x[i * 32 + threadIdx.x];
  __syncthreads();
  for (int k = 0; k < 64; ++k) {
    float sum = 0;
    for (int i = 0; i < 64; ++i) sum += v[i] * v[(i * 7 + k) & 63];
    x[k * 32 + threadIdx.x] = sum;
  }
}

// The main of a GPU test: 77, which CTest shows as skipped, where there is no GPU.
#pragma once

#include <cstdio>

#include "gtest/gtest.h"
#include "kernels/base/queue.h"

#define FP4T_GPU_TEST_MAIN                                       \
  int main(int argc, char** argv) {                              \
    testing::InitGoogleTest(&argc, argv);                        \
    if (fp4t::cuda::device_count() == 0) {                       \
      std::fprintf(stderr, "skipped: no GPU on this machine\n"); \
      return 77;                                                 \
    }                                                            \
    return RUN_ALL_TESTS();                                      \
  }

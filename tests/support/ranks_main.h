// The main of a test that mpirun starts: MPI lives as long as the tests, and one rank alone, which would
// leave nothing to compare, is refused.
#pragma once

#include <cstdio>

#include "engine/comm/mpi.h"
#include "gtest/gtest.h"

namespace fp4t::test {
inline Communicator* g_world = nullptr;  // one MPI a process
}

#define FP4T_RANKS_TEST_MAIN                     \
  int main(int argc, char** argv) {              \
    ::testing::InitGoogleTest(&argc, argv);      \
    const auto world = fp4t::make_mpi();         \
    fp4t::test::g_world = world.get();           \
    if (world->size() < 2) {                     \
      std::printf("needs at least two ranks\n"); \
      return 1;                                  \
    }                                            \
    return RUN_ALL_TESTS();                      \
  }

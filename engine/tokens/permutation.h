// A keyed permutation of [0, n) that needs no table: a four-round Feistel network over the next even
// number of bits, walked until it lands inside (Black and Rogaway 2002, cycle walking).
#pragma once

#include <cstdint>

#include "kernels/base/check.h"
#include "kernels/base/philox.h"

namespace fp4t {

inline int64_t permuted_index(PhiloxKey key, int64_t n, int64_t i) {
  FP4T_CHECK(i >= 0 && i < n, i, " of ", n);
  int half = 1;
  while ((int64_t{1} << (2 * half)) < n) ++half;
  const uint32_t mask = (uint32_t{1} << half) - 1;
  auto x = static_cast<uint64_t>(i);
  do {
    auto left = static_cast<uint32_t>(x >> half), right = static_cast<uint32_t>(x) & mask;
    for (uint32_t round = 0; round < 4; ++round) {
      const uint32_t next = left ^ (philox4x32(key, right, round, 0, 0).word[0] & mask);
      left = right;
      right = next;
    }
    x = uint64_t{left} << half | right;
  } while (x >= static_cast<uint64_t>(n));
  return static_cast<int64_t>(x);
}

}  // namespace fp4t

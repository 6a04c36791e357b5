// Pairs of standard normal numbers from two random words, one source for host and device.
#pragma once

#include <cmath>
#include <cstdint>

#include "kernels/base/host_device.h"

namespace fp4t {

struct NormalPair {
  float even, odd;
};

FP4T_HD NormalPair normal_pair(uint32_t radius_word, uint32_t angle_word) {
  // In (0, 1], so the logarithm is finite.
  const double u = (static_cast<double>(radius_word) + 1.0) * 0x1p-32;
  const double angle = 2 * 3.14159265358979323846 * static_cast<double>(angle_word) * 0x1p-32;
  const double radius = std::sqrt(-2.0 * std::log(u));
  return {static_cast<float>(radius * std::cos(angle)), static_cast<float>(radius * std::sin(angle))};
}

}  // namespace fp4t

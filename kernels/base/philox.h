// Philox4x32-10 (Salmon et al., SC 2011), the only source of randomness. Counter-based: the bits are a
// pure function of (seed, purpose, copy, site, step, sample, index), so there is no state to save and
// neither threads nor devices nor ranks can change them. Contract: NUMERICS.md section 0.0.
#pragma once

#include <cstdint>

#include "kernels/base/host_device.h"

namespace fp4t {

struct PhiloxKey {
  uint32_t lo = 0;
  uint32_t hi = 0;
};

struct PhiloxBits {
  uint32_t word[4];
};

// What a draw is for. Frozen: the values are part of every checkpoint's meaning; append only.
enum class Purpose : uint32_t {
  kInit = 0,                // parameter initialisation
  kRounding = 1,            // stochastic rounding and MS-EDEN draws of operands
  kSigns = 2,               // fresh Hadamard signs
  kStore = 3,               // stochastic rounding of optimizer stores
  kDataOrder = 4,           // permutation of samples and documents
  kDataMixture = 5,         // which source a sample comes from
  kDataGenerate = 6,        // generated documents
  kSampling = 7,            // token sampling in RL
  kTask = 8,                // which prompts a rollout uses
  kEvalSampling = 9,        // token sampling in evaluations
  kRewardPermutation = 10,  // the permuted-reward control experiment
  kMiniBatch = 11,          // order of samples within a rollout's epochs
  kGenerate = 12,           // text generation from the command line
};

FP4T_HD PhiloxBits philox4x32(PhiloxKey key, uint32_t c0, uint32_t c1, uint32_t c2, uint32_t c3) {
  for (int round = 0; round < 10; ++round) {
    const uint64_t p0 = uint64_t{0xD2511F53u} * c0;
    const uint64_t p1 = uint64_t{0xCD9E8D57u} * c2;
    const uint32_t n0 = static_cast<uint32_t>(p1 >> 32) ^ c1 ^ key.lo;
    const uint32_t n2 = static_cast<uint32_t>(p0 >> 32) ^ c3 ^ key.hi;
    c1 = static_cast<uint32_t>(p1);
    c3 = static_cast<uint32_t>(p0);
    c0 = n0;
    c2 = n2;
    key.lo += 0x9E3779B9u;
    key.hi += 0xBB67AE85u;
  }
  return {{c0, c1, c2, c3}};
}

// The key of one site: words 0 and 1 of Philox(seed; purpose | copy << 8, site, step, sample).
// `copy` is 0 for the row copy of an operand, 1 for the column copy.
FP4T_HD PhiloxKey site_key(uint64_t seed, Purpose purpose, uint32_t copy, uint32_t site, uint32_t step,
                           uint32_t sample) {
  const PhiloxBits b = philox4x32({static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32)},
                                  static_cast<uint32_t>(purpose) | copy << 8, site, step, sample);
  return {b.word[0], b.word[1]};
}

// Draw number `index` of a site.
FP4T_HD PhiloxBits site_draw(PhiloxKey site, uint64_t index) {
  return philox4x32(site, static_cast<uint32_t>(index), static_cast<uint32_t>(index >> 32), 0, 0);
}

// Uniform in [0, 1) with 24 bits: exact in FP32.
FP4T_HD float uniform24(uint32_t word) { return static_cast<float>(word >> 8) * 0x1p-24f; }

}  // namespace fp4t

#include "engine/model/rope.h"

#include <algorithm>
#include <cmath>
#include <numbers>

#include "kernels/base/check.h"

namespace fp4t {

namespace {

constexpr double kPi = std::numbers::pi;

// Llama 3.1: long wavelengths are stretched by `factor`, short ones kept, those between interpolated.
void scale_llama3(const RopeSpec& spec, std::vector<double>& frequencies) {
  const double original = static_cast<double>(spec.original_positions);
  for (double& f : frequencies) {
    const double turns = original * f / (2 * kPi);  // over the original context
    if (turns < spec.low_freq_factor) {
      f /= spec.factor;
    } else if (turns <= spec.high_freq_factor) {
      const double smooth = (turns - spec.low_freq_factor) / (spec.high_freq_factor - spec.low_freq_factor);
      f = (1 - smooth) * f / spec.factor + smooth * f;
    }
  }
}

// Dimension whose wavelength turns `rotations` times over the original context (YaRN, section 3.2).
double yarn_dimension(const RopeSpec& spec, int64_t head_dim, double rotations) {
  const double original = static_cast<double>(spec.original_positions);
  return static_cast<double>(head_dim) * std::log(original / (rotations * 2 * kPi)) /
         (2 * std::log(spec.theta));
}

void scale_yarn(const RopeSpec& spec, int64_t head_dim, std::vector<double>& frequencies) {
  const double low = std::max(std::floor(yarn_dimension(spec, head_dim, spec.beta_fast)), 0.0);
  double high =
      std::min(std::ceil(yarn_dimension(spec, head_dim, spec.beta_slow)), static_cast<double>(head_dim - 1));
  if (high == low) high += 0.001;
  for (size_t i = 0; i < frequencies.size(); ++i) {
    const double ramp = std::clamp((static_cast<double>(i) - low) / (high - low), 0.0, 1.0);
    frequencies[i] = frequencies[i] / spec.factor * ramp + frequencies[i] * (1 - ramp);
  }
}

}  // namespace

std::vector<double> rope_frequencies(const RopeSpec& spec, int64_t head_dim) {
  std::vector<double> frequencies;
  for (int64_t i = 0; i < head_dim / 2; ++i) {
    frequencies.push_back(
        std::pow(spec.theta, -2.0 * static_cast<double>(i) / static_cast<double>(head_dim)));
  }
  if (spec.scaling == "linear") {
    for (double& f : frequencies) f /= spec.factor;
  } else if (spec.scaling == "llama3") {
    scale_llama3(spec, frequencies);
  } else if (spec.scaling == "yarn") {
    scale_yarn(spec, head_dim, frequencies);
  } else {
    FP4T_CHECK(spec.scaling == "none", "rope scaling ", spec.scaling);
  }
  return frequencies;
}

double rope_amplitude(const RopeSpec& spec) {
  return spec.scaling == "yarn" && spec.factor > 1 ? 0.1 * std::log(spec.factor) + 1.0 : 1.0;
}

RopeTables rope_tables(const RopeSpec& spec, int64_t head_dim, int64_t max_positions) {
  const std::vector<double> frequencies = rope_frequencies(spec, head_dim);
  const double amplitude = rope_amplitude(spec);
  RopeTables t;
  for (int64_t p = 0; p < max_positions; ++p) {
    for (const double f : frequencies) {
      t.cos.push_back(static_cast<float>(amplitude * std::cos(static_cast<double>(p) * f)));
      t.sin.push_back(static_cast<float>(amplitude * std::sin(static_cast<double>(p) * f)));
    }
  }
  return t;
}

}  // namespace fp4t

#include "engine/model/params.h"

#include <algorithm>
#include <cmath>
#include <numbers>

#include "engine/plan/layout.h"
#include "kernels/base/philox.h"
#include "kernels/formats/bf16.h"
#include "kernels/ops/run.h"

namespace fp4t {

ParamSet::ParamSet(Arena& run_arena, const Plan& plan) {
  const auto take = [&](const std::string& block, DType dtype, const Shape& shape) {
    return run_arena.take(block, dtype, shape);
  };
  for (const ParamInfo& info : plan.parameters) {
    const ParamBlocks b = take_param(info, plan, take);
    params_.push_back({info, b.master, b.copy, b.gradient});
  }
  for (const BufferInfo& info : plan.buffers) {
    buffers_.push_back({info, run_arena.take(info.name, info.dtype, info.shape)});
  }
}

Param& ParamSet::find(const std::string& name) {
  for (Param& p : params_) {
    if (p.info.name == name) return p;
  }
  throw InternalError("no parameter '" + name + "'");
}

Buffer& ParamSet::find_buffer(const std::string& name) {
  for (Buffer& b : buffers_) {
    if (b.info.name == name) return b;
  }
  throw InternalError("no buffer '" + name + "'");
}

namespace {

// Element i takes words 2 (i / 2 mod 2) and the next of draw i / 4: the cosine for even i, the sine for odd.
float normal_element(PhiloxKey key, int64_t i) {
  const PhiloxBits bits = site_draw(key, static_cast<uint64_t>(i / 4));
  const int64_t w = 2 * (i / 2 % 2);
  // In (0, 1], so the logarithm is finite.
  const double u = (static_cast<double>(bits.word[w]) + 1.0) * 0x1p-32;
  const double angle = 2 * std::numbers::pi * static_cast<double>(bits.word[w + 1]) * 0x1p-32;
  const double radius = std::sqrt(-2.0 * std::log(u));
  return static_cast<float>(radius * (i % 2 == 0 ? std::cos(angle) : std::sin(angle)));
}

void fill(Queue& queue, const TensorView& out, const std::vector<float>& values) {
  if (out.dtype == DType::kF32) {
    queue.copy_from_host(out.data, values.data(), out.bytes());
    return;
  }
  std::vector<Bf16> rounded(values.size());
  std::transform(values.begin(), values.end(), rounded.begin(), [](float v) { return f32_to_bf16(v); });
  queue.copy_from_host(out.data, rounded.data(), out.bytes());
}

}  // namespace

void ParamSet::initialise(Queue& queue, const Plan& plan) {
  const ModelSpec& model = plan.model;
  const double depth = std::sqrt(2.0 * static_cast<double>(model.layers));
  for (Param& p : params_) {
    const int64_t n = p.master.elements();
    std::vector<float> values(static_cast<size_t>(n), 1.0f);
    if (p.info.role != ParamRole::kNorm) {
      const bool scaled = p.info.residual_out && model.init.scale_residual;
      const auto std_dev = static_cast<float>(model.init.std / (scaled ? depth : 1.0));
      const PhiloxKey key = site_key(plan.run.seed, Purpose::kInit, 0, p.info.tensor_id, 0, 0);
      parallel_for(queue, n, 16384, [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i)
          values[static_cast<size_t>(i)] = std_dev * normal_element(key, i);
      });
    }
    fill(queue, p.master, values);
  }
  for (Buffer& b : buffers_) queue.fill_bytes(b.data.data, 0, b.data.bytes());
  refresh_copies(queue);
}

void ParamSet::refresh_copies(Queue& queue) {
  for (Param& p : params_) {
    if (!p.copy.empty()) run(queue, Cast{.x = p.master, .out = p.copy});
  }
}

}  // namespace fp4t

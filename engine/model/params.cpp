#include "engine/model/params.h"

#include <cmath>

#include "engine/model/shard_exchange.h"
#include "engine/plan/run_layout.h"
#include "kernels/base/philox.h"
#include "kernels/ops/run.h"

namespace fp4t {

ParamSet::ParamSet(Arena& run_arena, const Plan& plan, int rank) : plan_(plan), rank_(rank) {
  const auto take = [&](const std::string& block, DType dtype, const Shape& shape) {
    return run_arena.take(block, dtype, shape);
  };
  for (const ParamInfo& info : plan.parameters) {
    const ParamBlocks b = take_param(info, plan, rank, take);
    params_.push_back(
        {info, b.master, b.copy, b.gradient, plan.shards.held(info, rank), b.owned_gradient, false});
  }
  const SharedPlaces places = shared_places(plan, rank);
  const SharedBlocks shared = take_shared_blocks(plan, places, take);
  for (size_t i = 0; i < params_.size(); ++i) {
    Param& p = params_[i];
    const auto view = [&](const TensorView& block, int64_t at, DType dtype) {
      return TensorView{static_cast<char*>(block.data) + at, dtype, held_shape(p.info, plan, rank)};
    };
    if (places.gradients[i] >= 0) {
      p.gradient =
          view(shared.gradients[p.info.layer % gradient_places(plan)], places.gradients[i], p.info.gradient);
    }
    if (places.copies[i] >= 0) {
      p.copy = view(shared.copies[p.info.layer % kCopyPlaces], places.copies[i], plan.act);
      p.shares_copy = true;
    }
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

void fill_ones(Queue& queue, const TensorView& out) {
  FP4T_CHECK(out.dtype == DType::kF32, "norm weights are F32");
  const std::vector<float> ones(static_cast<size_t>(out.elements()), 1.0f);
  queue.upload(out.data, ones.data(), out.bytes());
}

}  // namespace

void ParamSet::initialise(Queue& queue, const Plan& plan) {
  const ModelSpec& model = plan.model;
  const double depth = std::sqrt(2.0 * static_cast<double>(model.layers));
  for (Param& p : params_) {
    if (p.info.role == ParamRole::kNorm) {
      fill_ones(queue, p.master);
      continue;
    }
    const bool scaled = p.info.residual_out && model.init.scale_residual;
    if (p.master.elements() == 0) continue;
    run(queue, FillNormal{.key = site_key(plan.run.seed, Purpose::kInit, 0, p.info.tensor_id, 0, 0),
                          .scale = static_cast<float>(model.init.std / (scaled ? depth : 1.0)),
                          .out = p.master,
                          .first_element = (master_is_part(p.info, plan) ? owned(p) : p.held).begin});
  }
  for (Buffer& b : buffers_) queue.fill_bytes(b.data.data, 0, b.data.bytes());
  refresh_copies(queue);
}

void ParamSet::refresh_copies(Queue& queue) {
  for (Param& p : params_) {
    if (p.copy.empty() || p.shares_copy) continue;
    const Span elements = owned(p);
    if (elements.count() == 0) continue;
    run(queue, Cast{.x = master_of(p, elements), .out = owned_copy(p, elements)});
  }
  if (exchange_) exchange_->gather_weights();
}

}  // namespace fp4t

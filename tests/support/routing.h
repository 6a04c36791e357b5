// The tensors of one routing, for tests: fill the logits, route, read.
#pragma once

#include <cstdint>
#include <random>

#include "kernels/ops/run.h"
#include "tests/support/tensors.h"

namespace fp4t::test {

struct RoutingSetup {
  int64_t tokens, num_experts, top_k;
  RouterKind kind = RouterKind::kSoftmax;
  bool normalise = true;
  float gate_scale = 1.0f;
};

struct Routing {
  explicit Routing(const RoutingSetup& s)
      : setup(s),
        logits(DType::kF32, {s.tokens, s.num_experts}),
        bias(DType::kF32, {s.num_experts}),
        scores(DType::kF32, {s.tokens, s.num_experts}),
        experts(DType::kI32, {s.tokens, s.top_k}),
        gates(DType::kF32, {s.tokens, s.top_k}),
        offsets(DType::kI32, {s.num_experts + 1}),
        row_of(DType::kI32, {s.tokens, s.top_k}),
        token_of(DType::kI32, {s.tokens * s.top_k}) {
    bias.zero();
  }

  void route(Queue& queue) {
    run(queue,
        Route{logits.view(), bias.view(), setup.kind, setup.top_k, setup.normalise, setup.gate_scale,
              scores.view(), experts.view(), gates.view(), offsets.view(), row_of.view(), token_of.view()});
  }
  void add_stats(Queue& queue, HostTensor& sums, HostTensor& load) {
    run(queue, RouterStats{logits.view(), scores.view(), offsets.view(), setup.kind, setup.top_k, sums.view(),
                           load.view()});
  }
  void backward(Queue& queue, HostTensor& dgates, float aux, float z, HostTensor& dlogits) {
    run(queue, RouteBackward{logits.view(), scores.view(), experts.view(), offsets.view(), dgates.view(),
                             setup.kind, setup.normalise, setup.gate_scale, aux, z, dlogits.view()});
  }
  int64_t count(int64_t e) { return offsets.as<int32_t>()[e + 1] - offsets.as<int32_t>()[e]; }

  RoutingSetup setup;
  HostTensor logits, bias, scores, experts, gates, offsets, row_of, token_of;
};

// Every token prefers the experts of `wanted` in this order, by logits 8, 7, ... against 0.
inline void prefer(Routing& r, int64_t token, std::initializer_list<int64_t> wanted) {
  float* row = r.logits.as<float>() + token * r.setup.num_experts;
  std::fill(row, row + r.setup.num_experts, 0.0f);
  float value = 8.0f;
  for (int64_t e : wanted) row[e] = value--;
}

}  // namespace fp4t::test

// A model with its queue, and the loss of a batch: mean cross-entropy of the trained tokens plus the
// router's losses with the plan's coefficients.
#pragma once

#include <cstring>
#include <memory>
#include <random>
#include <vector>

#include "engine/comm/comm.h"
#include "engine/model/transformer.h"
#include "kernels/ops/run.h"
#include "tests/support/plans.h"
#include "tests/support/tensors.h"

namespace fp4t::test {

struct TestModel {
  explicit TestModel(Plan plan_in, Poison poison = Poison::kNan)
      : TestModel(std::move(plan_in), make_single(), 2, poison) {}
  TestModel(Plan plan_in, std::unique_ptr<Communicator> comm_in, int threads, Poison poison = Poison::kNan)
      : plan(std::move(plan_in)),
        queue(Queue::cpu(threads)),
        comm(std::move(comm_in)),
        model(queue, *comm, plan, poison) {}

  const StagePrecision& tables() const { return plan.stages[0].precision; }
  Pass training_pass() const {
    Pass p;
    p.forward = &tables().forward.at(0);
    p.backward = &tables().backward.at(0);
    p.seed = plan.run.seed;
    p.step = 3;
    p.sample_id = 40;
    return p;
  }
  Pass sampling_pass() const {
    Pass p;
    p.forward = &tables().sampler.at(0);
    p.seed = plan.run.seed;
    p.step = 3;
    return p;
  }

  Plan plan;
  Queue queue;
  std::unique_ptr<Communicator> comm;
  Transformer model;
};

// Documents of these lengths with random tokens, the last target of each left out.
inline TokenBatch random_batch(const std::vector<int>& lengths, int64_t vocabulary, uint64_t seed) {
  std::mt19937_64 engine(seed);
  std::uniform_int_distribution<int32_t> token(0, static_cast<int32_t>(vocabulary) - 1);
  TokenBatch b;
  for (const int length : lengths) {
    const auto begin = static_cast<int32_t>(b.tokens.size());
    for (int32_t i = 0; i < length; ++i) {
      b.tokens.push_back(token(engine));
      b.positions.push_back(i);
      b.doc_begin.push_back(begin);
    }
    for (int32_t i = 0; i < length; ++i) {
      const auto next = static_cast<size_t>(begin + i + 1);
      b.targets.push_back(i + 1 < length ? b.tokens[next] : -1);
    }
  }
  return b;
}

inline int64_t trained_tokens(const TokenBatch& b) {
  return std::count_if(b.targets.begin(), b.targets.end(), [](int32_t t) { return t >= 0; });
}

// Mean cross-entropy alone, of a batch that was scored.
inline double cross_entropy(TestModel& m, const TokenBatch& batch, double weight) {
  const auto buffers = m.model.token_buffers(batch.size());
  double sum = 0;
  for (int64_t t = 0; t < batch.size(); ++t) {
    sum -= static_cast<double>(buffers.log_prob.as<float>()[t]);
  }
  return sum * weight;
}

// The whole loss of a forward, and the load that its routing put on the experts.
struct LossAndLoad {
  double loss;
  std::vector<std::vector<int64_t>> load;
};
inline LossAndLoad total_loss(TestModel& m, Pass pass, const TokenBatch& batch, double weight) {
  pass.count_load = true;
  pass.token_weight = weight;
  m.model.take_router_sums();
  m.model.forward(pass, batch);
  m.model.score(pass, {});
  const double ce = cross_entropy(m, batch, weight);
  const RouterSums sums = m.model.take_router_sums();
  const BalanceSpec& balance = m.plan.model.moe.balance;
  return {ce + weight * (balance.z_loss * sums.z + balance.aux_loss * sums.aux), sums.load};
}

// One micro-batch: forward, loss, backward; gradients are added to the buffers.
inline double forward_backward(TestModel& m, Pass pass, const TokenBatch& batch, double weight) {
  pass.token_weight = weight;
  m.model.forward(pass, batch);
  const auto buffers = m.model.token_buffers(batch.size());
  for (int64_t t = 0; t < batch.size(); ++t) {
    buffers.d_log_prob.as<float>()[t] = static_cast<float>(-weight);
  }
  m.model.backward(pass, {});
  return cross_entropy(m, batch, weight);
}

inline std::vector<uint8_t> bytes_of(const TensorView& v) {
  const auto* p = static_cast<const uint8_t*>(v.data);
  return {p, p + v.bytes()};
}

inline double gradient_element(const TensorView& g, int64_t i) {
  return g.dtype == DType::kF32 ? static_cast<double>(g.as<float>()[i])
                                : static_cast<double>(from_bf16(g.as<Bf16>()[i]));
}

// All gradients by parameter, as bytes.
inline std::vector<std::vector<uint8_t>> gradient_bytes(TestModel& m) {
  std::vector<std::vector<uint8_t>> list;
  for (const Param& p : m.model.params().params()) list.push_back(bytes_of(p.gradient));
  return list;
}

}  // namespace fp4t::test

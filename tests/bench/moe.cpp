// Nanoseconds a token of routing, combination, log-probabilities and sampling at the quickstart's sizes:
// 2,048 tokens, 8 experts, top 2, width 128, vocabulary 257.
//   bench_moe --benchmark_counters_tabular=true
#include <benchmark/benchmark.h>

#include <cstdint>
#include <vector>

#include "kernels/base/queue.h"
#include "kernels/ops/run.h"
#include "tests/bench/values.h"

namespace fp4t {
namespace {

constexpr int64_t kTokens = 2048, kExperts = 8, kTopK = 2, kWidth = 128, kVocab = kValuesBound;

template <class Op>
void measure(benchmark::State& state, const Op& op) {
  Queue queue = Queue::cpu(static_cast<int>(state.range(0)));
  for (auto _ : state) run(queue, op);
  state.counters["s/token"] =
      benchmark::Counter(static_cast<double>(kTokens),
                         benchmark::Counter::kIsIterationInvariantRate | benchmark::Counter::kInvert);
}

// One routed batch; its members are the inputs and outputs of every op below.
struct Batch {
  Batch() {
    Queue queue = Queue::cpu(1);
    run(queue, route());
  }
  Route route(RouterKind kind = RouterKind::kSoftmax) {
    return {logits.view(), bias.view(),    kind,         kTopK,          true,          1.0f,
            scores.view(), experts.view(), gates.view(), offsets.view(), row_of.view(), token_of.view()};
  }

  Values logits{DType::kF32, {kTokens, kExperts}}, dlogits = logits, scores = logits;
  Values bias{DType::kF32, {kExperts}}, gates{DType::kF32, {kTokens, kTopK}}, dgates = gates;
  Values experts{DType::kI32, {kTokens, kTopK}}, row_of = experts, offsets{DType::kI32, {kExperts + 1}};
  Values token_of{DType::kI32, {kTokens * kTopK}};
  Values sums{DType::kF64, {2}}, load{DType::kI64, {kExperts}};
  Values x{DType::kBf16, {kTokens, kWidth}}, out = x, residual = x, dx{DType::kF32, {kTokens, kWidth}};
  Values y{DType::kBf16, {kTokens * kTopK, kWidth}}, dy = y;
  Values weight{DType::kF32, {kExperts, kWidth}}, dweight = weight;
};

void router_logits(benchmark::State& state) {
  Batch b;
  measure(state, RouterLogits{b.x.view(), b.weight.view(), b.logits.view()});
}
void router_logits_backward(benchmark::State& state) {
  Batch b;
  measure(state,
          RouterLogitsBackward{b.x.view(), b.weight.view(), b.dlogits.view(), b.dx.view(), b.dweight.view()});
}
void route_softmax(benchmark::State& state) {
  Batch b;
  measure(state, b.route());
}
void route_sigmoid(benchmark::State& state) {
  Batch b;
  measure(state, b.route(RouterKind::kSigmoid));
}
void router_stats(benchmark::State& state) {
  Batch b;
  measure(state, RouterStats{b.logits.view(), b.scores.view(), b.offsets.view(), RouterKind::kSoftmax, kTopK,
                             b.sums.view(), b.load.view()});
}
void route_backward(benchmark::State& state) {
  Batch b;
  measure(state,
          RouteBackward{b.logits.view(), b.scores.view(), b.experts.view(), b.offsets.view(), b.dgates.view(),
                        RouterKind::kSoftmax, true, 1.0f, 0.01f, 0.001f, b.dlogits.view()});
}
void permute_rows(benchmark::State& state) {
  Batch b;
  measure(state, PermuteRows{b.x.view(), b.token_of.view(), b.y.view()});
}
void combine_experts(benchmark::State& state) {
  Batch b;
  measure(state, CombineExperts{b.y.view(),
                                b.row_of.view(),
                                b.experts.view(),
                                b.gates.view(),
                                kExperts,
                                {},
                                b.residual.view(),
                                b.out.view()});
}
void combine_experts_backward(benchmark::State& state) {
  Batch b;
  measure(state, CombineExpertsBackward{b.x.view(), b.y.view(), b.row_of.view(), b.gates.view(), b.dy.view(),
                                        b.dgates.view()});
}

// Rows of logits; top_p in hundredths is the second argument.
struct Rows {
  Values logits{DType::kF32, {kTokens, kVocab}}, dlogits{DType::kBf16, {kTokens, kVocab}};
  Values targets{DType::kI32, {kTokens}}, tokens = targets, samples{DType::kI64, {kTokens}};
  Values log_prob{DType::kF32, {kTokens}}, lse = log_prob, entropy = log_prob, weights = log_prob;
};
float top_p(const benchmark::State& state) { return static_cast<float>(state.range(1)) / 100.0f; }

void log_prob_forward(benchmark::State& state) {
  Rows r;
  measure(state,
          LogProbForward{
              r.logits.view(), r.targets.view(), 1.0f, top_p(state), r.log_prob.view(), r.lse.view(), {}});
}
void log_prob_forward_entropy(benchmark::State& state) {
  Rows r;
  measure(state, LogProbForward{r.logits.view(), r.targets.view(), 1.0f, top_p(state), r.log_prob.view(),
                                r.lse.view(), r.entropy.view()});
}
void log_prob_backward(benchmark::State& state) {
  Rows r;
  measure(state, LogProbBackward{r.logits.view(),
                                 r.targets.view(),
                                 1.0f,
                                 top_p(state),
                                 r.lse.view(),
                                 {},
                                 r.weights.view(),
                                 {},
                                 {},
                                 r.dlogits.view()});
}
void sample_tokens(benchmark::State& state) {
  Rows r;
  measure(state, SampleTokens{r.logits.view(),
                              1.0f,
                              top_p(state),
                              {1, 2},
                              r.samples.view(),
                              r.targets.view(),
                              r.tokens.view(),
                              r.log_prob.view()});
}

BENCHMARK(router_logits)->Arg(1)->Arg(2);
BENCHMARK(router_logits_backward)->Arg(1)->Arg(2);
BENCHMARK(route_softmax)->Arg(1)->Arg(2);
BENCHMARK(route_sigmoid)->Arg(1)->Arg(2);
BENCHMARK(router_stats)->Arg(1)->Arg(2);
BENCHMARK(route_backward)->Arg(1)->Arg(2);
BENCHMARK(permute_rows)->Arg(1)->Arg(2);
BENCHMARK(combine_experts)->Arg(1)->Arg(2);
BENCHMARK(combine_experts_backward)->Arg(1)->Arg(2);
BENCHMARK(log_prob_forward)->ArgsProduct({{1, 2}, {100, 90}});
BENCHMARK(log_prob_forward_entropy)->ArgsProduct({{1, 2}, {100, 90}});
BENCHMARK(log_prob_backward)->ArgsProduct({{1, 2}, {100, 90}});
BENCHMARK(sample_tokens)->ArgsProduct({{1, 2}, {100, 90}});

}  // namespace
}  // namespace fp4t

BENCHMARK_MAIN();

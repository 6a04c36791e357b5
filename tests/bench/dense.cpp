// The dense ops in CPU nanoseconds a token on one thread, BF16, at the sizes of the small recipes:
// 2048 tokens, hidden 128, heads 4/2 x 32, documents of 9 to 128 tokens; optimizer steps a parameter.
//   bench_dense --benchmark_filter=attention
#include <benchmark/benchmark.h>

#include "tests/support/dense_cases.h"

namespace fp4t::test {
namespace {

constexpr int64_t kTokens = 2048, kHidden = 128, kParameters = 1 << 18;
constexpr reference::Heads kHeads = {4, 2, 32};

// body(queue) again and again; `items` are what one call works through.
template <class Body>
void measure(benchmark::State& state, int64_t items, const Body& body) {
  Queue queue = Queue::cpu(1);
  for (auto _ : state) body(queue);
  state.counters["ns/item"] =
      benchmark::Counter(static_cast<double>(items) * 1e-9,
                         benchmark::Counter::kIsIterationInvariantRate | benchmark::Counter::kInvert);
}

std::vector<int32_t> documents() {
  std::mt19937_64 engine(1);
  std::vector<int32_t> first;
  while (static_cast<int64_t>(first.size()) < kTokens) {
    const auto begin = static_cast<int32_t>(first.size());
    const size_t length = 9 + engine() % 120;
    for (size_t i = 0; i < length && static_cast<int64_t>(first.size()) < kTokens; ++i)
      first.push_back(begin);
  }
  return first;
}

void norm_forward(benchmark::State& state) {
  NormCase c(DType::kBf16, {kTokens, kHidden}, true, 1);
  measure(state, kTokens, [&](Queue& queue) { c.forward(queue); });
}

void norm_backward(benchmark::State& state) {
  NormCase c(DType::kBf16, {kTokens, kHidden}, false, 1);
  Queue queue = Queue::cpu(1);
  c.forward(queue);
  measure(state, kTokens, [&](Queue& q) { c.backward(q, true); });
}

template <bool kNorm>
void rope_forward(benchmark::State& state) {
  RopeCase c(DType::kBf16, kTokens, kHeads, kNorm, 1);
  measure(state, kTokens, [&](Queue& queue) { c.forward(queue); });
}

template <bool kNorm>
void rope_backward(benchmark::State& state) {
  RopeCase c(DType::kBf16, kTokens, kHeads, kNorm, 1);
  Queue queue = Queue::cpu(1);
  c.forward(queue);
  measure(state, kTokens, [&](Queue& q) { c.backward(q); });
}

void attention_forward(benchmark::State& state) {
  AttentionCase c(DType::kBf16, documents(), kHeads, 1);
  measure(state, kTokens, [&](Queue& queue) { c.forward(queue); });
}

void attention_backward(benchmark::State& state) {
  AttentionCase c(DType::kBf16, documents(), kHeads, 1);
  Queue queue = Queue::cpu(1);
  c.forward(queue);
  measure(state, kTokens, [&](Queue& q) { c.backward(q); });
}

// One new token in each of 64 sequences of `range` tokens.
template <Format kFormat>
void attention_decode(benchmark::State& state) {
  constexpr int64_t kSlots = 64;
  const int64_t length = state.range(0), width = kHeads.kv_heads * kHeads.head_dim;
  constexpr bool kCodes = kFormat == Format::kMxfp8;
  HostTensor qkv = normal_tensor(DType::kBf16, {kSlots, kHeads.width()}, 1);
  HostTensor k(kCodes ? DType::kU8 : DType::kBf16, {kSlots, length, width}), out(DType::kBf16, {kSlots, 128});
  HostTensor scales(DType::kU8, {kSlots, length, width / 32});
  std::memset(k.view().data, 0x3C, static_cast<size_t>(k.view().bytes()));
  std::memset(scales.view().data, 127, static_cast<size_t>(scales.view().bytes()));
  std::vector<int32_t> slots(kSlots), positions(kSlots, static_cast<int32_t>(length - 1));
  for (size_t i = 0; i < slots.size(); ++i) slots[i] = static_cast<int32_t>(i);
  HostTensor slot = i32_tensor(slots), position = i32_tensor(positions);
  const TensorView scale_view = kCodes ? scales.view() : TensorView{};
  const AttentionCached op{.qkv = qkv.view(),
                           .heads = kHeads.heads,
                           .kv_heads = kHeads.kv_heads,
                           .head_dim = kHeads.head_dim,
                           .slots = slot.view(),
                           .positions = position.view(),
                           .cache = {kFormat, k.view(), k.view(), scale_view, scale_view},
                           .scale = 0.2f,
                           .out = out.view()};
  measure(state, kSlots, [&](Queue& queue) { run(queue, op); });
}

void kv_round(benchmark::State& state) {
  HostTensor qkv = normal_tensor(DType::kBf16, {kTokens, kHeads.width()}, 1);
  const KvRound op{.qkv = qkv.view(),
                   .heads = kHeads.heads,
                   .kv_heads = kHeads.kv_heads,
                   .head_dim = kHeads.head_dim,
                   .format = Format::kMxfp8};
  measure(state, kTokens, [&](Queue& queue) { run(queue, op); });
}

void embed_forward(benchmark::State& state) {
  HostTensor table = normal_tensor(DType::kBf16, {512, kHidden}, 1), out(DType::kBf16, {kTokens, kHidden});
  HostTensor tokens = i32_tensor(std::vector<int32_t>(kTokens, 7));
  const EmbedForward op{.table = table.view(), .tokens = tokens.view(), .out = out.view()};
  measure(state, kTokens, [&](Queue& queue) { run(queue, op); });
}

void embed_backward(benchmark::State& state) {
  HostTensor dout = normal_tensor(DType::kBf16, {kTokens, kHidden}, 1),
             table = zeros(DType::kF32, {512, kHidden});
  std::vector<int32_t> ids(kTokens);
  for (size_t i = 0; i < ids.size(); ++i) ids[i] = static_cast<int32_t>(i * 7919 % 512);
  HostTensor tokens = i32_tensor(ids);
  const EmbedBackward op{.dout = dout.view(), .tokens = tokens.view(), .dtable = table.view()};
  measure(state, kTokens, [&](Queue& queue) { run(queue, op); });
}

// Argument: the inner width F.
void swiglu_forward(benchmark::State& state) {
  const int64_t width = state.range(0);
  HostTensor gate_up = normal_tensor(DType::kBf16, {kTokens, 2 * width}, 1),
             out(DType::kBf16, {kTokens, width});
  const SwigluForward op{.gate_up = gate_up.view(), .clamp = 0, .out = out.view()};
  measure(state, kTokens, [&](Queue& queue) { run(queue, op); });
}

void swiglu_backward(benchmark::State& state) {
  const int64_t width = state.range(0);
  HostTensor gate_up = normal_tensor(DType::kBf16, {kTokens, 2 * width}, 1);
  HostTensor dout = normal_tensor(DType::kBf16, {kTokens, width}, 2), out(DType::kBf16, {kTokens, 2 * width});
  const SwigluBackward op{.gate_up = gate_up.view(), .clamp = 0, .dout = dout.view(), .dgate_up = out.view()};
  measure(state, kTokens, [&](Queue& queue) { run(queue, op); });
}

void add(benchmark::State& state) {
  HostTensor a = normal_tensor(DType::kBf16, {kTokens, kHidden}, 1), out = a;
  const Add op{.a = a.view(), .b = a.view(), .out = out.view()};
  measure(state, kTokens, [&](Queue& queue) { run(queue, op); });
}

template <DType kState>
void adamw(benchmark::State& state) {
  HostTensor grad = normal_tensor(DType::kBf16, {kParameters}, 1), scale = normal_tensor(DType::kF32, {1}, 2);
  HostTensor master = normal_tensor(kState, {kParameters}, 3), m = zeros(kState, {kParameters}), v = m;
  HostTensor copy(DType::kBf16, {kParameters});
  const AdamWStep op{.grad = grad.view(),
                     .grad_scale = scale.view(),
                     .master = master.view(),
                     .m = m.view(),
                     .v = v.view(),
                     .copy = copy.view(),
                     .lr = 1e-3f,
                     .beta1 = 0.9f,
                     .beta2 = 0.95f,
                     .eps = 1e-8f,
                     .weight_decay = 0.1f,
                     .bias1 = 2.0f,
                     .bias2 = 3.0f,
                     .store_key = {1, 2},
                     .first_element = 0};
  measure(state, kParameters, [&](Queue& queue) { run(queue, op); });
}

void sum_squares(benchmark::State& state) {
  HostTensor x = normal_tensor(DType::kF32, {kParameters}, 1), sum = zeros(DType::kF64, {1}), bad = sum;
  const SumSquares op{.x = x.view(), .sum = sum.view(), .nonfinite = bad.view()};
  measure(state, kParameters, [&](Queue& queue) { run(queue, op); });
}

BENCHMARK(norm_forward);
BENCHMARK(norm_backward);
BENCHMARK(rope_forward<false>);
BENCHMARK(rope_forward<true>);
BENCHMARK(rope_backward<false>);
BENCHMARK(rope_backward<true>);
BENCHMARK(attention_forward);
BENCHMARK(attention_backward);
BENCHMARK(attention_decode<Format::kBf16>)->Arg(40)->Arg(128);
BENCHMARK(attention_decode<Format::kMxfp8>)->Arg(128);
BENCHMARK(kv_round);
BENCHMARK(embed_forward);
BENCHMARK(embed_backward);
BENCHMARK(swiglu_forward)->Arg(128);
BENCHMARK(swiglu_backward)->Arg(128);
BENCHMARK(add);
BENCHMARK(adamw<DType::kF32>);
BENCHMARK(adamw<DType::kBf16>);
BENCHMARK(sum_squares);

}  // namespace
}  // namespace fp4t::test

BENCHMARK_MAIN();

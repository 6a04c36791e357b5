// A model of the quickstart's size under each kind of table: forward and backward of 2048 tokens, and a
// decoding call of 512 rows. Items are tokens; the loss is included.
//   bench_model --benchmark_filter=quartet2
#include <benchmark/benchmark.h>

#include "tests/support/model_runs.h"

namespace fp4t::test {
namespace {

constexpr int kLength = 128, kSequences = 16, kRows = 512;

ModelSpec quickstart_model() {
  ModelSpec m;
  m.layers = 4;
  m.hidden = 128;
  m.heads = 4;
  m.kv_heads = 2;
  m.head_dim = 32;
  m.vocabulary = 257;
  m.max_positions = kLength;
  m.moe.experts = 8;
  m.moe.top_k = 2;
  m.moe.hidden = 128;
  m.moe.balance.z_loss = 0.001;
  return m;
}

Plan bench_plan(const TestCells& cells) {
  TestSizes sizes;
  sizes.max_tokens = int64_t{kLength} * kSequences;
  sizes.max_decode_tokens = sizes.max_cache_slots = kRows;
  sizes.max_cache_length = 32;
  DtypesSpec dtypes;
  dtypes.gradients = DType::kBf16;
  return make_plan_by_hand(quickstart_model(), cells, dtypes, "none", sizes);
}

void train(benchmark::State& state, const TestCells& cells) {
  TestModel m(bench_plan(cells), Poison::kNone);
  const TokenBatch batch = random_batch(std::vector<int>(kSequences, kLength), m.plan.model.vocabulary, 3);
  const double weight = 1.0 / static_cast<double>(trained_tokens(batch));
  Pass pass = m.training_pass();
  pass.count_load = true;
  for (auto _ : state) {
    pass.step += 1;
    m.model.weights_changed();
    m.model.zero_gradients();
    forward_backward(m, pass, batch, weight);
  }
  state.SetItemsProcessed(static_cast<int64_t>(state.iterations()) * batch.size());
}

void decode(benchmark::State& state, const TestCells& cells) {
  TestModel m(bench_plan(cells), Poison::kNone);
  Transformer::DecodeRows rows;
  for (int32_t slot = 0; slot < kRows; ++slot) {
    rows.tokens.push_back(slot % 257);
    rows.slots.push_back(slot);
    rows.positions.push_back(0);
    rows.logit_rows.push_back(slot);
  }
  int32_t position = 0;
  for (auto _ : state) {
    for (int32_t& p : rows.positions) p = position;
    position = (position + 1) % 32;
    m.model.decode(m.sampling_pass(), rows);
  }
  state.SetItemsProcessed(static_cast<int64_t>(state.iterations()) * kRows);
}

BENCHMARK_CAPTURE(train, fp32, fp32_cells())->Unit(benchmark::kMillisecond)->UseRealTime();
BENCHMARK_CAPTURE(train, bf16, TestCells{})->Unit(benchmark::kMillisecond)->UseRealTime();
BENCHMARK_CAPTURE(train, mxfp8, mxfp8_cells())->Unit(benchmark::kMillisecond)->UseRealTime();
BENCHMARK_CAPTURE(train, nvidia_nvfp4, nvidia_nvfp4_cells())->Unit(benchmark::kMillisecond)->UseRealTime();
BENCHMARK_CAPTURE(train, quartet2, quartet2_cells())->Unit(benchmark::kMillisecond)->UseRealTime();
BENCHMARK_CAPTURE(train, rl_nvfp4, rl_nvfp4_cells())->Unit(benchmark::kMillisecond)->UseRealTime();
BENCHMARK_CAPTURE(decode, bf16, TestCells{})->Unit(benchmark::kMillisecond)->UseRealTime();
BENCHMARK_CAPTURE(decode, rl_nvfp4, rl_nvfp4_cells())->Unit(benchmark::kMillisecond)->UseRealTime();

}  // namespace
}  // namespace fp4t::test

BENCHMARK_MAIN();

// Experts over ranks against the same model on one rank, in every process: equal bits forward where the plan
// is row-invariant, the same gradients; ranks without tokens, lopsided routing, rounds. Started by mpirun.
#include <cmath>

#include "engine/comm/mpi.h"
#include "tests/support/compare.h"
#include "tests/support/model_runs.h"
#include "tests/support/ranks_main.h"

namespace fp4t::test {
namespace {

ModelSpec spread_model() {
  ModelSpec m = tiny_model();
  m.layers = 3;
  m.moe.experts = 8;
  m.moe.top_k = 3;
  m.moe.balance = {.bias_rate = 0, .aux_loss = 0, .z_loss = 0.01};
  return m;
}

struct Spread {
  Axes axes;
  double receive_factor = 2;
  int64_t chunks = 0;
};

std::string text(const Spread& s) {
  return detail::concat(s.axes.data, " x ", s.axes.expert, ", receive factor ", s.receive_factor, ", chunks ",
                        s.chunks);
}

Plan plan_of(const TestCells& cells, const Spread& s, const std::string& recompute = "none",
             const ModelSpec& model = spread_model()) {
  return make_plan_by_hand(model, cells, {.gradients = DType::kF32}, recompute,
                           {.axes = s.axes, .receive_factor = s.receive_factor, .expert_chunks = s.chunks});
}

// The selection biases push tokens to few experts: some ranks get nothing, one nearly everything.
void lean(TestModel& m, float strength) {
  for (Buffer& b : m.model.params().buffers()) {
    for (int64_t e = 0; e < b.data.elements(); ++e) b.data.as<float>()[e] = e < 3 ? strength : 0.0f;
  }
}

// Batches of every rank, uneven, one of them empty.
TokenBatch batch_of(int rank) {
  if (rank == 1) return {};
  return random_batch(rank == 0   ? std::vector<int>{30, 9}
                      : rank == 2 ? std::vector<int>{5}
                                  : std::vector<int>{17, 40},
                      61, 100 + static_cast<uint64_t>(rank));
}

std::vector<Spread> spreads() {
  const int64_t n = g_world->size();
  std::vector<Spread> list;
  for (int64_t expert = 2; expert <= n && expert <= 8; expert *= 2) {
    if (n % expert != 0) continue;
    for (const double factor : {2.0, 0.0, 0.3}) list.push_back({{n / expert, expert}, factor});
    if (expert < 8) list.push_back({{n / expert, expert}, 0.5, 2});
  }
  return list;
}

std::unique_ptr<Communicator> world() { return g_world->split(0, g_world->rank()); }

struct Cells {
  const char* name;
  TestCells cells;
};

TestCells with_dispatch(TestCells cells, Format format) {
  cells.dispatch = format;
  return cells;
}
std::vector<Cells> row_invariant_cells() {
  return {{"fp32", fp32_cells()},
          {"bf16", TestCells{}},
          {"mxfp8", mxfp8_cells()},
          {"rl_nvfp4", rl_nvfp4_cells()},
          {"bf16, dispatched in mxfp8", with_dispatch({}, Format::kMxfp8)},
          {"rl_nvfp4, dispatched in nvfp4", with_dispatch(rl_nvfp4_cells(), Format::kNvfp4)}};
}

TEST(RanksExperts, logits_have_the_bits_of_one_rank) {
  for (const auto& [name, cells] : row_invariant_cells()) {
    for (const float strength : {0.0f, 5.0f}) {
      TestModel alone(plan_of(cells, {}));
      lean(alone, strength);
      const TokenBatch batch = batch_of(g_world->rank());
      Pass pass = alone.training_pass();
      pass.backward = nullptr;
      std::vector<uint8_t> want;
      if (batch.size() > 0) {
        alone.model.forward(pass, batch);
        want = bytes_of(alone.model.logits(pass));
      }
      for (const Spread& s : spreads()) {
        SCOPED_TRACE(detail::concat(name, ", ", text(s), ", lean ", strength, ", rank ", g_world->rank()));
        TestModel m(plan_of(cells, s), world(), 1);
        lean(m, strength);
        Pass own = m.training_pass();
        own.backward = nullptr;
        m.model.forward(own, batch);
        if (batch.size() == 0) continue;
        const TensorView logits = m.model.logits(own);
        EXPECT_EQ(bytes_of(logits), want);
      }
    }
  }
}

TEST(RanksExperts, decoding_has_the_bits_of_one_rank_with_idle_ranks_in_between) {
  for (const auto& [name, cells] : row_invariant_cells()) {
    TestModel alone(plan_of(cells, {}));
    for (const Spread& s : spreads()) {
      SCOPED_TRACE(detail::concat(name, ", ", text(s), ", rank ", g_world->rank()));
      TestModel m(plan_of(cells, s), world(), 1);
      for (int32_t call = 0; call < 3; ++call) {
        Transformer::DecodeRows rows;
        if ((g_world->rank() + call) % 2 == 0) {
          for (int32_t i = 0; i < 4; ++i) {
            rows.tokens.push_back(7 * i + call);
            rows.slots.push_back(i);
            rows.positions.push_back(call / 2);
            rows.logit_rows.push_back(i);
          }
        }
        const TensorView got = m.model.decode(m.sampling_pass(), rows);
        if (rows.tokens.empty()) continue;
        const TensorView want = alone.model.decode(alone.sampling_pass(), rows);
        EXPECT_EQ(bytes_of(got), bytes_of(want)) << "call " << call;
      }
    }
  }
}

struct Sums {
  std::vector<std::vector<double>> gradients;  // by parameter, logical
};

// Gradients of all batches on one rank, micro-batch after micro-batch.
Sums gradients_of_one_rank(const TestCells& cells, double weight, float strength) {
  TestModel m(plan_of(cells, {}));
  lean(m, strength);
  m.model.zero_gradients();
  for (int r = 0; r < g_world->size(); ++r) {
    const TokenBatch batch = batch_of(r);
    if (batch.size() > 0) forward_backward(m, m.training_pass(), batch, weight);
  }
  m.model.settle_gradients();
  Sums sums;
  for (const Param& p : m.model.params().params()) {
    std::vector<double> g;
    for (int64_t i = 0; i < p.gradient.elements(); ++i) g.push_back(gradient_element(p.gradient, i));
    sums.gradients.push_back(std::move(g));
  }
  return sums;
}

TEST(RanksExperts, gradients_are_those_of_one_rank) {
  double tokens = 0;
  for (int r = 0; r < g_world->size(); ++r) tokens += static_cast<double>(trained_tokens(batch_of(r)));
  for (const std::string recompute : {"none", "block"}) {
    for (const auto& [name, cells] :
         {Cells{"fp32", fp32_cells()}, Cells{"bf16", TestCells{}},
          Cells{"bf16, dispatched in mxfp8", with_dispatch({}, Format::kMxfp8)}}) {
      for (const float strength : {0.0f, 5.0f}) {
        const Sums want = gradients_of_one_rank(cells, 1 / tokens, strength);
        for (const Spread& s : spreads()) {
          SCOPED_TRACE(detail::concat(name, ", ", text(s), ", recompute ", recompute, ", lean ", strength));
          TestModel m(plan_of(cells, s, recompute), world(), 1);
          lean(m, strength);
          m.model.zero_gradients();
          forward_backward(m, m.training_pass(), batch_of(g_world->rank()), 1 / tokens);
          m.model.settle_gradients();
          m.model.shard_exchange().sum_gradients();
          size_t i = 0;
          for (const Param& p : m.model.params().params()) {
            const Span owned = m.model.params().owned(p);
            const std::vector<double>& all = want.gradients[i++];
            double error = 0, energy = 0;
            for (const double x : all) energy += x * x;
            for (int64_t e = owned.begin; e < owned.end; ++e) {
              const double d = gradient_element(p.gradient, e - p.held.begin) - all[static_cast<size_t>(e)];
              error += d * d;
            }
            // FP32: sums in another order. BF16: the sums that come back from other ranks are rounded with
            // the residual, as on one rank; but gradients of experts are one product instead of several.
            EXPECT_LE(error, (name == std::string("fp32") ? 1e-11 : 1e-9) * energy) << p.info.name;
          }
        }
      }
    }
  }
}

// Fresh rotations and stochastic rounding: what the experts draw is keyed alike on all ranks.
TEST(RanksExperts, quantised_gradients_are_finite_and_alike) {
  for (const auto& [name, cells] :
       {Cells{"nvidia_nvfp4", nvidia_nvfp4_cells()}, Cells{"quartet2", quartet2_cells()}}) {
    for (const Spread& s : spreads()) {
      SCOPED_TRACE(detail::concat(name, ", ", text(s)));
      std::vector<std::vector<uint8_t>> first;
      for (int round = 0; round < 2; ++round) {
        TestModel m(plan_of(cells, s), world(), 1 + round);
        m.model.zero_gradients();
        forward_backward(m, m.training_pass(), batch_of(g_world->rank()), 1.0 / 64);
        m.model.settle_gradients();
        for (const Param& p : m.model.params().params()) {
          bool finite = true;  // nobody leaves early: the others would wait
          for (int64_t i = 0; i < p.gradient.elements(); ++i) {
            finite = finite && std::isfinite(gradient_element(p.gradient, i));
          }
          EXPECT_TRUE(finite) << p.info.name;
        }
        if (round == 0) first = gradient_bytes(m);
        if (round == 1) {
          EXPECT_EQ(gradient_bytes(m), first);
        }
      }
    }
  }
}

// Chunks change when rows travel, and no bit of what is made of them: every gradient, with draws, rotations,
// scales of whole experts, routing that leaves ranks without tokens, rounds.
TEST(RanksExperts, chunks_change_no_bit) {
  ModelSpec model = spread_model();
  model.layers = 2;
  model.moe.experts = 16;  // up to eight a rank
  const auto digest = [&](const TestCells& cells, const Spread& s, const std::string& recompute,
                          float strength) {
    TestModel m(plan_of(cells, s, recompute, model), world(), 1);
    lean(m, strength);
    m.model.zero_gradients();
    for (int micro = 0; micro < 2; ++micro) {
      forward_backward(m, m.training_pass(), batch_of((g_world->rank() + micro) % g_world->size()), 1.0 / 64);
    }
    m.model.settle_gradients();
    return gradient_bytes(m);
  };
  for (const auto& [name, cells] :
       {Cells{"bf16", TestCells{}}, Cells{"nvidia_nvfp4", nvidia_nvfp4_cells()},
        Cells{"quartet2, dispatched in nvfp4", with_dispatch(quartet2_cells(), Format::kNvfp4)},
        Cells{"mxfp8", mxfp8_cells()}}) {
    for (int64_t expert = 2; expert <= std::min<int64_t>(g_world->size(), 4); expert *= 2) {
      if (g_world->size() % expert != 0) continue;
      for (const double factor : {0.0, 0.4}) {
        const float strength = factor == 0 ? 5.0f : 0.0f;
        const std::string recompute = factor == 0 ? "none" : "block";
        std::vector<std::vector<uint8_t>> want;
        for (const int64_t chunks : {1, 2, 4}) {
          const Spread s = {{g_world->size() / expert, expert}, factor, chunks};
          SCOPED_TRACE(detail::concat(name, ", ", text(s), ", rank ", g_world->rank()));
          const auto got = digest(cells, s, recompute, strength);
          if (chunks == 1) want = got;
          EXPECT_EQ(got, want);
        }
      }
    }
  }
}

// Parameters of the whole model are the same ones, however they are spread.
TEST(RanksExperts, initial_weights_are_parts_of_the_whole) {
  TestModel alone(plan_of(TestCells{}, {}));
  for (const Spread& s : spreads()) {
    SCOPED_TRACE(text(s));
    TestModel m(plan_of(TestCells{}, s), world(), 1);
    for (const Param& p : m.model.params().params()) {
      const Param& whole = alone.model.params().find(p.info.name);
      if (!p.copy.empty()) {
        EXPECT_EQ(bytes_of(p.copy), bytes_of(elements_of(whole, whole.copy, p.held))) << p.info.name;
      }
      const Span owned = m.model.params().owned(p);
      EXPECT_EQ(bytes_of(master_of(p, owned)), bytes_of(elements_of(whole, whole.master, owned)))
          << p.info.name;
    }
  }
}

}  // namespace
}  // namespace fp4t::test

FP4T_RANKS_TEST_MAIN

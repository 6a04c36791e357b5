// Gradients and weights by fast domains of ranks: sums in the order of the domain's ranks and then of the
// domains, to the bit; every weight from its owner to all. Started by mpirun.
#include <gtest/gtest.h>

#include "engine/comm/mpi.h"
#include "kernels/formats/bf16.h"
#include "tests/support/model_runs.h"
#include "tests/support/ranks_main.h"

namespace fp4t::test {
namespace {

Plan plan_of(int64_t expert, int64_t domain) {
  ModelSpec model = tiny_model();
  model.moe.experts = 8;
  return make_plan_by_hand(model, TestCells{}, {}, "none",
                           {.axes = {g_world->size() / expert, expert}, .domain = domain});
}

// Of sizes that FP32 sums round differently in every order.
float gradient_of(int64_t rank, int64_t tensor, int64_t element) {
  const auto x = static_cast<uint32_t>((rank * 7919 + tensor * 104729 + element) * 2654435761u);
  return (static_cast<float>(x >> 8) / 16777216.0f - 0.3f) * (x % 5 == 0 ? 1e4f : 1.0f);
}

struct Layout {
  int64_t expert, domain;
};
std::vector<Layout> layouts() {
  const int64_t n = g_world->size();
  std::vector<Layout> list = {{1, 0}, {1, n}, {1, 1}};
  for (int64_t domain = 2; domain < n; domain *= 2) {
    list.push_back({1, domain});
    for (int64_t expert = 2; expert <= domain && expert <= 4; expert *= 2) list.push_back({expert, domain});
  }
  return list;
}

// The sum over the ranks that hold the element, as the layout orders it.
float sum_of(const std::vector<int64_t>& holders, int64_t size, int64_t tensor, int64_t element) {
  float all = 0;
  for (size_t first = 0; first < holders.size(); first += static_cast<size_t>(size)) {
    float sum = gradient_of(holders[first], tensor, element);
    for (size_t i = first + 1; i < first + static_cast<size_t>(size); ++i) {
      sum = sum + gradient_of(holders[i], tensor, element);
    }
    all = first == 0 ? sum : all + sum;
  }
  return all;
}

TEST(RanksDomains, gradients_are_summed_in_domains_and_then_over_them) {
  const int rank = g_world->rank();
  for (const Layout& l : layouts()) {
    SCOPED_TRACE(detail::concat("expert ", l.expert, ", domain ", l.domain, ", rank ", rank));
    TestModel m(plan_of(l.expert, l.domain), g_world->split(0, rank), 1);
    for (const Param& p : m.model.params().params()) {
      for (int64_t i = 0; i < p.gradient.elements(); ++i) {
        p.gradient.as<float>()[i] = gradient_of(rank, p.info.tensor_id, p.held.begin + i);
      }
    }
    m.model.shard_exchange().begin_gradients();
    m.model.shard_exchange().sum_gradients();
    int64_t owned_elements = 0, wrong = 0;
    for (const Param& p : m.model.params().params()) {
      const bool spread = l.expert > 1 && p.info.placement == Placement::kSplitByExpert;
      std::vector<int64_t> holders;
      for (int64_t r = 0; r < g_world->size(); ++r) {
        if (!spread || r % l.expert == rank % l.expert) holders.push_back(r);
      }
      const int64_t all = l.domain == 0 ? g_world->size() : l.domain;
      const int64_t size = std::max<int64_t>(spread ? all / l.expert : all, 1);
      const Span owned = m.model.params().owned(p);
      owned_elements += owned.count();
      for (int64_t i = owned.begin; i < owned.end; ++i) {
        // Domains of one rank are no domains.
        const float want =
            sum_of(holders, size == 1 ? static_cast<int64_t>(holders.size()) : size, p.info.tensor_id, i);
        wrong += p.gradient.as<float>()[i - p.held.begin] == want ? 0 : 1;
      }
    }
    EXPECT_EQ(wrong, 0) << "of " << owned_elements;
  }
}

TEST(RanksDomains, weights_come_from_their_owners_to_all) {
  const int rank = g_world->rank();
  for (const Layout& l : layouts()) {
    SCOPED_TRACE(detail::concat("expert ", l.expert, ", domain ", l.domain, ", rank ", rank));
    TestModel m(plan_of(l.expert, l.domain), g_world->split(0, rank), 1);
    const auto want = [](const Param& p, int64_t element) {
      return f32_to_bf16(gradient_of(3, p.info.tensor_id, element));
    };
    int64_t copies = 0, wrong = 0;
    for (const Param& p : m.model.params().params()) {
      if (p.copy.empty()) continue;
      const Span owned = m.model.params().owned(p);
      for (int64_t i = 0; i < p.copy.elements(); ++i) p.copy.as<Bf16>()[i] = Bf16{0};
      for (int64_t i = owned.begin; i < owned.end; ++i) p.copy.as<Bf16>()[i - p.held.begin] = want(p, i);
    }
    m.model.shard_exchange().gather_weights();
    for (const Param& p : m.model.params().params()) {
      for (int64_t i = 0; i < p.copy.elements(); ++i, ++copies) {
        wrong += p.copy.as<Bf16>()[i].bits == want(p, p.held.begin + i).bits ? 0 : 1;
      }
    }
    EXPECT_GT(copies, 1000);
    EXPECT_EQ(wrong, 0) << "of " << copies;
  }
}

}  // namespace
}  // namespace fp4t::test

FP4T_RANKS_TEST_MAIN

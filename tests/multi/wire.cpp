// What the plan says that ranks send (engine/plan/wire.h) against what they do send in whole steps of a tiny
// model, counted in a communicator around the real one: every collective, near and far. Started by mpirun.
#include "engine/plan/wire.h"

#include <gtest/gtest.h>

#include <map>

#include "engine/comm/mpi.h"
#include "engine/optim/optimizer.h"
#include "tests/support/model_runs.h"
#include "tests/support/ranks_main.h"

namespace fp4t::test {
namespace {

constexpr int kDomain = 2;  // ranks of a fast domain

struct Sent {
  double inside = 0, outside = 0;
};
using Counts = std::map<std::string, Sent>;

// Counts what goes from this rank to others, by call.
class Counting : public Communicator {
 public:
  Counting(std::unique_ptr<Communicator> inner, int world_rank, std::shared_ptr<Counts> counts)
      : inner_(std::move(inner)), world_rank_(world_rank), counts_(std::move(counts)) {
    world_ranks_.resize(static_cast<size_t>(inner_->size()));
    inner_->all_gather(&world_rank_, world_ranks_.data(), sizeof(int));
  }
  int rank() const override { return inner_->rank(); }
  int size() const override { return inner_->size(); }
  int local_rank() const override { return inner_->local_rank(); }
  int local_size() const override { return inner_->local_size(); }
  void set_timeout(double seconds) override { inner_->set_timeout(seconds); }
  double timeout() const override { return inner_->timeout(); }
  double waited_seconds() const override { return inner_->waited_seconds(); }
  void barrier() override { inner_->barrier(); }
  void all_reduce(double* values, int64_t n, ReduceOp op) override {
    to_all("all_reduce", n * 8);
    inner_->all_reduce(values, n, op);
  }
  void all_reduce(float* values, int64_t n, ReduceOp op) override {
    to_all("all_reduce", n * 4);
    inner_->all_reduce(values, n, op);
  }
  void all_gather(const void* in, void* out, int64_t bytes) override {
    to_all("all_gather", bytes);
    inner_->all_gather(in, out, bytes);
  }
  std::unique_ptr<PendingCall> begin_exchange(const std::vector<Part>& send,
                                              const std::vector<Part>& receive) override {
    for (const Part& part : send) to("exchange", part.rank, part.bytes);
    return inner_->begin_exchange(send, receive);
  }
  void reduce_scatter(const float* in, float* out, int64_t n) override {
    to_all("reduce_scatter", n * 4);
    inner_->reduce_scatter(in, out, n);
  }
  void all_to_all(const void* in, const std::vector<int64_t>& send, void* out,
                  const std::vector<int64_t>& receive) override {
    for (int r = 0; r < size(); ++r) to("all_to_all", r, send[static_cast<size_t>(r)]);
    inner_->all_to_all(in, send, out, receive);
  }
  void broadcast(void* data, int64_t bytes, int root) override { inner_->broadcast(data, bytes, root); }
  std::unique_ptr<Communicator> split(int colour, int key) override {
    return std::make_unique<Counting>(inner_->split(colour, key), world_rank_, counts_);
  }

 private:
  void to(const char* call, int peer, int64_t bytes) {
    if (peer == rank()) return;
    Sent& sent = (*counts_)[call];
    const bool near = world_ranks_[static_cast<size_t>(peer)] / kDomain == world_rank_ / kDomain;
    (near ? sent.inside : sent.outside) += static_cast<double>(bytes);
  }
  void to_all(const char* call, int64_t bytes) {
    for (int r = 0; r < size(); ++r) to(call, r, bytes);
  }

  std::unique_ptr<Communicator> inner_;
  int world_rank_;
  std::shared_ptr<Counts> counts_;
  std::vector<int> world_ranks_;
};

// Every token chooses every expert, so what travels does not depend on weights.
ModelSpec model_of() {
  ModelSpec m = tiny_model();
  m.layers = 5;  // more blocks than places for their weights
  m.moe.experts = m.moe.top_k = 4;
  return m;
}

struct Case {
  Axes axes;
  int64_t zero, micro_batches;
  std::string recompute = "none";
  Format dispatch = Format::kBf16;
  int64_t chunks = 0, domain = 0;
};

constexpr int kTokens = 24;

Plan plan_of(const Case& c) {
  TestCells cells;
  cells.dispatch = c.dispatch;
  Plan plan = make_plan_by_hand(model_of(), cells, {}, c.recompute,
                                {.axes = c.axes, .expert_chunks = c.chunks, .domain = c.domain});
  plan.parallel.zero = c.zero;
  plan.memory = plan_memory(plan);
  return plan;
}

const char* name_of(Collective collective) {
  constexpr const char* kNames[] = {"exchange", "all_gather"};
  return kNames[static_cast<size_t>(collective)];
}

// Of all ranks together.
Counts predicted(const Plan& plan, const Case& c) {
  const ForwardTable& table = plan.stages[0].precision.forward.at(0);
  Counts counts;
  const auto add = [&](const std::vector<WireLine>& lines, int64_t times) {
    for (const WireLine& line : lines) {
      const char* call = name_of(line.collective);
      const double all = real(times) * real(plan.axes.ranks());
      counts[call].inside += all * line.inside_bytes;
      counts[call].outside += all * line.outside_bytes;
    }
  };
  const int64_t forwards = c.recompute == "block" ? 2 : 1;
  add(expert_forward_wire(plan, table, kTokens), forwards * c.micro_batches);
  add(expert_backward_wire(plan, table, kTokens), c.micro_batches);
  add(update_wire(plan, {kDomain}, c.micro_batches), 1);
  return counts;
}

void expect_equal(const Counts& mine, const Counts& want) {
  for (const std::string call : {"exchange", "all_to_all", "all_gather", "all_reduce", "reduce_scatter"}) {
    const auto of = [&](const Counts& counts) { return counts.count(call) ? counts.at(call) : Sent{}; };
    double sums[2] = {of(mine).inside, of(mine).outside};
    g_world->all_reduce(sums, 2, ReduceOp::kSum);
    EXPECT_NEAR(sums[0], of(want).inside, 0.5) << call << ", inside a fast domain";
    EXPECT_NEAR(sums[1], of(want).outside, 0.5) << call << ", beyond it";
    const bool always = call == "exchange" || call == "all_gather";
    EXPECT_TRUE(!always || sums[0] + sums[1] > 0) << call;
  }
}

std::vector<Case> cases() {
  const int64_t n = g_world->size();
  const Axes data = {n, 1}, both = {n / 2, 2};
  return {{data, 1, 1},
          {both, 1, 2},
          {data, 2, 2},
          {both, 2, 2},
          {data, 3, 3},
          {both, 3, 3},
          {both, 3, 2, "block"},
          {both, 1, 1, "none", Format::kNvfp4},
          {both, 1, 1, "none", Format::kMxfp8},
          {both, 1, 2, "block", Format::kNvfp4, 2},
          {data, 1, 1, "none", Format::kBf16, 0, kDomain},
          {data, 3, 2, "none", Format::kBf16, 0, kDomain},
          {both, 2, 2, "none", Format::kBf16, 0, std::max<int64_t>(n / 2, kDomain)}};
}

TEST(RanksWire, ranks_send_what_the_plan_says) {
  for (const Case& c : cases()) {
    SCOPED_TRACE(detail::concat(c.axes.data, " x ", c.axes.expert, ", zero ", c.zero, ", ", c.micro_batches,
                                " micro-batches, recompute ", c.recompute, ", dispatch ", name_of(c.dispatch),
                                ", chunks ", c.chunks, ", domain ", c.domain));
    const auto counts = std::make_shared<Counts>();
    TestModel m(plan_of(c),
                std::make_unique<Counting>(g_world->split(0, g_world->rank()), g_world->rank(), counts), 1);
    Optimizer optimizer(m.model, *m.comm, m.model.run_arena());
    const OptimizerSpec spec;
    // Of a second step weights of blocks that the first has left are void.
    for (uint32_t step = 0; step < (c.zero == 3 ? 2 : 1); ++step) {
      counts->clear();
      m.model.zero_gradients();
      for (int64_t i = 0; i < c.micro_batches; ++i) {
        const auto seed = static_cast<uint64_t>(g_world->rank() * 10 + i);
        forward_backward(m, m.training_pass(), random_batch({kTokens}, 61, seed), 0.01);
      }
      EXPECT_TRUE(optimizer.step(spec, 1.0, step, 0).applied);
      expect_equal(*counts, predicted(m.plan, c));
    }
  }
}

}  // namespace
}  // namespace fp4t::test

FP4T_RANKS_TEST_MAIN

// Whole runs of several ranks on GPUs. Tensors travel through host memory, so that one GPU is enough; where
// there are two, NCCL must leave the same bytes.
#include <cmath>
#include <csignal>

#include "engine/comm/device.h"
#include "tests/support/gpu_main.h"
#include "tests/support/layouts.h"
#include "tests/support/runs.h"

namespace fp4t::test {
namespace {

// Eight sequences a step; four ranks have one micro-batch each.
const std::string kPretrain = R"(stages:
  - pretrain:
      steps: 4
      batch: {tokens: 256, micro_sequences: 2, length: 32}
      data: [{name: sums, kind: sums, low: 0, high: 9, end_of_document: false, held_out: {fraction: 0.2, seed: 7}}]
      optimizer: {learning_rate: 1e-3, weight_decay: 0.1}
      schedule: {kind: constant}
      eval: {tokens: 256}
)";

const std::string kRl = spread_rl("bf16", 2);

struct Layout {
  int ranks, expert, zero;
  double factor = 2;
  int chunks = 0;
};
std::string name_of(const Layout& l) {
  return "r" + std::to_string(l.ranks) + "e" + std::to_string(l.expert) + "z" + std::to_string(l.zero) + "f" +
         std::to_string(static_cast<int>(10 * l.factor)) + "c" + std::to_string(l.chunks);
}

class GpuRanks : public testing::Test {
 protected:
  void use(const std::string& recipe) { write_inputs(folder_.path(), recipe); }
  std::string dir(const std::string& name) const { return folder_ / name; }
  // Runs the recipe; returns the name of its folder.
  std::string on(const std::string& device, const Layout& l, const std::vector<std::string>& sets = {},
                 const std::string& tag = "", const std::string& transport = "host") {
    const std::string name = device + name_of(l) + tag;
    std::vector<std::string> more = {"run.device=" + device,
                                     "parallel.transport=" + transport,
                                     "parallel.expert=" + std::to_string(l.expert),
                                     "parallel.zero=" + std::to_string(l.zero),
                                     "parallel.receive_factor=" + std::to_string(l.factor),
                                     "parallel.expert_chunks=" + std::to_string(l.chunks)};
    more.insert(more.end(), sets.begin(), sets.end());
    std::vector<std::string> args;
    for (const std::string& set : more) args.insert(args.end(), {"--set", set});
    const Exit exit = train_on(l.ranks, folder_.path(), name, args);
    if (device == "cuda" && l.ranks > 1 && transport == "host") {
      EXPECT_NE(exit.output.find("parallel.transport: host): this is slow"), std::string::npos)
          << exit.output;
    }
    return name;
  }
  std::map<std::string, std::string> tensors_of(const std::string& name) {
    auto hashes = tensor_hashes_of(latest_checkpoint_of(dir(name)), "model.");
    const auto moments = tensor_hashes_of(latest_checkpoint_of(dir(name)), "optimizer.");
    hashes.insert(moments.begin(), moments.end());
    EXPECT_GT(hashes.size(), 30u);
    return hashes;
  }

  ScratchFolder folder_;
};

// FP32: other sums of products, the same numbers otherwise.
TEST_F(GpuRanks, losses_are_those_of_the_same_layout_on_cpus) {
  use(kTinyModel + kPretrain);
  const std::vector<std::string> fp32 = {"precision={preset: fp32}"};
  for (const Layout& l :
       {Layout{2, 1, 1}, Layout{2, 2, 1}, Layout{4, 2, 2, 0.4}, Layout{4, 4, 3}, Layout{3, 1, 3}}) {
    SCOPED_TRACE(name_of(l));
    const std::string gpu = on("cuda", l, fp32), cpu = on("cpu", l, fp32);
    for (const char* figure : {"loss", "grad_norm"}) {
      const auto a = step_figures(dir(gpu), "pretrain", figure),
                 b = step_figures(dir(cpu), "pretrain", figure);
      ASSERT_EQ(a.size(), 4u);
      ASSERT_EQ(b.size(), 4u);
      for (size_t i = 0; i < a.size(); ++i)
        EXPECT_NEAR(a[i], b[i], 1e-5 * std::abs(b[i])) << figure << " " << i;
    }
    EXPECT_EQ(step_figures(dir(gpu), "pretrain", "trained_tokens"),
              step_figures(dir(cpu), "pretrain", "trained_tokens"));
    EXPECT_GT(summary_of(dir(gpu)).at("exposed_seconds").get<double>(), 0);
  }
}

// Stochastic rounding, fresh signs, codes on the wire.
TEST_F(GpuRanks, two_runs_leave_the_same_bytes) {
  use(kTinyModel + (kTinyTables + kPretrain));
  for (const Layout& l : {Layout{2, 2, 1}, Layout{4, 2, 3, 0.4}}) {
    const std::string one = on("cuda", l, {}, "-1"), two = on("cuda", l, {}, "-2");
    expect_same_outcome(dir(one), dir(two));
  }
}

TEST_F(GpuRanks, gradients_and_weights_in_pieces_change_no_bit) {
  use(kTinyModel + (kTinyTables + kPretrain));
  for (const int expert : {1, 2}) {
    const auto whole = tensors_of(on("cuda", {4, expert, 1}));
    for (const int zero : {2, 3}) {
      EXPECT_EQ(tensors_of(on("cuda", {4, expert, zero})), whole) << "expert " << expert << ", zero " << zero;
    }
  }
}

// In which parts tokens travel to experts, over host memory and over NCCL.
TEST_F(GpuRanks, chunks_of_experts_change_no_bit) {
  use(kTinyModel + (kTinyTables + kPretrain));
  const bool nccl = built_with_nccl() && (cuda::device_count() >= 2 || nccl_shares_gpus());
  for (const double factor : {0.0, 0.4}) {
    const auto whole = tensors_of(on("cuda", {2, 2, 1, factor, 1}));
    EXPECT_EQ(tensors_of(on("cuda", {2, 2, 1, factor, 2})), whole) << "receive factor " << factor;
    if (!nccl) continue;
    EXPECT_EQ(tensors_of(on("cuda", {2, 2, 1, factor, 2}, {}, "-nccl", "auto")), whole) << "over NCCL";
  }
}

TEST_F(GpuRanks, a_row_invariant_forward_has_the_same_bits_however_experts_are_spread) {
  use(kTinyModel + kPretrain);
  std::vector<nlohmann::json> first;
  for (const Layout& l : {Layout{4, 1, 1}, Layout{4, 2, 1}, Layout{4, 4, 1}, Layout{4, 4, 1, 0.4}}) {
    const std::string name =
        on("cuda", l, {"precision={preset: mxfp8}", "stages.0.pretrain.steps=1"}, "-mxfp8");
    const auto evals = metrics_of(dir(name), "eval"), steps = metrics_of(dir(name), "step");
    ASSERT_GE(evals.size(), 1u);
    ASSERT_EQ(steps.size(), 1u);
    const std::vector<nlohmann::json> lines = {evals[0], steps[0]};
    if (first.empty()) first = lines;
    EXPECT_EQ(lines[0], first[0]) << name;
    for (const char* figure : {"loss", "router_z", "expert_load.0", "expert_load.1"}) {
      EXPECT_EQ(lines[1].at(figure), first[1].at(figure)) << name << ", " << figure;
    }
  }
}

TEST_F(GpuRanks, state_is_byte_identical_on_other_layouts_and_devices) {
  use(kTinyModel + (kTinyTables + kPretrain));
  std::string from = on("cuda", {4, 2, 2}, {}, "-start");
  const auto state = tensors_of(from);
  int turn = 0;
  for (const auto& [device, layout] : {std::pair{"cuda", Layout{2, 1, 3}},
                                       {"cpu", Layout{4, 4, 1}},
                                       {"cuda", Layout{2, 2, 1}},
                                       {"cuda", Layout{1, 1, 1}}}) {
    from = on(device, layout, {"run.branch_from=" + latest_checkpoint_of(dir(from))},
              "-turn" + std::to_string(turn++));
    EXPECT_EQ(tensors_of(from), state) << from;
  }
}

TEST_F(GpuRanks, rollouts_depend_on_no_layout) {
  use(kRl);
  std::vector<nlohmann::json> first;
  for (const Layout& l : {Layout{1, 1, 1}, Layout{2, 1, 1}, Layout{4, 2, 1}, Layout{2, 1, 3}}) {
    const std::string name = on("cuda", l);
    const auto steps = metrics_of(dir(name), "step", "rl");
    ASSERT_EQ(steps.size(), 2u);
    if (first.empty()) first = steps;
    for (const char* figure :
         {"reward", "reward_std", "completion_tokens", "truncated", "logprob_equal_fraction"}) {
      EXPECT_EQ(steps[0].at(figure), first[0].at(figure)) << name << ", " << figure;
    }
    EXPECT_EQ(steps[0].at("logprob_equal_fraction"), 1.0);
    EXPECT_GT(steps[0].at("grad_norm").get<double>(), 0);
  }
}

TEST_F(GpuRanks, more_ranks_than_gpus_are_refused_by_name) {
  if (nccl_shares_gpus()) GTEST_SKIP() << "NCCL_MULTI_RANK_GPU_ENABLE=1 lets them share";
  use(kTinyModel + kPretrain);
  const int ranks = cuda::device_count() + 1;
  const Exit exit = run_ranks(ranks, folder_.path(), train_args({"--set", "run.device=cuda"}));
  EXPECT_EQ(exit.code, 2) << exit.errors;
  const std::string counts =
      "has " + std::to_string(ranks) + " ranks and " + std::to_string(cuda::device_count()) + " GPUs";
  EXPECT_NE(exit.errors.find(counts), std::string::npos) << exit.errors;
}

// Sums are ours on both, in rank order.
TEST_F(GpuRanks, nccl_leaves_the_bytes_that_host_memory_leaves) {
  if (!built_with_nccl()) GTEST_SKIP() << "built without NCCL";
  if (cuda::device_count() < 2 && !nccl_shares_gpus()) GTEST_SKIP() << "one GPU";
  use(kTinyModel + (kTinyTables + kPretrain));
  for (const Layout& l : {Layout{2, 1, 1}, Layout{2, 1, 3}, Layout{2, 2, 2}}) {
    const std::string nccl = on("cuda", l, {}, "-nccl", "auto"), host = on("cuda", l, {}, "-host");
    expect_same_outcome(dir(nccl), dir(host));
  }
}

// The others stand in the device's queue, or in a call of MPI.
TEST_F(GpuRanks, a_rank_that_hangs_ends_the_run_within_the_time_out) {
  const bool nccl = built_with_nccl() && (cuda::device_count() >= 2 || nccl_shares_gpus());
  use(kTinyModel + kPretrain);
  for (const std::string transport : {"host", "nccl"}) {
    if (transport == "nccl" && !nccl) GTEST_SKIP() << "no NCCL between two ranks";
    SCOPED_TRACE(transport);
    const std::string name = "hangs-" + transport;
    Process job(folder_.path(),
                ranks_command(
                    2, train_args({"--set", "run.device=cuda", "--set", "run.dir=" + name, "--set",
                                   "stages.0.pretrain.steps=100000", "--set", "run.watchdog_seconds=10",
                                   "--set", "parallel.zero=3", "--set", "parallel.transport=" + transport})));
    // The time-out leaves room for a start beside other tests.
    ASSERT_TRUE(wait_until([&] { return count_steps(dir(name), "pretrain") > 0 || !job.running(); }));
    ASSERT_TRUE(job.running()) << job.wait().errors;
    const auto ranks = job.children();
    ASSERT_EQ(ranks.size(), 2u);
    ::kill(ranks[1], SIGSTOP);
    const Exit exit = job.wait();
    EXPECT_EQ(exit.code, 72) << exit.errors;
    EXPECT_NE(exit.errors.find("s for another rank (run.watchdog_seconds is 10)"), std::string::npos)
        << exit.errors;
  }
}

// Two GPUs, of which one is hidden, or ranks that share the only one. Steps before and after are those of a
// run that was never killed: the same samples, the same numbers but for the order of sums.
TEST_F(GpuRanks, a_killed_run_goes_on_with_more_gpus_and_with_fewer) {
  const bool two_gpus = built_with_nccl() && cuda::device_count() >= 2;
  use(kTinyModel + kPretrain + "      checkpoint: {every: 5}\n");
  const auto args_of = [&](int ranks, const std::string& run_dir, int64_t steps) {
    std::vector<std::string> args = {"--accept-changes"};
    for (const std::string& set : {std::string("run.device=cuda"), std::string("precision={preset: fp32}"),
                                   "run.dir=" + run_dir, "stages.0.pretrain.steps=" + std::to_string(steps),
                                   std::string("parallel.transport=") + (two_gpus ? "auto" : "host"),
                                   std::string("parallel.zero=") + (ranks > 1 ? "3" : "1")}) {
      args.insert(args.end(), {"--set", set});
    }
    return train_args(args);
  };
  std::map<std::string, std::string> one_visible;
  if (two_gpus) one_visible = {{"CUDA_VISIBLE_DEVICES", "1"}};
  const auto run_on = [&](int ranks, const std::string& run_dir, int64_t steps) {
    const Exit exit = ranks > 1 ? run_ranks(ranks, folder_.path(), args_of(ranks, run_dir, steps))
                                : run_binary(folder_.path(), args_of(1, run_dir, steps), one_visible);
    EXPECT_EQ(exit.code, 0) << exit.errors << "\n" << exit.output;
    return exit;
  };
  for (const auto& [before, after] : {std::pair{2, 1}, std::pair{1, 2}}) {
    SCOPED_TRACE(detail::concat(before, " ranks, then ", after));
    const std::string run_dir = "killed-" + std::to_string(before);
    constexpr int64_t kEndless = 100000;
    {
      Process job(folder_.path(),
                  before > 1 ? ranks_command(before, args_of(before, run_dir, kEndless))
                             : binary_command(args_of(before, run_dir, kEndless)),
                  before > 1 ? std::map<std::string, std::string>() : one_visible);
      ASSERT_TRUE(wait_until([&] {
        return count_steps(dir(run_dir), "pretrain") >= 8 && !latest_checkpoint_of(dir(run_dir)).empty();
      }));
      if (before > 1) {
        const auto ranks = job.children();
        ASSERT_EQ(ranks.size(), 2u);
        ::kill(ranks[1], SIGKILL);
      } else {
        job.signal(SIGKILL);
      }
      EXPECT_EQ(job.wait().code, 137);
    }
    const int64_t steps = count_steps(dir(run_dir), "pretrain") + 6;
    const Exit again = run_on(after, run_dir, steps);
    EXPECT_NE(again.output.find("resuming from "), std::string::npos) << again.output;
    const std::string whole = "whole-" + std::to_string(after);
    run_on(after, whole, steps);
    EXPECT_EQ(step_figures(dir(run_dir), "pretrain", "trained_tokens"),
              step_figures(dir(whole), "pretrain", "trained_tokens"));
    const auto a = step_figures(dir(run_dir), "pretrain", "loss"),
               b = step_figures(dir(whole), "pretrain", "loss");
    ASSERT_EQ(static_cast<int64_t>(a.size()), steps);
    ASSERT_EQ(a.size(), b.size());
    for (size_t i = 0; i < a.size(); ++i) EXPECT_NEAR(a[i], b[i], 1e-3 * b[i]) << "step " << i;
  }
}

}  // namespace
}  // namespace fp4t::test

FP4T_GPU_TEST_MAIN

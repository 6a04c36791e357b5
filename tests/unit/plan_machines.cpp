// Machines from files, and plans for them: strict reading, refusals by key, counts of work by hand.
#include <gtest/gtest.h>

#include <fstream>
#include <sstream>

#include "engine/plan/sizes.h"
#include "tests/support/plans.h"
#include "tests/support/predictions.h"

namespace fp4t::test {
namespace {

#define EXPECT_HAS(text, part) EXPECT_NE((text).find(part), std::string::npos) << "in: " << (text)

std::string text_of(const std::string& machine) {
  std::ifstream file(source_path("configs/machines/" + machine + ".yaml"));
  std::stringstream text;
  text << file.rdbuf();
  return text.str();
}

std::string replaced(std::string text, const std::string& before, const std::string& after) {
  const size_t at = text.find(before);
  EXPECT_NE(at, std::string::npos) << before;
  return text.replace(at, before.size(), after);
}

std::string error_of(const std::string& machine_text) {
  try {
    parse_machine(machine_text, "m.yaml");
  } catch (const RecipeError& e) {
    return e.what();
  }
  return "";
}

TEST(MachineFiles, the_program_carries_every_file_and_each_is_read) {
  for (const std::string& name : machine_names()) {
    SCOPED_TRACE(name);
    const MachineSpec by_name = load_machine(name),
                      by_path = load_machine(source_path("configs/machines/" + name + ".yaml"));
    EXPECT_EQ(by_name.name, by_path.name);
    EXPECT_GT(by_name.peak(Format::kBf16), 0);
    EXPECT_EQ(error_of(text_of(name)), "");
  }
  EXPECT_EQ(machine_names(), (std::vector<std::string>{"cpu", "gb200", "gb300", "h200"}));
}

TEST(MachineFiles, errors_name_place_key_and_what_is_allowed) {
  const std::string h200 = text_of("h200");
  EXPECT_HAS(error_of(replaced(h200, "fast_domain: 8", "fast_domian: 8")),
             "m.yaml:6:1: fast_domian: unknown key; did you mean fast_domain?");
  EXPECT_HAS(error_of(replaced(h200, "shares:\n", "choice_ns: {value: 43, source: x}\nshares:\n")),
             "choice_ns: unknown key");
  EXPECT_HAS(error_of(replaced(h200, "arch: 90\n", "")), "arch: missing");
  EXPECT_HAS(error_of(replaced(h200, "{value: 989,", "{value: fast,")),
             "peaks.bf16_tflops.value: found fast (not a number)");
  EXPECT_HAS(error_of(replaced(h200, "{value: 989, source: \"data sheet, dense\"}", "989")),
             "peaks.bf16_tflops: found 989; allowed: a map");
  EXPECT_HAS(error_of(replaced(h200, ", source: \"data sheet, dense\"", "")),
             "peaks.bf16_tflops.source: missing");
  EXPECT_HAS(error_of(replaced(h200, "fast_domain: 8", "fast_domain: 12")),
             "fast_domain: found 12; allowed: a multiple");
  EXPECT_HAS(error_of(replaced(h200, "shares:\n", "shares:\n  coded_products: {value: 0.5, source: x}\n")),
             "shares.coded_products: has no effect: it applies only when peaks.mxfp8_tflops");
  EXPECT_HAS(error_of(replaced(text_of("gb300"), "coded_products", "dense_products")),
             "shares.coded_products.value: missing");
  EXPECT_HAS(error_of("- a\n"), "a machine is a map of keys");
  for (const char* nothing : {"", "# a machine\n"}) {
    EXPECT_HAS(error_of(nothing), "m.yaml:1:1: empty file; needed: the keys of a machine");
  }
}

TEST(MachineFiles, a_name_that_is_none_gets_the_nearest) {
  const auto message = [](const std::string& name) -> std::string {
    try {
      load_machine(name);
    } catch (const Error& e) {
      return e.what();
    }
    return "";
  };
  EXPECT_HAS(message("gb30"), "--machine gb30: no machine of that name; did you mean gb300?");
  EXPECT_HAS(message("nowhere/m.yaml"), "--machine nowhere/m.yaml: no machine to read there");
  EXPECT_HAS(message("./"), "./ is no regular file");
  const std::string empty = ::testing::TempDir() + "empty_machine.yaml";
  std::ofstream(empty).close();
  EXPECT_HAS(message(empty), empty + ":1:1: empty file; needed: the keys of a machine");
}

// Refusals -------------------------------------------------------------------------------------------

std::string refusal(const std::string& machine, int64_t ranks, const std::vector<std::string>& overrides) {
  try {
    planned("configs/scale/moe-30b-a3b.yaml", machine, ranks, overrides);
  } catch (const RecipeError& e) {
    return e.what();
  }
  return "";
}

TEST(PlansElsewhere, layouts_that_cannot_be_are_refused_by_key) {
  EXPECT_HAS(refusal("h200", 64, {"parallel.expert=16"}),
             "parallel.expert: 16 ranks share experts, and a fast domain of NVIDIA H200 has 8; allowed: at "
             "most that");
  EXPECT_HAS(refusal("gb300", 576, {"parallel.expert=64"}),
             "some groups would lie in two; allowed: a divisor of it");
  EXPECT_HAS(refusal("gb300", 72, {"parallel.expert=16"}),
             "parallel.expert: 16 needs 16 ranks, or a multiple");
  EXPECT_HAS(refusal("h200", 72, {}), "parallel.domain: 72 ranks, and a fast domain of NVIDIA H200 has 8");
  EXPECT_HAS(refusal("gb300", 80, {}), "--ranks: 80 leave a fast domain of NVIDIA GB300 half empty");
  EXPECT_HAS(refusal("gb300", 72, {"parallel.data=5"}),
             "parallel.data: 5 x parallel.expert 8 needs 40 ranks");
  EXPECT_HAS(refusal("gb300", 72, {"parallel.transport=host"}),
             "parallel.transport: host, and predictions know NCCL");
  EXPECT_HAS(refusal("gb300", 72, {"run.device=cpu"}),
             "run.device: cpu, and --machine NVIDIA GB300 computes on cuda");
  EXPECT_EQ(refusal("gb300", 64, {"parallel.expert=64"}), "");  // one domain, not full
}

TEST(PlansElsewhere, a_host_of_cpu_ranks_is_one_fast_domain) {
  for (const int64_t ranks : {2, 3, 8}) {
    const Planned p = planned("configs/quickstart.yaml", "cpu", ranks,
                              {"parallel.expert=" + std::to_string(ranks == 3 ? 1 : 2)});
    EXPECT_EQ(p.plan().axes.ranks(), ranks);
    for (const WireLine& line : p.prediction().stages[0].wire) EXPECT_EQ(line.outside_bytes, 0) << line.name;
  }
}

TEST(PlansElsewhere, one_rank_too_few_says_how_to_ask_for_more) {
  EXPECT_HAS(refusal("gb300", 1, {}), "fp4train plan: --ranks N");
}

TEST(PlansElsewhere, what_does_not_fit_is_a_plan_that_says_so) {
  const Planned p = planned("configs/scale/moe-276b-a12b.yaml", "h200", 8, {"parallel.expert=8"});
  EXPECT_HAS(p.made.memory_obstacle, "NVIDIA H200 has 143155 MiB");
  EXPECT_HAS(describe(p.prediction(), p.plan()), "it does not fit: the plan needs");
  EXPECT_EQ(planned("configs/bench/q6.yaml", "h200").made.memory_obstacle, "");
}

// Work by hand ---------------------------------------------------------------------------------------

double sum(const WorkList& list, WorkKind kind, double OpWork::*field) {
  double total = 0;
  for (const OpWork& op : list) {
    if (kind_of(op.rate) == kind) total += op.*field;
  }
  return total;
}

// A dense layer: 64 wide, two heads of 32 and one of keys, FFN of 96; 61 tokens to choose from.
ModelSpec dense_model() {
  ModelSpec m = tiny_model();
  m.layers = 1;
  m.qk_norm = false;
  m.moe = {};
  return m;
}

TEST(Work, a_dense_layer_counts_as_by_hand) {
  const Plan plan = make_plan_by_hand(dense_model(), TestCells{});
  const MachineSpec h200 = load_machine("h200");
  const StagePrecision& p = plan.stages[0].precision;
  const WorkCall call{plan, h200, {&p.forward.at(0), &p.backward.at(0)}, 32, 16};
  WorkList forward, backward, head;
  add_forward(call, forward);
  add_backward(call, false, backward);
  add_head(call, false, head);
  // qkv 128 x 64, out 64 x 64, gate and up 192 x 64, down 64 x 96.
  const double weights = 128 * 64 + 64 * 64 + 192 * 64 + 64 * 96;
  EXPECT_EQ(sum(forward, WorkKind::kProducts, &OpWork::flops), 2 * 32 * weights);
  EXPECT_EQ(sum(backward, WorkKind::kProducts, &OpWork::flops), 4 * 32 * weights);
  EXPECT_EQ(sum(head, WorkKind::kProducts, &OpWork::flops), 6 * 32 * 61 * 64);
  // Half of 16 keys for each of 32 queries, two products of 2 FLOPs over 64 columns; five backward.
  EXPECT_EQ(sum(forward, WorkKind::kAttention, &OpWork::flops), 2 * 2 * 32 * 8 * 64);
  EXPECT_EQ(sum(backward, WorkKind::kAttention, &OpWork::flops), 5 * 2 * 32 * 8 * 64);
  // Operands and result of each product, BF16.
  const double acts = 32 * (64 + 64 + 64 + 96), outs = 32 * (128 + 64 + 192 + 64);
  EXPECT_EQ(sum(forward, WorkKind::kProducts, &OpWork::bytes), 2 * (acts + weights + outs));
  EXPECT_EQ(sum(backward, WorkKind::kProducts, &OpWork::bytes), 2 * 2 * (acts + weights + outs));
  // Embedding 2, norms 2 and 4, residual 3 streams of 32 x 64; rotary 2 x 32 x 128; SwiGLU 3 x 32 x 96.
  EXPECT_EQ(sum(forward, WorkKind::kRest, &OpWork::bytes), 2 * (11 * 32 * 64 + 2 * 32 * 128 + 3 * 32 * 96));
  EXPECT_EQ(sum(forward, WorkKind::kCodes, &OpWork::bytes), 0);
}

TEST(Work, experts_count_the_rows_that_are_routed) {
  ModelSpec model = tiny_model();  // layer 1: six experts of 48, two a token, one shared of 48
  const Plan plan = make_plan_by_hand(model, TestCells{});
  const MachineSpec h200 = load_machine("h200");
  const StagePrecision& p = plan.stages[0].precision;
  WorkList forward;
  add_forward({plan, h200, {&p.forward.at(0), &p.backward.at(0)}, 32, 16}, forward);
  double experts = 0, router = 0;
  for (const OpWork& op : forward) {
    if (op.rate == Rate::kGroupedFprop) experts += op.flops;
    if (op.rate == Rate::kRouter) router += op.flops;
  }
  EXPECT_EQ(experts, 2 * 32 * 2 * 3 * 48 * 64);
  EXPECT_EQ(router, 2 * 32 * 6 * 64);
  WorkList gradients;
  add_gate_up_gradients({plan, h200, {&p.forward.at(0), &p.backward.at(0)}, 32, 16}, false, gradients);
  EXPECT_EQ(sum(gradients, WorkKind::kProducts, &OpWork::flops), 2 * 32 * 2 * 2 * 48 * 64);
}

TEST(Work, all_of_a_step_is_what_the_plan_calls_model_flops) {
  for (const char* recipe : {"configs/bench/q6.yaml", "configs/scale/moe-30b-a3b.yaml"}) {
    const Planned p = planned(recipe, "h200", 1, {"parallel.expert=1"});
    const StagePrecision& tables = p.plan().stages[0].precision;
    const WorkCall call{p.plan(), p.machine, {&tables.forward.at(0), &tables.backward.at(0)}, 8192, 4096};
    WorkList list;
    add_forward(call, list);
    add_backward(call, false, list);
    add_head(call, false, list);
    const double products =
        sum(list, WorkKind::kProducts, &OpWork::flops) + sum(list, WorkKind::kRest, &OpWork::flops);
    // Attention's gradient makes the scores again: five products where two of the model's six are forward's.
    const double attention = sum(list, WorkKind::kAttention, &OpWork::flops) * 6 / 7;
    EXPECT_NEAR((products + attention) / (p.plan().flops_per_token * 8192), 1, 1e-9) << recipe;
  }
}

TEST(Work, codes_cost_their_making_and_without_tensor_cores_their_decoding) {
  const Plan plan = make_plan_by_hand(dense_model(), nvidia_nvfp4_cells());
  const StagePrecision& p = plan.stages[0].precision;
  const auto forward_on = [&](const MachineSpec& machine) {
    WorkList list;
    add_forward({plan, machine, {&p.forward.at(0), &p.backward.at(0)}, 32, 16}, list);
    return list;
  };
  const double acts = 32 * (64 + 64 + 64 + 96), weights = 128 * 64 + 64 * 64 + 192 * 64 + 64 * 96;
  // Rows for fprop, columns for wgrad, in one reading of BF16: half a byte and a sixteenth each.
  const double made = acts * (2 + 2 * 0.5625);
  // Codes read and BF16 written; weights have a scale in 256.
  const double decoded = acts * (0.5625 + 2) + weights * (0.5 + 1.0 / 256 + 2);
  const MachineSpec h200 = load_machine("h200"), gb300 = load_machine("gb300");
  EXPECT_DOUBLE_EQ(sum(forward_on(gb300), WorkKind::kCodes, &OpWork::bytes), made);
  EXPECT_DOUBLE_EQ(sum(forward_on(h200), WorkKind::kCodes, &OpWork::bytes), made + decoded);
  for (const OpWork& op : forward_on(gb300)) {
    if (kind_of(op.rate) != WorkKind::kProducts) continue;
    EXPECT_EQ(op.format, Format::kNvfp4);
    EXPECT_EQ(op.rate, Rate::kCodedProducts);
  }
  WorkList once;
  add_weight_codes({plan, h200, {&p.forward.at(0), &p.backward.at(0)}, 0, 0}, once);
  EXPECT_DOUBLE_EQ(sum(once, WorkKind::kCodes, &OpWork::bytes), weights * (2 + 2 * (0.5 + 1.0 / 256)));
}

TEST(Work, an_op_takes_the_longer_of_computing_and_moving) {
  MachineSpec m = load_machine("h200");
  m.bf16_tflops.value = 100, m.memory_gb_s.value = 1000, m.sustained.value = 0.5;
  m.rates[static_cast<size_t>(Rate::kDense)].value = 0.5;
  m.rates[static_cast<size_t>(Rate::kAdamw)].value = 0.8;
  EXPECT_DOUBLE_EQ(seconds_of(OpWork{Rate::kDense, Format::kBf16, 25e12, 0}, m), 1);
  EXPECT_DOUBLE_EQ(seconds_of(OpWork{Rate::kDense, Format::kBf16, 25e12, 3e12}, m), 3);
  EXPECT_DOUBLE_EQ(seconds_of(OpWork{Rate::kDense, Format::kBf16, 25e12, 0, 1, true}, m), 0.5);  // of codes
  EXPECT_DOUBLE_EQ(seconds_of(OpWork{Rate::kAdamw, Format::kBf16, 0, 8e11}, m), 1);
}

// Monotony -------------------------------------------------------------------------------------------

StagePrediction step_of(const std::vector<std::string>& overrides, int64_t ranks = 72,
                        const std::string& machine = "gb300") {
  return planned("configs/scale/moe-30b-a3b.yaml", machine, ranks, overrides).prediction().stages.at(0);
}

TEST(Predictions, more_work_takes_longer_and_more_machine_less) {
  const double base = step_of({}).step_seconds();
  EXPECT_GT(step_of({"model.layers=60"}).step_seconds(), base);
  EXPECT_GT(step_of({"model.moe.hidden=1024"}).step_seconds(), base);
  EXPECT_GT(step_of({"model.moe.top_k=9"}).step_seconds(), base);
  EXPECT_GT(step_of({"parallel.recompute=block"}).step_seconds(), base);
  EXPECT_GT(step_of({"stages.0.pretrain.batch.tokens=37748736"}).step_seconds(), 1.9 * base);
  EXPECT_LT(step_of({}, 576).step_seconds(), base);
  EXPECT_GT(step_of({}, 576).step_seconds(), base / 8);  // ranks exchange more
  EXPECT_GT(step_of({"parallel.domain=8"}, 72, "h200").step_seconds(), base);
  EXPECT_GT(step_of({}, 72, "gb200").step_seconds(), base);  // slower NVFP4
  // What leaves a fast domain once a rank costs more than what leaves it once a domain.
  EXPECT_LT(step_of({}, 576).step_seconds(), step_of({"parallel.domain=0"}, 576).step_seconds());
}

TEST(Predictions, what_runs_beside_the_computation_is_hidden_as_far_as_there_is_time) {
  const StagePrediction one = step_of({}, 576), two = step_of({"parallel.zero=2"}, 576),
                        three = step_of({"parallel.zero=3"}, 576);
  for (const StagePrediction* s : {&one, &two, &three}) {
    EXPECT_GT(s->hidden_seconds, 0);
    EXPECT_LT(s->hidden_seconds, s->communication_seconds);
    EXPECT_DOUBLE_EQ(s->step_seconds(), s->compute_seconds + s->communication_seconds - s->hidden_seconds);
  }
  EXPECT_GT(two.communication_seconds, one.communication_seconds);  // in every micro-batch
  EXPECT_GT(three.hidden_seconds, two.hidden_seconds);
  EXPECT_EQ(planned("configs/quickstart.yaml", "cpu", 2).prediction().stages[0].hidden_seconds, 0);
  EXPECT_GT(planned("configs/quickstart.yaml", "cpu", 2).prediction().stages[0].exposed_seconds(), 0);
}

TEST(Predictions, gradients_from_experts_are_hidden_as_long_as_a_product_takes) {
  // `link`: GB/s. What is hidden of the line, and what gate_up's weight gradients take, in seconds.
  const auto hidden = [](int64_t chunks, double link, double& product) {
    MachineSpec h200 = load_machine("h200");
    h200.fast.gb_s.value = link;
    const Planned p = planned("configs/bench/q6.yaml", h200, 2,
                              {"parallel.expert=2", "parallel.expert_chunks=" + std::to_string(chunks),
                               "precision={preset: bf16}", "stages[0].pretrain.batch.tokens=65536"});
    const StagePrecision& tables = p.plan().stages[0].precision;
    WorkList list;
    add_gate_up_gradients({p.plan(), p.machine, {&tables.forward.at(0), &tables.backward.at(0)}, 32768, 4096},
                          false, list);
    product = 0;
    for (const OpWork& op : list) product += seconds_of(op, p.machine);
    const Prediction made = p.prediction();
    for (const WireLine& line : made.stages.at(0).wire) {
      if (line.name != "gradients from experts") continue;
      const double seconds = seconds_of(line, p.machine);
      EXPECT_GE(line.share_beside, 0);
      EXPECT_LE(line.share_beside, 1);
      return std::pair{seconds * line.share_beside, seconds};
    }
    throw InternalError("no gradients from experts");
  };
  double product = 0;
  const auto [all, fast] = hidden(1, 1e6, product);
  EXPECT_DOUBLE_EQ(all, fast);
  EXPECT_GT(product, fast);
  const auto [one, slow] = hidden(1, 1, product);
  EXPECT_LT(product, slow);
  EXPECT_NEAR(one, product, 1e-9);
  // Of two chunks half the product is of the last, and the first is hidden as before.
  const auto [two, same] = hidden(2, 1, product);
  EXPECT_GT(two, product / 2);
  EXPECT_LT(two, same);
}

TEST(Predictions, recomputing_costs_a_forward_and_the_exchange_of_its_experts) {
  const StagePrediction kept = step_of({}), again = step_of({"parallel.recompute=block"});
  const auto forward = static_cast<size_t>(Phase::kForward),
             recompute = static_cast<size_t>(Phase::kRecompute);
  EXPECT_EQ(kept.phases[recompute].total(), 0);
  EXPECT_GT(again.phases[recompute].total(), 0.9 * again.phases[forward].total());
  EXPECT_LE(again.phases[recompute].total(), again.phases[forward].total());
  EXPECT_GT(again.communication_seconds, kept.communication_seconds);
}

}  // namespace
}  // namespace fp4t::test

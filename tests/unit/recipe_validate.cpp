// Checks between keys, one message each.
#include "tests/unit/recipe_text.h"

namespace fp4t {
namespace {

using test::errors_of;
using test::minimal;
using test::with_rl;
using Set = std::vector<std::string>;

std::string accepted(const std::string& text, const Set& overrides) { return errors_of(text, overrides); }

TEST(recipe_validate, model_shapes_fit_together) {
  EXPECT_REFUSED(minimal(), Set{"model.kv_heads=3"}, "model.kv_heads: found 3", "a divisor of heads (4)");
  EXPECT_REFUSED(minimal(), Set{"model.head_dim=33"}, "model.head_dim: found 33", "an even number");
  EXPECT_REFUSED(minimal(), Set{"model.vocabulary=256"}, "model.vocabulary: found 256", "257");
  EXPECT_EQ(accepted(minimal(), {"model.vocabulary=257"}), "");
  EXPECT_REFUSED(minimal(), Set{"model.moe.top_k=9"}, "model.moe.top_k: found 9", "1 to experts (8)");
  EXPECT_EQ(accepted(minimal(), {"model.moe.top_k=8"}), "");
  EXPECT_REFUSED(minimal(), (Set{"model.moe.dense_layers=4", "model.mlp_hidden=8"}), "dense_layers",
                 "0 to 3");
  EXPECT_REFUSED(minimal(),
                 Set{"model.rope={scaling: llama3, factor: 8, low_freq_factor: 4, original_positions: 64}"},
                 "low_freq_factor: found 4", "less than high_freq_factor (4)");
  EXPECT_REFUSED(minimal(), Set{"model.rope={scaling: yarn, beta_slow: 40, original_positions: 64}"},
                 "beta_slow", "less than beta_fast (32)");
  EXPECT_REFUSED(minimal(), Set{"model.rope={scaling: yarn, factor: 4}"}, "original_positions: missing");
}

TEST(recipe_validate, tokens_made_elsewhere_spell_no_problems) {
  const std::string ids = "tokenizer={kind: ids, vocabulary: 300}";
  EXPECT_EQ(accepted(minimal(), {ids}), "");
  EXPECT_EQ(accepted(minimal(), {ids, "stages[0].pretrain.data=[{kind: random}]"}), "");
  EXPECT_REFUSED(minimal(), Set{"tokenizer={kind: ids}"}, "tokenizer.vocabulary: missing");
  EXPECT_REFUSED(minimal(), Set{"tokenizer.vocabulary=300"}, "tokenizer.vocabulary", "kind is ids");
  EXPECT_REFUSED(minimal(), (Set{ids, "model.vocabulary=299"}), "model.vocabulary: found 299", "300");
  EXPECT_REFUSED(minimal(), (Set{ids, "stages[0].pretrain.data=[{kind: sums}]"}), "data[0].kind",
                 "tokenizer.kind bytes");
  EXPECT_REFUSED(with_rl(), Set{ids}, "stages[1].rl.task", "tokenizer.kind bytes");
  EXPECT_REFUSED(minimal(), Set{"stages[0].pretrain.data=[{kind: random, held_out: {fraction: 0.1}}]"},
                 "held_out.fraction", "kind is not random");
}

TEST(recipe_validate, ranks_must_be_there) {
  EXPECT_EQ(accepted(minimal(), {"parallel.expert=2"}), "");  // how many ranks there are, the plan knows
  EXPECT_REFUSED(minimal(), Set{"parallel.expert=3"}, "parallel.expert: found 3",
                 "a divisor of model.moe.experts (8)");
  EXPECT_REFUSED(minimal(), Set{"parallel.zero=4"}, "parallel.zero: found 4", "from 1 to 3");
  EXPECT_EQ(accepted(minimal(), {"parallel.zero=3"}), "");
  for (const char* few : {"0.049", "1e-09"}) {
    EXPECT_REFUSED(minimal(), Set{std::string("parallel.receive_factor=") + few},
                   "parallel.receive_factor: found ", few, "from 0.05 on, or 0");
  }
  for (const char* enough : {"0", "0.05", "0.3", "2"}) {
    EXPECT_EQ(accepted(minimal(), {std::string("parallel.receive_factor=") + enough}), "");
  }
  const std::string message = errors_of(minimal(), {"parallel.expert=3"});
  EXPECT_NE(message.find("a divisor of model.moe.experts (8)"), std::string::npos) << message;
}

TEST(recipe_validate, batches_are_whole) {
  EXPECT_REFUSED(minimal(), Set{"stages[0].pretrain.batch.tokens=8191"}, "batch.tokens: found 8191",
                 "a multiple of micro_sequences * length (16 * 128 = 2048)");
  EXPECT_REFUSED(minimal(), Set{"model.max_positions=64"}, "batch.length: found 128",
                 "model.max_positions (64)");
}

TEST(recipe_validate, sources_are_usable) {
  EXPECT_REFUSED(minimal(), Set{"stages[0].pretrain.data[0].weight=0"}, "weights sum to 0");
  EXPECT_REFUSED(minimal(), Set{"stages[0].pretrain.data=[]"}, "empty list", "one source or more");
  EXPECT_REFUSED(minimal(), Set{"stages[0].pretrain.data=[{paths: a}, {paths: b}]"}, "data[1].name",
                 "found text a second time");
  EXPECT_REFUSED(minimal(), Set{"stages[0].pretrain.data[0].paths=[]"}, "paths", "empty list");
  EXPECT_REFUSED(minimal(), Set{"stages[0].pretrain.data[0]={kind: sums, low: 9, high: 8}"}, "low: found 9",
                 "at most high (8)");
  EXPECT_REFUSED(minimal(), Set{"stages[0].pretrain.data[0]={kind: text}"}, "paths: missing");
  EXPECT_REFUSED(minimal(), Set{"stages[0].pretrain.data[0].held_out.fraction=1"}, "nothing to train on");
  // Files that are only measured.
  const std::string beside = "stages[0].pretrain.data=[{name: a, kind: text, paths: a}, {name: b, kind: ";
  EXPECT_EQ(accepted(minimal(), {beside + "text, paths: b, weight: 0, held_out: {fraction: 1}}]"}), "");
  EXPECT_REFUSED(minimal(), Set{beside + "sums, weight: 0, held_out: {fraction: 1}}]"},
                 "nothing to train on");
  EXPECT_REFUSED(minimal(), Set{"stages[0].pretrain.data[0].held_out.fraction=1.5"}, "a number from 0 to 1");
}

TEST(recipe_validate, one_split_serves_all) {
  const std::string sums = "stages[0].pretrain.data[0]={kind: sums, held_out: {fraction: 0.05, seed: 3}}";
  const auto task = [](const std::string& body) { return "stages[1].rl.task=" + body; };
  EXPECT_EQ(
      accepted(with_rl(), {sums, task("{held_out: {fraction: 0.05, seed: 3, hash: 00112233aabbccdd}}")}), "");
  EXPECT_REFUSED(with_rl(), (Set{sums, task("{held_out: {fraction: 0.05, seed: 4}}")}), "stages[1].rl.task",
                 "stages[0].pretrain.data[0]", "held_out.seed 3 there, 4 here",
                 "training would see held-out problems");
  EXPECT_REFUSED(with_rl(), (Set{sums, task("{held_out: {fraction: 0.1, seed: 3}}")}), "held_out.fraction");
  EXPECT_REFUSED(with_rl(), (Set{sums, task("{high: 98, held_out: {fraction: 0.05, seed: 3}}")}),
                 "high 99 there");
  EXPECT_REFUSED(with_rl(), (Set{sums, task("{}")}), "held_out.fraction 0.05 there, 0 here");
  // Numbers that never meet, and another kind, have splits of their own.
  EXPECT_EQ(accepted(with_rl(), {sums, task("{low: 100, high: 200}")}), "");
  EXPECT_EQ(accepted(with_rl(), {sums, task("{kind: countdown}")}), "");
  EXPECT_REFUSED(
      with_rl(),
      (Set{"stages[0].pretrain.data[0]={kind: sums, held_out: {fraction: 0.05, hash: aaaaaaaaaaaaaaaa}}",
           task("{held_out: {fraction: 0.05, hash: bbbbbbbbbbbbbbbb}}")}),
      "held_out.hash aaaaaaaaaaaaaaaa there, bbbbbbbbbbbbbbbb here");
  EXPECT_REFUSED(minimal(),
                 (Set{"stages[0].pretrain.data[0]={kind: sums}",
                      "stages[0].pretrain.eval.task={held_out: {fraction: 0.05}}"}),
                 "stages[0].pretrain.eval.task", "training would see");
}

TEST(recipe_validate, evaluation_has_something_to_ask) {
  EXPECT_REFUSED(minimal(), Set{"stages[0].pretrain.eval.task={}"}, "eval.task.held_out.fraction", "above 0");
  EXPECT_REFUSED(minimal(),
                 Set{"stages[0].pretrain.eval={task: {held_out: {fraction: 0.1}}, max_tokens: 2043}"},
                 "eval.max_tokens: found 2043", "model.max_positions (2048)");
}

TEST(recipe_validate, rollouts_fit) {
  EXPECT_REFUSED(with_rl(), Set{"stages[1].rl.sampling.samples=1"}, "samples: found 1", "at least 2");
  EXPECT_REFUSED(with_rl(), Set{"stages[1].rl.objective.mini_batches=513"}, "mini_batches: found 513",
                 "prompts * samples (512)");
  EXPECT_REFUSED(with_rl(), Set{"stages[1].rl.sampling.max_tokens=2043"}, "max_tokens: found 2043",
                 "model.max_positions (2048)");
  EXPECT_EQ(accepted(with_rl(), {"stages[1].rl.sampling.max_tokens=2042"}), "");
  EXPECT_REFUSED(with_rl(), Set{"stages[1].rl.objective.micro_tokens=21"}, "micro_tokens: found 21",
                 "22 or more");
  EXPECT_REFUSED(with_rl(), Set{"stages[1].rl.sampling.end_tokens=[]"}, "end_tokens", "empty list");
  EXPECT_REFUSED(with_rl(), Set{"stages[1].rl.sampling.end_tokens=[\"ab\"]"}, "found \"ab\"",
                 "not one token");
  EXPECT_REFUSED(with_rl(), Set{"stages[1].rl.sampling.temperature=0"}, "temperature: found 0",
                 "from 0.001 to 1000");
  EXPECT_REFUSED(with_rl(), Set{"stages[1].rl.sampling.top_p=1.01"}, "top_p: found 1.01", "from 1e-06 to 1");
  EXPECT_REFUSED(with_rl(), Set{"stages[1].rl.task={low: 5, high: 4}"}, "rl.task.low: found 5");
}

TEST(recipe_validate, objectives_mean_what_their_kind_says) {
  const auto objective = [](const std::string& keys) { return Set{"stages[1].rl.objective=" + keys}; };
  for (const char* kind : {"grpo", "dr_grpo", "dapo", "gspo", "cispo", "rloo"}) {
    EXPECT_EQ(accepted(with_rl(), objective(std::string("{kind: ") + kind + "}")), "");
    EXPECT_REFUSED(
        with_rl(),
        (Set{std::string("stages[1].rl.objective={kind: ") + kind + "}", "stages[1].rl.sampling.samples=1"}),
        "samples: found 1", "at least 2", kind);
  }
  EXPECT_EQ(objective_defaults("grpo", 16).average, "sequence");  // the mean of completions' means
  EXPECT_EQ(objective_defaults("dapo", 16).average, "token");
  EXPECT_EQ(objective_defaults("cispo", 16).average, "token");
  EXPECT_EQ(ObjectiveSpec().average, objective_defaults(ObjectiveSpec().kind, 16).average);
  EXPECT_REFUSED(with_rl(), objective("{kind: dr_grpo, normalise_std: true}"), "normalise_std: found true",
                 "allowed: false, which is what kind dr_grpo means");
  EXPECT_REFUSED(with_rl(), objective("{kind: dapo, average: sequence}"), "average: found sequence",
                 "kind dapo");
  EXPECT_REFUSED(with_rl(), objective("{kind: gspo, ratio: token}"), "ratio: found token", "kind gspo");
  EXPECT_REFUSED(with_rl(), objective("{kind: grpo, clip_form: cispo}"), "clip_form: found cispo",
                 "kind grpo");
  EXPECT_REFUSED(with_rl(), objective("{kind: rloo, baseline: group_mean}"), "baseline: found group_mean");
  EXPECT_EQ(accepted(with_rl(), objective("{kind: rloo, clip_form: ppo, clip_low: 0.1}")), "");
  EXPECT_REFUSED(with_rl(), objective("{kind: rloo, clip_low: 0.1}"), "clip_low",
                 "clip_form is ppo or cispo");
  EXPECT_REFUSED(with_rl(), objective("{kind: cispo, clip_dual: 3}"), "clip_dual", "clip_form is ppo");
  EXPECT_REFUSED(with_rl(), objective("{clip_dual: 1}"), "clip_dual: found 1", "above 1");
  EXPECT_REFUSED(with_rl(), objective("{average_tokens: 9}"), "average_tokens", "average is constant");
  EXPECT_REFUSED(with_rl(), objective("{kl_estimator: k2}"), "kl_estimator", "kl is above 0");
  EXPECT_REFUSED(with_rl(), objective("{overlong_tokens: 17}"), "overlong_tokens: found 17",
                 "sampling.max_tokens (16)");
  EXPECT_REFUSED(with_rl(), objective("{mismatch: {importance: raw, cap: 3}}"), "cap",
                 "importance is truncated");
  EXPECT_REFUSED(with_rl(), objective("{mismatch: {token_low: 0.5}}"), "token_low", "token_high is above 0");
  EXPECT_REFUSED(with_rl(), objective("{mismatch: {sequence_low: 1, sequence_high: 1}}"),
                 "sequence_low: found 1", "below sequence_high (1)");
  EXPECT_REFUSED(with_rl(), objective("{mismatch: {sequence_low: 0.9, sequence_high: 0.95}}"),
                 "sequence_high: found 0.95", "1 and above");
  EXPECT_REFUSED(with_rl(), objective("{mismatch: {token_high: 0.5}}"), "token_high: found 0.5",
                 "1 and above");
  EXPECT_EQ(accepted(with_rl(), objective("{mismatch: {token_low: 0.5, token_high: 1}}")), "");
}

TEST(recipe_validate, routing_is_replayed_where_there_are_experts) {
  const std::string replay = "stages[1].rl.objective.router_replay=sampler";
  EXPECT_EQ(accepted(with_rl(), {replay}), "");
  EXPECT_REFUSED(with_rl(), (Set{replay, "model.moe={}", "model.mlp_hidden=64"}),
                 "router_replay: found sampler", "without experts");
}

TEST(recipe_validate, checkpoints_outlive_one_that_is_damaged) {
  EXPECT_REFUSED(minimal(), Set{"stages[0].pretrain.checkpoint.keep=1"}, "checkpoint.keep: found 1",
                 "at least 2");
  EXPECT_EQ(accepted(minimal(), {"stages[0].pretrain.checkpoint.keep=1", "run.resume=never"}), "");
  EXPECT_REFUSED(minimal(), (Set{"run.resume=some/folder", "run.branch_from=other"}), "run.branch_from",
                 "contradicts");
}

TEST(recipe_validate, stages_have_names_of_their_own) {
  const std::string two = with_rl() + test::kRl;
  EXPECT_REFUSED(two, Set{}, "stages[2].rl.name: found rl a second time");
  EXPECT_EQ(accepted(two, {"stages[2].rl.name=rl2"}), "");
  EXPECT_REFUSED(minimal(), Set{"stages=[]"}, "stages: found an empty list");
}

TEST(recipe_validate, kept_optimizer_state_exists) {
  EXPECT_REFUSED(with_rl(), Set{"stages[0].pretrain.optimizer.state=keep"}, "found keep in the first stage");
  EXPECT_EQ(accepted(with_rl(), {"stages[0].pretrain.optimizer.state=keep", "run.branch_from=c"}), "");
  EXPECT_EQ(accepted(with_rl(), {"stages[1].rl.optimizer.state=keep"}), "");
  EXPECT_REFUSED(with_rl(), Set{"stages[1].rl.optimizer={kind: muon, state: keep}"}, "optimizer.kind adamw");
}

// Rules ---------------------------------------------------------------------------------------------

std::string rule(const std::string& table, const std::string& body) {
  return "precision={" + table + ": [{" + body + "}]}";
}

void expect_rule(const std::string& table, const std::string& body, const std::string& part) {
  const std::string message = errors_of(minimal(), {rule(table, body)});
  EXPECT_EQ(test::count_lines(message), 1) << body << "\n" << message;
  EXPECT_NE(message.find("precision." + table + "[0]"), std::string::npos) << message;
  EXPECT_NE(message.find(part), std::string::npos) << part << "\n in " << message;
}

TEST(recipe_rules, a_rule_has_a_format) {
  expect_rule("pretrain.forward", "module: head", "format: missing");
  expect_rule("pretrain.forward", "module: head, format: nvfp8", "did you mean nvfp4?");
  expect_rule("pretrain.forward", "format: fp16", "bf16, fp32, mxfp8 or nvfp4");
  EXPECT_REFUSED(minimal(), Set{rule("pretrain.forwards", "format: bf16")}, "did you mean pretrain.forward?");
  EXPECT_REFUSED(minimal(), Set{"precision={preset: bf17}"}, "did you mean bf16?");
}

TEST(recipe_rules, matchers_match_something) {
  expect_rule("pretrain.forward", "module: experts, format: bf16", "matches no module");
  expect_rule("pretrain.forward", "module: attn.qvk, format: bf16", "did you mean attn.qkv?");
  expect_rule("pretrain.forward", "module: [], format: bf16", "empty list");
  EXPECT_EQ(errors_of(minimal(), {rule("pretrain.forward", "module: '*.gate_up', format: bf16")}), "");
  for (const char* layers : {"last", "3-1", "first 0", "last 101%", "last 100.5%", "last 1.%",
                             "last 0.1234567%", "'1,2'", "-1", "first -2", "15%"}) {
    expect_rule("pretrain.forward", std::string("format: bf16, layers: ") + layers, "allowed: 5, 0-3");
  }
  for (const char* layers : {"0", "0-3", "first 2", "last 12.5%", "first 100%"}) {
    EXPECT_EQ(
        errors_of(minimal(), {rule("pretrain.forward", std::string("format: bf16, layers: ") + layers)}), "");
  }
  for (const char* steps : {"90%", "5-5", "0-101%", "10-5", "a-b", "-5", "1-"}) {
    expect_rule("pretrain.forward", std::string("format: bf16, steps: ") + steps,
                "allowed: 100-500 or 0-90%");
  }
  expect_rule("pretrain.forward", "format: bf16, gemm: dgrad", "allowed: fprop");
  expect_rule("pretrain.forward", "format: bf16, operand: grad", "allowed: act or weight");
  expect_rule("pretrain.backward", "format: bf16, gemm: fprop", "allowed: dgrad or wgrad");
  expect_rule("pretrain.backward", "format: bf16, gemm: dgrad, operand: act", "grad or weight");
  expect_rule("pretrain.backward", "format: bf16, gemm: wgrad, operand: weight", "grad or act");
}

TEST(recipe_rules, illegal_combinations_give_their_reason) {
  const std::string f = "pretrain.forward", b = "pretrain.backward";
  expect_rule(b, "format: nvfp4, block: 16x16, hadamard: 16", "a 16x16 tile serves both orientations");
  expect_rule(b, "format: nvfp4, rounding: stochastic, scale_rule: four_over_six", "would bias the draw");
  expect_rule(b, "format: nvfp4, headroom: 17/16", "goes with these alone");
  expect_rule(b, "format: nvfp4, operand: act, scale_scope: row", "row in a backward table");
  expect_rule(f, "format: nvfp4, scale_scope: row", "add operand: act");
  expect_rule(f, "format: nvfp4, operand: act, scale_scope: row, block: 16x16", "whose scales span 16 rows");
  const std::string eden = "format: nvfp4, rounding: ms_eden";
  expect_rule(b, eden, "it needs hadamard: 16, 32, 64 or 128");
  expect_rule(b, eden + ", hadamard: 128", "it needs signs: fresh");
  const std::string fresh = eden + ", hadamard: 128, signs: fresh";
  EXPECT_EQ(errors_of(minimal(), {rule(b, fresh)}), "");
  expect_rule(b, fresh + ", scale_round: pow2", "it needs scale_round: fp32");
  expect_rule(b, fresh + ", scale_rule: four_over_six", "it needs scale_rule: amax");
  const std::string both = errors_of(minimal(), {rule(b, fresh + ", block: 16x16")});
  EXPECT_NE(both.find("it needs block: 1x16"), std::string::npos) << both;
}

TEST(recipe_rules, keys_of_another_format_have_no_effect) {
  const std::string f = "pretrain.forward", b = "pretrain.backward";
  for (const char* key :
       {"block: 1x16", "scale_rule: amax", "scale_scope: tensor", "scale_round: fp32", "rounding: nearest",
        "headroom: none", "hadamard: none", "signs: fixed", "hadamard_out: fp32"}) {
    expect_rule(b, std::string("format: mxfp8, ") + key, "applies only when format is nvfp4");
    expect_rule(b, std::string("format: bf16, ") + key, "applies only when format is nvfp4");
  }
  expect_rule(b, "format: nvfp4, signs: fresh", "applies only when hadamard is given");
  expect_rule(f, "format: bf16, source: forward", "applies only when the table is a backward table");
  expect_rule(b, "format: bf16, operand: grad, source: forward",
              "applies only when the operand is act or weight");
}

TEST(recipe_rules, modules_without_gemms_take_format_alone) {
  expect_rule("pretrain.forward", "module: embed, format: nvfp4, block: 16x16", "has no GEMM");
  expect_rule("pretrain.forward", "module: [embed, head], operand: act, format: bf16", "has no GEMM");
  expect_rule("pretrain.forward", "module: embed, format: mxfp8", "bf16 or fp32");
  expect_rule("rl.sampler", "module: kv_cache, format: nvfp4", "bf16, mxfp8 or fp32");
  expect_rule("rl.trainer.forward", "module: kv_cache, format: bf16", "kv_cache stands in rl.sampler alone");
  expect_rule("pretrain.backward", "module: embed, format: bf16", "stands in forward tables alone");
  EXPECT_EQ(errors_of(minimal(), {rule("rl.sampler", "module: kv_cache, format: mxfp8")}), "");
  const std::string message =
      errors_of(minimal(), {rule("rl.sampler", "module: kv_cache, format: mxfp8"), "model.head_dim=48"});
  EXPECT_NE(message.find("model.head_dim is 48, allowed: a multiple of 32"), std::string::npos) << message;
}

TEST(recipe_rules, fp32_is_everywhere_or_nowhere) {
  const std::string message = errors_of(minimal(), {rule("pretrain.forward", "format: fp32")});
  EXPECT_EQ(test::count_lines(message), 4) << message;
  EXPECT_NE(message.find("fp32 is legal only when every cell has it; rl.sampler is left out"),
            std::string::npos);
  EXPECT_REFUSED(minimal(),
                 Set{"precision={preset: fp32, override: {rl.sampler: [{module: head, format: bf16}]}}"},
                 "precision.override.rl.sampler[0]", "fp32 is legal only when every cell has it");
  EXPECT_REFUSED(minimal(), (Set{"precision={preset: fp32}", "dtypes.gradients=bf16"}), "dtypes.gradients");
  EXPECT_REFUSED(minimal(), (Set{"precision={preset: fp32}", "dtypes.masters=bf16"}), "dtypes.masters");
}

TEST(recipe_rules, a_preset_and_tables_exclude_each_other) {
  EXPECT_REFUSED(minimal(), Set{"precision={preset: bf16, rl.sampler: [{format: bf16}]}"},
                 "precision.rl.sampler", "go under override");
  EXPECT_REFUSED(minimal(), Set{"precision={override: {rl.sampler: [{format: bf16}]}}"}, "precision.override",
                 "has no effect without preset");
  EXPECT_REFUSED(minimal(), Set{"precision={preset: bf16, expanded_from: bf16}"}, "contradicts preset");
}

TEST(recipe_validate, promises_that_nothing_keeps_are_refused) {
  EXPECT_REFUSED(minimal(), Set{"run.deterministic=false"}, "run.deterministic: found false",
                 "allowed: true");
  EXPECT_REFUSED(minimal(), Set{"run.allow_fault_injection=true"}, "run.allow_fault_injection: found true",
                 "allowed: false");
}

// Sizes whose products leave 64 bits, or memory: a message, whatever the key.
TEST(recipe_validate, sizes_beyond_all_machines_are_refused_key_by_key) {
  const std::string pretrain = "stages[0].pretrain.", rl = "stages[1].rl.";
  for (const std::string& key : {std::string("model.layers"),
                                 std::string("model.hidden"),
                                 std::string("model.heads"),
                                 std::string("model.kv_heads"),
                                 std::string("model.head_dim"),
                                 std::string("model.vocabulary"),
                                 std::string("model.max_positions"),
                                 std::string("model.moe.experts"),
                                 std::string("model.moe.top_k"),
                                 std::string("model.moe.hidden"),
                                 std::string("model.moe.shared_experts"),
                                 std::string("model.moe.dense_layers"),
                                 std::string("run.threads"),
                                 pretrain + "steps",
                                 pretrain + "batch.tokens",
                                 pretrain + "batch.micro_sequences",
                                 pretrain + "batch.length",
                                 pretrain + "eval.tokens",
                                 pretrain + "checkpoint.keep",
                                 rl + "steps",
                                 rl + "sampling.prompts",
                                 rl + "sampling.samples",
                                 rl + "sampling.max_tokens",
                                 rl + "sampling.max_batch",
                                 rl + "objective.epochs",
                                 rl + "objective.mini_batches",
                                 rl + "objective.micro_tokens",
                                 rl + "task.high"}) {
    for (const char* value : {"9223372036854775807", "9223372036854775806", "1e15"}) {
      EXPECT_NE(errors_of(with_rl(), {key + "=" + value}), "") << key << " " << value;
    }
  }
}

TEST(recipe_validate, sizes_that_are_legal_alone_are_refused_together) {
  EXPECT_REFUSED(minimal(), (Set{"model.hidden=16777216", "model.moe.hidden=16777216"}),
                 "r.yaml:2:3: model: found sizes", "parameters", "at most");
  EXPECT_REFUSED(with_rl(), (Set{"stages[1].rl.sampling={prompts: 1e5, samples: 1e5}"}),
                 "10000000000 completions");
  EXPECT_REFUSED(with_rl(), (Set{"stages[1].rl.steps=1e9", "stages[1].rl.objective.mini_batches=8"}),
                 "stages", "updates in all", "4294967296");
  EXPECT_REFUSED(with_rl(), Set{"stages[1].rl.task={low: 0, high: 99999}"}, "rl.task.high: found 99999",
                 "5000050000 pairs", "at most 10000000");
  EXPECT_EQ(accepted(with_rl(), {"stages[1].rl.task={low: 0, high: 999}"}), "");
}

TEST(recipe_validate, every_source_has_an_effect) {
  const std::string data = "stages[0].pretrain.data=";
  EXPECT_REFUSED(minimal(), Set{data + "[{paths: a}, {name: b, paths: b, weight: 0}]"},
                 "data[1].weight: found 0", "nothing is ever read");
  EXPECT_EQ(
      accepted(minimal(), {data + "[{paths: a}, {name: b, paths: b, weight: 0, held_out: {fraction: 0.5}}]"}),
      "");
  EXPECT_REFUSED(minimal(), Set{data + "[{paths: a}, {name: b, paths: b, weight: 1e-4}]"},
                 "data[1].weight: found 0.0001", "at least 0.001");
  EXPECT_REFUSED(minimal(), Set{data + "[{paths: a, separator: \"a\\nb\"}]"}, "data[0].separator",
                 "one line");
  EXPECT_REFUSED(minimal(), Set{data + "[{kind: sums, held_out: {fraction: 0.1, hash: ABC}}]"},
                 "held_out.hash: found ABC", "16 hexadecimal digits");
  EXPECT_REFUSED(minimal(), Set{"stages[0].pretrain.eval.prompts=[a, '']"}, "eval.prompts",
                 "allowed: not empty, but a text");
}

}  // namespace
}  // namespace fp4t

// Every key arrives: recipes that set all keys away from their defaults, and a walk over the declared fields
// that fails when a key is in none of them.
#include <map>
#include <set>

#include "engine/recipe/print.h"
#include "engine/recipe/tables.h"
#include "tests/unit/recipe_keys_texts.h"
#include "tests/unit/recipe_text.h"

namespace fp4t {
namespace {

using namespace test;

// Keys that have one legal value so far.
const std::set<std::string> kSingleValued = {"run.deterministic", "run.allow_fault_injection",
                                             "parallel.expert", "parallel.zero", "model.init.kind"};

HeldOutSpec held_out(double fraction, uint64_t seed, const char* hash) {
  return {.fraction = fraction, .seed = seed, .hash = hash};
}

Recipe first() {
  Recipe r;
  r.run = {.name = "n",
           .dir = "some/dir",
           .seed = 18446744073709551615u,
           .device = "cpu",
           .threads = 3,
           .watchdog_seconds = 2.5,
           .resume = "never",
           .branch_from = "c",
           .prometheus = "figures.prom"};
  r.model.layers = 5;
  r.model.hidden = 96;
  r.model.heads = 6;
  r.model.kv_heads = 3;
  r.model.head_dim = 64;
  r.model.mlp_hidden = 80;
  r.model.vocabulary = 300;
  r.model.max_positions = 512;
  r.model.qk_norm = true;
  r.model.tied_head = true;
  r.model.norm_eps = 1e-5;
  r.model.swiglu_clamp = 7.5;
  r.model.rope = {.theta = 5e5,
                  .scaling = "llama3",
                  .factor = 8,
                  .low_freq_factor = 1.5,
                  .high_freq_factor = 5,
                  .original_positions = 64};
  r.model.moe = {.experts = 4,
                 .top_k = 3,
                 .hidden = 48,
                 .shared_experts = 2,
                 .shared_hidden = 40,
                 .dense_layers = 1,
                 .router = "sigmoid",
                 .normalise = false,
                 .gate_scale = 2.5,
                 .balance = {.bias_rate = 0.25, .aux_loss = 0.5, .z_loss = 0.75}};
  r.model.init.std = 0.5;
  r.model.init.scale_residual = false;
  r.parallel = {.data = 6,
                .receive_factor = 3.5,
                .expert_chunks = 3,
                .domain = 3,
                .transport = "host",
                .recompute = "block"};
  r.dtypes = {.masters = DType::kBf16, .moments = DType::kBf16, .gradients = DType::kF32};
  PretrainSpec p;
  p.name = "p";
  p.steps = 11;
  p.batch = {.tokens = 64, .micro_sequences = 2, .length = 32};
  p.data.resize(4);
  p.data[0].name = "t";
  p.data[0].kind = "text";
  p.data[0].paths = {"a", "b"};
  p.data[0].separator = "%";
  p.data[0].weight = 2;
  p.data[0].end_of_document = false;
  p.data[0].held_out = held_out(0.125, 5, "");
  p.data[1].name = "j";
  p.data[1].kind = "jsonl";
  p.data[1].paths = {"l"};
  p.data[1].field = "body";
  p.data[1].loss_on = "all";
  p.data[2].name = "s";
  p.data[2].kind = "sums";
  p.data[2].low = 1;
  p.data[2].high = 9;
  p.data[2].wrong_fraction = 0.5;
  p.data[2].held_out = held_out(0.25, 6, "00112233aabbccdd");
  p.data[3].name = "c";
  p.data[3].kind = "countdown";
  p.data[3].numbers = 4;
  p.optimizer = {.learning_rate = 0.5,
                 .beta1 = 0.6,
                 .beta2 = 0.7,
                 .eps = 1e-6,
                 .weight_decay = 0.1,
                 .clip_norm = 2,
                 .state = "keep"};
  p.schedule = {.kind = "linear", .warmup = 4, .final_fraction = 0.5};
  TaskSpec task;
  task.kind = "countdown";
  task.low = 2;
  task.high = 8;
  task.numbers = 5;
  task.held_out = held_out(0.5, 7, "0123456789abcdef");
  p.eval = {.every = 3,
            .tokens = 100,
            .task = task,
            .task_samples = 2,
            .task_problems = 6,
            .max_tokens = 12,
            .end_tokens = {},
            .prompts = {"x", "y: z"}};
  p.checkpoint = {.every = 9, .keep = 5};
  p.z_loss = 0.001;
  p.on_nonfinite = "stop";
  RlSpec rl;
  rl.name = "r";
  rl.steps = 12;
  rl.task = task;
  rl.task.permute_rewards = true;
  rl.sampling = {.prompts = 8,
                 .samples = 4,
                 .temperature = 0.5,
                 .top_p = 0.75,
                 .max_tokens = 10,
                 .max_batch = 64,
                 .end_tokens = {";", "<eod>"}};
  rl.objective = {.kind = "gspo",
                  .normalise_std = false,
                  .ratio = "sequence",
                  .clip_low = 0.1,
                  .clip_high = 0.3,
                  .clip_dual = 3,
                  .average = "constant",
                  .average_tokens = 7,
                  .drop_zero_advantage = false,
                  .mask_truncated = true,
                  .resample = 2,
                  .overlong_tokens = 4,
                  .overlong_penalty = 0.5,
                  .kl = 0.01,
                  .kl_estimator = "k1",
                  .kl_in = "reward",
                  .entropy = 0.125,
                  .epochs = 2,
                  .mini_batches = 4,
                  .micro_tokens = 1000,
                  .mismatch = {.cap = 3,
                               .token_low = 0.5,
                               .token_high = 5,
                               .sequence_low = 0.75,
                               .sequence_high = 1.5,
                               .veto = 1e-4},
                  .router_replay = "sampler"};
  rl.optimizer = p.optimizer;
  rl.optimizer.learning_rate = 0.25;
  rl.schedule = {.kind = "constant", .warmup = 4};
  rl.eval = p.eval;
  rl.eval.prompts = {"x"};
  rl.checkpoint = {.every = 9, .every_updates = 3, .keep = 5};
  rl.on_nonfinite = "stop";
  rl.stop_without_signal = 21;
  r.stages = {p, rl};
  return r;
}

Recipe second() {
  Recipe r;
  r.run.dir = "runs/run";
  r.model.layers = 5;
  r.model.hidden = 96;
  r.model.heads = 6;
  r.model.kv_heads = 3;
  r.model.head_dim = 64;
  r.model.mlp_hidden = 80;
  r.model.rope = {.scaling = "yarn", .factor = 4, .beta_fast = 16, .beta_slow = 2, .original_positions = 64};
  r.model.from = "weights";
  PretrainSpec p;
  p.steps = 11;
  p.batch = {.tokens = 64, .length = 32};
  p.data.resize(1);
  p.data[0].name = "text";
  p.data[0].paths = {"a"};
  p.optimizer = {.kind = "muon", .muon_learning_rate = 0.5, .muon_momentum = 0.75, .muon_iterations = 3};
  p.schedule = {.kind = "wsd", .decay_fraction = 0.5};
  p.max_skips = 2;
  RlSpec rl;
  rl.steps = 12;
  rl.task.kind = "countdown";
  rl.objective.kind = "rloo";
  rl.objective.baseline = "leave_one_out";
  rl.objective.normalise_std = false;
  rl.objective.clip_form = "none";
  rl.objective.average = "constant";
  rl.objective.average_tokens = 1;
  rl.objective.mismatch.importance = "raw";
  rl.optimizer = p.optimizer;
  rl.schedule = {.kind = "wsd", .final_fraction = 0.25, .decay_fraction = 0.5};
  rl.max_skips = 2;
  r.stages = {p, rl};
  return r;
}

Recipe third() {
  Recipe r;
  r.run.dir = "runs/run";
  r.model.layers = 5;
  r.model.hidden = 96;
  r.model.heads = 6;
  r.model.kv_heads = 3;
  r.model.head_dim = 64;
  r.model.mlp_hidden = 80;
  r.tokenizer.kind = "ids";
  r.tokenizer.vocabulary = 5000;
  PretrainSpec p;
  p.steps = 11;
  p.batch = {.tokens = 64, .length = 32};
  p.data.resize(1);
  p.data[0].name = p.data[0].kind = "random";
  r.stages = {p};
  return r;
}

Recipe fourth() {
  Recipe r;
  r.run.dir = "runs/run";
  r.model.layers = 5;
  r.model.hidden = 96;
  r.model.heads = 6;
  r.model.kv_heads = 3;
  r.model.head_dim = 64;
  r.model.mlp_hidden = 80;
  PretrainSpec p;
  p.steps = 11;
  p.batch = {.tokens = 64, .length = 32};
  p.data.resize(1);
  p.data[0].name = p.data[0].kind = "countdown";
  p.data[0].wrong_fraction = 0.25;
  RlSpec rl;
  rl.steps = 12;
  rl.task.kind = "jsonl";
  rl.task.paths = {"rows"};
  rl.task.prompt_field = "q";
  rl.task.answer_field = "a";
  rl.task.limit_field = "n";
  rl.task.prompt_template = "{prompt}?";
  rl.task.max_prompt_tokens = 100;
  rl.task.answer = {.form = "regex", .gold = "hash", .pattern = "x", .compare = "text"};
  p.eval.task = rl.task;
  p.eval.task->paths = {"test"};
  p.eval.task->held_out.fraction = 1;
  p.eval.end_tokens = {"<eod>"};
  rl.rewards.resize(4);
  rl.rewards[0].name = "right";
  rl.rewards[0].weight = 2;
  rl.rewards[1].kind = rl.rewards[1].name = "length";
  rl.rewards[1].weight = 0.5;
  rl.rewards[1].free_tokens = 8;
  rl.rewards[2].kind = rl.rewards[2].name = "format";
  rl.rewards[2].weight = -1;
  rl.rewards[2].pattern = "x";
  RewardSpec& process = rl.rewards[3];
  process.kind = process.name = "process";
  process.command = {"python3", "judge.py"};
  process.timeout_seconds = 1.5;
  process.restarts = 1;
  process.cpu_seconds = 60;
  process.memory_mib = 512;
  process.file_mib = 1;
  rl.rollouts = {.every = 2, .keep = 10};
  rl.eval = p.eval;
  r.stages = {p, rl};
  return r;
}

Recipe fifth() {
  Recipe r = third();
  r.tokenizer.kind = "json";
  r.tokenizer.path = "t.json";
  r.tokenizer.vocabulary = 500;
  r.tokenizer.end_of_document = "</s>";
  r.tokenizer.begin_of_document = "<s>";
  r.tokenizer.hash = "0123456789abcdef";
  r.tokenizer.chat = "chatml";
  std::vector<DataSourceSpec>& data = std::get<PretrainSpec>(r.stages[0]).data;
  data.assign(2, DataSourceSpec{});
  data[0].name = data[0].kind = "nanogpt";
  data[0].paths = {"a"};
  data[0].dtype = "uint32";
  data[1].name = data[1].kind = "jsonl";
  data[1].paths = {"b"};
  data[1].special_tokens = true;
  return r;
}

// "stages[1].rl.steps" as "stages[].rl.steps".
std::string without_indices(const std::string& path) {
  std::string out;
  bool inside = false;
  for (const char c : path) {
    inside = inside && c != ']';
    if (!inside) out += c;
    inside = inside || c == '[';
  }
  return out;
}

// Every declared key outside the precision rules, with the text of its default.
class DefaultsVisitor : public TextVisitor {
 public:
  std::map<std::string, std::string> defaults;

  void text(const Field& field, const std::string& value) override {
    defaults[without_indices(path_of(field))] = value;
  }
  // Conditions do not matter here: every key is wanted.
  void value(const Field& field, std::string& v) override { TextVisitor::value(open(field), v); }
  void value(const Field& field, int64_t& v) override { TextVisitor::value(open(field), v); }
  void value(const Field& field, uint64_t& v) override { TextVisitor::value(open(field), v); }
  void value(const Field& field, double& v) override { TextVisitor::value(open(field), v); }
  void value(const Field& field, bool& v) override { TextVisitor::value(open(field), v); }
  void value(const Field& field, std::vector<std::string>& v) override { TextVisitor::value(open(field), v); }
  void choice(const Field& field, size_t& index) override { TextVisitor::choice(open(field), index); }
  bool enter(const Field& field) override { return TextVisitor::enter(open(field)); }
  void precision(const Field&, PrecisionSpec&) override {}

 private:
  static Field open(Field field) {
    field.applies = true;
    return field;
  }
};

// The keys with free texts that apply, and what an empty text says.
class TextKeys : public WalkVisitor {
 public:
  std::map<std::string, std::string> empty_means;  // by path

  void any(const Field&) override {}
  void value(const Field& field, std::string&) override { take(field, field.choices.empty()); }
  void value(const Field& field, std::vector<std::string>&) override { take(field, true); }
  void precision(const Field&, PrecisionSpec&) override {}

 private:
  void take(const Field& field, bool is_free) {
    if (is_free && field.applies) empty_means[path_of(field)] = field.empty_means;
  }
};

std::map<std::string, std::string> all_keys() {
  PretrainSpec p;
  p.data.emplace_back();
  p.eval.task.emplace();
  RlSpec rl;
  rl.rewards.emplace_back();
  rl.eval.task.emplace();
  Recipe r;
  r.stages = {p, rl};
  DefaultsVisitor visitor;
  visit_recipe(visitor, r);
  return visitor.defaults;
}

TEST(recipe_keys, every_value_arrives) {
  EXPECT_EQ(parse_recipe(kFirst, "first", {}).recipe, first());
  EXPECT_EQ(parse_recipe(kSecond, "second", {}).recipe, second());
  EXPECT_EQ(parse_recipe(kThird, "third", {}).recipe, third());
  EXPECT_EQ(parse_recipe(kFourth, "fourth", {}).recipe, fourth());
  EXPECT_EQ(parse_recipe(kFifth, "fifth", {}).recipe, fifth());
}

TEST(recipe_keys, every_key_is_set_away_from_its_default) {
  const std::map<std::string, std::string> keys = all_keys();
  EXPECT_GT(keys.size(), 150u);
  std::set<std::string> covered = kSingleValued;
  for (const char* text : {kFirst, kSecond, kThird, kFourth, kFifth}) {
    for (const FlatKey& key : flatten(parse_recipe(text, "r", {}).recipe)) {
      const auto it = keys.find(without_indices(key.path));
      ASSERT_NE(it, keys.end()) << key.path;
      if (it->second != key.value) covered.insert(it->first);
    }
  }
  for (const auto& [path, value] : keys) {
    EXPECT_TRUE(covered.count(path)) << path << " is " << value << " in all recipes above";
  }
}

// A value of each key of a precision rule.
const std::map<std::string, std::string> kRuleKeys = {
    {"module", "module: [head, \"mlp.*\"]"},
    {"layers", "layers: first 15%"},
    {"steps", "steps: 0-90%"},
    {"gemm", "gemm: wgrad"},
    {"operand", "operand: act"},
    {"format", "format: mxfp8"},
    {"block", "format: nvfp4, block: 16x16"},
    {"scale_rule", "format: nvfp4, scale_rule: four_over_six"},
    {"scale_scope", "format: nvfp4, operand: act, scale_scope: row"},
    {"scale_round", "format: nvfp4, scale_round: pow2"},
    {"rounding", "format: nvfp4, rounding: stochastic"},
    {"headroom", "format: nvfp4, rounding: stochastic, headroom: 17/16"},
    {"hadamard", "format: nvfp4, hadamard: 64"},
    {"signs", "format: nvfp4, hadamard: 16, signs: fresh"},
    {"hadamard_out", "format: nvfp4, hadamard: 16, hadamard_out: bf16"},
    {"source", "format: bf16, source: forward"},
    {"from_preset", "from_preset: true"},
};

class RuleKeys : public WalkVisitor {
 public:
  std::vector<std::string> names;
  void any(const Field& field) override { names.emplace_back(field.key); }
};

TEST(recipe_keys, every_key_of_a_rule_arrives) {
  RuleKeys keys;
  RuleSpec plain;
  visit_rule(keys, plain, 1);
  for (const std::string& key : keys.names) {
    ASSERT_TRUE(kRuleKeys.count(key)) << key << " has no case";
    std::string body = kRuleKeys.at(key);
    if (body.find("format") == std::string::npos) body += ", format: bf16";
    const size_t table = key == "scale_scope" ? 0 : 1;
    const std::string text = test::minimal() + "precision: {" + kTableNames[table] + ": [{" + body + "}]}\n";
    const Recipe r = parse_recipe(text, "r", {}).recipe;
    ASSERT_EQ(r.precision.tables[table].size(), 1u);
    const std::string printed = rule_text(r.precision.tables[table][0], table);
    EXPECT_NE(printed.find(key + ": "), std::string::npos) << printed;
    EXPECT_NE(r.precision.tables[table][0], plain) << key;
  }
}

TEST(recipe_keys, rule_keys_land_in_their_members) {
  const std::string text =
      test::minimal() +
      "precision: {pretrain.backward: [{module: mlp.down, layers: 0-3, steps: 5-9, gemm: dgrad, "
      "operand: weight, format: nvfp4, rounding: ms_eden, hadamard: 32, signs: fresh, "
      "hadamard_out: bf16, source: forward}]}\n";
  RuleSpec want;
  want.modules = {"mlp.down"};
  want.layers = "0-3";
  want.steps = "5-9";
  want.gemm = "dgrad";
  want.operand = "weight";
  want.spec = {.format = Format::kNvfp4,
               .rounding = Rounding::kMsEden,
               .hadamard = 32,
               .signs = Signs::kFresh,
               .hadamard_out = HadamardOut::kBf16,
               .source = Source::kForward};
  EXPECT_EQ(parse_recipe(text, "r", {}).recipe.precision.tables[1][0], want);
}

// Whoever writes an empty text does not want the default of a key left out.
TEST(recipe_keys, an_empty_text_is_refused_or_has_a_meaning_of_its_own) {
  size_t refused = 0, meant = 0;
  for (const char* text : {kFirst, kSecond}) {
    Recipe recipe = parse_recipe(text, "r.yaml", {}).recipe;
    TextKeys keys;
    visit_recipe(keys, recipe);
    for (const auto& [path, meaning] : keys.empty_means) {
      const std::string errors = test::errors_of(text, {path + "=''"});
      if (meaning.empty()) {
        EXPECT_EQ(errors.find("--set: " + path + ": found the text \"\" in quotes; allowed: not empty"), 0u)
            << path << "\n"
            << errors;
        ++refused;
      } else {
        EXPECT_EQ(errors.find("not empty"), std::string::npos) << errors;
        ++meant;
      }
    }
  }
  EXPECT_GE(refused, 20u);  // names, folders, paths, prompts, end tokens of both
  EXPECT_GE(meant, 5u);     // run.branch_from, hashes and separators
}

}  // namespace
}  // namespace fp4t

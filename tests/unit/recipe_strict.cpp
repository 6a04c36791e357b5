// What a recipe must not contain, case by case (RELIABILITY.md B6): each is refused with one message that
// says where, what was found and what is allowed.
#include <random>

#include "kernels/base/text.h"
#include "tests/unit/recipe_text.h"

namespace fp4t {
namespace {

using test::count_lines;
using test::errors_of;
using test::minimal;
using test::with_rl;
using Set = std::vector<std::string>;

const Set kNone;

Recipe read(const std::string& text, const Set& overrides = {}) {
  return parse_recipe(text, "r.yaml", overrides).recipe;
}
double learning_rate(const std::string& value) {
  const Recipe r = read(minimal(), {"stages[0].pretrain.optimizer.learning_rate=" + value});
  return std::get<PretrainSpec>(r.stages[0]).optimizer.learning_rate;
}
int64_t steps(const std::string& value) {
  return std::get<PretrainSpec>(read(minimal(), {"stages[0].pretrain.steps=" + value}).stages[0]).steps;
}

TEST(recipe_strict, spellings_of_a_number_are_equal) {
  for (const char* text : {"1e-4", "1E-4", "1.e-4", ".0001", "0.0001", "+1e-4"}) {
    EXPECT_EQ(learning_rate(text), 1e-4) << text;
  }
  for (const char* text : {"1000", "1e3", "1E3", "1000.0", "1_000", "0.1e4", "+1000"}) {
    EXPECT_EQ(steps(text), 1000) << text;
  }
  EXPECT_EQ(read(minimal(), {"run.seed=18446744073709551615"}).run.seed, 18446744073709551615u);
}

TEST(recipe_strict, numbers_that_mislead_are_refused) {
  const std::string key = "stages[0].pretrain.steps=";
  EXPECT_REFUSED(minimal(), Set{key + "010"}, "--set: stages[0].pretrain.steps: found 010", "leading zero",
                 "a whole number from 1 to 1000000000");
  EXPECT_REFUSED(minimal(), Set{key + "0x10"}, "decimal");
  EXPECT_REFUSED(minimal(), Set{key + "1.5"}, "not a whole number");
  EXPECT_REFUSED(minimal(), Set{key + "many"}, "found many", "not a number");
  EXPECT_REFUSED(minimal(), Set{key + "1e30"}, "too large");
  EXPECT_REFUSED(minimal(), Set{key + "99999999999999999999"}, "too large");
  EXPECT_REFUSED(minimal(), Set{key + "1__0"}, "not a number");
  EXPECT_REFUSED(minimal(), Set{key + "_10"}, "not a number");
  EXPECT_REFUSED(minimal(), Set{key + "0"}, "found 0", "from 1 to");
  EXPECT_REFUSED(minimal(), Set{key + "-5"}, "found -5", "from 1 to");
  EXPECT_REFUSED(minimal(), Set{"run.seed=-1"}, "negative");
  EXPECT_REFUSED(minimal(), Set{"run.seed=-1e3"}, "negative");
  EXPECT_REFUSED(minimal(), Set{key + "'600'"}, "\"600\" in quotes", "without quotes");
  const std::string rate = "stages[0].pretrain.optimizer.learning_rate=";
  EXPECT_REFUSED(minimal(), Set{rate + "\"1e-4\""}, "in quotes", "without quotes");
  for (const char* text : {".inf", "-.inf", ".nan", "inf", "nan", "Infinity"}) {
    EXPECT_REFUSED(minimal(), Set{rate + text}, "infinities and NaN");
  }
  EXPECT_REFUSED(minimal(), Set{rate + "1e400"}, "out of the range");
  EXPECT_REFUSED(minimal(), Set{rate + "010.5"}, "leading zero");
  EXPECT_REFUSED(minimal(), Set{rate + "[1]"}, "found a list of 1", "a number from 0 to 1000");
}

TEST(recipe_strict, a_quoted_number_has_a_position) {
  const std::string text = minimal() + "run:\n  threads: \"4\"\n";
  EXPECT_REFUSED(text, kNone, "r.yaml:14:12: run.threads: found the text \"4\" in quotes");
}

TEST(recipe_strict, booleans_are_true_and_false) {
  EXPECT_TRUE(read(minimal(), {"model.qk_norm=true"}).model.qk_norm);
  EXPECT_FALSE(read(minimal(), {"model.moe.normalise=false"}).model.moe.normalise);
  for (const char* text : {"yes", "on", "y", "1", "True", "tRue"}) {
    EXPECT_REFUSED(minimal(), Set{std::string("run.deterministic=") + text}, "write true", "true or false");
  }
  for (const char* text : {"no", "off", "n", "0", "FALSE"}) {
    EXPECT_REFUSED(minimal(), Set{std::string("run.deterministic=") + text}, "write false");
  }
  EXPECT_REFUSED(minimal(), Set{"run.deterministic='true'"}, "quoted", "true or false");
}

TEST(recipe_strict, words_stay_texts_in_text_keys) {
  EXPECT_EQ(read(minimal(), {"run.name=no"}).run.name, "no");
  EXPECT_EQ(read(minimal(), {"run.name=5"}).run.name, "5");
  EXPECT_EQ(read(minimal(), {"run.name=010"}).run.name, "010");
}

TEST(recipe_strict, duplicate_keys_name_both_places) {
  EXPECT_REFUSED(minimal() + "run: {seed: 1}\nrun: {seed: 2}\n", kNone, "r.yaml:14:1", "duplicate key run",
                 "first at r.yaml:13:1");
  EXPECT_REFUSED(minimal() + "run:\n  seed: 1\n  seed: 2\n", kNone, "r.yaml:15:3", "duplicate key seed",
                 "first at r.yaml:14:3");
}

TEST(recipe_strict, unknown_keys_are_named_with_the_nearest) {
  EXPECT_REFUSED(minimal(), Set{"stages[0].pretrain.optimizer.learning_rte=1e-4"},
                 "--set: stages[0].pretrain.optimizer.learning_rte: unknown key",
                 "did you mean learning_rate?");
  EXPECT_REFUSED(minimal() + "rnu: {seed: 1}\n", kNone, "r.yaml:13:1: rnu: unknown key; did you mean run?");
  EXPECT_REFUSED(minimal() + "run: {determinstic: true}\n", kNone, "r.yaml:13:7", "run.determinstic",
                 "did you mean deterministic?");
  EXPECT_REFUSED(minimal() + "run: {allow_fault: true}\n", kNone, "did you mean allow_fault_injection?");
  EXPECT_REFUSED(minimal() + "run: {banana: 1}\n", kNone, "run.banana: unknown key; known: name, dir, seed");
  EXPECT_REFUSED(minimal() + "model.layers: 3\n", kNone, "model.layers: unknown key");
}

TEST(recipe_strict, old_names_say_what_they_became) {
  EXPECT_REFUSED(minimal(), Set{"stages[0].pretrain.optimizer.lr=1e-4"},
                 "unknown key; renamed to learning_rate");
  EXPECT_REFUSED(minimal(), Set{"model.rope_theta=1e4"}, "renamed to rope.theta");
}

TEST(recipe_strict, tabs_are_called_tabs) {
  EXPECT_REFUSED("model:\n\tlayers: 4\n", kNone, "r.yaml:2:1",
                 "a tab in the indentation; indent with spaces");
  EXPECT_REFUSED("model:\n  layers: 4\n \thidden: 4\n", kNone, "r.yaml:3:2", "tab");
  EXPECT_EQ(errors_of(minimal() + "\t# only a comment\n\t\n"), "");
}

TEST(recipe_strict, yaml_that_we_do_not_read_is_named) {
  EXPECT_REFUSED(minimal() + "run: {<<: {seed: 1}}\n", kNone, "r.yaml:13:7", "merge key (<<)",
                 "not supported");
  EXPECT_REFUSED(minimal() + "---\nrun: {seed: 1}\n", kNone, "r.yaml:13:1", "second YAML document");
  EXPECT_REFUSED(minimal() + "run: {seed: !!int 1}\n", kNone, "YAML tag", "tags are not supported");
  EXPECT_REFUSED(minimal() + "run: {[a]: 1}\n", kNone, "found a list of 1 as a key");
  EXPECT_REFUSED(minimal() + "run: &r {name: *r}\n", kNone, "an alias inside the value that it stands for");
  EXPECT_REFUSED("model: [1, 2\n", kNone, "r.yaml:", "not YAML");
  EXPECT_REFUSED("run: *nowhere\n", kNone, "not YAML");
}

TEST(recipe_strict, empty_recipes_are_empty) {
  for (const char* text : {"", "# nothing\n", "---\n", "~\n"}) {
    EXPECT_REFUSED(text, kNone, "r.yaml:1:1", "empty recipe");
  }
}

TEST(recipe_strict, values_of_the_wrong_shape_are_named) {
  EXPECT_REFUSED("just text\n", kNone, "r.yaml:1:1", "found just text", "a map of keys");
  EXPECT_REFUSED("[1]\n", kNone, "found a list of 1");
  EXPECT_REFUSED(minimal(), Set{"run=5"}, "--set: run: found 5; allowed: a map of keys");
  EXPECT_REFUSED(minimal(), Set{"stages={pretrain: {}}"}, "stages: found a map; allowed: a list");
  EXPECT_REFUSED(minimal(), Set{"stages[0]=5"}, "stages[0]", "a map with one key, pretrain or rl");
  EXPECT_REFUSED(minimal(), Set{"stages[0]={sft: {}}"}, "unknown key sft", "pretrain or rl");
  EXPECT_REFUSED(minimal(), Set{"stages[0].rl={}"}, "a map of 2 keys", "one key, pretrain or rl");
  EXPECT_REFUSED(minimal(), Set{"stages[0].pretrain.data[0]=text"}, "data[0]: found text; allowed: a map");
  EXPECT_REFUSED(minimal(), Set{"run.name=[a]"}, "run.name: found a list of 1; allowed: a text");
  EXPECT_REFUSED(minimal(), Set{"run.device=gpu"}, "found gpu", "auto, cpu or cuda");
  EXPECT_REFUSED(minimal(), Set{"run.device=cdua"}, "did you mean cuda?");
  EXPECT_REFUSED(minimal(), Set{"stages[0].pretrain.data[0].paths={a: b}"}, "a text, or a list of texts");
  EXPECT_REFUSED(minimal(), Set{"stages[0].pretrain.data[0].paths=[a, [b]]"}, "a text, or a list of texts");
  EXPECT_REFUSED(minimal(), Set{"dtypes.masters=fp16"}, "found fp16", "fp32 or bf16");
}

TEST(recipe_strict, nulls_are_refused) {
  for (const char* text : {"", "~", "null", "Null"}) {
    EXPECT_REFUSED(minimal(), Set{std::string("run.seed=") + text}, "run.seed: found no value (null)",
                   "leave the key out");
  }
  EXPECT_REFUSED(minimal() + "run:\n", kNone, "r.yaml:13:1: run: found no value (null)");
  EXPECT_REFUSED(minimal(), Set{"stages[0]="}, "found no value (null)");
}

TEST(recipe_strict, missing_keys_are_placed_at_their_map) {
  EXPECT_REFUSED(std::string("stages:\n") + test::kPretrain, kNone, "r.yaml:1:1: model: missing");
  EXPECT_REFUSED(std::string(test::kModel), kNone, "stages: missing");
  const std::string text =
      std::string(test::kModel) + "stages:\n  - pretrain:\n      steps: 5\n      data: [{paths: a}]\n";
  EXPECT_REFUSED(text, kNone, "r.yaml:10:7: stages[0].pretrain.batch: missing");
  EXPECT_REFUSED(minimal(), Set{"model.moe={experts: 2, hidden: 8}"}, "model.moe.top_k: missing");
}

TEST(recipe_strict, crlf_bom_and_anchors_are_fine) {
  std::string crlf;
  for (const char c : minimal()) crlf += c == '\n' ? std::string("\r\n") : std::string(1, c);
  EXPECT_EQ(read(crlf), read(minimal()));
  EXPECT_EQ(read("\xef\xbb\xbf" + minimal()), read(minimal()));
}

TEST(recipe_strict, all_errors_come_at_once_in_order) {
  const std::string text = R"(model:
  layers: zero
  hidden: 128
  heads: 4
  kv_heads: 3
  head_dim: 32
  mlp_hidden: 64
  colour: blue
run: {device: gpu}
stages:
  - pretrain:
      steps: 0x10
      batch: {tokens: 100, micro_sequences: 16, length: 128}
      data: [{kind: text, paths: corpus, wrong_fraction: 0.5}]
)";
  const std::string message = errors_of(text, {"run.sed=4"});
  EXPECT_EQ(count_lines(message), 8) << message;
  const char* const order[] = {"r.yaml:2:11: model.layers",
                               "r.yaml:5:13: model.kv_heads",
                               "r.yaml:8:3: model.colour",
                               "r.yaml:9:15: run.device",
                               "r.yaml:12:14: stages[0].pretrain.steps",
                               "r.yaml:13:23: stages[0].pretrain.batch.tokens",
                               "r.yaml:14:42: stages[0].pretrain.data[0].wrong_fraction",
                               "--set: run.sed: unknown key; did you mean seed?"};
  size_t at = 0;
  for (const char* part : order) {
    const size_t found = message.find(part, at);
    ASSERT_NE(found, std::string::npos) << part << "\n in " << message;
    at = found;
  }
}

TEST(recipe_strict, a_value_that_could_not_be_read_starts_no_chain) {
  EXPECT_REFUSED(minimal(), Set{"model.heads=four"}, "model.heads");
  EXPECT_REFUSED(minimal(), Set{"model.moe.experts='8'"}, "model.moe.experts");
  EXPECT_REFUSED(minimal(), Set{"stages[0].pretrain.data[0]={kind: smus, low: 1, wrong_fraction: 0.5}"},
                 "did you mean sums?");
  EXPECT_REFUSED(minimal(), Set{"stages[0].pretrain.optimizer={knid: muon, muon_momentum: 0.5}"},
                 "did you mean kind?");
}

TEST(recipe_strict, malformed_overrides_are_refused) {
  EXPECT_REFUSED(minimal(), Set{"run.seed"}, "--set run.seed", "a.b.c=value");
  EXPECT_REFUSED(minimal(), Set{"=5"}, "a.b.c=value");
  EXPECT_REFUSED(minimal(), Set{"run..seed=5"}, "a.b.c=value");
  EXPECT_REFUSED(minimal(), Set{"stages[x].pretrain.steps=5"}, "a.b.c=value");
  EXPECT_REFUSED(minimal(), Set{"stages[0.pretrain.steps=5"}, "a.b.c=value");
  EXPECT_REFUSED(minimal(), Set{"stages[3].pretrain.steps=5"}, "stages: found the index 3; allowed: 0 to 0");
  EXPECT_REFUSED(minimal(), Set{"stages.pretrain.steps=5"}, "found the index pretrain");
  EXPECT_REFUSED(minimal(), Set{"run[0]=5"}, "there is no list");
  EXPECT_REFUSED(minimal(), Set{"model.layers.x=5"}, "found 4, which has no key x");
  EXPECT_REFUSED(minimal(), Set{"run.seed=[1"}, "not a YAML value");
  EXPECT_REFUSED(minimal(), Set{"precision.rl.sampler[0].format=bf16"}, "precision.rl.sampler",
                 "there is no list");
  EXPECT_REFUSED(minimal(), Set{"precision.rl.smapler=[]"}, "unknown key");
}

TEST(recipe_strict, later_overrides_win) {
  EXPECT_EQ(read(minimal(), {"run.seed=5", "run.seed=6"}).run.seed, 6u);
  EXPECT_EQ(read(minimal(), {"run.name=a=b"}).run.name, "a=b");
}

TEST(recipe_strict, keys_without_effect_are_errors) {
  const auto refuse = [](const char* set, const char* path, const char* when) {
    EXPECT_REFUSED(with_rl(), Set{set}, path, "has no effect", when);
  };
  const std::string stage = "stages[0].pretrain.";
  refuse("model.mlp_hidden=64", "model.mlp_hidden", "dense layers");
  refuse("model.rope.factor=2", "model.rope.factor", "scaling is linear, llama3 or yarn");
  refuse("model.rope={scaling: linear, beta_fast: 3}", "model.rope.beta_fast", "scaling is yarn");
  refuse("model.moe.shared_hidden=64", "model.moe.shared_hidden", "shared_experts is at least 1");
  EXPECT_REFUSED(minimal(), (Set{"model.from=x", "model.init.std=0.1"}), "model.init", "has no effect",
                 "not taken from a folder");
  refuse("stages[0].pretrain.data[0].wrong_fraction=0.5", "wrong_fraction", "kind is sums");
  refuse("stages[0].pretrain.data[0].low=5", "data[0].low", "kind is sums or countdown");
  refuse("stages[0].pretrain.data[0].field=x", "field", "kind is jsonl");
  refuse("stages[0].pretrain.data[0].held_out.seed=5", "held_out.seed", "fraction is above 0");
  refuse("stages[0].pretrain.data[0].held_out={fraction: 0.1, hash: ab}", "held_out.hash",
         "sums or countdown");
  refuse("stages[0].pretrain.optimizer.muon_momentum=0.9", "muon_momentum", "kind is muon");
  refuse("stages[0].pretrain.schedule.decay_fraction=0.1", "decay_fraction", "kind is wsd");
  refuse("stages[0].pretrain.schedule={kind: constant, final_fraction: 0.1}", "final_fraction", "cosine");
  refuse("stages[0].pretrain.eval.task_samples=2", "task_samples", "task is given");
  refuse("stages[0].pretrain.eval.max_tokens=2", "max_tokens", "task or prompts is given");
  refuse(
      "stages[0].pretrain={steps: 1, batch: {tokens: 8, length: 8}, data: [{paths: a}], on_nonfinite: stop, "
      "max_skips: 3}",
      "max_skips", "on_nonfinite is skip");
  refuse("stages[1].rl.task.numbers=4", "rl.task.numbers", "kind is countdown");
}

TEST(recipe_strict, keys_of_a_dense_model_are_not_those_of_experts) {
  const std::string message =
      errors_of(with_rl(), {"model.moe={experts: 0, top_k: 2, balance: {z_loss: 1}}", "model.mlp_hidden=64"});
  EXPECT_EQ(count_lines(message), 2) << message;
  EXPECT_NE(message.find("model.moe.top_k: has no effect"), std::string::npos);
  EXPECT_NE(message.find("model.moe.balance: has no effect"), std::string::npos);
}

// Whatever the text, it is a recipe or it is refused as one: no other exception, no crash.
TEST(recipe_strict, damaged_texts_are_refused_or_read) {
  const unsigned seed = 20240612;
  std::mt19937_64 random(seed);
  const std::string text =
      with_rl() +
      "precision:\n  pretrain.forward: &f [{module: [embed, head], format: bf16}, {layers: last "
      "15%, format: nvfp4, hadamard: 16}]\n  rl.sampler: *f\n";
  const std::string bytes = " \n\t:,-[]{}&*#?|>'\"%@`!<~0189aef.\x01\xff\\=";
  int accepted = 0;
  for (int i = 0; i < 3000; ++i) {
    std::string damaged = text;
    for (uint64_t k = random() % 2 + 1; k > 0; --k) {
      const size_t at = random() % damaged.size();
      const uint64_t kind = random() % 3;
      if (kind == 0) damaged[at] = bytes[random() % bytes.size()];
      if (kind == 1) damaged.insert(at, 1, bytes[random() % bytes.size()]);
      if (kind == 2) damaged.erase(at, random() % 8 + 1);
    }
    try {
      const Recipe recipe = read(damaged);
      EXPECT_EQ(read(print_recipe(recipe)), recipe) << "seed " << seed << ", case " << i << "\n" << damaged;
      ++accepted;
    } catch (const RecipeError& e) {
      EXPECT_FALSE(std::string(e.what()).empty());
    } catch (const std::exception& e) {
      ADD_FAILURE() << "seed " << seed << ", case " << i << ": " << e.what() << "\n" << damaged;
    }
  }
  EXPECT_GT(accepted, 50);
}

TEST(recipe_strict, keys_of_another_stage_are_unknown) {
  EXPECT_REFUSED(with_rl(), Set{"stages[1].rl.z_loss=1"}, "stages[1].rl.z_loss: unknown key");
  EXPECT_REFUSED(with_rl(), Set{"stages[0].pretrain.checkpoint.every_updates=1"}, "unknown key");
  EXPECT_REFUSED(with_rl(),
                 Set{"stages[0].pretrain.eval.task={low: 100, high: 200, held_out: {fraction: 0.1}, "
                     "permute_rewards: true}"},
                 "permute_rewards: unknown key");
}

TEST(recipe_strict, aliases_of_aliases_do_not_fill_the_memory) {
  std::string bomb = "{a0: &a0 [x, x, x, x, x, x, x, x, x, x]";
  for (int i = 1; i < 15; ++i) {
    const std::string before = "*a" + std::to_string(i - 1), name = "a" + std::to_string(i);
    bomb += ", " + name + ": &" + name + " [";
    for (int k = 0; k < 10; ++k) bomb += (k == 0 ? "" : ", ") + before;
    bomb += "]";
  }
  bomb += "}";
  EXPECT_REFUSED(minimal() + "run: " + bomb + "\n", kNone, "r.yaml:13:", "aliases", "1000000");
  EXPECT_REFUSED(minimal(), Set{"run.name=" + bomb}, "--set: run.name: ", "not a YAML value");
}

TEST(recipe_strict, nesting_without_end_is_refused) {
  for (const char* open : {"[", "{a: ", "- "}) {
    std::string text = "stages: ";
    for (int i = 0; i < 20000; ++i) text += open;
    EXPECT_NE(errors_of(text), "") << open;
  }
  EXPECT_REFUSED("stages: " + std::string(5000, '['), kNone, "r.yaml:1:", "nested too deeply");
}

TEST(recipe_strict, a_recipe_is_text) {
  EXPECT_EQ(errors_of("\xEF\xBB\xBF# ü \xE2\x82\xAC \xF0\x9F\x98\x80\n" + minimal()), "");
  EXPECT_REFUSED(minimal() + "run: {name: caf\xE9}\n", kNone, "r.yaml:13:16: found the byte 0xe9", "UTF-8");
  for (const char* bad : {"\x80", "\xC0\x80", "\xC1\xBF", "\xE0\x80\x80", "\xED\xA0\x80", "\xF0\x80\x80\x80",
                          "\xF4\x90\x80\x80", "\xF5\x80\x80\x80", "\xE2\x82", "\x01", "\x7F"}) {
    EXPECT_REFUSED(minimal() + "# " + bad + "\n", kNone, "r.yaml:13:3: found the byte");
  }
  EXPECT_REFUSED(minimal() + std::string("# \0\n", 4), kNone, "r.yaml:13:3: found the byte 0x00");
  EXPECT_REFUSED("model:\r  layers: 1\r", kNone, "r.yaml:1:7: found the byte 0x0d", "LF or CR LF");
  EXPECT_REFUSED(minimal(), Set{"model=null"}, "model: found no value (null); allowed: a value");
  EXPECT_EQ(errors_of(minimal(), {"model=null"}).find("leave the key out"), std::string::npos);
  EXPECT_REFUSED(minimal() + "run: {dir: \"a\\0b\"}\n", kNone, "r.yaml:13:12: run.dir", "NUL");
  EXPECT_REFUSED(minimal(), Set{"stages[0].pretrain.data[0].paths=[\"a\\0\"]"}, "paths", "NUL");
}

TEST(recipe_strict, an_override_has_no_more_steps_than_any_key) {
  std::string deep = "run";
  for (int i = 0; i < 30000; ++i) deep += ".a";
  EXPECT_REFUSED(minimal(), Set{deep + "=1"}, "--set run.a", "allowed: a.b.c=value");
  EXPECT_LT(errors_of(minimal(), {deep + "=1"}).size(), 1000u);
  std::string brackets = "stages";
  for (int i = 0; i < 30000; ++i) brackets += "[0]";
  EXPECT_REFUSED(minimal(), Set{brackets + "=1"}, "--set stages[0]", "allowed: a.b.c=value");
}

TEST(recipe_strict, of_very_many_problems_the_first_are_told_and_the_rest_counted) {
  std::string text = minimal();
  for (int i = 0; i < 60000; ++i) text += "key_" + std::to_string(i) + ": 1\n";
  const std::string errors = errors_of(text);
  EXPECT_EQ(count_lines(errors), 201);
  EXPECT_NE(errors.find("key_0: unknown key"), std::string::npos);
  EXPECT_TRUE(errors.ends_with("\nand 59800 more problems"));
}

TEST(recipe_strict, names_are_one_line) {
  for (const char* key : {"run.name", "stages[0].pretrain.name", "stages[0].pretrain.data[0].name",
                          "stages[1].rl.name", "stages[1].rl.rewards[0].name"}) {
    const Set sets = {"stages[1].rl.rewards=[{kind: verifier}]", std::string(key) + "=\"a\\nstep 1\""};
    EXPECT_REFUSED(with_rl(), sets, key, "with control characters", "allowed: a text of one line");
  }
}

TEST(recipe_strict, a_problem_is_one_printable_line_whatever_it_quotes) {
  const std::string hostile[] = {
      minimal() + "run: {\"a\\e[2J\\nfake: fine\": 1}\n",           // a key
      minimal() + "run: {device: \"\\e]0;title\\a\\u202Ecpu\"}\n",  // a value of a list of names
      minimal() + "run: {seed: \"\\r\\n1\"}\n",                     // a number
      minimal() + "run: {name: \"a\\e[31m\"}\n",                    // a name
      minimal() + "precision: {pretrain.forward: [{module: \"x\\n\", format: bf16}]}\n",
      minimal() + "precision: {pretrain.forward: [{layers: \"1\\x9b2\", format: bf16}]}\n",
      minimal() + "\"\\n\": 1\n",
      minimal() + "run: {seed: 1, seed: 2, \"\\e\": 3, \"\\e\": 4}\n",
      minimal() + "run: {seed: !\x1e 5}\n",
  };
  for (const std::string& text : hostile) {
    const std::string errors = errors_of(text);
    EXPECT_FALSE(errors.empty()) << text;
    EXPECT_EQ(printable_lines(errors), errors);
    EXPECT_LE(count_lines(errors), 3) << errors;
    for (size_t at = 0; at < errors.size();
         at = errors.find('\n', at + 1) == std::string::npos ? errors.size() : errors.find('\n', at + 1) + 1)
      EXPECT_EQ(errors.compare(at, 7, "r.yaml:"), 0) << errors;
  }
  for (const std::string& set :
       {std::string("run.name\n\x1b[2J=1"), std::string("run.\xff=1"), std::string("\x1b]0;x"),
        std::string("run.seed=\x1b"), std::string("stages[0].\n=1"), std::string("run.name=\xC2\x9B")}) {
    const std::string errors = errors_of(minimal(), {set});
    EXPECT_FALSE(errors.empty()) << printable(set);
    EXPECT_EQ(printable(errors, 10000), errors);
  }
  try {
    parse_recipe("a: 1", "bad\nname\x1b", {});
    FAIL();
  } catch (const RecipeError& e) {
    EXPECT_EQ(std::string(e.what()).find("bad\\nname\\x1b:1:1: "), 0u) << e.what();
  }
}

}  // namespace
}  // namespace fp4t

// Tiny runs of the whole job, and what they leave behind. Text and recipe are written into a folder of the
// test's own; the run folder is `run` in it unless a test says otherwise.
#pragma once

#include <gtest/gtest.h>

#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "tests/support/process.h"

namespace fp4t::test {

// Two layers, four experts; every source of random bits (stochastic rounding, MS-EDEN with fresh signs, BF16
// masters and moments), bias balancing, recomputation; 16 steps of pretraining, then 13 of RL with three
// updates a rollout and checkpoints also between these. In both stages an evaluation and a checkpoint come
// right before step 11, whose quantisation errors are measured.
extern const std::string kTinyRecipe;
// `run:` with these keys and a model of two layers and four experts with these further ones, each key of the
// model on a line of its own; those of moe begin with a comma. Tests add `precision:` and `stages:`.
std::string tiny_model(const std::string& run, const std::string& keys, const std::string& of_moe = "");
// The model of kTinyRecipe in default precision.
inline const std::string kTinyModel =
    tiny_model("name: tiny, dir: run, seed: 3, threads: 2", "  max_positions: 32\n",
               ", balance: {bias_rate: 0.01, aux_loss: 0.001, z_loss: 0.001}");
// Its `precision:` of pretraining; rules of other tables may follow.
extern const char* const kTinyTables;

// Writes <folder>/text/words.txt, a corpus for `paths: text` with `%` between documents.
void write_corpus(const std::string& folder);
// Corpus and <folder>/recipe.yaml.
void write_inputs(const std::string& folder, const std::string& recipe);

std::vector<std::string> train_args(const std::vector<std::string>& more = {});
// Runs recipe.yaml to its end; a failure fails the test.
Exit train(const std::string& folder, const std::vector<std::string>& more = {});
// The same on several ranks, into a run folder of that name.
Exit train_on(int ranks, const std::string& folder, const std::string& run_dir,
              std::vector<std::string> more = {});

// Whole lines of metrics.jsonl of a kind ("step", "eval", "" for all) and stage ("" for all).
std::vector<nlohmann::json> metrics_of(const std::string& run_dir, const std::string& kind = "",
                                       const std::string& stage = "");
int64_t count_steps(const std::string& run_dir, const std::string& stage);
// One figure of every step of a stage.
std::vector<double> step_figures(const std::string& run_dir, const std::string& stage,
                                 const std::string& name);
nlohmann::json summary_of(const std::string& run_dir);

// The folder that `latest` names; "" when there is none yet.
std::string latest_checkpoint_of(const std::string& run_dir);
std::vector<std::string> checkpoints_of(const std::string& run_dir);  // names, sorted
// Every file of a folder but telemetry.json, by name.
std::map<std::string, std::string> stored_bytes_of(const std::string& folder);
// Every file below a folder, by path.
std::map<std::string, std::string> all_bytes_of(const std::string& folder);

// Hashes by tensor name, of names that begin with `prefix`, as `fp4train inspect --verify` prints them.
std::map<std::string, std::string> tensor_hashes_of(const std::string& checkpoint, const std::string& prefix);

// metrics.jsonl and every stored byte of the last checkpoint are equal.
void expect_same_outcome(const std::string& run_dir, const std::string& other_run_dir);

}  // namespace fp4t::test

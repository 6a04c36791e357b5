// Where a run continues: found before the plan is made, because resolved step spans come from there.
#pragma once

#include <string>
#include <vector>

#include "engine/comm/comm.h"
#include "engine/recipe/problems.h"
#include "engine/recipe/recipe.h"
#include "engine/store/checkpoint.h"

namespace fp4t {

struct ResumePoint {
  bool found = false;
  bool branch = false;     // weights and counters from elsewhere, metrics start anew
  bool elsewhere = false;  // the same run, but of another folder: its metrics do not come along
  CheckpointInfo info;
  std::vector<std::string> notes;  // damaged checkpoints that were passed over
  // Steps by stage that percentages in precision rules refer to; beyond its end: the recipe's own.
  std::vector<int64_t> span_steps;
};

// Names of what the loops note in RunState::texts, by stage.
std::string span_steps_key(size_t stage);  // steps that percentages refer to
std::string data_key(size_t stage);        // fingerprint of the data
std::string task_key(size_t stage);        // hash of the held-out problems
std::string evaluated_key(size_t stage);   // step of the last evaluation
// Whether a stage has made its first evaluation.
bool is_started(const RunState& state, size_t stage);

// Steps that a stage was finished with; 0 when the state records none.
std::string done_key(size_t stage);
int64_t finished_steps(const RunState& state, size_t stage);

// The recorded steps of the stages that have begun: what ResumePoint::span_steps holds.
std::vector<int64_t> recorded_span_steps(const RunState& state);

// The recipe as checkpoints keep it: without where and how it runs (run.dir, resume, device, threads,
// transport), so that equal runs in two folders or on two machines leave equal bytes.
std::string recorded_recipe(const std::string& recipe_yaml);

// Whether numbers that passed every hash can be those of a run of the checkpoint's own recipe. Throws
// BadDataError naming the field.
void check_state(const CheckpointInfo& info);

// Whether what run.resume or run.branch_from names is there and can be read, as far as it will be used: a
// run.dir with checkpoints of its own continues these. Makes and removes nothing. Throws MissingInputError,
// BadDataError; as those of find_resume, with the place of the key.
void check_origin(const RunSpec& run, const FieldPlaces& places);

// Whether what a run keeps up to date outside its folder (run.prometheus) can be written; leaves nothing
// behind. run.dir must be there, as the file may lie in it. Throws SaveError with the place of the key.
void check_outlets(const RunSpec& run, const FieldPlaces& places);

// By run.resume and run.branch_from; a checkpoint that either names counts until run.dir has one of its own,
// so that the same command goes on after a stop. Throws NoCheckpointError, BadDataError, RecipeError.
ResumePoint find_resume(const RunSpec& run, const FieldPlaces& places);
// Rank 0's on every rank; the others read what it found.
ResumePoint share_resume(Communicator& comm, const ResumePoint& found);

// Compares the recipe that the checkpoint was made with against the present one. Identity changes throw
// RecipeError; course changes do unless accepted, and are returned as lineage lines.
std::vector<std::string> check_resume(const ResumePoint& resume, const std::string& recipe_yaml,
                                      bool accept_changes);

}  // namespace fp4t

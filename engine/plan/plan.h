// The plan: everything decided before anything is allocated; const ever after, passed by reference.
// Pure functions of recipe and machine.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "engine/plan/parameters.h"
#include "engine/plan/precision.h"
#include "engine/plan/ranks.h"
#include "engine/recipe/problems.h"
#include "engine/recipe/recipe.h"
#include "kernels/base/queue.h"

namespace fp4t {

struct StagePlan {
  StageSpec spec;
  std::string name;
  bool is_rl = false;
  int64_t steps = 0;
  int64_t updates_per_step = 1;  // optimizer updates a step, at most
  int64_t accumulation = 1;      // micro-batches a step (pretraining), of the rank with the most
  StagePrecision precision;
  std::string equality_obstacle;  // "" when sampler and trainer agree bit for bit
};

struct MemoryLine {
  std::string name;
  int64_t bytes = 0;
};
struct MemoryPlan {
  std::vector<MemoryLine> run, step, scratch;  // blocks of the three arenas
  int64_t run_bytes = 0, step_bytes = 0, scratch_bytes = 0;
  int64_t workspace_bytes = 0;     // of the kernels themselves
  int64_t communicator_bytes = 0;  // of NCCL
  int64_t total_bytes() const {
    return run_bytes + step_bytes + scratch_bytes + workspace_bytes + communicator_bytes;
  }
  int64_t checkpoint_bytes = 0;
};

struct Plan {
  RunSpec run;
  ModelSpec model;  // vocabulary resolved
  ParallelSpec parallel;
  DtypesSpec dtypes;
  TokenizerSpec tokenizer;
  Machine machine;
  std::vector<ParamInfo> parameters;
  std::vector<BufferInfo> buffers;
  Axes axes;              // ranks of the run
  ShardTable shards;      // what each of them owns
  std::string transport;  // of tensors between them: "nccl", "host"; "" on one rank
  std::vector<StagePlan> stages;
  MemoryPlan memory;
  DType act = DType::kBf16;       // of tensors between ops: BF16, F32 under the fp32 format
  int64_t max_tokens = 0;         // rows of the largest forward-backward
  int64_t head_chunk = 0;         // tokens that the head takes at a time (engine/plan/sizes.h)
  int64_t max_decode_tokens = 0;  // rows of the largest prefill or decode call
  int64_t max_cache_slots = 0;    // sequences decoded together
  int64_t max_cache_length = 0;   // positions a sequence, prompt included
  int64_t max_cache_pages = 0;  // that sequences share (engine/plan/cache_layout.h); 0: enough for all slots
  double flops_per_token = 0;   // BENCH.md: 6 x active matmul weights + causal attention counted half
  std::string precision_hash;   // hex, over all stages
  std::string recipe_yaml;      // the resolved recipe
};

// Token ids that a tokenizer of this kind can make: the smallest vocabulary.
int64_t tokenizer_vocabulary(const TokenizerSpec& tokenizer);

// Throws RecipeError with every problem at once.
// `span_steps`: steps by stage that percentages in precision rules refer to, as a checkpoint recorded them
// (a longer run does not move a switch); empty: each stage's own steps.
// `places` of the recipe's keys, which the problems are to name; empty: paths alone.
// `ranks` that work on the run together. The plan is the same on all of them; its memory is that of the rank
// that needs most.
Plan make_plan(const Recipe& recipe, const Machine& machine, const std::vector<int64_t>& span_steps,
               const FieldPlaces& places = {}, int64_t ranks = 1);

// Sizes a plan for generation alone: one forward of a prompt, `samples` sequences of `length` positions.
void size_for_generation(Plan& plan, int64_t prompt_tokens, int64_t length, int64_t samples);

// The text that `fp4train plan` prints: model, precision table, equality, parameters, memory, FLOPs a
// token, tokens, steps, checkpoint size.
std::string describe(const Plan& plan);

// The same facts as JSON for the report; keys in engine/plan/README.md.
std::string plan_json(const Plan& plan);

}  // namespace fp4t

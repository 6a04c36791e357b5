// How much a run works on at once: rows of a forward-backward, of a decode call, sequences and positions of
// the key-value cache. Bounds, from the recipe alone.
#pragma once

#include <cstdint>

#include "engine/plan/plan.h"
#include "engine/plan/problems.h"

namespace fp4t {

// Tokens of a task's longest prompt, at most. Texts of both tasks are ASCII, so bytes bound any tokenizer.
int64_t longest_prompt(const TaskSpec& task);

// Fills the max_* fields of the plan and the accumulation of its stages.
void size_plan(Plan& plan, ProblemList& problems);

// Tokens that the head takes at a time: as many as keep their FP32 logits within a GiB, where the gradient of
// the head's weights, read and written once a chunk, costs little beside the products. A function of the
// vocabulary alone, since it decides the order of that gradient's sum.
int64_t head_chunk(int64_t vocabulary);

// Whether some update sums several micro-batches, so that gradients need FP32 (DESIGN.md section 4).
bool accumulates(const Plan& plan);

// Model FLOPs a token (BENCH.md, "Rules"): forward and backward.
double model_flops_per_token(const Plan& plan);

}  // namespace fp4t

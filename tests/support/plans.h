// Plans by hand: a tiny model whose every cell of a table is the same, without recipe or presets.
#pragma once

#include <algorithm>
#include <string>
#include <utility>

#include "engine/plan/memory.h"
#include "engine/plan/plan.h"

namespace fp4t::test {

// Two layers with everything that a model can have: a dense first layer, MoE with a shared expert, query
// and key norms, grouped queries.
inline ModelSpec tiny_model() {
  ModelSpec m;
  m.layers = 2;
  m.hidden = 64;
  m.heads = 2;
  m.kv_heads = 1;
  m.head_dim = 32;
  m.mlp_hidden = 96;
  m.vocabulary = 61;
  m.max_positions = 64;
  m.qk_norm = true;
  m.init.std = 0.15;
  m.moe.experts = 6;
  m.moe.top_k = 2;
  m.moe.hidden = 48;
  m.moe.shared_experts = 1;
  m.moe.dense_layers = 1;
  return m;
}

struct TestCells {
  ForwardCell forward, sampler;  // of all modules but the head, which is BF16
  BackwardCell backward;
  Format kv_cache = Format::kBf16, dispatch = Format::kBf16;
  bool fp32 = false;  // every cell is fp32
};

inline TestCells fp32_cells() {
  TestCells c;
  c.fp32 = true;
  QuantSpec s;
  s.format = Format::kFp32;
  c.forward = c.sampler = {s, s};
  c.backward = {s, s, s, s};
  c.kv_cache = Format::kFp32;
  return c;
}

struct TestSizes {
  int64_t max_tokens = 96, max_decode_tokens = 96, max_cache_slots = 96, max_cache_length = 64;
  int64_t head_chunk = 1024;
  Axes axes = {};
  double receive_factor = 2;
  int64_t expert_chunks = 0;
  int64_t domain = 0;
};

inline ForwardTable uniform_forward(const ModelSpec& model, const ForwardCell& cell, const TestCells& cells) {
  ForwardTable t;
  t.layers.resize(static_cast<size_t>(model.layers));
  for (auto& layer : t.layers) layer.fill(cell);
  if (cells.fp32) {
    t.head = cell;
    t.embed = t.dispatch = Format::kFp32;
  }
  t.kv_cache = cells.kv_cache;
  if (!cells.fp32) t.dispatch = cells.dispatch;
  return t;
}

inline Plan make_plan_by_hand(const ModelSpec& model, const TestCells& cells, const DtypesSpec& dtypes = {},
                              const std::string& recompute = "none", const TestSizes& sizes = {}) {
  Plan plan;
  plan.run.seed = 7;
  plan.model = model;
  plan.dtypes = dtypes;
  plan.parallel.recompute = recompute;
  plan.act = cells.fp32 ? DType::kF32 : DType::kBf16;
  if (cells.fp32) plan.dtypes.gradients = DType::kF32;
  plan.parameters = parameter_list(model, plan.dtypes);
  plan.buffers = buffer_list(model);
  plan.max_tokens = sizes.max_tokens;
  plan.head_chunk = sizes.head_chunk;
  plan.max_decode_tokens = sizes.max_decode_tokens;
  plan.max_cache_slots = sizes.max_cache_slots;
  plan.max_cache_length = sizes.max_cache_length;
  plan.axes = sizes.axes;
  plan.parallel.expert = sizes.axes.expert;
  plan.parallel.receive_factor = sizes.receive_factor;
  plan.parallel.expert_chunks = sizes.expert_chunks;
  plan.parallel.domain = sizes.domain;
  if (plan.axes.ranks() > 1) {
    for (ParamInfo& p : plan.parameters) p.gradient = DType::kF32;
    plan.shards = ShardTable(plan.parameters, plan.axes, ShardTable::Cut::kChunks);
  }

  StagePlan stage;
  stage.name = "test";
  stage.steps = 1;
  BackwardTable backward;
  backward.layers.resize(static_cast<size_t>(model.layers));
  for (auto& layer : backward.layers) layer.fill(cells.backward);
  if (cells.fp32) backward.head = cells.backward;
  stage.precision.forward.spans = {{0, 1, uniform_forward(model, cells.forward, cells)}};
  stage.precision.backward.spans = {{0, 1, backward}};
  stage.precision.sampler.spans = {{0, 1, uniform_forward(model, cells.sampler, cells)}};
  plan.stages.push_back(std::move(stage));
  plan.memory = plan_memory(plan);
  return plan;
}

// Cells ------------------------------------------------------------------------------------------------

inline QuantSpec mxfp8() {
  QuantSpec s;
  s.format = Format::kMxfp8;
  return s;
}
inline QuantSpec nvfp4() {
  QuantSpec s;
  s.format = Format::kNvfp4;
  return s;
}
inline QuantSpec nvfp4_row(ScaleRound round = ScaleRound::kFp32) {
  QuantSpec s = nvfp4();
  s.scale_scope = ScaleScope::kRow;
  s.scale_round = round;
  return s;
}
inline QuantSpec from_forward(QuantSpec s) {
  s.source = Source::kForward;
  return s;
}

// NVIDIA's NVFP4 recipe: 16x16 weights, stochastic gradients, rotated weight gradients.
inline TestCells nvidia_nvfp4_cells() {
  TestCells c;
  QuantSpec weight = nvfp4();
  weight.block = BlockShape::k16x16;
  QuantSpec grad = nvfp4();
  grad.rounding = Rounding::kStochastic;
  QuantSpec rotated_grad = grad, rotated_act = nvfp4();
  rotated_grad.hadamard = rotated_act.hadamard = 16;
  rotated_grad.hadamard_out = rotated_act.hadamard_out = HadamardOut::kBf16;
  c.forward = {nvfp4(), weight};
  c.backward = {grad, weight, rotated_grad, rotated_act};
  c.sampler = {nvfp4_row(), weight};
  return c;
}

// Quartet II: four-over-six forward, MS-EDEN backward from the forward's codes.
inline TestCells quartet2_cells() {
  TestCells c;
  QuantSpec forward = nvfp4();
  forward.scale_rule = ScaleRule::kFourOverSix;
  QuantSpec eden = nvfp4();
  eden.rounding = Rounding::kMsEden;
  eden.hadamard = 128;
  eden.signs = Signs::kFresh;
  c.forward = c.sampler = {forward, forward};
  c.backward = {eden, from_forward(eden), eden, from_forward(eden)};
  return c;
}

// RL: forward in row-scaled NVFP4, backward in BF16 on the dequantised operands.
inline TestCells rl_nvfp4_cells() {
  TestCells c;
  QuantSpec act = nvfp4_row(ScaleRound::kPow2), weight = nvfp4(), plain;
  act.scale_rule = weight.scale_rule = ScaleRule::kFourOverSix;
  weight.scale_round = ScaleRound::kPow2;
  c.forward = c.sampler = {act, weight};
  c.backward = {plain, from_forward(plain), plain, from_forward(plain)};
  return c;
}

inline TestCells mxfp8_cells() {
  TestCells c;
  c.forward = c.sampler = {mxfp8(), mxfp8()};
  c.backward = {mxfp8(), mxfp8(), mxfp8(), mxfp8()};
  return c;
}

}  // namespace fp4t::test

// The plan as the report reads it; the keys are documented in engine/plan/README.md.
#include <nlohmann/json.hpp>

#include "engine/plan/modules.h"
#include "engine/plan/notes.h"
#include "engine/plan/plan.h"
#include "engine/recipe/load.h"

namespace fp4t {

namespace {

using Json = nlohmann::ordered_json;

Json cell_json(const CellRow& row) {
  Json j;
  j["layer"] = row.layer < 0 ? Json(nullptr) : Json(row.layer);
  j["module"] = name_of(row.module);
  if (is_gemm_module(row.module)) {
    j["gemm"] = name_of(row.gemm);
    j["operand"] = name_of(row.operand);
  }
  j["format"] = name_of(row.spec.format);
  j["cell"] = describe(row.spec);
  return j;
}

// One entry a table and span, with its cells.
Json precision_json(const StagePlan& stage, const ModelSpec& model) {
  Json tables = Json::array();
  const CellRow* before = nullptr;
  const std::vector<CellRow> rows = list_cells(stage.precision, model, stage.is_rl);
  for (const CellRow& row : rows) {
    if (!before || before->table != row.table || before->begin != row.begin) {
      tables.push_back(
          {{"table", name_of(row.table)}, {"begin", row.begin}, {"end", row.end}, {"cells", Json::array()}});
    }
    tables.back()["cells"].push_back(cell_json(row));
    before = &row;
  }
  return tables;
}

Json stage_json(const StagePlan& stage, const ModelSpec& model) {
  Json j;
  j["name"] = stage.name;
  j["kind"] = stage.is_rl ? "rl" : "pretrain";
  j["steps"] = stage.steps;
  j["updates_per_step"] = stage.updates_per_step;
  j["accumulation"] = stage.accumulation;
  if (const auto* spec = std::get_if<PretrainSpec>(&stage.spec)) {
    j["tokens"] = stage.steps * spec->batch.tokens;
  } else {
    j["equal_bits"] = stage.equality_obstacle.empty();
    j["equality_obstacle"] = stage.equality_obstacle;
  }
  j["precision"] = precision_json(stage, model);
  return j;
}

Json arena_json(const std::vector<MemoryLine>& lines, int64_t total) {
  Json blocks = Json::array();
  for (const MemoryLine& line : lines) blocks.push_back({{"name", line.name}, {"bytes", line.bytes}});
  return {{"bytes", total}, {"blocks", blocks}};
}

}  // namespace

std::string plan_json(const Plan& plan) {
  const ModelSpec& m = plan.model;
  Json j;
  j["name"] = plan.run.name;
  j["seed"] = plan.run.seed;
  j["device"] = plan.machine.device_name;
  j["model"] = {{"layers", m.layers},
                {"hidden", m.hidden},
                {"heads", m.heads},
                {"kv_heads", m.kv_heads},
                {"head_dim", m.head_dim},
                {"vocabulary", m.vocabulary},
                {"positions", m.max_positions},
                {"mlp_hidden", m.mlp_hidden},
                {"experts", m.moe.experts},
                {"top_k", m.moe.top_k},
                {"expert_hidden", m.moe.hidden},
                {"shared_hidden", shared_width(m)},
                {"dense_layers", m.moe.dense_layers}};
  j["parameters"] = {{"total", total_parameters(plan.parameters)},
                     {"active", active_parameters(plan.parameters, m)}};
  j["ranks"] = {{"data", plan.axes.data}, {"expert", plan.axes.expert}, {"transport", plan.transport}};
  j["flops_per_token"] = plan.flops_per_token;
  j["max_tokens"] = plan.max_tokens;
  j["precision_hash"] = plan.precision_hash;
  j["stages"] = Json::array();
  for (const StagePlan& stage : plan.stages) j["stages"].push_back(stage_json(stage, m));
  j["memory"] = {{"run", arena_json(plan.memory.run, plan.memory.run_bytes)},
                 {"step", arena_json(plan.memory.step, plan.memory.step_bytes)},
                 {"scratch", arena_json(plan.memory.scratch, plan.memory.scratch_bytes)}};
  if (plan.memory.workspace_bytes > 0) j["memory"]["workspace"] = arena_json({}, plan.memory.workspace_bytes);
  if (plan.memory.communicator_bytes > 0) {
    j["memory"]["communicators"] = arena_json({}, plan.memory.communicator_bytes);
  }
  j["checkpoint_bytes"] = plan.memory.checkpoint_bytes;
  if (const auto list = notes(plan); !list.empty()) j["notes"] = list;
  j["recipe"] = Json::object();
  for (const auto& [path, value] : recipe_keys(plan.recipe_yaml)) j["recipe"][path] = value;
  return j.dump(1) + "\n";
}

}  // namespace fp4t

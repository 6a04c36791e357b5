#include "engine/stage/checkpoint_model.h"

#include "engine/recipe/load.h"
#include "engine/recipe/scalars.h"
#include "engine/stage/resume.h"
#include "kernels/base/text.h"

namespace fp4t {

Recipe recipe_of_checkpoint(const CheckpointInfo& info, std::vector<std::string> overrides) {
  // Nothing is saved here, so how many checkpoints the run keeps is no matter: rules about resuming are off.
  // One rank computes, however many trained.
  for (const char* o : {"run.resume=never", "parallel.data=0", "parallel.expert=1", "parallel.zero=1"}) {
    overrides.emplace_back(o);
  }
  return parse_recipe(info.state.recipe_yaml, info.path + "/manifest.json", overrides).recipe;
}

const ForwardTable& table_in_force(const Plan& plan, const RunState& state, const std::string& name) {
  const auto at = static_cast<size_t>(state.stage);
  const StagePlan& now = plan.stages[at];
  if (name == name_of(Table::kSampler)) return now.precision.sampler.at(state.step);
  if (name == name_of(Table::kTrainerForward) && now.is_rl) return now.precision.forward.at(state.step);
  if (name == name_of(Table::kPretrainForward)) {
    if (!now.is_rl) return now.precision.forward.at(state.step);
    for (size_t i = at; i-- > 0;) {
      if (!plan.stages[i].is_rl) return plan.stages[i].precision.forward.spans.back().table;
    }
  }
  throw RecipeError(detail::concat("--table ", printable(name), ": the checkpoint is in stage '", now.name,
                                   "', and no stage up to it has that table; rl.sampler is there always, ",
                                   now.is_rl ? "rl.trainer.forward here" : "pretrain.forward here"));
}

void load_weights(Queue& queue, const std::string& checkpoint, Transformer& model) {
  std::vector<NamedTensor> tensors;
  for (const Param& p : model.params().params()) tensors.push_back({"model." + p.info.name, p.master});
  for (const Buffer& b : model.params().buffers()) tensors.push_back({"model." + b.info.name, b.data});
  load_tensors(queue, checkpoint, tensors, {"optimizer.", "reference.", "rollout."});
  model.params().refresh_copies(queue);
  model.weights_changed();
}

CheckpointModel::CheckpointModel(const std::string& checkpoint, const std::string& tokenizer_path) {
  path = find_checkpoint(checkpoint);
  info = read_checkpoint_info(path, true);
  check_state(info);
  std::vector<std::string> overrides;
  if (!tokenizer_path.empty()) overrides.push_back("tokenizer.path=" + write_text(tokenizer_path));
  const Recipe recipe = recipe_of_checkpoint(info, overrides);
  machine = probe_machine(recipe.run.device, static_cast<int>(recipe.run.threads));
  plan = make_plan(recipe, machine, recorded_span_steps(info.state));
  try {
    tokenizer = make_tokenizer(plan.tokenizer);
  } catch (const MissingInputError& e) {
    if (!tokenizer_path.empty()) throw;
    throw MissingInputError(std::string(e.what()) + "; --tokenizer FILE says where it is now");
  }
}

Pass CheckpointModel::pass(const std::string& table) const {
  Pass pass;
  pass.forward = &table_in_force(plan, info.state, table);
  pass.seed = plan.run.seed;
  pass.step = static_cast<uint32_t>(info.state.attempted_updates);
  return pass;
}

LoadedModel::LoadedModel(const CheckpointModel& source)
    : queue(Queue::on(source.machine)), comm(make_single()), model(queue, *comm, source.plan) {
  load_weights(queue, source.path, model);
}

}  // namespace fp4t

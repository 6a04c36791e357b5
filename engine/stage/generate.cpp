#include "engine/stage/generate.h"

#include <algorithm>

#include "engine/recipe/load.h"
#include "engine/rl/sampler.h"
#include "engine/stage/resume.h"
#include "engine/store/checkpoint.h"
#include "engine/tokens/tokenizer.h"

namespace fp4t {

std::vector<std::string> generate_text(const TextRequest& request) {
  const std::string path = find_checkpoint(request.checkpoint);
  const CheckpointInfo info = read_checkpoint_info(path, true);
  check_state(info);
  // Nothing is saved here, so how many checkpoints the run keeps is no matter: rules about resuming are off.
  // One rank generates, however many trained.
  const Recipe recipe =
      parse_recipe(info.state.recipe_yaml, path + "/manifest.json",
                   {"run.resume=never", "parallel.data=0", "parallel.expert=1", "parallel.zero=1"})
          .recipe;
  const Machine machine = probe_machine(recipe.run.device, static_cast<int>(recipe.run.threads));
  Plan plan = make_plan(recipe, machine, recorded_span_steps(info.state));
  const auto tokenizer = make_tokenizer(plan.tokenizer);
  const std::vector<int32_t> prompt = tokenizer->encode(request.prompt);
  if (prompt.empty()) throw RecipeError("--prompt: an empty text has no token to continue");
  constexpr int64_t kUsualTokens = 128;
  const int64_t room = plan.model.max_positions - static_cast<int64_t>(prompt.size());
  const int64_t max_tokens =
      request.max_tokens > 0 ? request.max_tokens : std::max<int64_t>(1, std::min(kUsualTokens, room));
  const auto length = static_cast<int64_t>(prompt.size()) + max_tokens;
  if (length > plan.model.max_positions) {
    throw RecipeError(detail::concat("--prompt of ", prompt.size(), " tokens and --max-tokens ", max_tokens,
                                     " exceed model.max_positions ", plan.model.max_positions));
  }
  size_for_generation(plan, static_cast<int64_t>(prompt.size()), length, request.samples);
  Queue queue = Queue::on(machine);
  const auto comm = make_single();
  Transformer model(queue, *comm, plan);
  std::vector<NamedTensor> tensors;
  for (const Param& p : model.params().params()) tensors.push_back({"model." + p.info.name, p.master});
  for (const Buffer& b : model.params().buffers()) tensors.push_back({"model." + b.info.name, b.data});
  load_tensors(queue, path, tensors, {"optimizer.", "reference.", "rollout."});
  model.params().refresh_copies(queue);
  model.weights_changed();

  GenerateOptions options;
  options.temperature = request.temperature;
  options.top_p = request.top_p;
  options.max_tokens = max_tokens;
  options.max_batch = plan.max_cache_slots;
  options.end_tokens = {tokenizer->end_of_document()};
  options.key = site_key(request.seed, Purpose::kGenerate, 0, 0, 0, 0);
  Pass pass;
  const StagePlan& stage = plan.stages[static_cast<size_t>(info.state.stage)];
  pass.forward = &stage.precision.sampler.at(info.state.step);
  pass.seed = plan.run.seed;
  pass.step = static_cast<uint32_t>(info.state.attempted_updates);
  std::vector<GenerateRequest> requests;
  for (int64_t s = 0; s < request.samples; ++s) requests.push_back({prompt, s});
  std::vector<std::string> texts;
  for (const Completion& c : generate(model, pass, requests, options))
    texts.push_back(tokenizer->decode(c.tokens));
  return texts;
}

}  // namespace fp4t

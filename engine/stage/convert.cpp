#include "engine/stage/convert.h"

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <map>

#include "engine/recipe/huggingface_config.h"
#include "engine/recipe/load.h"
#include "engine/recipe/scalars.h"
#include "engine/stage/calibrate.h"
#include "engine/stage/resume.h"
#include "engine/store/checkpoint.h"
#include "engine/store/huggingface_folder.h"
#include "engine/tokens/tokenizer.h"
#include "kernels/base/check.h"
#include "kernels/base/text.h"

namespace fp4t {

namespace {

using detail::concat;

// Plans that only name weights are made for any machine: nothing of what they price is allocated.
Machine any_machine(int64_t threads) {
  Machine machine = probe_machine("cpu", static_cast<int>(threads));
  machine.memory_bytes = machine.free_bytes = 0;
  return machine;
}

// A recipe that has this model and as little else as a recipe can have. `tokenizer` is its section, as YAML.
Recipe recipe_of(const std::string& from, const ModelSpec& model, const std::string& tokenizer) {
  const int64_t length = std::min<int64_t>(model.max_positions, 2048);
  std::vector<std::string> keys = {"model.from=" + write_text(from)};
  for (const ImpliedKey& key : implied_keys(model)) keys.push_back(key.path + "=" + key.value);
  const std::string text =
      concat("run: {name: import}\ntokenizer: ", tokenizer,
             "\nmodel: {}\nstages:\n  - pretrain:\n      steps: 1\n      batch: {tokens: ", length,
             ", length: ", length, "}\n      data: [{kind: random}]\n");
  Recipe recipe = parse_recipe(text, from + "/config.json", keys).recipe;
  complete_tokenizer(recipe);
  return recipe;
}

// With the folder's own tokenizer where we can read it; `note` says why not.
Recipe recipe_of_folder(const std::string& from, const ModelSpec& model, std::string* note) {
  const std::string own = tokenizer_of_folder(from);
  try {
    if (!own.empty()) return recipe_of(from, model, own);
  } catch (const Error& error) {
    *note = concat("its tokenizer is not used, texts are numbers of tokens: ", error.what(), "\n");
  }
  return recipe_of(from, model, concat("{kind: ids, vocabulary: ", model.vocabulary, "}"));
}

}  // namespace

Recipe recipe_of_checkpoint(const CheckpointInfo& info, std::vector<std::string> overrides) {
  // Nothing is saved, so how many checkpoints the run keeps is no matter.
  for (const char* o : {"run.resume=never", "parallel.data=0", "parallel.expert=1", "parallel.zero=1"}) {
    overrides.emplace_back(o);
  }
  return parse_recipe(info.state.recipe_yaml, info.path + "/manifest.json", overrides).recipe;
}

void load_weights(Queue& queue, const std::string& checkpoint, Transformer& model) {
  std::vector<NamedTensor> tensors;
  for (const Param& p : model.params().params()) tensors.push_back({"model." + p.info.name, p.master});
  for (const Buffer& b : model.params().buffers()) tensors.push_back({"model." + b.info.name, b.data});
  load_tensors(queue, checkpoint, tensors, {"optimizer.", "reference.", "rollout."});
  model.params().refresh_copies(queue);
  model.weights_changed();
}

std::string import_checkpoint(const std::string& from, const std::string& to, bool replace) {
  const ModelSpec model = model_from_config(from);
  std::string note;
  const Recipe recipe = recipe_of_folder(from, model, &note);
  const Plan plan = make_plan(recipe, any_machine(1), {});
  const HuggingFaceFolder weights(from, plan.model, plan.parameters);
  RunState state;
  state.recipe_yaml = recorded_recipe(plan.recipe_yaml);
  state.precision_hash = plan.precision_hash;
  std::vector<NamedTensor> tensors;
  TensorParts parts;
  std::map<std::string, size_t> index;
  const auto add = [&](const std::string& name, const Shape& shape) {
    tensors.push_back({"model." + name, {nullptr, DType::kF32, shape}});
    parts["model." + name] = {shape, 0, true};
  };
  for (size_t i = 0; i < plan.parameters.size(); ++i) {
    add(plan.parameters[i].name, plan.parameters[i].shape);
    index["model." + plan.parameters[i].name] = i;
  }
  for (const BufferInfo& b : plan.buffers) add(b.name, b.shape);
  Queue queue = Queue::cpu(1);
  const auto fetch = [&](const std::string& name, void* host) {
    const auto it = index.find(name);
    const size_t bytes = static_cast<size_t>(parts.at(name).whole.elements()) * sizeof(float);
    if (it == index.end()) {
      std::memset(host, 0, bytes);  // selection biases
    } else {
      std::memcpy(host, weights.read(it->second).data(), bytes);
    }
  };
  write_beside(to, replace, "manifest.json", {}, [&](const std::string& folder) {
    write_checkpoint(queue, folder, tensors, state, parts, fetch, {});
  });
  return concat(printable(to), ": ", model_type_of(family_of(model)), ", ", total_parameters(plan.parameters),
                " parameters\n", note);
}

namespace {

// The table in force at the checkpoint's step: of its stage, or of the last pretraining before it.
const ForwardTable& table_of(const Plan& plan, const RunState& state, const std::string& name) {
  const auto at = static_cast<size_t>(state.stage);
  const StagePlan& stage = plan.stages[at];
  if (name == "rl.sampler") return stage.precision.sampler.at(state.step);
  const bool of_rl = name == "rl.trainer.forward";
  if (stage.is_rl == of_rl) return stage.precision.forward.at(state.step);
  for (size_t i = at; i-- > 0 && !of_rl;) {
    if (!plan.stages[i].is_rl) return plan.stages[i].precision.forward.spans.back().table;
  }
  throw RecipeError(concat("--table ", printable(name), ": the checkpoint is in stage '", stage.name,
                           "', which has no such table"));
}

// Where the tokenizer's files lie that an export takes along: of the tokenizer in use, else of the folder
// that the weights came from; "" where neither is there any more.
std::string tokenizer_folder(const Plan& plan) {
  const std::filesystem::path file = plan.tokenizer.path;
  std::error_code ignored;
  if (!file.empty() && std::filesystem::exists(file, ignored)) {
    return file.has_parent_path() ? file.parent_path().string() : ".";
  }
  const std::string& from = plan.model.from;
  return !from.empty() && std::filesystem::exists(from + "/config.json", ignored) ? from : "";
}

std::string lines_of(const ExportRequest& request, const ExportModel& model, const ExportReport& report) {
  std::string text = concat(printable(request.to), ": ", model_type_of(model.family()), ", ",
                            kExportLayouts[static_cast<size_t>(request.options.layout)], ", ", report.tensors,
                            " tensors of ", report.bytes, " bytes in ", report.files,
                            report.files == 1 ? " file\n" : " files\n");
  int64_t coded = 0;
  for (const ExportWeight& w : model.weights()) coded += w.format != Format::kBf16;
  if (coded > 0) {
    text += concat(coded, " of ", model.weights().size(), " matrices are codes, as ", request.table,
                   request.preset.empty() ? "" : " of " + request.preset, " multiplies them\n");
  }
  text += concat("numbers are ", report.number == FileType::kF32 ? "fp32" : "bf16", ": ", report.rounded,
                 " values were rounded\n");
  std::string copied;
  for (const std::string& name : report.copied) copied += (copied.empty() ? "" : ", ") + name;
  return text + (copied.empty() ? "no tokenizer files (--tokenizer FOLDER copies them)\n"
                                : "copied: " + copied + "\n");
}

}  // namespace

std::string export_checkpoint(const ExportRequest& request) {
  const std::string path = find_checkpoint(request.checkpoint);
  const CheckpointInfo info = read_checkpoint_info(path, false);  // hashes are checked where tensors are read
  check_state(info);
  std::vector<std::string> overrides;
  if (!request.preset.empty()) overrides.push_back("precision={preset: " + write_text(request.preset) + "}");
  const Recipe recipe = recipe_of_checkpoint(info, overrides);
  const Plan plan = make_plan(recipe, any_machine(recipe.run.threads), recorded_span_steps(info.state));
  const Format coded = coded_format(request.options.layout);
  const ForwardTable* table = coded == Format::kBf16 ? nullptr : &table_of(plan, info.state, request.table);
  ExportModel model(path, plan, table, coded);
  ExportOptions options = request.options;
  if (options.source.empty()) options.source = tokenizer_folder(plan);
  if (options.source.empty() || !path_exists(options.source + "/config.json")) {
    options.end_token = make_tokenizer(plan.tokenizer)->end_of_document();
  }
  std::string calibrated;
  if (has_act_scales(options.layout)) calibrated = calibrate(info, request.calibrate, model);
  const ExportReport report = write_export(model, request.to, options);
  return lines_of(request, model, report) + calibrated;
}

}  // namespace fp4t

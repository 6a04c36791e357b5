#include "engine/stage/convert.h"

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <map>

#include "engine/recipe/huggingface_config.h"
#include "engine/recipe/load.h"
#include "engine/recipe/scalars.h"
#include "engine/stage/calibrate.h"
#include "engine/stage/checkpoint_model.h"
#include "engine/stage/resume.h"
#include "engine/store/checkpoint.h"
#include "engine/store/huggingface_folder.h"
#include "engine/store/write_beside.h"
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

// Which recipe was made up is no matter to who reads what is wrong with the folder.
BadDataError folder_error(const std::string& from, const RecipeError& error) {
  std::string what = error.what();
  const std::string set = "--set: ";
  for (size_t at = what.find(set); at != std::string::npos; at = what.find(set, at))
    what.erase(at, set.size());
  return BadDataError(concat("'", printable(from), "' holds no model of this program: ", what));
}

Plan plan_of_folder(const ImportRequest& request, const ModelSpec& model) {
  const auto plan_with = [&](const std::string& tokenizer) {
    try {
      return make_plan(recipe_of(request.from, model, tokenizer), any_machine(1), {});
    } catch (const RecipeError& error) {
      throw folder_error(request.from, error);
    }
  };
  const std::string ids = concat("{kind: ids, vocabulary: ", model.vocabulary, "}");
  const FolderTokenizer own = request.no_tokenizer ? FolderTokenizer{} : tokenizer_of_folder(request.from);
  if (own.kind.empty()) return plan_with(ids);
  try {
    return plan_with("{kind: " + own.kind + ", path: " + write_text(own.path) + "}");
  } catch (const BadDataError& error) {
    plan_with(ids);  // what is wrong without a tokenizer, too, is not its fault
    throw BadDataError(concat(error.what(), " (--no-tokenizer imports the weights alone)"));
  }
}

}  // namespace

std::string import_checkpoint(const ImportRequest& request) {
  const ModelSpec model = model_from_config(request.from);
  const Plan plan = plan_of_folder(request, model);
  const HuggingFaceFolder weights(request.from, plan.model, plan.parameters);
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
  write_beside(request.to, request.replace, "manifest.json", {}, [&](const std::string& folder) {
    write_checkpoint(queue, folder, tensors, state, parts, fetch, {});
  });
  return concat(printable(request.to), ": ", model_type_of(family_of(model)), ", ",
                total_parameters(plan.parameters), " parameters, ",
                plan.tokenizer.path.empty() ? "texts are numbers of tokens"
                                            : "tokenizer " + printable(plan.tokenizer.path),
                "\n");
}

namespace {

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

void refuse_without_effect(const ExportRequest& request) {
  const char* layout = kExportLayouts[static_cast<size_t>(request.options.layout)];
  const auto refuse = [&](const char* option, const std::string& value, bool has_effect) {
    if (has_effect || value.empty()) return;
    throw RecipeError(concat(option, " has no effect with --format ", layout));
  };
  const bool codes = coded_format(request.options.layout) != Format::kBf16;
  refuse("--table", request.table, codes);
  refuse("--preset", request.preset, codes);
  refuse("--calibrate", request.calibrate, has_act_scales(request.options.layout));
}

// The recipe's key for where its tokenizer's file is now, if that lies in the folder that the user names.
std::vector<std::string> moved_tokenizer(const std::string& folder, const CheckpointInfo& info) {
  std::error_code ignored;
  if (folder.empty()) return {};
  if (!std::filesystem::is_directory(folder, ignored)) {
    throw MissingInputError(concat("--tokenizer: '", printable(folder), "' is no folder"));
  }
  const std::filesystem::path file = recipe_of_checkpoint(info, {}).tokenizer.path;
  const std::string here = (std::filesystem::path(folder) / file.filename()).string();
  if (file.empty() || !std::filesystem::is_regular_file(here, ignored)) return {};
  return {"tokenizer.path=" + write_text(here)};
}

std::string lines_of(const ExportRequest& request, const ExportModel& model, const ExportReport& report) {
  std::string text = concat(printable(request.to), ": ", model_type_of(model.family()), ", ",
                            kExportLayouts[static_cast<size_t>(request.options.layout)], ", ", report.tensors,
                            " tensors of ", report.bytes, " bytes in ", report.files,
                            report.files == 1 ? " file\n" : " files\n");
  int64_t coded = 0;
  for (const ExportWeight& w : model.weights()) coded += w.format != Format::kBf16;
  if (coded > 0) {
    text += concat(coded, " of ", model.weights().size(), " matrices are codes, as ",
                   request.table.empty() ? name_of(Table::kSampler) : request.table,
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
  refuse_without_effect(request);
  const std::string path = find_checkpoint(request.checkpoint);
  const CheckpointInfo info = read_checkpoint_info(path, false);  // hashes are checked where tensors are read
  check_state(info);
  const std::vector<std::string> moved = moved_tokenizer(request.options.source, info);
  std::vector<std::string> overrides = moved;
  if (!request.preset.empty()) overrides.push_back("precision={preset: " + write_text(request.preset) + "}");
  const Recipe recipe = recipe_of_checkpoint(info, overrides);
  const Plan plan = make_plan(recipe, any_machine(recipe.run.threads), recorded_span_steps(info.state));
  if (!moved.empty()) make_tokenizer(plan.tokenizer);  // it is the model's
  const Format coded = coded_format(request.options.layout);
  const std::string table_name = request.table.empty() ? name_of(Table::kSampler) : request.table;
  const ForwardTable* table =
      coded == Format::kBf16 ? nullptr : &table_in_force(plan, info.state, table_name);
  ExportModel model(path, plan, table, coded);
  ExportOptions options = request.options;
  if (options.source.empty()) options.source = tokenizer_folder(plan);
  if (options.source.empty() || !path_exists(options.source + "/config.json")) {
    const auto tokenizer = make_tokenizer(plan.tokenizer);
    options.begin_token = tokenizer->begin_of_document();
    options.end_token = tokenizer->end_of_document();
  }
  std::string calibrated;
  if (has_act_scales(options.layout)) calibrated = calibrate(info, moved, request.calibrate, model);
  const ExportReport report = write_export(model, request.to, options);
  return lines_of(request, model, report) + calibrated;
}

}  // namespace fp4t

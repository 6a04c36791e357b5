#include "engine/store/export_folder.h"

#include <algorithm>
#include <cstdio>
#include <map>

#include "engine/store/export_config.h"
#include "engine/store/files.h"
#include "engine/store/write_beside.h"
#include "kernels/base/check.h"
#include "kernels/base/text.h"
#include "kernels/formats/bf16.h"

namespace fp4t {

namespace {

using Json = nlohmann::ordered_json;

// What readers look for beside the weights.
constexpr const char* kTokenizerFiles[] = {
    "tokenizer.json",    "tokenizer_config.json",   "tokenizer.model",   "vocab.json",
    "merges.txt",        "special_tokens_map.json", "added_tokens.json", "chat_template.jinja",
    "chat_template.json"};
constexpr const char* kGeneration = "generation_config.json";
constexpr int64_t kMaxTokenizerBytes = int64_t{1} << 30;

// One weight's tensors lie in one file.
struct Shard {
  size_t begin, end;  // weights
  int64_t bytes;
};

class FolderWriter {
 public:
  FolderWriter(ExportModel& model, const ExportOptions& options) : model_(model), options_(options) {}

  ExportReport write(const std::string& folder) {
    choose_types();
    const std::vector<Shard> shards = cut();
    std::map<std::string, std::string> place;
    for (size_t i = 0; i < shards.size(); ++i)
      write_shard(folder, shards[i], file_name(i, shards.size()), place);
    report_.files = static_cast<int64_t>(shards.size());
    if (shards.size() > 1) {
      const Json index = {{"metadata", {{"total_size", report_.bytes}}}, {"weight_map", place}};
      write_json(folder + "/model.safetensors.index.json", index);
    }
    write_configs(folder);
    copy_files(folder);
    sync_directory(folder, options_.hook);
    return report_;
  }

 private:
  static std::string file_name(size_t i, size_t count) {
    if (count == 1) return "model.safetensors";
    char text[64];
    std::snprintf(text, sizeof text, "model-%05zu-of-%05zu.safetensors", i + 1, count);
    return text;
  }

  void choose_types() {
    std::vector<int64_t> inexact;
    for (const ExportWeight& w : model_.weights()) {
      int64_t count = 0;
      if (w.format == Format::kBf16) {
        for (const float v : model_.values(w)) count += !(bf16_to_f32(f32_to_bf16(v)) == v);
      }
      inexact.push_back(count);
    }
    const bool any = std::any_of(inexact.begin(), inexact.end(), [](int64_t n) { return n > 0; });
    const bool codes = options_.layout != ExportLayout::kHf;
    report_.number = FileType::kBf16;
    if (options_.numbers == NumberType::kF32 || (options_.numbers == NumberType::kExact && any && !codes)) {
      report_.number = FileType::kF32;
    }
    for (size_t i = 0; i < inexact.size(); ++i) {
      FileType type = report_.number;
      const ParamRole role = model_.plan().parameters[model_.weights()[i].parameter].role;
      const bool kept_fp32 = role == ParamRole::kNorm || role == ParamRole::kRouter;
      if (options_.numbers == NumberType::kExact && codes && kept_fp32 && inexact[i] > 0)
        type = FileType::kF32;
      if (type == FileType::kBf16) report_.rounded += inexact[i];
      types_.push_back(type);
    }
  }

  std::vector<ExportTensor> tensors(size_t weight) const {
    return tensors_of(model_.weights()[weight], options_.layout, types_[weight]);
  }

  std::vector<Shard> cut() {
    std::vector<Shard> shards;
    for (size_t i = 0; i < model_.weights().size(); ++i) {
      int64_t bytes = 0;
      for (const ExportTensor& t : tensors(i)) bytes += stored_bytes(t.type, t.dims);
      if (shards.empty() || shards.back().bytes + bytes > options_.shard_bytes) shards.push_back({i, i, 0});
      shards.back().end = i + 1;
      shards.back().bytes += bytes;
      report_.bytes += bytes;
    }
    return shards;
  }

  void write_shard(const std::string& folder, const Shard& shard, const std::string& file,
                   std::map<std::string, std::string>& place) {
    std::vector<TensorToStore> list;
    std::map<std::string, std::vector<uint8_t>> data;
    for (size_t i = shard.begin; i < shard.end; ++i) {
      std::vector<std::vector<uint8_t>> bytes =
          bytes_of(model_, model_.weights()[i], options_.layout, types_[i]);
      const std::vector<ExportTensor> parts = tensors(i);
      for (size_t k = 0; k < parts.size(); ++k) {
        list.push_back({parts[k].name, parts[k].type, parts[k].dims, nullptr});
        data[parts[k].name] = std::move(bytes[k]);
        place[parts[k].name] = file;
        report_.tensors += 1;
      }
    }
    SafetensorsWriter writer(folder + "/" + file, std::move(list), {{"format", "pt"}}, options_.hook);
    for (size_t i = 0; i < writer.order().size(); ++i)
      writer.write_next(data.at(writer.order()[i].name).data());
    writer.finish();
  }

  void write_json(const std::string& path, const Json& json) {
    write_file(path, json.dump(2, ' ', false, Json::error_handler_t::replace) + "\n", options_.hook);
  }

  void write_configs(const std::string& folder) {
    const Json special = special_tokens(options_.source, options_.begin_token, options_.end_token);
    Json config = config_json(model_.model(), model_.family(), report_.number, special);
    const Json quantised = quantization_config(model_, options_.layout);
    if (!quantised.is_null()) config["quantization_config"] = quantised;
    write_json(folder + "/config.json", config);
    const Json modelopt = modelopt_config(model_, options_.layout);
    if (!modelopt.is_null()) write_json(folder + "/hf_quant_config.json", modelopt);
    if (!options_.source.empty() && path_exists(options_.source + "/" + kGeneration)) {
      copy_file(folder, kGeneration);
    } else {
      Json generation = special;
      generation["_from_model_config"] = true;
      write_json(folder + "/" + kGeneration, generation);
    }
  }

  void copy_files(const std::string& folder) {
    if (options_.source.empty()) return;
    for (const char* name : kTokenizerFiles) {
      if (path_exists(options_.source + "/" + name)) copy_file(folder, name);
    }
  }

  void copy_file(const std::string& folder, const std::string& name) {
    write_file(folder + "/" + name, read_small_file(options_.source + "/" + name, kMaxTokenizerBytes),
               options_.hook);
    report_.copied.push_back(name);
  }

  ExportModel& model_;
  const ExportOptions& options_;
  ExportReport report_;
  std::vector<FileType> types_;  // by weight
};

}  // namespace

ExportReport write_export(ExportModel& model, const std::string& to, const ExportOptions& options) {
  ExportReport report;
  write_beside(to, options.replace, "config.json", options.hook,
               [&](const std::string& folder) { report = FolderWriter(model, options).write(folder); });
  return report;
}

}  // namespace fp4t

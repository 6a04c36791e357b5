#include "engine/store/huggingface.h"

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <map>
#include <nlohmann/json.hpp>
#include <set>

#include "engine/plan/run_layout.h"
#include "engine/store/huggingface_names.h"
#include "engine/store/safetensors.h"
#include "kernels/base/check.h"
#include "kernels/base/text.h"
#include "kernels/formats/bf16.h"

namespace fp4t {

namespace {

namespace fs = std::filesystem;
using Json = nlohmann::json;

constexpr int64_t kMaxIndexBytes = int64_t{64} << 20;

// The folder's tensors over all its weight files.
class WeightFolder {
 public:
  explicit WeightFolder(const std::string& folder) : folder_(folder) {
    const std::string index = folder + "/model.safetensors.index.json";
    if (path_exists(index)) {
      open_indexed(index);
    } else {
      open("model.safetensors");
    }
  }

  bool contains(const std::string& name) const { return place_.count(name) != 0; }
  std::vector<std::string> names() const {
    std::vector<std::string> out;
    for (const auto& [name, file] : place_) out.push_back(name);
    return out;
  }
  const SafetensorsFile& file_of(const std::string& name) const { return *files_.at(place_.at(name)); }
  const std::string& path() const { return folder_; }

 private:
  void open(const std::string& file) {
    const auto opened = std::make_shared<SafetensorsFile>(folder_ + "/" + file);
    files_[file] = opened;
    for (const StoredTensor& t : opened->tensors()) {
      const auto [it, fresh] = place_.emplace(t.name, file);
      if (!fresh) {
        throw BadDataError(detail::concat("'", printable(opened->path()), "': tensor '", printable(t.name),
                                          "' is also in '", printable(it->second), "'"));
      }
    }
  }

  void open_indexed(const std::string& index) {
    const auto refuse = [&](const std::string& why) {
      throw BadDataError("'" + printable(index) + "': " + why);
    };
    std::map<std::string, std::string> listed;
    const auto shallow = [&](int depth, Json::parse_event_t, Json&) {
      if (depth > 8) refuse("nested too deeply");
      return true;
    };
    try {
      const Json json = Json::parse(read_small_file(index, kMaxIndexBytes), shallow);
      listed = json.at("weight_map").get<std::map<std::string, std::string>>();
    } catch (const Json::exception& error) {
      refuse(printable(error.what()));
    }
    for (const auto& [name, file] : listed) {
      if (fs::path(file).filename().string() != file || file.empty() || file == "..") {
        refuse("'" + printable(file) + "' is no file of this folder");
      }
      if (files_.count(file) == 0) open(file);
    }
    for (const auto& [name, file] : listed) {
      const auto it = place_.find(name);
      if (it == place_.end() || it->second != file) {
        refuse("tensor '" + printable(name) + "' is not in '" + printable(file) + "'");
      }
    }
    for (const auto& [name, file] : place_) {
      if (listed.count(name) == 0)
        refuse("tensor '" + printable(name) + "' of '" + printable(file) + "' is not listed");
    }
  }

  std::string folder_;
  std::map<std::string, std::shared_ptr<SafetensorsFile>> files_;
  std::map<std::string, std::string> place_;  // tensor -> file
};

// The keys in which a plan's model and a folder's differ, as lines of a message.
std::string differences(const ModelSpec& plan, const ModelSpec& folder) {
  std::string out;
  const auto compare = [&](const char* key, const auto& a, const auto& b) {
    if (!(a == b)) out += detail::concat("\n  model.", key, " is ", a, ", the folder's is ", b);
  };
  compare("layers", plan.layers, folder.layers);
  compare("hidden", plan.hidden, folder.hidden);
  compare("heads", plan.heads, folder.heads);
  compare("kv_heads", plan.kv_heads, folder.kv_heads);
  compare("head_dim", plan.head_dim, folder.head_dim);
  compare("vocabulary", plan.vocabulary, folder.vocabulary);
  compare("qk_norm", plan.qk_norm, folder.qk_norm);
  compare("tied_head", plan.tied_head, folder.tied_head);
  compare("norm_eps", plan.norm_eps, folder.norm_eps);
  compare("swiglu_clamp", plan.swiglu_clamp, folder.swiglu_clamp);
  compare("rope.theta", plan.rope.theta, folder.rope.theta);
  compare("rope.scaling", plan.rope.scaling, folder.rope.scaling);
  if (plan.rope.scaling != "none" && folder.rope.scaling != "none") {
    compare("rope.factor", plan.rope.factor, folder.rope.factor);
    compare("rope.low_freq_factor", plan.rope.low_freq_factor, folder.rope.low_freq_factor);
    compare("rope.high_freq_factor", plan.rope.high_freq_factor, folder.rope.high_freq_factor);
    compare("rope.beta_fast", plan.rope.beta_fast, folder.rope.beta_fast);
    compare("rope.beta_slow", plan.rope.beta_slow, folder.rope.beta_slow);
    compare("rope.original_positions", plan.rope.original_positions, folder.rope.original_positions);
  }
  compare("moe.experts", plan.moe.experts, folder.moe.experts);
  if (plan.moe.experts > 0 && folder.moe.experts > 0) {
    compare("moe.top_k", plan.moe.top_k, folder.moe.top_k);
    compare("moe.hidden", plan.moe.hidden, folder.moe.hidden);
    compare("moe.shared_experts", plan.moe.shared_experts, folder.moe.shared_experts);
    compare("moe.dense_layers", plan.moe.dense_layers, folder.moe.dense_layers);
    compare("moe.router", plan.moe.router, folder.moe.router);
    compare("moe.normalise", plan.moe.normalise, folder.moe.normalise);
    compare("moe.gate_scale", plan.moe.gate_scale, folder.moe.gate_scale);
  }
  if (folder.mlp_hidden > 0) compare("mlp_hidden", plan.mlp_hidden, folder.mlp_hidden);
  return out;
}

// Copies one library tensor into its place among ours, widened to FP32.
void read_piece(const WeightFolder& weights, const LibraryPiece& piece, float* ours) {
  const SafetensorsFile& file = weights.file_of(piece.name);
  const StoredTensor& t = file.find(piece.name);
  const auto refuse = [&](const std::string& why) {
    throw BadDataError(
        detail::concat("'", printable(file.path()), "': tensor '", printable(piece.name), "' ", why));
  };
  if (t.dims != piece.dims) {
    refuse("has shape " + dims_text(t.dims) + ", the model needs " + dims_text(piece.dims));
  }
  const std::vector<uint8_t> bytes = file.read(t);
  float* out = ours + piece.offset;
  if (t.dtype == DType::kF32) {
    std::memcpy(out, bytes.data(), bytes.size());
  } else if (t.dtype == DType::kBf16) {
    for (int64_t i = 0; i < piece.elements(); ++i) {
      Bf16 x;
      std::memcpy(&x, bytes.data() + 2 * i, sizeof x);
      out[i] = bf16_to_f32(x);
    }
  } else {
    refuse(detail::concat("is ", safetensors_name(t.dtype), ", weights are F32 or BF16"));
  }
}

void store_floats(Queue& queue, const std::vector<float>& values, const TensorView& out) {
  if (out.dtype == DType::kF32) {
    queue.copy_from_host(out.data, values.data(), out.bytes());
    return;
  }
  FP4T_CHECK(out.dtype == DType::kBf16, "master in ", dtype_name(out.dtype));
  std::vector<Bf16> rounded(values.size());
  std::transform(values.begin(), values.end(), rounded.begin(), [](float v) { return f32_to_bf16(v); });
  queue.copy_from_host(out.data, rounded.data(), out.bytes());
}

std::vector<float> load_floats(Queue& queue, const TensorView& t) {
  std::vector<float> values(static_cast<size_t>(t.elements()));
  if (t.dtype == DType::kF32) {
    queue.copy_to_host(values.data(), t.data, t.bytes());
    return values;
  }
  FP4T_CHECK(t.dtype == DType::kBf16, "tensor in ", dtype_name(t.dtype));
  std::vector<Bf16> raw(values.size());
  queue.copy_to_host(raw.data(), t.data, t.bytes());
  std::transform(raw.begin(), raw.end(), values.begin(), [](Bf16 v) { return bf16_to_f32(v); });
  return values;
}

// The layout that this folder has for one layer's experts.
ExpertLayout layout_of(const WeightFolder& weights, const ParamInfo& info, const ModelSpec& model) {
  if (info.role != ParamRole::kExpertWeight) return ExpertLayout::kSeparate;
  const auto stacked = library_pieces(info, model, ExpertLayout::kStacked);
  return weights.contains(stacked[0].name) ? ExpertLayout::kStacked : ExpertLayout::kSeparate;
}

}  // namespace

void import_weights(Queue& queue, const std::string& folder, const Plan& plan, ParamSet& params) {
  const std::string differing = differences(plan.model, model_from_config(folder));
  if (!differing.empty()) {
    throw RecipeError("the recipe's model is not that of '" + printable(folder) +
                      "/config.json':" + differing);
  }
  const WeightFolder weights(folder);
  // Partners on both sides before anything is written.
  std::vector<std::vector<LibraryPiece>> pieces;
  std::set<std::string> wanted;
  for (const Param& p : params.params()) {
    pieces.push_back(library_pieces(p.info, plan.model, layout_of(weights, p.info, plan.model)));
    for (const LibraryPiece& piece : pieces.back()) {
      if (!weights.contains(piece.name)) {
        throw BadDataError("'" + printable(folder) + "': tensor '" + printable(piece.name) + "' is missing");
      }
      wanted.insert(piece.name);
    }
  }
  for (const std::string& name : weights.names()) {
    if (wanted.count(name) != 0) continue;
    throw BadDataError(detail::concat("'", printable(weights.file_of(name).path()), "': tensor '",
                                      printable(name), "' has no place in the model"));
  }
  for (size_t i = 0; i < pieces.size(); ++i) {
    const Param& p = params.params()[i];
    std::vector<float> values(static_cast<size_t>(p.info.shape.elements()));
    for (const LibraryPiece& piece : pieces[i]) read_piece(weights, piece, values.data());
    if (p.master.shape != p.info.shape) {  // what this rank keeps of it
      const Span kept = master_is_part(p.info, plan) ? params.owned(p) : p.held;
      values = {values.begin() + kept.begin, values.begin() + kept.end};
    }
    store_floats(queue, values, p.master);
  }
  for (const Buffer& b : params.buffers()) queue.fill_bytes(b.data.data, 0, b.data.bytes());
  params.refresh_copies(queue);
}

std::vector<NamedHostTensor> export_named(Queue& queue, const Plan& plan, ParamSet& params, Exported what) {
  std::vector<NamedHostTensor> out;
  for (const Param& p : params.params()) {
    const std::vector<float> values = load_floats(queue, what == Exported::kWeights ? p.master : p.gradient);
    for (const LibraryPiece& piece : library_pieces(p.info, plan.model, ExpertLayout::kStacked)) {
      const auto begin = values.begin() + piece.offset;
      out.push_back({piece.name, piece.dims, {begin, begin + piece.elements()}});
    }
  }
  return out;
}

}  // namespace fp4t

#include "engine/recipe/huggingface_config.h"

#include <algorithm>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <set>

#include "engine/recipe/print.h"
#include "engine/recipe/scalars.h"
#include "kernels/base/check.h"
#include "kernels/base/text.h"
#include "kernels/base/text_file.h"

namespace fp4t {

namespace {

using Json = nlohmann::json;

constexpr uintmax_t kMaxConfigBytes = uintmax_t{4} << 20;
constexpr int64_t kMaxSize = int64_t{1} << 31;  // of any dimension: keeps later products far from overflow

// Typed access to one object, with errors that name the file and the key.
class Config {
 public:
  Config(std::string path, Json json) : path_(std::move(path)), json_(std::move(json)) {
    if (!json_.is_object()) throw BadDataError("'" + printable(path_) + "' is no JSON object");
  }

  bool has(const char* key) const { return json_.contains(key) && !json_.at(key).is_null(); }
  Config object(const char* key) const { return {path_ + ": " + key, json_.at(key)}; }
  const Json& raw(const char* key) const { return json_.at(key); }

  int64_t count(const char* key, int64_t least) const {
    need(key);
    const Json& v = json_.at(key);
    const bool fits = v.is_number_integer() && v >= least && v <= kMaxSize;
    if (!fits) refuse(key, "is no whole number from " + std::to_string(least));
    return v.get<int64_t>();
  }
  int64_t count_or(const char* key, int64_t least, int64_t otherwise) const {
    return has(key) ? count(key, least) : otherwise;
  }
  double positive(const char* key) const {
    need(key);
    if (!json_.at(key).is_number() || !(json_.at(key).get<double>() > 0))
      refuse(key, "is no positive number");
    return json_.at(key).get<double>();
  }
  double positive_or(const char* key, double otherwise) const { return has(key) ? positive(key) : otherwise; }
  bool flag_or(const char* key, bool otherwise) const {
    if (!has(key)) return otherwise;
    if (!json_.at(key).is_boolean()) refuse(key, "is neither true nor false");
    return json_.at(key).get<bool>();
  }
  std::string text(const char* key) const {
    need(key);
    if (!json_.at(key).is_string()) refuse(key, "is no text");
    return json_.at(key).get<std::string>();
  }
  // Absent, null and the given value pass; another one means a part that we do not have.
  void expect(const char* key, const Json& only) const {
    if (has(key) && json_.at(key) != only) refuse(key, "is not supported (only " + only.dump() + ")");
  }
  void expect_absent(const char* key) const {
    if (has(key)) refuse(key, "is not supported");
  }
  [[noreturn]] void refuse(const char* key, const std::string& why) const {
    constexpr size_t kMostShown = 120;  // a quantization_config is a page
    const std::string value = has(key) ? " " + printable(json_.at(key).dump(-1, ' ', true), kMostShown) : "";
    throw BadDataError("'" + printable(path_) + "': " + key + value + " " + why);
  }

 private:
  void need(const char* key) const {
    if (!has(key)) refuse(key, "is missing");
  }
  std::string path_;
  Json json_;
};

std::string config_text(const std::string& path) {
  std::error_code error;
  const std::filesystem::file_status status = std::filesystem::status(path, error);
  if (!std::filesystem::exists(status)) throw MissingInputError("'" + printable(path) + "' is not there");
  if (!std::filesystem::is_regular_file(status))
    throw BadDataError("'" + printable(path) + "' is no regular file");
  if (std::filesystem::file_size(path, error) > kMaxConfigBytes) {
    throw BadDataError(detail::concat("'", printable(path), "' has more than ", kMaxConfigBytes, " bytes"));
  }
  return read_text_file(path);
}

Config read_config(const std::string& folder) {
  const std::string path = folder + "/config.json";
  const std::string text = config_text(path);
  constexpr int kMaxDepth = 32;
  const auto shallow = [&](int depth, Json::parse_event_t, Json&) {
    if (depth > kMaxDepth) throw BadDataError("'" + printable(path) + "' is nested too deeply");
    return true;
  };
  try {
    return {path, Json::parse(text, shallow)};
  } catch (const Json::exception& error) {
    throw BadDataError("'" + printable(path) + "': " + printable(error.what()));
  }
}

void refuse_unsupported(const Config& c) {
  c.expect("hidden_act", "silu");
  c.expect("attention_bias", false);
  c.expect("mlp_bias", false);
  c.expect("attention_dropout", 0.0);
  c.expect("partial_rotary_factor", 1.0);
  c.expect("router_jitter_noise", 0.0);
  c.expect_absent("quantization_config");
  if (c.flag_or("use_sliding_window", false)) c.refuse("use_sliding_window", "is not supported (only false)");
  if (c.has("layer_types")) {
    const Json& types = c.raw("layer_types");
    for (const Json& type : types) {
      if (type != "full_attention") c.refuse("layer_types", "is not supported (only \"full_attention\")");
    }
    if (!types.is_array() || static_cast<int64_t>(types.size()) != c.count("num_hidden_layers", 1)) {
      c.refuse("layer_types", "is no list of one type for each of num_hidden_layers");
    }
  }
}

// The newer form has everything in rope_parameters, the older rope_theta beside rope_scaling.
RopeSpec rope_of(const Config& c, Family family, int64_t max_positions) {
  RopeSpec rope;
  rope.theta = c.positive_or("rope_theta", family == Family::kMixtral ? 1e6 : 1e4);  // the library's defaults
  const char* key = c.has("rope_parameters") ? "rope_parameters" : "rope_scaling";
  if (!c.has(key)) return rope;
  const Config r = c.object(key);
  rope.theta = r.positive_or("rope_theta", rope.theta);
  const std::string kind = r.has("rope_type") ? r.text("rope_type")
                           : r.has("type")    ? r.text("type")
                                              : "default";
  r.expect("partial_rotary_factor", 1.0);
  if (kind == "default") return rope;
  if (kind != "linear" && kind != "llama3" && kind != "yarn") {
    r.refuse(r.has("rope_type") ? "rope_type" : "type", "is not supported (default, linear, llama3, yarn)");
  }
  rope.scaling = kind;
  rope.factor = r.positive("factor");
  if (kind == "llama3") {
    rope.low_freq_factor = r.positive("low_freq_factor");
    rope.high_freq_factor = r.positive("high_freq_factor");
    rope.original_positions = r.count("original_max_position_embeddings", 1);
  }
  if (kind == "yarn") {
    for (const char* unused : {"attention_factor", "mscale", "mscale_all_dim"}) r.expect_absent(unused);
    r.expect("truncate", true);
    rope.beta_fast = r.positive_or("beta_fast", rope.beta_fast);
    rope.beta_slow = r.positive_or("beta_slow", rope.beta_slow);
    rope.original_positions = r.count_or("original_max_position_embeddings", 1, max_positions);
  }
  return rope;
}

// Every layer has experts, and a token's gates always sum to 1.
MoeSpec mixtral_moe(const Config& c) {
  MoeSpec moe;
  moe.experts = c.count("num_local_experts", 1);
  moe.top_k = c.count("num_experts_per_tok", 1);
  if (moe.top_k > moe.experts) c.refuse("num_experts_per_tok", "exceeds the number of experts");
  moe.hidden = c.count("intermediate_size", 1);
  c.expect_absent("sliding_window");
  return moe;
}

// Layers are dense where mlp_only_layers says so or decoder_sparse_step leaves them out; ours are the first.
MoeSpec qwen3_moe(const Config& c, int64_t layers) {
  MoeSpec moe;
  moe.experts = c.has("num_experts") ? c.count("num_experts", 1) : c.count("num_local_experts", 1);
  moe.top_k = c.count("num_experts_per_tok", 1);
  if (moe.top_k > moe.experts) c.refuse("num_experts_per_tok", "exceeds the number of experts");
  moe.hidden = c.count("moe_intermediate_size", 1);
  moe.normalise = c.flag_or("norm_topk_prob", false);  // the family's default
  const int64_t step = c.count_or("decoder_sparse_step", 1, 1);
  std::set<int64_t> dense;
  if (c.has("mlp_only_layers")) {
    for (const Json& layer : c.raw("mlp_only_layers")) {
      if (!layer.is_number_integer() || layer < 0 || layer >= layers) {
        c.refuse("mlp_only_layers", "is no list of layers");
      }
      dense.insert(layer.get<int64_t>());
    }
  }
  const auto is_dense = [&](int64_t l) { return dense.count(l) != 0 || (l + 1) % step != 0; };
  while (moe.dense_layers < layers && is_dense(moe.dense_layers)) ++moe.dense_layers;
  for (int64_t l = moe.dense_layers; l < layers; ++l) {
    if (!is_dense(l)) continue;
    c.refuse(dense.count(l) ? "mlp_only_layers" : "decoder_sparse_step",
             "is not supported: dense layers must be the first ones");
  }
  if (moe.dense_layers == layers) c.refuse("mlp_only_layers", "is not supported: every layer is dense");
  return moe;
}

constexpr Family kFamilies[] = {Family::kQwen3, Family::kQwen3Moe, Family::kMixtral, Family::kLlama};

Family family_of(const Config& c) {
  const std::string type = c.text("model_type");
  for (const Family family : kFamilies) {
    if (type != model_type_of(family)) continue;
    c.expect("architectures", Json::array({architecture_of(family)}));
    return family;
  }
  c.refuse("model_type", "is not supported (qwen3, qwen3_moe, mixtral, llama)");
}

}  // namespace

const char* model_type_of(Family family) {
  switch (family) {
    case Family::kQwen3:
      return "qwen3";
    case Family::kQwen3Moe:
      return "qwen3_moe";
    case Family::kMixtral:
      return "mixtral";
    case Family::kLlama:
      return "llama";
  }
  return "";
}

const char* architecture_of(Family family) {
  switch (family) {
    case Family::kQwen3:
      return "Qwen3ForCausalLM";
    case Family::kQwen3Moe:
      return "Qwen3MoeForCausalLM";
    case Family::kMixtral:
      return "MixtralForCausalLM";
    case Family::kLlama:
      return "LlamaForCausalLM";
  }
  return "";
}

ModelSpec model_from_config(const std::string& folder) {
  const Config c = read_config(folder);
  const Family family = family_of(c);
  refuse_unsupported(c);

  ModelSpec m;
  m.layers = c.count("num_hidden_layers", 1);
  m.hidden = c.count("hidden_size", 1);
  m.heads = c.count("num_attention_heads", 1);
  // Only Llama's default is the number of heads; the others' are figures of one model.
  m.kv_heads = family == Family::kLlama ? c.count_or("num_key_value_heads", 1, m.heads)
                                        : c.count("num_key_value_heads", 1);
  m.head_dim =
      family == Family::kQwen3 ? c.count("head_dim", 1) : c.count_or("head_dim", 1, m.hidden / m.heads);
  if (m.head_dim < 2 || m.head_dim % 2 != 0) c.refuse("head_dim", "is not even");
  if (m.heads % m.kv_heads != 0) c.refuse("num_key_value_heads", "does not divide the number of heads");
  m.vocabulary = c.count("vocab_size", 1);
  m.max_positions = c.count("max_position_embeddings", 1);
  m.qk_norm = family == Family::kQwen3 || family == Family::kQwen3Moe;
  m.tied_head = c.flag_or("tie_word_embeddings", false);
  m.norm_eps = c.positive_or("rms_norm_eps", family == Family::kMixtral ? 1e-5 : 1e-6);
  m.rope = rope_of(c, family, m.max_positions);
  if (family == Family::kMixtral) m.moe = mixtral_moe(c);
  if (family == Family::kQwen3Moe) m.moe = qwen3_moe(c, m.layers);
  if (m.moe.experts == 0 || m.moe.dense_layers > 0) m.mlp_hidden = c.count("intermediate_size", 1);
  return m;
}

std::vector<ImpliedKey> implied_keys(const ModelSpec& model) {
  Recipe recipe;
  recipe.model = model;
  const auto is_below = [](const std::string& path, const std::string& map) {
    return path.rfind(map, 0) == 0;
  };
  std::vector<ImpliedKey> keys;
  for (const FlatKey& key : flatten(recipe)) {
    const bool how_to_train = key.path == "model.from" || is_below(key.path, "model.init.") ||
                              is_below(key.path, "model.moe.balance.");
    if (!is_below(key.path, "model.") || how_to_train) continue;
    keys.push_back({key.path, key.value, key.path != "model.max_positions"});
  }
  return keys;
}

FolderTokenizer tokenizer_of_folder(const std::string& folder) {
  // Of a SentencePiece model tokenizer.json, where it is there too, is a conversion.
  constexpr struct {
    const char *file, *kind;
  } kFiles[] = {{"tokenizer.model", "sentencepiece"}, {"tokenizer.json", "json"}};
  for (const auto& known : kFiles) {
    const std::string path = folder + "/" + known.file;
    std::error_code ignored;
    if (std::filesystem::is_regular_file(path, ignored)) return {known.kind, path};
  }
  return {};
}

}  // namespace fp4t

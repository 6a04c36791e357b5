// config.json of the families qwen3_moe and llama to the recipe's model keys. What the model computes must
// be ours in full: anything else is refused by its key.
#include <algorithm>
#include <nlohmann/json.hpp>
#include <set>

#include "engine/store/files.h"
#include "engine/store/huggingface.h"
#include "kernels/base/check.h"
#include "kernels/base/text.h"

namespace fp4t {

namespace {

using Json = nlohmann::json;

constexpr int64_t kMaxConfigBytes = int64_t{4} << 20;
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
    const std::string value = has(key) ? " " + printable(json_.at(key).dump(-1, ' ', true)) : "";
    throw BadDataError("'" + printable(path_) + "': " + key + value + " " + why);
  }

 private:
  void need(const char* key) const {
    if (!has(key)) refuse(key, "is missing");
  }
  std::string path_;
  Json json_;
};

Config read_config(const std::string& folder) {
  const std::string path = folder + "/config.json";
  const std::string text = read_small_file(path, kMaxConfigBytes);
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
  c.expect_absent("quantization_config");
  if (c.flag_or("use_sliding_window", false)) c.refuse("use_sliding_window", "is not supported (only false)");
  if (c.has("layer_types")) {
    for (const Json& type : c.raw("layer_types")) {
      if (type != "full_attention") c.refuse("layer_types", "is not supported (only \"full_attention\")");
    }
  }
}

// The newer form has everything in rope_parameters, the older rope_theta beside rope_scaling.
RopeSpec rope_of(const Config& c, int64_t max_positions) {
  RopeSpec rope;
  rope.theta = c.positive_or("rope_theta", rope.theta);
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

// Layers are dense where mlp_only_layers says so or decoder_sparse_step leaves them out; ours are the first.
MoeSpec moe_of(const Config& c, int64_t layers) {
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
      if (!layer.is_number_integer()) c.refuse("mlp_only_layers", "is no list of layers");
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

}  // namespace

ModelSpec model_from_config(const std::string& folder) {
  const Config c = read_config(folder);
  const std::string family = c.text("model_type");
  if (family != "qwen3_moe" && family != "llama") {
    c.refuse("model_type", "is not supported (qwen3_moe, llama)");
  }
  const bool is_moe = family == "qwen3_moe";
  c.expect("architectures", Json::array({is_moe ? "Qwen3MoeForCausalLM" : "LlamaForCausalLM"}));
  refuse_unsupported(c);

  ModelSpec m;
  m.layers = c.count("num_hidden_layers", 1);
  m.hidden = c.count("hidden_size", 1);
  m.heads = c.count("num_attention_heads", 1);
  m.kv_heads = c.count_or("num_key_value_heads", 1, m.heads);
  m.head_dim = c.count_or("head_dim", 1, m.hidden / m.heads);
  if (m.head_dim < 2 || m.head_dim % 2 != 0) c.refuse("head_dim", "is not even");
  if (m.heads % m.kv_heads != 0) c.refuse("num_key_value_heads", "does not divide the number of heads");
  m.vocabulary = c.count("vocab_size", 1);
  m.max_positions = c.count("max_position_embeddings", 1);
  m.qk_norm = is_moe;
  m.tied_head = c.flag_or("tie_word_embeddings", false);
  m.norm_eps = c.positive_or("rms_norm_eps", m.norm_eps);
  m.rope = rope_of(c, m.max_positions);
  if (is_moe) m.moe = moe_of(c, m.layers);
  if (!is_moe || m.moe.dense_layers > 0) m.mlp_hidden = c.count("intermediate_size", 1);
  return m;
}

}  // namespace fp4t

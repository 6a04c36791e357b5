#include "engine/store/export_config.h"

#include "engine/metrics/json_line.h"
#include "engine/store/files.h"
#include "kernels/base/check.h"
#include "kernels/base/text.h"

namespace fp4t {

namespace {

using Json = nlohmann::ordered_json;

Json rope_scaling(const RopeSpec& rope) {
  Json out = {{"rope_type", rope.scaling == "none" ? "default" : rope.scaling}};
  if (rope.scaling == "none") return out;
  out["factor"] = rope.factor;
  if (rope.scaling == "llama3") {
    out["low_freq_factor"] = rope.low_freq_factor;
    out["high_freq_factor"] = rope.high_freq_factor;
  }
  if (rope.scaling == "yarn") {
    out["beta_fast"] = rope.beta_fast;
    out["beta_slow"] = rope.beta_slow;
  }
  if (rope.scaling != "linear") out["original_max_position_embeddings"] = rope.original_positions;
  return out;
}

void add_rope(const RopeSpec& rope, Json& out) {
  Json parameters = rope_scaling(rope);
  parameters["rope_theta"] = rope.theta;
  out["rope_parameters"] = parameters;
  out["rope_theta"] = rope.theta;
  out["rope_scaling"] = rope.scaling == "none" ? Json(nullptr) : rope_scaling(rope);
}

void add_experts(const ModelSpec& m, Family family, Json& out) {
  if (family == Family::kMixtral) {
    out["num_local_experts"] = m.moe.experts;
    out["num_experts_per_tok"] = m.moe.top_k;
    out["intermediate_size"] = m.moe.hidden;
    out["router_jitter_noise"] = 0.0;
  }
  if (family == Family::kQwen3Moe) {
    out["num_experts"] = m.moe.experts;
    out["num_experts_per_tok"] = m.moe.top_k;
    out["moe_intermediate_size"] = m.moe.hidden;
    out["norm_topk_prob"] = m.moe.normalise;
    out["decoder_sparse_step"] = 1;
    Json dense = Json::array();
    for (int64_t l = 0; l < m.moe.dense_layers; ++l) dense.push_back(l);
    out["mlp_only_layers"] = dense;
    // Of layers without experts; the key has to be there.
    out["intermediate_size"] = m.moe.dense_layers > 0 ? m.mlp_hidden : m.moe.hidden;
  }
  out["router_aux_loss_coef"] = m.moe.balance.aux_loss;
  out["output_router_logits"] = false;
}

}  // namespace

Json special_tokens(const std::string& source, int64_t begin_token, int64_t end_token) {
  constexpr int64_t kMaxConfigBytes = int64_t{4} << 20;
  Json out = Json::object();
  const std::string path = source + "/config.json";
  if (!source.empty() && path_exists(path)) {
    const std::string place = "'" + printable(path) + "'";
    const Json config = parse_json<Json>(read_small_file(path, kMaxConfigBytes), place);
    if (!config.is_object()) throw BadDataError(place + " is no JSON object");
    for (const char* key : {"bos_token_id", "eos_token_id", "pad_token_id"}) {
      if (config.contains(key)) out[key] = config.at(key);
    }
  } else if (end_token >= 0) {
    out["bos_token_id"] = begin_token >= 0 ? Json(begin_token) : Json(nullptr);
    out["eos_token_id"] = end_token;
  }
  return out;
}

Json config_json(const ModelSpec& m, Family family, FileType number, const Json& special) {
  const char* type = number == FileType::kF32 ? "float32" : "bfloat16";
  Json out = {{"architectures", {architecture_of(family)}},
              {"model_type", model_type_of(family)},
              {"dtype", type},
              {"torch_dtype", type},
              {"vocab_size", m.vocabulary},
              {"hidden_size", m.hidden},
              {"num_hidden_layers", m.layers},
              {"num_attention_heads", m.heads},
              {"num_key_value_heads", m.kv_heads},
              {"head_dim", m.head_dim},
              {"max_position_embeddings", m.max_positions},
              {"rms_norm_eps", m.norm_eps},
              {"hidden_act", "silu"},
              {"attention_dropout", 0.0},
              {"tie_word_embeddings", m.tied_head},
              {"initializer_range", m.init.std},
              {"use_cache", true}};
  for (const auto& [key, value] : special.items()) out[key] = value;
  add_rope(m.rope, out);
  if (family != Family::kMixtral) out["attention_bias"] = false;
  if (family == Family::kLlama) out["mlp_bias"] = false;
  if (family != Family::kLlama) out["sliding_window"] = nullptr;
  if (family == Family::kQwen3 || family == Family::kQwen3Moe) out["use_sliding_window"] = false;
  if (m.moe.experts > 0) {
    add_experts(m, family, out);
  } else {
    out["intermediate_size"] = m.mlp_hidden;
  }
  return out;
}

}  // namespace fp4t

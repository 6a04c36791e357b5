// What a config.json of Hugging Face says of a model.
#include <gtest/gtest.h>

#include <filesystem>

#include "engine/recipe/huggingface_config.h"
#include "kernels/base/check.h"
#include "tests/unit/huggingface_fixture.h"

namespace fp4t::test {
namespace {

using Json = nlohmann::json;
using Folder = HuggingFaceCopy;

TEST(HuggingFaceConfig, qwen3_moe_keys_are_translated) {
  const ModelSpec m = model_from_config(golden("qwen3_moe"));
  EXPECT_EQ(m.layers, 2);
  EXPECT_EQ(m.hidden, 64);
  EXPECT_EQ(m.heads, 4);
  EXPECT_EQ(m.kv_heads, 2);
  EXPECT_EQ(m.head_dim, 16);
  EXPECT_EQ(m.vocabulary, 257);
  EXPECT_EQ(m.max_positions, 128);
  EXPECT_EQ(m.mlp_hidden, 0);
  EXPECT_TRUE(m.qk_norm);
  EXPECT_FALSE(m.tied_head);
  EXPECT_EQ(m.norm_eps, 1e-6);
  EXPECT_EQ(m.rope.theta, 10000.0);
  EXPECT_EQ(m.rope.scaling, "none");
  EXPECT_EQ(m.moe.experts, 8);
  EXPECT_EQ(m.moe.top_k, 2);
  EXPECT_EQ(m.moe.hidden, 48);
  EXPECT_EQ(m.moe.router, "softmax");
  EXPECT_TRUE(m.moe.normalise);
  EXPECT_EQ(m.moe.dense_layers, 0);
}

TEST(HuggingFaceConfig, llama_keys_are_translated) {
  const ModelSpec m = model_from_config(golden("llama"));
  EXPECT_EQ(m.mlp_hidden, 96);
  EXPECT_EQ(m.moe.experts, 0);
  EXPECT_FALSE(m.qk_norm);
  EXPECT_TRUE(m.tied_head);
}

TEST(HuggingFaceConfig, qwen3_and_mixtral_keys_are_translated) {
  const ModelSpec qwen3 = model_from_config(golden("qwen3"));
  EXPECT_TRUE(qwen3.qk_norm);
  EXPECT_EQ(qwen3.moe.experts, 0);
  EXPECT_EQ(qwen3.mlp_hidden, 24);
  EXPECT_EQ(qwen3.head_dim, 8);
  const ModelSpec mixtral = model_from_config(golden("mixtral"));
  EXPECT_FALSE(mixtral.qk_norm);
  EXPECT_EQ(mixtral.moe.experts, 4);
  EXPECT_EQ(mixtral.moe.top_k, 2);
  EXPECT_EQ(mixtral.moe.hidden, 24);
  EXPECT_TRUE(mixtral.moe.normalise);
  EXPECT_EQ(mixtral.mlp_hidden, 0);
  EXPECT_EQ(mixtral.rope.theta, 1e6);
  EXPECT_EQ(mixtral.norm_eps, 1e-5);
}

TEST(HuggingFaceConfig, a_silent_config_has_its_familys_defaults) {
  const auto without = [](const char* family) {
    Folder f(family);
    for (const char* key : {"rms_norm_eps", "rope_parameters", "tie_word_embeddings"}) f.config.erase(key);
    return model_from_config(f.write());
  };
  const ModelSpec mixtral = without("mixtral"), llama = without("llama");
  EXPECT_EQ(mixtral.rope.theta, 1e6);
  EXPECT_EQ(mixtral.norm_eps, 1e-5);
  EXPECT_EQ(llama.rope.theta, 1e4);
  EXPECT_EQ(llama.norm_eps, 1e-6);
  EXPECT_FALSE(llama.tied_head);
}

TEST(HuggingFaceConfig, both_forms_of_rope_are_read) {
  Folder f("llama");
  f.config.erase("rope_parameters");
  f.config["rope_theta"] = 500000.0;
  f.config["rope_scaling"] = {{"rope_type", "llama3"},
                              {"factor", 8.0},
                              {"low_freq_factor", 1.0},
                              {"high_freq_factor", 4.0},
                              {"original_max_position_embeddings", 64}};
  const RopeSpec old_form = model_from_config(f.write()).rope;
  EXPECT_EQ(old_form.theta, 500000.0);
  EXPECT_EQ(old_form.scaling, "llama3");
  EXPECT_EQ(old_form.factor, 8.0);
  EXPECT_EQ(old_form.high_freq_factor, 4.0);
  EXPECT_EQ(old_form.original_positions, 64);

  f.config.erase("rope_theta");
  f.config.erase("rope_scaling");
  f.config["rope_parameters"] = {{"rope_type", "yarn"}, {"rope_theta", 1e6}, {"factor", 4.0}};
  const RopeSpec new_form = model_from_config(f.write()).rope;
  EXPECT_EQ(new_form.theta, 1e6);
  EXPECT_EQ(new_form.scaling, "yarn");
  EXPECT_EQ(new_form.original_positions, 128);
  EXPECT_EQ(new_form.beta_fast, 32.0);

  f.config["rope_parameters"] = nullptr;
  f.config["rope_scaling"] = {{"type", "linear"}, {"factor", 2.0}};
  EXPECT_EQ(model_from_config(f.write()).rope.scaling, "linear");
}

TEST(HuggingFaceConfig, dense_first_layers_are_recognised_from_either_key) {
  Folder f("qwen3_moe");
  f.config["num_hidden_layers"] = 4;
  f.config["mlp_only_layers"] = {1, 0};
  ModelSpec m = model_from_config(f.write());
  EXPECT_EQ(m.moe.dense_layers, 2);
  EXPECT_EQ(m.mlp_hidden, 96);
  f.config["num_hidden_layers"] = 2;
  f.config["mlp_only_layers"] = Json::array();
  f.config["decoder_sparse_step"] = 2;  // layers 1, 3, ... have experts
  EXPECT_EQ(model_from_config(f.write()).moe.dense_layers, 1);
}

TEST(HuggingFaceConfig, what_we_do_not_have_is_refused_by_name) {
  const auto message = [](const std::string& family, const char* key, const Json& value) {
    Folder f(family);
    f.config[key] = value;
    return error_of([&] { model_from_config(f.write()); });
  };
  struct Case {
    const char* family;
    const char* key;
    Json value;
  };
  const Case cases[] = {
      {"qwen3_moe", "attention_bias", true},
      {"llama", "mlp_bias", true},
      {"llama", "hidden_act", "gelu"},
      {"llama", "attention_dropout", 0.1},
      {"llama", "partial_rotary_factor", 0.5},
      {"qwen3_moe", "use_sliding_window", true},
      {"qwen3_moe", "layer_types", {"full_attention", "sliding_attention"}},
      {"llama", "quantization_config", {{"quant_method", "fp8"}}},
      {"llama", "model_type", "mistral"},
      {"llama", "architectures", {"LlamaForSequenceClassification"}},
      {"llama", "rope_parameters", {{"rope_type", "dynamic"}, {"factor", 2.0}}},
      {"llama", "rope_parameters", {{"rope_type", "yarn"}, {"factor", 2.0}, {"mscale", 0.7}}},
      {"mixtral", "sliding_window", 4096},
      {"mixtral", "router_jitter_noise", 0.1},
      {"mixtral", "num_key_value_heads", nullptr},
      {"qwen3", "head_dim", nullptr},
      {"qwen3_moe", "mlp_only_layers", {1}},
      {"qwen3_moe", "mlp_only_layers", {0, 1}},
      {"qwen3_moe", "num_experts_per_tok", 9},
      {"llama", "hidden_size", 0},
      {"llama", "hidden_size", -64},
      {"llama", "hidden_size", 64.5},
      {"llama", "hidden_size", 1e30},
      {"llama", "hidden_size", "64"},
      {"llama", "num_hidden_layers", nullptr},
      {"llama", "rms_norm_eps", -1.0},
      {"llama", "tie_word_embeddings", "yes"},
  };
  for (const Case& c : cases) {
    const std::string text = message(c.family, c.key, c.value);
    EXPECT_NE(text.find(c.key), std::string::npos) << c.key << " " << c.value << ": '" << text << "'";
    EXPECT_NE(text.find("config.json"), std::string::npos) << c.key << ": '" << text << "'";
  }
  EXPECT_EQ(message("qwen3_moe", "sliding_window", 4096), "");  // given, and not in use
}

TEST(HuggingFaceConfig, damaged_files_are_refused) {
  Folder f("llama");
  f.write();
  for (const std::string& text :
       {std::string("{"), std::string("[]"), std::string(100000, '['), std::string("\xFF"), std::string()}) {
    set_file(f / "config.json", text);
    EXPECT_THROW(model_from_config(f.path()), BadDataError) << text.substr(0, 10);
  }
  std::filesystem::remove(f / "config.json");
  EXPECT_THROW(model_from_config(f.path()), MissingInputError);
}

}  // namespace
}  // namespace fp4t::test

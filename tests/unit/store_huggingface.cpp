#include "engine/store/huggingface.h"

#include <cmath>
#include <cstring>

#include "engine/store/safetensors.h"
#include "gtest/gtest.h"
#include "tests/unit/huggingface_fixture.h"

namespace fp4t::test {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::json;
using Folder = HuggingFaceCopy;

// Parameters of a folder's model in an arena of their own.
struct Model {
  explicit Model(const ModelSpec& spec, DType masters = DType::kF32)
      : queue(Queue::cpu(1)),
        plan(plan_of(spec, masters)),
        arena(queue, "run", int64_t{16} << 20, Poison::kNan),
        params(arena, plan) {}
  static Plan plan_of(const ModelSpec& spec, DType masters) {
    Plan p;
    p.model = spec;
    p.dtypes.masters = masters;
    p.parameters = parameter_list(p.model, p.dtypes);
    p.buffers = buffer_list(p.model);
    return p;
  }
  std::map<std::string, NamedHostTensor> weights() {
    std::map<std::string, NamedHostTensor> out;
    for (NamedHostTensor& t : export_named(queue, plan, params, Exported::kWeights)) {
      EXPECT_TRUE(out.emplace(t.name, t).second) << t.name;
    }
    return out;
  }
  Queue queue;
  Plan plan;
  Arena arena;
  ParamSet params;
};

std::string import_error(const std::string& folder, const ModelSpec& spec) {
  Model model(spec);
  return error_of([&] { import_weights(model.queue, folder, model.plan, model.params); });
}

TEST(HuggingFaceWeights, every_value_arrives_under_the_librarys_name) {
  for (const char* family : {"qwen3", "qwen3_moe", "llama"}) {
    const std::string folder = golden(family);
    Model model(model_from_config(folder));
    import_weights(model.queue, folder, model.plan, model.params);
    const auto ours = model.weights();
    const SafetensorsFile file(folder + "/model.safetensors"), oracle(folder + "/oracle.safetensors");
    size_t gradients = 0;
    for (const StoredTensor& t : oracle.tensors()) {
      if (t.name.rfind("grad.", 0) != 0) continue;
      ++gradients;
      const auto it = ours.find(t.name.substr(5));
      ASSERT_NE(it, ours.end()) << t.name;
      EXPECT_EQ(it->second.dims, t.dims) << t.name;
    }
    EXPECT_EQ(gradients, ours.size()) << family;

    int64_t compared = 0;
    for (const StoredTensor& t : file.tensors()) {
      // The file's name of an expert's matrix, as name, first element and count of the stacked tensor.
      std::string name = t.name;
      int64_t begin = 0;
      const size_t at = name.find("experts.");
      if (at != std::string::npos) {
        const int64_t expert = std::stoll(name.substr(at + 8));
        const bool down = name.find("down_proj") != std::string::npos;
        const bool up = name.find("up_proj.weight") != std::string::npos;
        const int64_t matrix = t.dims[0] * t.dims[1];
        begin = down ? expert * matrix : (2 * expert + (up ? 1 : 0)) * matrix;
        name = name.substr(0, at + 8) + (down ? "down_proj" : "gate_up_proj");
      }
      ASSERT_TRUE(ours.count(name)) << name;
      const std::vector<float>& values = ours.at(name).values;
      const std::vector<uint8_t> bytes = file.read(t);
      const int64_t n = t.bytes() / t.dtype.bytes();
      for (int64_t i = 0; i < n; ++i, ++compared) {
        float expected;
        if (t.dtype == FileType::kF32) {
          std::memcpy(&expected, bytes.data() + 4 * i, 4);
        } else {
          Bf16 half;
          std::memcpy(&half, bytes.data() + 2 * i, 2);
          expected = from_bf16(half);
        }
        ASSERT_EQ(values[static_cast<size_t>(begin + i)], expected) << t.name << " element " << i;
      }
    }
    EXPECT_EQ(compared, total_parameters(model.plan.parameters)) << family;
  }
}

void stacked_import_equals_separate(const std::string& family) {
  const ModelSpec spec = model_from_config(golden(family));
  Model separate(spec);
  import_weights(separate.queue, golden(family), separate.plan, separate.params);

  Folder f(family);
  const auto of_experts = [](const std::string& name) {
    return name.find("experts.") != std::string::npos || name.find(".gate.weight") != std::string::npos;
  };
  for (auto it = f.tensors.begin(); it != f.tensors.end();) {
    it = of_experts(it->first) ? f.tensors.erase(it) : std::next(it);
  }
  for (const auto& [name, t] : separate.weights()) {
    if (!of_experts(name)) continue;
    EXPECT_NE(name.find(".mlp."), std::string::npos) << name;
    Folder::Tensor& stacked = f.tensors[name];
    stacked = {DType::kF32, t.dims, std::vector<uint8_t>(t.values.size() * 4)};
    std::memcpy(stacked.bytes.data(), t.values.data(), stacked.bytes.size());
  }
  Model stacked(spec);
  import_weights(stacked.queue, f.write(), stacked.plan, stacked.params);
  const auto a = separate.weights(), b = stacked.weights();
  ASSERT_EQ(a.size(), b.size());
  for (const auto& [name, t] : a) EXPECT_EQ(t.values, b.at(name).values) << name;
}

TEST(HuggingFaceWeights, stacked_experts_and_separate_ones_import_equally) {
  stacked_import_equals_separate("qwen3_moe");
  stacked_import_equals_separate("mixtral");
}

TEST(HuggingFaceWeights, half_precision_is_widened_exactly) {
  const ModelSpec spec = model_from_config(golden("llama"));
  Folder f("llama");
  Folder::Tensor& t = f.tensors["model.norm.weight"];
  const std::pair<uint16_t, float> cases[] = {
      {0x3C00, 1.0f},     {0xC000, -2.0f},       {0x0001, 0x1p-24f}, {0x83FF, -0x1.ff8p-15f},
      {0x7BFF, 65504.0f}, {0x3555, 0x1.554p-2f}, {0x8000, -0.0f},    {0x0400, 0x1p-14f}};
  t.dtype = FileType::kF16;
  t.bytes.assign(64 * 2, 0);
  for (size_t i = 0; i < std::size(cases); ++i) std::memcpy(t.bytes.data() + 2 * i, &cases[i].first, 2);
  Model model(spec);
  import_weights(model.queue, f.write(), model.plan, model.params);
  const std::vector<float> values = model.weights().at("model.norm.weight").values;
  for (size_t i = 0; i < std::size(cases); ++i) {
    EXPECT_EQ(values[i], cases[i].second) << i;
    EXPECT_EQ(std::signbit(values[i]), std::signbit(cases[i].second)) << i;
  }
}

TEST(HuggingFaceWeights, a_tied_head_may_be_stored_but_must_be_the_embedding) {
  const ModelSpec spec = model_from_config(golden("llama"));
  ASSERT_TRUE(spec.tied_head);
  Folder f("llama");
  f.tensors["lm_head.weight"] = f.tensors["model.embed_tokens.weight"];
  EXPECT_EQ(import_error(f.write(), spec), "");
  f.tensors["lm_head.weight"].bytes[7] ^= 1;
  EXPECT_NE(import_error(f.write(), spec).find("'lm_head.weight' is not the embedding"), std::string::npos);
}

TEST(HuggingFaceWeights, bf16_masters_round_and_norms_stay_fp32) {
  const std::string folder = golden("qwen3_moe");
  Model model(model_from_config(folder), DType::kBf16);
  import_weights(model.queue, folder, model.plan, model.params);
  EXPECT_EQ(model.params.find("embed.weight").master.dtype, DType::kBf16);
  EXPECT_EQ(model.params.find("norm.weight").master.dtype, DType::kF32);
  const SafetensorsFile file(folder + "/model.safetensors");
  const std::vector<uint8_t> bytes = file.read(file.find("model.embed_tokens.weight"));
  const std::vector<float> values = model.weights().at("model.embed_tokens.weight").values;
  for (size_t i = 0; i < values.size(); ++i) {
    float x;
    std::memcpy(&x, bytes.data() + 4 * i, 4);
    ASSERT_EQ(values[i], from_bf16(to_bf16(x))) << i;
  }
}

TEST(HuggingFaceWeights, selection_biases_become_zero) {
  const std::string folder = golden("qwen3_moe");
  Model model(model_from_config(folder));
  import_weights(model.queue, folder, model.plan, model.params);
  ASSERT_EQ(model.params.buffers().size(), 2u);
  for (const Buffer& b : model.params.buffers()) {
    for (int64_t i = 0; i < b.data.elements(); ++i) EXPECT_EQ(b.data.as<float>()[i], 0.0f);
  }
}

TEST(HuggingFaceWeights, each_absent_tensor_is_named) {
  const ModelSpec spec = model_from_config(golden("qwen3_moe"));
  const Folder all("qwen3_moe");
  for (const auto& [name, tensor] : all.tensors) {
    // One of each kind: layer 0 and expert 3 stand for the others.
    if (name.find("layers.1.") != std::string::npos) continue;
    if (name.find("experts.") != std::string::npos && name.find("experts.3.") == std::string::npos) continue;
    Folder f("qwen3_moe");
    f.tensors.erase(name);
    const std::string message = import_error(f.write(), spec);
    EXPECT_NE(message.find("'" + name + "' is missing"), std::string::npos) << message;
  }
}

TEST(HuggingFaceWeights, tensors_without_a_place_wrong_shapes_and_wrong_types_are_named) {
  const ModelSpec spec = model_from_config(golden("llama"));
  {
    Folder f("llama");
    f.tensors["model.layers.0.self_attn.q_proj.bias"] = {DType::kF32, {1}, {0, 0, 0, 0}};
    const std::string message = import_error(f.write(), spec);
    EXPECT_NE(message.find("'model.layers.0.self_attn.q_proj.bias' has no place"), std::string::npos)
        << message;
  }
  {
    Folder f("llama");
    f.tensors["model.layers.1.mlp.down_proj.weight"].dims = {96, 64};
    const std::string message = import_error(f.write(), spec);
    EXPECT_NE(
        message.find("'model.layers.1.mlp.down_proj.weight' has shape [96, 64], the model needs [64, 96]"),
        std::string::npos)
        << message;
  }
  {
    Folder f("llama");
    f.tensors["model.norm.weight"] = {DType::kF64, {64}, std::vector<uint8_t>(512)};
    const std::string message = import_error(f.write(), spec);
    EXPECT_NE(message.find("'model.norm.weight' is F64"), std::string::npos) << message;
  }
  {
    Folder f("llama");  // padded rows must not slip in
    Folder::Tensor& t = f.tensors["model.embed_tokens.weight"];
    t.dims[0] = 264;
    t.bytes.resize(264 * 64 * 2);
    const std::string message = import_error(f.write(), spec);
    EXPECT_NE(message.find("'model.embed_tokens.weight' has shape [264, 64]"), std::string::npos) << message;
  }
  {
    Folder f("qwen3_moe");  // the same experts in both layouts
    f.tensors["model.layers.0.mlp.experts.down_proj"] = {
        DType::kF32, {8, 64, 48}, std::vector<uint8_t>(8 * 64 * 48 * 4)};
    const std::string message = import_error(f.write(), model_from_config(golden("qwen3_moe")));
    EXPECT_NE(message.find("experts.0.down_proj.weight' has no place"), std::string::npos) << message;
  }
}

TEST(HuggingFaceWeights, values_that_are_no_numbers_are_named_with_their_place) {
  const ModelSpec spec = model_from_config(golden("qwen3"));
  const std::string name = "model.layers.1.mlp.up_proj.weight";
  for (const float bad : {NAN, INFINITY, -INFINITY}) {
    Folder f("qwen3");
    std::memcpy(f.tensors[name].bytes.data() + 7 * sizeof(bad), &bad, sizeof bad);
    const std::string message = import_error(f.write(), spec);
    EXPECT_NE(message.find("'" + name + "' holds "), std::string::npos) << message;
    EXPECT_NE(message.find("as its element 7"), std::string::npos) << message;
  }
}

TEST(HuggingFaceWeights, a_recipe_for_another_model_is_refused_with_every_key) {
  ModelSpec spec = model_from_config(golden("qwen3_moe"));
  spec.rope.theta = 1e6;
  spec.moe.normalise = false;
  Model model(spec);
  try {
    import_weights(model.queue, golden("qwen3_moe"), model.plan, model.params);
    ADD_FAILURE() << "accepted";
  } catch (const RecipeError& error) {
    const std::string message = error.what();
    EXPECT_NE(message.find("model.rope.theta is 1e+06, the folder's is 10000"), std::string::npos) << message;
    EXPECT_NE(message.find("model.moe.normalise"), std::string::npos) << message;
  }
}

TEST(HuggingFaceWeights, sharded_folders_follow_their_index) {
  const ModelSpec spec = model_from_config(golden("llama"));
  Folder f("llama");
  f.write();
  fs::remove(f / "model.safetensors");
  EXPECT_NE(import_error(f.path(), spec).find("model.safetensors"), std::string::npos);

  const std::string first = "model-00001-of-00002.safetensors", second = "model-00002-of-00002.safetensors";
  const auto in_first = [](const std::string& name) { return name.find("layers.0") != std::string::npos; };
  f.write_part(first, in_first);
  f.write_part(second, [&](const std::string& name) { return !in_first(name); });
  Json index = {{"metadata", {{"total_size", 1}}}};
  for (const auto& [name, tensor] : f.tensors) index["weight_map"][name] = in_first(name) ? first : second;
  const std::string index_file = f / "model.safetensors.index.json";
  set_file(index_file, index.dump());
  EXPECT_EQ(import_error(f.path(), spec), "");
  f.write();  // the library would read this one
  EXPECT_NE(import_error(f.path(), spec).find("has both model.safetensors and"), std::string::npos);
  fs::remove(f / "model.safetensors");

  Json changed = index;
  changed["weight_map"]["model.norm.weight"] = first;
  set_file(index_file, changed.dump());
  EXPECT_NE(import_error(f.path(), spec).find("'model.norm.weight' is not in"), std::string::npos);
  changed = index;
  changed["weight_map"].erase("model.norm.weight");
  set_file(index_file, changed.dump());
  EXPECT_NE(import_error(f.path(), spec).find("'model.norm.weight'"), std::string::npos);
  changed = index;
  changed["weight_map"]["model.norm.weight"] = "../" + second;
  set_file(index_file, changed.dump());
  EXPECT_NE(import_error(f.path(), spec).find("no file of this folder"), std::string::npos);
  set_file(index_file, "{}");
  EXPECT_THROW(
      {
        Model model(spec);
        import_weights(model.queue, f.path(), model.plan, model.params);
      },
      BadDataError);
}

}  // namespace
}  // namespace fp4t::test

// Exported codes against the contract: what an independent reader makes of the low-precision layouts is, bit
// for bit, what an independent quantiser makes of the fused BF16 matrices, and the two NVFP4 layouts agree.
#include <algorithm>
#include <map>

#include "engine/recipe/huggingface_config.h"
#include "engine/recipe/load.h"
#include "engine/stage/convert.h"
#include "engine/stage/resume.h"
#include "gtest/gtest.h"
#include "tests/formats/reference.h"
#include "tests/reference/exported_reader.h"
#include "tests/support/process.h"

namespace fp4t::test {
namespace {

using detail::concat;

const char* const kModel = R"(run: {name: e, threads: 1}
model: {layers: 2, hidden: 64, heads: 4, kv_heads: 2, head_dim: 16, qk_norm: true, max_positions: 64,
        moe: {experts: 3, top_k: 2, hidden: 48}}
stages:
  - pretrain: {steps: 1, batch: {tokens: 64, length: 32}, data: [{kind: sums}]}
)";

// A checkpoint of random weights, made without a run: masters of several magnitudes, zero blocks among them.
class Made {
 public:
  explicit Made(const std::string& precision, const std::vector<std::string>& overrides = {}) {
    plan = make_plan(parse_recipe(kModel + precision, "r", overrides).recipe, probe_machine("cpu", 1), {});
    RunState state;
    state.recipe_yaml = recorded_recipe(plan.recipe_yaml);
    state.precision_hash = plan.precision_hash;
    std::vector<NamedTensor> tensors;
    uint32_t x = 12345;
    const auto draw = [&] {
      x = x * 1664525u + 1013904223u;
      return static_cast<float>(static_cast<int32_t>(x >> 8) - (1 << 23)) * 0x1p-24f;
    };
    for (const ParamInfo& info : plan.parameters) {
      std::vector<float>& v = values[info.name];
      for (int64_t i = 0; i < info.shape.elements(); ++i) {
        v.push_back(i / 16 % 7 == 3 ? 0.0f : draw() * (i / 16 % 5 == 0 ? 30.0f : 1.0f));
      }
      tensors.push_back({"model." + info.name, {v.data(), DType::kF32, info.shape}});
    }
    for (const BufferInfo& b : plan.buffers) {
      values[b.name].assign(static_cast<size_t>(b.shape.elements()), 0.0f);
      tensors.push_back({"model." + b.name, {values[b.name].data(), DType::kF32, b.shape}});
    }
    Queue queue = Queue::cpu(1);
    path = folder / "ckpt";
    std::filesystem::create_directory(path);
    write_checkpoint(queue, path, tensors, state, {}, {}, {});
  }

  std::string export_as(ExportLayout layout, const std::string& table = "pretrain.forward") {
    ExportRequest request;
    request.checkpoint = path;
    request.to = folder / concat("out", ++count_);
    request.options.layout = layout;
    request.table = table;
    report = export_checkpoint(request);
    return request.to;
  }

  ScratchFolder folder;
  Plan plan;
  std::map<std::string, std::vector<float>> values;  // of parameters, by name
  std::string path, report;

 private:
  int count_ = 0;
};

// Rows [begin, begin + count) of a parameter read as [rows, cols].
Matrix rows_of(const Made& made, const std::string& name, int64_t begin, int64_t count, int64_t cols) {
  Matrix m{count, cols, {}};
  const std::vector<float>& v = made.values.at(name);
  for (int64_t i = begin * cols; i < (begin + count) * cols; ++i) {
    m.v.push_back(bf16_to_f32(f32_to_bf16(v[static_cast<size_t>(i)])));
  }
  return m;
}

// What fprop multiplies of a whole scale domain: (q * s) * S.
Matrix multiplied(const Matrix& x, const QuantSpec& spec) {
  const ReferenceResult r = reference_quantize(x, spec, {});
  const int64_t block = block_length(spec), height = outer_padding(spec);
  Matrix out{x.rows, x.cols, {}};
  for (int64_t row = 0; row < x.rows; ++row) {
    for (int64_t c = 0; c < x.cols; ++c) {
      const auto i = static_cast<size_t>(row * r.rotated.cols + c);
      const uint32_t s =
          r.block_scales[static_cast<size_t>(row / height * (r.rotated.cols / block) + c / block)];
      out.v.push_back(spec.format == Format::kNvfp4
                          ? e2m1_value(r.codes[i / 2] >> (i % 2 * 4) & 15u) * e4m3_value(s) *
                                r.tensor_scale[0]
                          : e4m3_value(r.codes[i]) * std::ldexp(1.0f, static_cast<int>(s) - 127));
    }
  }
  return out;
}

struct Piece {
  std::string module;  // of the library
  int64_t rows;
};
// One scale domain: rows of one of our parameters, and the matrices of the library that they are.
struct Domain {
  std::string parameter;
  int64_t begin, cols;
  std::vector<Piece> pieces;
};

std::vector<Domain> domains_of(int64_t layer) {
  const std::string ours = concat("layers.", layer, "."), theirs = "model." + ours;
  std::vector<Domain> list = {{ours + "attn.qkv.weight",
                               0,
                               64,
                               {{theirs + "self_attn.q_proj", 64},
                                {theirs + "self_attn.k_proj", 32},
                                {theirs + "self_attn.v_proj", 32}}},
                              {ours + "attn.out.weight", 0, 64, {{theirs + "self_attn.o_proj", 64}}}};
  for (int64_t e = 0; e < 3; ++e) {
    const std::string expert = concat(theirs, "mlp.experts.", e, ".");
    list.push_back({ours + "experts.gate_up.weight",
                    e * 96,
                    64,
                    {{expert + "gate_proj", 48}, {expert + "up_proj", 48}}});
    list.push_back({ours + "experts.down.weight", e * 64, 48, {{expert + "down_proj", 64}}});
  }
  return list;
}

// Every matrix of a layer is the reference's, bit for bit; `spec_of` says how a parameter is coded.
template <class SpecOf>
void expect_trainers_values(const Made& made, const ExportedReader& reader, const SpecOf& spec_of) {
  for (int64_t layer = 0; layer < 2; ++layer) {
    for (const Domain& d : domains_of(layer)) {
      const QuantSpec spec = spec_of(d.parameter);
      int64_t rows = 0;
      for (const Piece& p : d.pieces) rows += p.rows;
      Matrix expected = rows_of(made, d.parameter, d.begin, rows, d.cols);
      if (spec.quantised()) expected = multiplied(expected, spec);
      int64_t begin = 0;
      float scale = 0;
      for (const Piece& p : d.pieces) {
        const ReadMatrix got = reader.matrix(p.module);
        ASSERT_EQ(got.rows, p.rows) << p.module;
        ASSERT_EQ(got.cols, d.cols) << p.module;
        EXPECT_EQ(got.coded, spec.quantised()) << p.module;
        EXPECT_EQ(reader.is_ignored(p.module), !spec.quantised()) << p.module;
        const float* from = expected.v.data() + begin * d.cols;
        EXPECT_EQ(std::memcmp(got.values.data(), from, got.values.size() * sizeof(float)), 0) << p.module;
        if (begin == 0) scale = got.decode_scale;
        EXPECT_EQ(got.decode_scale, scale) << p.module << ": fused matrices share their scale";
        begin += p.rows;
      }
    }
  }
}

TEST(Exported, nvfp4_layouts_dequantise_to_what_fprop_multiplies) {
  const struct {
    const char* rule;
    QuantSpec spec;
  } cases[] = {
      {"format: nvfp4", {.format = Format::kNvfp4}},
      {"format: nvfp4, block: 16x16", {.format = Format::kNvfp4, .block = BlockShape::k16x16}},
      {"format: nvfp4, scale_rule: four_over_six",
       {.format = Format::kNvfp4, .scale_rule = ScaleRule::kFourOverSix}},
      {"format: nvfp4, scale_round: pow2", {.format = Format::kNvfp4, .scale_round = ScaleRound::kPow2}},
  };
  for (const auto& c : cases) {
    Made made(concat("precision: {pretrain.forward: [{module: [attn.*, experts.*], ", c.rule, "}]}\n"));
    const std::string modelopt = made.export_as(ExportLayout::kModeloptNvfp4);
    const ExportedReader a(modelopt), b(made.export_as(ExportLayout::kCompressedTensorsNvfp4));
    const auto spec_of = [&](const std::string&) { return c.spec; };
    expect_trainers_values(made, a, spec_of);
    expect_trainers_values(made, b, spec_of);
    for (int64_t layer = 0; layer < 2; ++layer) {
      for (const Domain& d : domains_of(layer)) {
        for (const Piece& p : d.pieces) {
          const ReadMatrix x = a.matrix(p.module), y = b.matrix(p.module);
          EXPECT_EQ(x.codes, y.codes) << p.module;
          EXPECT_EQ(x.block_scales, y.block_scales) << p.module;
          EXPECT_EQ(x.decode_scale, y.decode_scale) << p.module;
          EXPECT_GT(a.input_scale(p.module), 0) << p.module;
          EXPECT_EQ(a.input_scale(p.module), b.input_scale(p.module)) << p.module;
          EXPECT_EQ(a.input_scale(p.module), a.input_scale(d.pieces[0].module)) << p.module;
        }
      }
    }
    for (const char* module : {"lm_head", "model.layers.0.mlp.gate"}) {
      EXPECT_TRUE(a.is_ignored(module) && b.is_ignored(module)) << module;
      EXPECT_EQ(a.matrix(module).values, b.matrix(module).values) << module;
    }
    const auto declared =
        nlohmann::json::parse(read_text(modelopt + "/hf_quant_config.json")).at("quantization");
    EXPECT_EQ(declared.at("quant_algo"), "NVFP4");
    EXPECT_EQ(declared.at("group_size"), 16);
    EXPECT_NE(made.report.find("26 of 39 matrices are codes"), std::string::npos) << made.report;
  }
}

TEST(Exported, mxfp8_dequantises_to_what_fprop_multiplies) {
  const std::string rule = "precision: {pretrain.forward: [{module: attn.*, format: mxfp8}]}\n";
  Made made(rule);
  const ExportedReader reader(made.export_as(ExportLayout::kMxfp8));
  expect_trainers_values(made, reader, [](const std::string& name) {
    return name.find("attn") != std::string::npos ? QuantSpec{.format = Format::kMxfp8} : QuantSpec{};
  });
}

TEST(Exported, layers_that_the_table_leaves_are_numbers_and_ignored) {
  Made made(
      "precision: {pretrain.forward: [{layers: last 1, format: bf16, module: \"*\"}, "
      "{module: \"experts.*\", format: nvfp4}]}\n");
  const ExportedReader reader(made.export_as(ExportLayout::kModeloptNvfp4));
  expect_trainers_values(made, reader, [](const std::string& name) {
    const bool coded = name.find("layers.0.experts") != std::string::npos;
    return coded ? QuantSpec{.format = Format::kNvfp4} : QuantSpec{};
  });
}

std::string refusal(const std::string& precision, ExportLayout layout,
                    const std::vector<std::string>& overrides = {}) {
  Made made(precision, overrides);
  try {
    made.export_as(layout);
  } catch (const RecipeError& error) {
    EXPECT_FALSE(std::filesystem::exists(made.folder / "out1"));
    return error.what();
  }
  ADD_FAILURE() << "exported";
  return "";
}

TEST(Exported, codes_that_no_file_can_hold_are_refused_by_cell) {
  const auto expect = [](const std::string& message, const std::vector<std::string>& words) {
    for (const std::string& w : words)
      EXPECT_NE(message.find(w), std::string::npos) << w << " in " << message;
  };
  expect(refusal("precision: {pretrain.forward: [{module: attn.*, format: mxfp8}]}\n",
                 ExportLayout::kModeloptNvfp4),
         {"layers.0 attn.qkv fprop weight is mxfp8", "nvfp4 alone"});
  expect(refusal("precision: {pretrain.forward: [{module: attn.*, format: nvfp4, hadamard: 16}]}\n",
                 ExportLayout::kCompressedTensorsNvfp4),
         {"layers.0 attn.qkv fprop weight", "rotated"});
  expect(refusal("precision: {pretrain.forward: [{module: \"experts.*\", format: mxfp8}]}\n",
                 ExportLayout::kMxfp8),
         {"layers.0 experts.down fprop weight", "rows of 48", "32"});
  expect(refusal("", ExportLayout::kMxfp8), {"no weight of the table is mxfp8"});
  expect(refusal("precision: {pretrain.forward: [{module: head, format: nvfp4}]}\n",
                 ExportLayout::kModeloptNvfp4, {"model.tied_head=true"}),
         {"model.tied_head"});
}

TEST(Exported, models_of_no_family_are_refused_with_every_key) {
  ModelSpec m = parse_recipe(kModel, "r", {}).recipe.model;
  EXPECT_EQ(exportable_family(m), Family::kQwen3Moe);
  m.moe.shared_experts = 1;
  m.moe.router = "sigmoid";
  m.swiglu_clamp = 7;
  try {
    exportable_family(m);
    ADD_FAILURE() << "accepted";
  } catch (const RecipeError& error) {
    const std::string message = error.what();
    for (const char* key :
         {"model.moe.shared_experts is 1", "model.moe.router is sigmoid", "model.swiglu_clamp is 7"}) {
      EXPECT_NE(message.find(key), std::string::npos) << message;
    }
  }
  m = parse_recipe(kModel, "r", {"model.qk_norm=false", "model.moe.dense_layers=1", "model.mlp_hidden=64"})
          .recipe.model;
  EXPECT_THROW(exportable_family(m), RecipeError);
  m.moe.dense_layers = 0;
  EXPECT_EQ(exportable_family(m), Family::kMixtral);
  m.moe.normalise = false;
  EXPECT_THROW(exportable_family(m), RecipeError);
}

TEST(Exported, an_export_that_stops_at_any_step_leaves_nothing) {
  Made made("");
  std::vector<std::string> steps;
  ExportOptions options;
  options.hook = [&](const std::string& step) { steps.push_back(step); };
  ExportModel model(made.path, made.plan, nullptr, Format::kBf16);
  write_export(model, made.folder / "whole", options);
  ASSERT_GT(steps.size(), 4u);
  for (size_t stop = 0; stop < steps.size(); ++stop) {
    size_t step = 0;
    options.hook = [&](const std::string& name) {
      if (step++ == stop) throw SaveError("stopped at " + name);
    };
    EXPECT_THROW(write_export(model, made.folder / "out", options), SaveError) << steps[stop];
    if (stop + 1 == steps.size()) break;  // it stands, only its name may not be on the disk yet
    EXPECT_FALSE(std::filesystem::exists(made.folder / "out")) << steps[stop];
    for (const auto& entry : std::filesystem::directory_iterator(made.folder.path())) {
      EXPECT_EQ(entry.path().string().find(".tmp."), std::string::npos) << steps[stop];
    }
  }
}

TEST(Exported, encode_scales_are_reciprocals_whose_reciprocal_is_exact) {
  uint32_t x = 99;
  for (int i = 0; i < 20000; ++i) {
    x = x * 1664525u + 1013904223u;
    const float amax =
        std::ldexp(1.0f + static_cast<float>(x >> 8) * 0x1p-24f, static_cast<int>(x % 60) - 30);
    const float decode = 1.0f / (2688.0f / amax);
    EXPECT_EQ(1.0f / encode_scale(decode), decode) << amax;
  }
}

}  // namespace
}  // namespace fp4t::test

#include "engine/plan/parameters.h"

#include "engine/plan/modules.h"
#include "kernels/base/numeric.h"

namespace fp4t {

namespace {

// Collects the list in the order in which a token meets the parameters.
class ListBuilder {
 public:
  ListBuilder(const ModelSpec& model, const DtypesSpec& dtypes) : model_(model), dtypes_(dtypes) {}

  void embedding() {
    add("embed.weight", {model_.vocabulary, model_.hidden}, ParamRole::kEmbedding, Module::kEmbed, -1);
  }
  void norm(const std::string& name, int64_t size, int64_t layer) {
    add(name, {size}, ParamRole::kNorm, Module::kEmbed, layer);
  }
  void router(const std::string& name, int64_t layer) {
    add(name, {model_.moe.experts, model_.hidden}, ParamRole::kRouter, Module::kEmbed, layer);
  }
  void matrix(Module module, int64_t out, int64_t in, int64_t layer) {
    add(weight_name(module, layer), {out, in}, ParamRole::kGemmWeight, module, layer);
  }
  void experts(Module module, int64_t out, int64_t in, int64_t layer) {
    add(weight_name(module, layer), {model_.moe.experts, out, in}, ParamRole::kExpertWeight, module, layer);
  }
  std::vector<ParamInfo> take() { return std::move(list_); }

 private:
  static std::string weight_name(Module module, int64_t layer) {
    const std::string tail = std::string(name_of(module)) + ".weight";
    return layer < 0 ? tail : "layers." + std::to_string(layer) + "." + tail;
  }

  void add(const std::string& name, const Shape& shape, ParamRole role, Module module, int64_t layer) {
    const bool residual_out = module == Module::kAttnOut || module == Module::kMlpDown ||
                              module == Module::kExpertsDown || module == Module::kSharedDown;
    // Few rows gather many small contributions here, so these never go below FP32 (DESIGN.md section 4).
    const bool plain_matrix =
        (role == ParamRole::kGemmWeight && module != Module::kHead) || role == ParamRole::kExpertWeight;
    list_.push_back({name, shape, role, module, layer,
                     role == ParamRole::kExpertWeight ? Placement::kSplitByExpert : Placement::kReplicated,
                     role != ParamRole::kNorm, residual_out, plain_matrix ? dtypes_.gradients : DType::kF32,
                     narrow<uint32_t>(static_cast<int64_t>(list_.size()))});
  }

  const ModelSpec& model_;
  const DtypesSpec& dtypes_;
  std::vector<ParamInfo> list_;
};

void add_attention(ListBuilder& list, const ModelSpec& model, int64_t layer) {
  const std::string prefix = "layers." + std::to_string(layer) + ".";
  list.norm(prefix + "attn_norm.weight", model.hidden, layer);
  list.matrix(Module::kAttnQkv, (model.heads + 2 * model.kv_heads) * model.head_dim, model.hidden, layer);
  if (model.qk_norm) {
    list.norm(prefix + "attn.q_norm.weight", model.head_dim, layer);
    list.norm(prefix + "attn.k_norm.weight", model.head_dim, layer);
  }
  list.matrix(Module::kAttnOut, model.hidden, model.heads * model.head_dim, layer);
}

void add_feed_forward(ListBuilder& list, const ModelSpec& model, int64_t layer) {
  const std::string prefix = "layers." + std::to_string(layer) + ".";
  const MoeSpec& moe = model.moe;
  list.norm(prefix + "mlp_norm.weight", model.hidden, layer);
  if (!is_moe_layer(model, layer)) {
    list.matrix(Module::kMlpGateUp, 2 * model.mlp_hidden, model.hidden, layer);
    list.matrix(Module::kMlpDown, model.hidden, model.mlp_hidden, layer);
    return;
  }
  list.router(prefix + "router.weight", layer);
  list.experts(Module::kExpertsGateUp, 2 * moe.hidden, model.hidden, layer);
  list.experts(Module::kExpertsDown, model.hidden, moe.hidden, layer);
  if (moe.shared_experts > 0) {
    const int64_t width = shared_width(model);
    list.matrix(Module::kSharedGateUp, 2 * width, model.hidden, layer);
    list.matrix(Module::kSharedDown, model.hidden, width, layer);
  }
}

}  // namespace

bool is_moe_layer(const ModelSpec& model, int64_t layer) {
  return model.moe.experts > 0 && layer >= model.moe.dense_layers;
}

int64_t shared_width(const ModelSpec& model) {
  const int64_t one = model.moe.shared_hidden > 0 ? model.moe.shared_hidden : model.moe.hidden;
  return model.moe.shared_experts * one;
}

std::vector<ParamInfo> parameter_list(const ModelSpec& model, const DtypesSpec& dtypes) {
  ListBuilder list(model, dtypes);
  list.embedding();
  for (int64_t layer = 0; layer < model.layers; ++layer) {
    add_attention(list, model, layer);
    add_feed_forward(list, model, layer);
  }
  list.norm("norm.weight", model.hidden, -1);
  if (!model.tied_head) list.matrix(Module::kHead, model.vocabulary, model.hidden, -1);
  return list.take();
}

std::vector<BufferInfo> buffer_list(const ModelSpec& model) {
  std::vector<BufferInfo> list;
  for (int64_t layer = 0; layer < model.layers; ++layer) {
    if (!is_moe_layer(model, layer)) continue;
    list.push_back({"layers." + std::to_string(layer) + ".router.bias", {model.moe.experts}, DType::kF32});
  }
  return list;
}

int64_t total_parameters(const std::vector<ParamInfo>& list) {
  int64_t n = 0;
  for (const ParamInfo& p : list) n += p.shape.elements();
  return n;
}

int64_t active_parameters(const std::vector<ParamInfo>& list, const ModelSpec& model) {
  int64_t n = 0;
  for (const ParamInfo& p : list) {
    if (p.role == ParamRole::kExpertWeight) {
      n += p.shape.elements() / model.moe.experts * model.moe.top_k;
    } else if (p.role != ParamRole::kEmbedding || model.tied_head) {
      n += p.shape.elements();  // a tied embedding is counted as the head
    }
  }
  return n;
}

}  // namespace fp4t

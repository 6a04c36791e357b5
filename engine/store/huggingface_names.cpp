#include "engine/store/huggingface_names.h"

#include "engine/store/safetensors.h"
#include "kernels/base/check.h"

namespace fp4t {

namespace {

// Collects pieces one after another, so that offsets follow from sizes.
class Pieces {
 public:
  void add(const std::string& name, const std::vector<int64_t>& dims) {
    list_.push_back({name, dims, next_});
    next_ += list_.back().elements();
  }
  std::vector<LibraryPiece> take() { return std::move(list_); }

 private:
  std::vector<LibraryPiece> list_;
  int64_t next_ = 0;
};

void add_qkv(Pieces& out, const std::string& prefix, const ModelSpec& m) {
  out.add(prefix + "self_attn.q_proj.weight", {m.heads * m.head_dim, m.hidden});
  out.add(prefix + "self_attn.k_proj.weight", {m.kv_heads * m.head_dim, m.hidden});
  out.add(prefix + "self_attn.v_proj.weight", {m.kv_heads * m.head_dim, m.hidden});
}

// Of one expert: of Mixtral's w1 gates, w3 goes up and w2 down.
struct ExpertNames {
  const char *gate, *up, *down;
};
constexpr ExpertNames kQwen = {"gate_proj", "up_proj", "down_proj"}, kMixtral = {"w1", "w3", "w2"};

void add_experts(Pieces& out, const std::string& layer, const ParamInfo& info, Family family,
                 ExpertLayout layout) {
  const bool gate_up = info.module == Module::kExpertsGateUp;
  if (layout == ExpertLayout::kStacked) {
    out.add(layer + "mlp.experts." + (gate_up ? "gate_up_proj" : "down_proj"), dims_of(info.shape));
    return;
  }
  const bool mixtral = family == Family::kMixtral;
  const ExpertNames& names = mixtral ? kMixtral : kQwen;
  const std::string experts = layer + (mixtral ? "block_sparse_moe" : "mlp") + ".experts.";
  for (int64_t e = 0; e < info.shape[0]; ++e) {
    const auto add = [&](const char* name, int64_t rows) {
      out.add(experts + std::to_string(e) + "." + name + ".weight", {rows, info.shape[2]});
    };
    if (gate_up) {
      add(names.gate, info.shape[1] / 2);
      add(names.up, info.shape[1] / 2);
    } else {
      add(names.down, info.shape[1]);
    }
  }
}

// The rest of our name after "layers.<n>." and before ".weight", and the library's for it.
struct Alias {
  const char* ours;
  const char* theirs;
};
constexpr Alias kAliases[] = {
    {"attn_norm", "input_layernorm"},    {"mlp_norm", "post_attention_layernorm"},
    {"attn.out", "self_attn.o_proj"},    {"attn.q_norm", "self_attn.q_norm"},
    {"attn.k_norm", "self_attn.k_norm"}, {"mlp.down", "mlp.down_proj"},
};
constexpr Alias kTopAliases[] = {
    {"embed.weight", "model.embed_tokens.weight"},
    {"norm.weight", "model.norm.weight"},
    {"head.weight", "lm_head.weight"},
};

}  // namespace

int64_t LibraryPiece::elements() const {
  int64_t n = 1;
  for (const int64_t d : dims) n *= d;
  return n;
}

Family family_of(const ModelSpec& model) {
  if (model.moe.experts > 0) return model.qk_norm ? Family::kQwen3Moe : Family::kMixtral;
  return model.qk_norm ? Family::kQwen3 : Family::kLlama;
}

std::vector<LibraryPiece> library_pieces(const ParamInfo& info, const ModelSpec& model, ExpertLayout layout) {
  const Family family = family_of(model);
  Pieces out;
  for (const Alias& a : kTopAliases) {
    if (info.name == a.ours) out.add(a.theirs, dims_of(info.shape));
  }
  if (info.layer >= 0) {
    const std::string ours = "layers." + std::to_string(info.layer) + ".";
    const std::string theirs = "model." + ours;
    for (const Alias& a : kAliases) {
      if (info.name == ours + a.ours + ".weight") out.add(theirs + a.theirs + ".weight", dims_of(info.shape));
    }
    if (info.role == ParamRole::kRouter) {
      const bool own = family == Family::kMixtral && layout == ExpertLayout::kSeparate;
      out.add(theirs + (own ? "block_sparse_moe" : "mlp") + ".gate.weight", dims_of(info.shape));
    }
    if (info.role == ParamRole::kGemmWeight && info.module == Module::kAttnQkv) add_qkv(out, theirs, model);
    if (info.role == ParamRole::kExpertWeight) add_experts(out, theirs, info, family, layout);
    if (info.role == ParamRole::kGemmWeight && info.module == Module::kMlpGateUp) {
      out.add(theirs + "mlp.gate_proj.weight", {info.shape[0] / 2, info.shape[1]});
      out.add(theirs + "mlp.up_proj.weight", {info.shape[0] / 2, info.shape[1]});
    }
  }
  std::vector<LibraryPiece> pieces = out.take();
  if (pieces.empty()) {
    throw BadDataError("parameter '" + info.name +
                       "' has no place in the families qwen3, qwen3_moe, mixtral and llama");
  }
  return pieces;
}

}  // namespace fp4t

#include "engine/plan/memory.h"

#include <algorithm>
#include <set>

#include "engine/plan/cache_layout.h"
#include "engine/plan/dims.h"
#include "engine/plan/operands.h"
#include "engine/plan/run_layout.h"
#include "engine/plan/scratch_layout.h"
#include "engine/plan/step_layout.h"
#include "kernels/base/arena.h"
#include "kernels/base/numeric.h"

namespace fp4t {

namespace {

// Stands in for an arena: sums what it would hand out, by block name.
class Pricer {
 public:
  TensorView operator()(const std::string& block, DType dtype, const Shape& shape) {
    add(block, shape.elements() * dtype_bytes(dtype));
    return {nullptr, dtype, shape};
  }
  void add(const std::string& block, int64_t bytes) {
    const int64_t taken = Arena::block_bytes(bytes);
    total_ += taken;
    const auto line =
        std::find_if(lines_.begin(), lines_.end(), [&](const MemoryLine& l) { return l.name == block; });
    if (line == lines_.end()) {
      lines_.push_back({block, taken});
    } else {
      line->bytes += taken;
    }
  }
  void add_all(const Pricer& other) {
    for (const MemoryLine& l : other.lines_) add(l.name, l.bytes);  // whole blocks
  }
  int64_t total() const { return total_; }
  const std::vector<MemoryLine>& lines() const { return lines_; }

 private:
  std::vector<MemoryLine> lines_;
  int64_t total_ = 0;
};

bool needs_reference(const Plan& plan) {
  return std::any_of(plan.stages.begin(), plan.stages.end(),
                     [](const StagePlan& s) { return s.is_rl && std::get<RlSpec>(s.spec).objective.kl > 0; });
}

// Room for Muon's orthogonalisation, one matrix at a time: the update of a whole parameter, three matrices
// of its shape and three Gram matrices, all F32.
void price_muon(const Plan& plan, Pricer& p) {
  const bool used = std::any_of(plan.stages.begin(), plan.stages.end(), [](const StagePlan& s) {
    return std::visit([](const auto& spec) { return spec.optimizer.kind == "muon"; }, s.spec);
  });
  if (!used) return;
  int64_t parameter = 0, matrix = 0, side = 0;
  for (const ParamInfo& info : plan.parameters) {
    if (info.role != ParamRole::kGemmWeight && info.role != ParamRole::kExpertWeight) continue;
    const int last = info.shape.rank() - 1;
    parameter = std::max(parameter, plan.shards.held(info, 0).count());  // all hold as much
    matrix = std::max(matrix, info.shape[last - 1] * info.shape[last]);
    side = std::max(side, std::min(info.shape[last - 1], info.shape[last]));
  }
  p("optimizer scratch", DType::kF32, {parameter});
  for (int i = 0; i < 3; ++i) {
    p("optimizer scratch", DType::kF32, {matrix});
    p("optimizer scratch", DType::kF32, {side, side});
  }
}

Pricer price_weight_codes(const Plan& plan, const std::vector<GemmSite>& sites) {
  Pricer p;
  for (const GemmSite& site : sites) {
    for (const OperandForm& form : cached_forms(plan, site)) take_cached(form, site, p);
  }
  return p;
}

// `alike`: what is so on all ranks.
Pricer price_run_of(int64_t rank, const Plan& plan, const ModelDims& dims, int64_t num_sites,
                    const Pricer& alike) {
  Pricer p;
  for (const ParamInfo& info : plan.parameters) take_param(info, plan, rank, p);
  take_shared_blocks(plan, shared_places(plan, rank), p);
  for (const BufferInfo& b : plan.buffers) p("buffers", b.dtype, b.shape);
  take_state(dims, num_sites, num_moe_layers(plan.model), p);
  p.add_all(alike);
  for (const ParamInfo& info : plan.parameters) {
    const DType moments = master_dtype(info, {plan.dtypes.moments, plan.dtypes.moments, DType::kF32});
    for (int i = 0; i < 2; ++i) p("optimizer moments", moments, owned_shape(info, plan, rank));
  }
  if (plan.shards.is_sharded()) take_exchange(plan, p);
  for (int i = 0; i < 16; ++i) p("optimizer scalars", DType::kF64, {1});
  price_muon(plan, p);
  if (needs_reference(plan)) {
    for (const ParamInfo& info : plan.parameters) {
      p("reference policy", master_dtype(info, plan.dtypes),
        master_is_part(info, plan) ? owned_shape(info, plan, rank) : held_shape(info, plan, rank));
    }
    for (const BufferInfo& b : plan.buffers) p("reference policy", b.dtype, b.shape);
  }
  return p;
}

// Of the rank that needs most.
Pricer price_run(const Plan& plan, const ModelDims& dims, const std::vector<GemmSite>& sites) {
  Pricer most;
  Pricer alike = price_weight_codes(plan, sites);
  if (plan.shards.is_sharded()) alike("norm chunks", DType::kF64, {most_owned_chunks(plan), 2});
  for (int64_t rank = 0; rank < plan.axes.ranks(); ++rank) {
    const Pricer p = price_run_of(rank, plan, dims, static_cast<int64_t>(sites.size()), alike);
    if (p.total() > most.total()) most = p;
  }
  return most;
}

// The larger of the phases lies over the smaller one.
struct StepPrice {
  Pricer common, train, decode;
};
StepPrice price_step(const Plan& plan, const ModelDims& dims) {
  StepPrice s;
  take_token_blocks(plan, s.common);
  for (const TablePair& tables : table_pairs(plan)) {
    Pricer train;
    take_batch_acts(plan, dims, tables, plan.max_tokens, keep_for_backward(plan.parallel), train);
    if (train.total() > s.train.total()) s.train = train;
  }
  if (plan.max_cache_slots > 0) {
    for (int64_t l = 0; l < dims.layers; ++l) s.decode.add("key-value cache", max_cache_bytes(plan));
    s.decode.add("page table", page_table_bytes(plan));
    take_batch_acts(plan, dims, {}, plan.max_decode_tokens, Keep::kNothing, s.decode);
    take_decode_head(dims, max_logit_rows(plan), s.decode);
  }
  return s;
}

int64_t largest_gemm_scratch(const Plan& plan, const ModelDims& dims, const std::vector<GemmSite>& sites) {
  int64_t bytes = 0;
  for (const TablePair& tables : table_pairs(plan)) {
    for (const GemmSite& site : sites) {
      const int64_t train = site_rows(dims, site, plan.max_tokens);
      const int64_t decode = site_rows(dims, site, plan.max_decode_tokens);
      bytes = std::max(bytes, gemm_scratch_bytes(site, tables, train));
      bytes = std::max(bytes, gemm_scratch_bytes(site, {tables.forward, nullptr}, decode));
    }
  }
  return bytes;
}

// One block, or the head, at a time: the largest of what the parts of a step hold besides a product's
// operands.
Pricer largest_block_scratch(const Plan& plan, const ModelDims& dims) {
  std::vector<Pricer> parts;
  std::set<Format> dispatch_formats = {Format::kBf16};
  for (const TablePair& tables : table_pairs(plan)) dispatch_formats.insert(tables.forward->dispatch);
  for (int64_t l = 0; l < dims.layers; ++l) {
    const bool is_moe = is_moe_layer(plan.model, l);
    for (const Format dispatch : dispatch_formats) {
      for (int64_t tokens : {plan.max_tokens, plan.max_decode_tokens}) {
        take_forward_scratch(dims, is_moe, tokens, parts.emplace_back());
        if (!is_moe) continue;
        take_trip_scratch(dims, tokens, false, parts.back());
        take_dispatch_scratch(dims, dispatch, tokens, parts.back());
      }
      take_ffn_scratch(dims, is_moe, plan.max_tokens, parts.emplace_back());
      if (!is_moe) continue;
      take_trip_scratch(dims, plan.max_tokens, true, parts.back());
      take_dispatch_scratch(dims, dispatch, plan.max_tokens, parts.back());
    }
  }
  take_attention_scratch(dims, plan.max_tokens, parts.emplace_back());
  take_logits(plan, dims, parts.emplace_back());
  return *std::max_element(parts.begin(), parts.end(),
                           [](const Pricer& a, const Pricer& b) { return a.total() < b.total(); });
}

// Ops run one at a time: the largest of what each takes.
// What NCCL 2.28 keeps for a communicator, measured with two ranks (scripts/bench/RESULTS.md, "Two GPUs"). It
// grows with the ranks that one exchanges with.
constexpr int64_t kCommunicatorBytes = int64_t{1000} << 20;

// Of device buffers: all ranks, an expert group, and those that have the same experts.
int64_t communicators(const Plan& plan) {
  if (plan.transport != "nccl" || !plan.shards.is_sharded()) return 0;
  if (!plan.shards.spreads_experts()) return 1;
  return plan.axes.data > 1 ? 3 : 2;
}

int64_t workspace(const Plan& plan, const ModelDims& dims, const std::vector<GemmSite>& sites) {
  const Machine& machine = plan.machine;
  const int64_t rows = token_block_rows(plan);
  int64_t bytes = std::max(workspace_bytes(machine, rows, dims.heads, dims.vocabulary),
                           workspace_bytes(machine, CachedRows{plan.max_decode_tokens, dims.heads,
                                                               dims.head_dim, plan.max_cache_length}));
  for (const TablePair& tables : table_pairs(plan)) {
    for (const GemmSite& site : sites) {
      for (const ProductCodes& codes : product_codes(site, tables, site_rows(dims, site, rows))) {
        bytes = std::max(bytes, workspace_bytes(machine, codes));
      }
    }
  }
  return align_up(bytes, 256);
}

int64_t checkpoint_bytes(const Plan& plan) {
  int64_t bytes = 0;
  for (const ParamInfo& info : plan.parameters) {
    const int64_t n = info.shape.elements();
    const DType moments = master_dtype(info, {plan.dtypes.moments, plan.dtypes.moments, DType::kF32});
    bytes += n * dtype_bytes(master_dtype(info, plan.dtypes)) + 2 * n * dtype_bytes(moments);
    if (needs_reference(plan)) bytes += n * dtype_bytes(master_dtype(info, plan.dtypes));
  }
  for (const BufferInfo& b : plan.buffers) bytes += b.shape.elements() * dtype_bytes(b.dtype);
  return bytes;
}

}  // namespace

MemoryPlan plan_memory(const Plan& plan) {
  const ModelDims dims = dims_of(plan);
  const std::vector<GemmSite> sites = gemm_sites(plan);
  MemoryPlan m;

  const Pricer run = price_run(plan, dims, sites);
  m.run = run.lines();
  m.run_bytes = run.total();

  const StepPrice step = price_step(plan, dims);
  const bool train_larger = step.train.total() >= step.decode.total();
  const Pricer& larger = train_larger ? step.train : step.decode;
  const Pricer& smaller = train_larger ? step.decode : step.train;
  m.step = step.common.lines();
  m.step.insert(m.step.end(), larger.lines().begin(), larger.lines().end());
  if (smaller.total() > 0) {
    const char* name = train_larger ? "sampling (overlaid)" : "training (overlaid)";
    m.step.push_back({name, 0});
  }
  m.step_bytes = step.common.total() + larger.total();

  Pricer stream;
  take_stream_scratch(dims, plan.max_tokens, stream);
  const Pricer block = largest_block_scratch(plan, dims);
  const int64_t operands = largest_gemm_scratch(plan, dims, sites);
  m.scratch = stream.lines();
  m.scratch.insert(m.scratch.end(), block.lines().begin(), block.lines().end());
  m.scratch.push_back({"operands of a product", operands});
  m.scratch_bytes = stream.total() + block.total() + operands;
  m.workspace_bytes = workspace(plan, dims, sites);
  m.communicator_bytes = communicators(plan) * kCommunicatorBytes;

  m.checkpoint_bytes = checkpoint_bytes(plan);
  return m;
}

}  // namespace fp4t

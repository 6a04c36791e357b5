#include <algorithm>
#include <functional>
#include <set>
#include <utility>

#include "engine/model/rope.h"
#include "engine/model/transformer_impl.h"
#include "engine/plan/cache_layout.h"
#include "kernels/ops/run.h"

namespace fp4t {

Transformer::Impl::Impl(Queue& queue_in, Communicator& comm, const Plan& plan_in, Poison poison)
    : queue(queue_in),
      plan(plan_in),
      dims(dims_of(plan_in)),
      run_arena(queue_in, "run", plan_in.memory.run_bytes, poison),
      step_arena(queue_in, "step", plan_in.memory.step_bytes, poison),
      scratch(queue_in, "scratch", plan_in.memory.scratch_bytes, poison),
      params(run_arena, plan_in, comm.rank()),
      exchange(queue_in, comm, plan_in, params.params(), run_arena),
      experts(queue_in, comm, plan_in),
      first_expert(plan_in.axes.expert_index(comm.rank()) * dims.local_experts),
      state(take_state(dims, static_cast<int64_t>(gemm_sites(plan_in).size()), num_moe_layers(plan_in.model),
                       ArenaTake{run_arena})),
      monitors(queue_in, plan_in, state) {
  params.connect(exchange);
  queue.reserve_workspace(plan.memory.workspace_bytes);
  build_blocks();
  embedding = &params.find("embed.weight");
  final_weight = &params.find("norm.weight");
  const RopeTables rope = rope_tables(plan.model.rope, dims.head_dim, dims.max_positions);
  queue.copy_from_host(state.cos.data, rope.cos.data(), state.cos.bytes());
  queue.copy_from_host(state.sin.data, rope.sin.data(), state.sin.bytes());

  // Both phases start above the token blocks: the cache and the activations share memory.
  const ArenaTake take{step_arena};
  token_blocks = take_token_blocks(plan, take);
  phases_mark = step_arena.used_bytes();
  const int64_t entries = plan.max_cache_slots * pages_per_slot(plan);
  const int64_t own_pages = cache_pages(plan) - (cache_slots(plan) - plan.max_cache_slots);
  pages.assign(static_cast<size_t>(cache_slots(plan) * pages_per_slot(plan)), -1);
  for (int64_t i = 0; i < std::min(entries, own_pages); ++i)
    pages[static_cast<size_t>(i)] = static_cast<int32_t>(i);
  // The slot behind the last writes where nobody reads.
  std::fill(pages.begin() + entries, pages.end(), static_cast<int32_t>(own_pages));
  enter(Phase::kTrain);
  params.initialise(queue, plan);
  if (plan.axes.ranks() == 1) return;
  queue.after_waits([this] {
    exchange.check();
    experts.check();
  });
}

// Makes room for a call: what an earlier call of the same phase left above the phase's own blocks is given
// back, and another phase's blocks with it.
void Transformer::Impl::enter(Phase next) {
  if (phase == next) {
    step_arena.rewind(calls_mark);
    return;
  }
  step_arena.rewind(phases_mark);
  if (next == Phase::kDecode) {
    caches.clear();
    for (int64_t l = 0; l < dims.layers; ++l) {
      caches.push_back(step_arena.take_bytes("key-value cache", max_cache_bytes(plan)));
    }
    page_table = {step_arena.take_bytes("page table", page_table_bytes(plan)),
                  DType::kI32,
                  {cache_slots(plan), pages_per_slot(plan)}};
    pages_changed = true;
  }
  phase = next;
  calls_mark = step_arena.used_bytes();
}

void Transformer::Impl::forget() {
  kept.reset();
  head->end();
}

std::vector<Linear*> Transformer::Impl::linears() {
  std::vector<Linear*> all;
  for (const Block& block : blocks) {
    for (Linear* l : block.linears()) all.push_back(l);
  }
  all.push_back(&head->linear());
  return all;
}

void Transformer::Impl::build_blocks() {
  const std::vector<GemmSite> sites = gemm_sites(plan);
  int64_t moe_layer = 0;
  BlockLinears linears;
  for (size_t i = 0; i < sites.size(); ++i) {
    const GemmSite& site = sites[i];
    const bool is_head = site.module == Module::kHead;
    const std::string name =
        is_head ? (plan.model.tied_head ? "embed.weight" : "head.weight")
                : "layers." + std::to_string(site.layer) + "." + name_of(site.module) + ".weight";
    auto linear = std::make_unique<Linear>(plan, site, params.find(name), run_arena, monitors.site_stats(i),
                                           first_expert);
    switch (site.module) {
      case Module::kAttnQkv:
        linears.qkv = std::move(linear);
        break;
      case Module::kAttnOut:
        linears.out = std::move(linear);
        break;
      case Module::kMlpGateUp:
      case Module::kExpertsGateUp:
        linears.gate_up = std::move(linear);
        break;
      case Module::kMlpDown:
      case Module::kExpertsDown:
        linears.down = std::move(linear);
        break;
      case Module::kSharedGateUp:
        linears.shared_gate_up = std::move(linear);
        break;
      case Module::kSharedDown:
        linears.shared_down = std::move(linear);
        break;
      default:
        head = std::make_unique<Head>(plan, std::move(linear));
        break;
    }
    if (is_head || sites[i + 1].layer == site.layer) continue;
    const bool is_moe = is_moe_layer(plan.model, site.layer);
    const TensorView load = is_moe ? monitors.layer_load(moe_layer++) : TensorView{};
    blocks.emplace_back(plan, site.layer, params, experts, std::move(linears), load);
    linears = {};
  }
}

Call Transformer::Impl::make_call(const Pass& pass, int64_t tokens, bool counting) {
  if (counting) monitors.touch();
  return {queue,
          scratch,
          dims,
          pass,
          counting,
          tokens,
          token_blocks.positions.rows(0, tokens),
          token_blocks.groups.rows(0, tokens),
          pass.count_load ? monitors.router_sums() : TensorView{},
          state.cos,
          state.sin,
          monitors.dispatch_stats()};
}

// Checks ---------------------------------------------------------------------------------------------

void Transformer::Impl::check_ids(const std::vector<int32_t>& tokens,
                                  const std::vector<int32_t>& positions) const {
  FP4T_CHECK_EQ(positions.size(), tokens.size());
  for (size_t t = 0; t < tokens.size(); ++t) {
    FP4T_CHECK(tokens[t] >= 0 && tokens[t] < dims.vocabulary, "token ", tokens[t], " at ", t,
               " is outside the vocabulary of ", dims.vocabulary);
    FP4T_CHECK(positions[t] >= 0 && positions[t] < dims.max_positions, "position ", positions[t], " at ", t,
               " is not below model.max_positions ", dims.max_positions);
  }
}

void Transformer::Impl::check_batch(const Pass& pass, const TokenBatch& batch) const {
  FP4T_CHECK(pass.forward != nullptr, "a pass without a forward table");
  FP4T_CHECK(batch.size() > 0 || calls_together(plan, pass.backward != nullptr), "an empty batch");
  FP4T_CHECK(batch.size() <= plan.max_tokens, batch.size(), " tokens in a batch, the plan has room for ",
             plan.max_tokens);
  check_ids(batch.tokens, batch.positions);
  FP4T_CHECK_EQ(batch.targets.size(), batch.tokens.size());
  FP4T_CHECK_EQ(batch.doc_begin.size(), batch.tokens.size());
  for (size_t t = 0; t < batch.tokens.size(); ++t) {
    FP4T_CHECK(batch.targets[t] >= -1 && batch.targets[t] < dims.vocabulary, "target ", batch.targets[t],
               " at ", t);
    const auto begin = static_cast<size_t>(batch.doc_begin[t]);
    FP4T_CHECK(
        batch.doc_begin[t] >= 0 && begin <= t && (begin == t || batch.doc_begin[t - 1] == batch.doc_begin[t]),
        "document of token ", t, " begins at ", batch.doc_begin[t]);
  }
}

// Parts ----------------------------------------------------------------------------------------------

void Transformer::Impl::upload(const std::vector<int32_t>& values, const TensorView& block) {
  queue.upload(block.data, values.data(), static_cast<int64_t>(values.size()) * 4);
}

void Transformer::Impl::embed(const TensorView& tokens, const TensorView& out) {
  run(queue, EmbedForward{.table = operand_of(*embedding), .tokens = tokens, .out = out});
}

void Transformer::Impl::final_norm(const TensorView& x, const TensorView& out, const TensorView& rstd) {
  run(queue, NormForward{.x = x,
                         .residual = {},
                         .weight = final_weight->master,
                         .eps = static_cast<float>(plan.model.norm_eps),
                         .sum = {},
                         .out = out,
                         .rstd = rstd});
}

// Forward, backward ----------------------------------------------------------------------------------

void Transformer::Impl::forward(const Pass& pass, const TokenBatch& batch) {
  check_batch(pass, batch);
  const int64_t tokens = batch.size();
  const Keep keep = pass.backward ? keep_for_backward(plan.parallel) : Keep::kNothing;
  forget();
  enter(Phase::kTrain);
  Kept k{take_batch_acts(plan, dims, {pass.forward, pass.backward}, tokens, keep, ArenaTake{step_arena}),
         tokens, keep};
  upload(batch.tokens, token_blocks.tokens);
  upload(batch.positions, token_blocks.positions);
  upload(batch.targets, token_blocks.targets);
  upload(batch.doc_begin, token_blocks.groups);
  place_routing(pass, batch, k.acts);

  const Call call = make_call(pass, tokens, true);
  exchange.await_weights(-1);
  if (tokens > 0) embed(token_blocks.tokens.rows(0, tokens), k.acts.stream[0]);
  for (size_t l = 0; l < blocks.size(); ++l) {
    exchange.use_weights(static_cast<int64_t>(l), layer_after(l));
    blocks[l].forward(call, k.acts.stream[l], k.acts.layers[l], nullptr, k.acts.stream[l + 1]);
  }
  if (tokens > 0) {
    final_norm(k.acts.stream.back(), k.acts.final_in, k.acts.final_rstd);
    ScratchScope scope(scratch);
    take_stream_scratch(dims, tokens, ArenaTake{scratch});
    head->begin(k.acts.final_in, token_blocks, take_logits(plan, dims, ArenaTake{scratch}));
    k.logits_end = scratch.used_bytes();
  }
  kept = std::move(k);
}

// The experts that the batch gives, a part to each MoE layer; or where each layer's own choice is recorded.
void Transformer::Impl::place_routing(const Pass& pass, const TokenBatch& batch, BatchActs& acts) {
  const bool given = !batch.router.empty();
  if (!given && !pass.record_router) return;
  FP4T_CHECK(!pass.record_router || (!given && !pass.backward),
             "a record of routing that is given or trained");
  FP4T_CHECK(!token_blocks.router.empty(), "the plan records no routing");
  const int64_t tokens = batch.size(), routers = recorded_routers(plan);
  if (given) {
    FP4T_CHECK_EQ(static_cast<int64_t>(batch.router.size()), routers * tokens * dims.top_k);
    upload(batch.router, token_blocks.router);
  }
  int64_t at = 0;
  for (size_t l = 0; l < blocks.size(); ++l) {
    if (!is_moe_layer(plan.model, static_cast<int64_t>(l))) continue;
    if (given) {
      acts.layers[l].replay = token_blocks.router.rows(at, tokens);
      acts.layers[l].replay_differs = token_blocks.router_differs.rows(at, tokens);
    } else {
      acts.layers[l].experts = token_blocks.router.rows(at, tokens);
    }
    at += tokens;
  }
}

void Transformer::Impl::score(const Pass& pass, const Scoring& scoring) {
  FP4T_CHECK(kept.has_value(), "scores without a forward");
  if (kept->tokens == 0) return;
  ScratchScope scope(scratch);
  scratch.reclaim(kept->logits_end);
  head->score(make_call(pass, kept->tokens, true), scoring);
}

TensorView Transformer::Impl::logits_of_batch(const Pass& pass) {
  FP4T_CHECK(kept.has_value(), "logits without a forward");
  ScratchScope scope(scratch);
  scratch.reclaim(kept->logits_end);
  return head->logits(make_call(pass, kept->tokens, false));
}

void Transformer::Impl::backward(const Pass& pass, const Scoring& scoring, float lse_slope) {
  FP4T_CHECK(kept.has_value() && kept->keep != Keep::kNothing,
             "backward without a forward that kept its activations");
  FP4T_CHECK(pass.forward && pass.backward, "backward without tables");
  BatchActs& acts = kept->acts;
  const Call call = make_call(pass, kept->tokens, true);
  const Call again = make_call(pass, kept->tokens, false);
  ScratchScope scope(scratch);
  const StreamScratch s = take_stream_scratch(dims, kept->tokens, ArenaTake{scratch});

  if (kept->tokens > 0) {
    {
      ScratchScope logits(scratch);
      scratch.reclaim(kept->logits_end);
      head->backward(call, scoring, lse_slope, s.dnorm);
    }
    run(queue, NormBackward{.x = acts.stream.back(),
                            .weight = final_weight->master,
                            .rstd = acts.final_rstd,
                            .dout = s.dnorm,
                            .dresidual = {},
                            .dx = s.dstream,
                            .dweight = final_weight->gradient});
  }
  end_outside_gradients(pass, ShardExchange::Outside::kAfter);
  // Gradients of a block go their way in the backward of the one below it, behind what that one waits for.
  std::function<void()> meanwhile;
  const bool waits = experts.spreads() && (!scatters_gradients(plan) || gradient_places(plan) > 1);
  for (size_t l = blocks.size(); l-- > 0;) {
    exchange.use_weights(static_cast<int64_t>(l), static_cast<int64_t>(l) - 1);
    begin_block_gradients(l);
    if (kept->keep == Keep::kInputs) {
      // Writes the same bits over the block's output, which nothing reads any more.
      blocks[l].forward(again, acts.stream[l], acts.layers[l], nullptr, acts.stream[l + 1]);
    }
    blocks[l].backward(call, acts.stream[l], acts.layers[l], s, meanwhile);
    meanwhile = [this, &pass, l] { end_block_gradients(pass, l); };
    if (!waits) std::exchange(meanwhile, {})();
  }
  if (meanwhile) meanwhile();
  if (kept->tokens > 0) {
    run(queue, EmbedBackward{.dout = s.dstream,
                             .tokens = token_blocks.tokens.rows(0, kept->tokens),
                             .dtable = embedding->gradient});
  }
  end_outside_gradients(pass, ShardExchange::Outside::kBefore);
  forget();  // gate and up were overwritten
}

// Where gradients are scattered, those of a block lie where another's did: they begin with its backward and
// go to their owners after it.
void Transformer::Impl::begin_block_gradients(size_t l) {
  if (!scatters_gradients(plan)) return;
  exchange.claim_gradients(static_cast<int64_t>(l));
  std::set<const Param*> written;
  for (Linear* linear : blocks[l].linears()) {
    linear->begin_gradient();
    written.insert(&linear->param());
  }
  for (const Param& p : params.params()) {
    if (p.info.layer != static_cast<int64_t>(l) || written.count(&p)) continue;
    queue.fill_bytes(p.gradient.data, 0, p.gradient.bytes());
  }
}

void Transformer::Impl::end_block_gradients(const Pass& pass, size_t l) {
  const bool scatters = scatters_gradients(plan);
  if (!scatters && !(pass.completes_gradients && plan.shards.is_sharded())) return;
  for (Linear* linear : blocks[l].linears()) linear->settle_gradient(queue);
  if (scatters) {
    exchange.scatter_gradients(static_cast<int64_t>(l));
  } else {
    exchange.sum_block(static_cast<int64_t>(l));
  }
}

void Transformer::Impl::end_outside_gradients(const Pass& pass, ShardExchange::Outside part) {
  if (!pass.completes_gradients || !plan.shards.is_sharded()) return;
  head->linear().settle_gradient(queue);
  exchange.sum_outside(part);
}

// Interface ------------------------------------------------------------------------------------------

Transformer::Transformer(Queue& queue, Communicator& comm, const Plan& plan, Poison poison)
    : impl_(std::make_unique<Impl>(queue, comm, plan, poison)) {}
Transformer::~Transformer() = default;

ParamSet& Transformer::params() {
  impl_->exchange.await_all_weights();
  return impl_->params;
}
const Plan& Transformer::plan() const { return impl_->plan; }
Queue& Transformer::queue() { return impl_->queue; }
Arena& Transformer::run_arena() { return impl_->run_arena; }
ShardExchange& Transformer::shard_exchange() { return impl_->exchange; }

void Transformer::forward(const Pass& pass, const TokenBatch& batch) { impl_->forward(pass, batch); }
void Transformer::score(const Pass& pass, const Scoring& scoring) { impl_->score(pass, scoring); }
void Transformer::backward(const Pass& pass, const Scoring& scoring, float lse_slope) {
  impl_->backward(pass, scoring, lse_slope);
}
TensorView Transformer::logits(const Pass& pass) { return impl_->logits_of_batch(pass); }
TensorView Transformer::decode(const Pass& pass, const DecodeRows& rows) { return impl_->decode(pass, rows); }
int64_t Transformer::num_pages() const {
  const Plan& p = impl_->plan;
  return cache_pages(p) - (cache_slots(p) - p.max_cache_slots);
}
void Transformer::set_pages(int32_t slot, const std::vector<int32_t>& pages) {
  impl_->set_pages(slot, pages);
}
void Transformer::copy_pages(const Pass& pass, const std::vector<int32_t>& from,
                             const std::vector<int32_t>& to) {
  impl_->copy_pages(pass, from, to);
}
Transformer::Drawn Transformer::decode_and_draw(const Pass& pass, const DecodeRows& rows,
                                                const Draws& draws) {
  return impl_->decode_and_draw(pass, rows, draws);
}

Transformer::TokenBuffers Transformer::token_buffers(int64_t num_tokens) {
  const TokenBlocks& b = impl_->token_blocks;
  const auto rows = [&](const TensorView& v) { return v.rows(0, num_tokens); };
  TokenBuffers out;
  out.targets = rows(b.targets);
  out.log_prob = rows(b.log_prob);
  out.lse = rows(b.lse);
  out.entropy = rows(b.entropy);
  out.d_log_prob = rows(b.d_log_prob);
  out.old_log_prob = rows(b.old_log_prob);
  out.reference = rows(b.reference);
  out.advantage = rows(b.advantage);
  out.importance = rows(b.importance);
  out.loss = rows(b.loss);
  out.d_entropy = rows(b.d_entropy);
  out.weight = rows(b.weight);
  out.log_ratio = rows(b.log_ratio);
  out.clipped = rows(b.clipped);
  out.sequence_begin = rows(b.sequence_begin);
  out.sequence_end = rows(b.sequence_end);
  const int64_t routers = recorded_routers(impl_->plan);
  if (routers > 0) {
    out.router = b.router.rows(0, routers * num_tokens);
    out.router_differs = b.router_differs.rows(0, routers * num_tokens);
  }
  return out;
}

void Transformer::weights_changed() {
  for (Linear* l : impl_->linears()) l->weights_changed();
}

void Transformer::prepare(const Pass& pass) {
  if (gathers_weights(impl_->plan)) return;
  impl_->prepare_weights(impl_->make_call(pass, 0, false));
}

void Transformer::zero_gradients() {
  impl_->exchange.begin_gradients();
  std::set<const Param*> written;
  for (Linear* l : impl_->linears()) {
    l->begin_gradient();
    written.insert(&l->param());
  }
  for (const Param& p : impl_->params.params()) {
    if (!written.count(&p)) impl_->queue.fill_bytes(p.gradient.data, 0, p.gradient.bytes());
  }
}

void Transformer::settle_gradients() {
  for (Linear* l : impl_->linears()) l->settle_gradient(impl_->queue);
}

void Transformer::update_expert_bias(const std::vector<std::vector<int64_t>>& load) {
  const ModelSpec& model = impl_->plan.model;
  const auto rate = static_cast<float>(model.moe.balance.bias_rate);
  if (rate == 0.0f) return;
  FP4T_CHECK_EQ(static_cast<int64_t>(load.size()), num_moe_layers(model));
  ScratchScope scope(impl_->scratch);
  const TensorView counts = scope.take("expert load", DType::kI64, {model.moe.experts});
  size_t moe_layer = 0;
  for (int64_t l = 0; l < model.layers; ++l) {
    if (!is_moe_layer(model, l)) continue;
    const std::vector<int64_t>& layer = load[moe_layer++];
    FP4T_CHECK_EQ(static_cast<int64_t>(layer.size()), model.moe.experts);
    impl_->queue.upload(counts.data, layer.data(), counts.bytes());
    const std::string name = "layers." + std::to_string(l) + ".router.bias";
    run(impl_->queue,
        UpdateExpertBias{.load = counts, .rate = rate, .bias = impl_->params.find_buffer(name).data});
  }
}

RouterDownload Transformer::begin_router_sums() { return impl_->monitors.take_router_sums(); }
double Transformer::take_nonfinite() { return impl_->monitors.take_nonfinite(); }
std::vector<OperandStats> Transformer::take_operand_stats() { return impl_->monitors.take_operand_stats(); }
void Transformer::reset_monitors() { impl_->monitors.reset(); }

std::vector<std::string> Transformer::kernels_used() const {
  std::vector<std::string> lines;
  for (const Linear* l : impl_->linears()) l->append_kernels(lines);
  return lines;
}

}  // namespace fp4t

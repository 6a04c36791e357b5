// Cached decoding: prefill and token steps; on a GPU token steps are recorded once and replayed.
#include <algorithm>
#include <cstring>

#include "engine/model/transformer_impl.h"
#include "engine/plan/cache_layout.h"
#include "kernels/ops/run.h"

namespace fp4t {

void Transformer::Impl::check_rows(const Pass& pass, const DecodeRows& rows) const {
  FP4T_CHECK(pass.forward != nullptr, "a pass without a forward table");
  const auto count = static_cast<int64_t>(rows.tokens.size());
  FP4T_CHECK((count > 0 || calls_together(plan, false)) && count <= plan.max_decode_tokens, count,
             " rows to decode, the plan has room for ", plan.max_decode_tokens);
  check_ids(rows.tokens, rows.positions);
  FP4T_CHECK_EQ(rows.slots.size(), rows.tokens.size());
  for (size_t t = 0; t < rows.slots.size(); ++t) {
    FP4T_CHECK(rows.slots[t] >= 0 && rows.slots[t] < plan.max_cache_slots, "slot ", rows.slots[t], " of ",
               plan.max_cache_slots);
    FP4T_CHECK(rows.positions[t] < plan.max_cache_length, "position ", rows.positions[t],
               " in a cache of length ", plan.max_cache_length);
    const int64_t entry = rows.slots[t] * pages_per_slot(plan) + rows.positions[t] / kKvPage;
    FP4T_CHECK(pages[static_cast<size_t>(entry)] >= 0, "slot ", rows.slots[t], " has no page for position ",
               rows.positions[t]);
  }
  FP4T_CHECK(static_cast<int64_t>(rows.logit_rows.size()) <= max_logit_rows(plan), rows.logit_rows.size(),
             " rows of logits, the plan has room for ", max_logit_rows(plan));
  for (const int32_t r : rows.logit_rows) FP4T_CHECK(r >= 0 && r < count, "logits of row ", r, " of ", count);
}

KvCacheView Transformer::Impl::cache_of(int64_t layer, Format format) const {
  const CacheLayout layout = cache_layout(plan, format);
  const Shape shape = {cache_pages(plan), kKvPage, dims.kv_width};
  char* base = static_cast<char*>(caches[static_cast<size_t>(layer)]);
  KvCacheView view;
  view.format = format == Format::kMxfp8 ? Format::kMxfp8 : Format::kBf16;
  view.table = page_table;
  view.k = {base, layout.dtype, shape};
  view.v = {base + layout.values_bytes, layout.dtype, shape};
  if (format == Format::kMxfp8) {
    const Shape scales = {shape[0], shape[1], dims.kv_width / 32};
    view.k_scales = {base + 2 * layout.values_bytes, DType::kU8, scales};
    view.v_scales = {base + 2 * layout.values_bytes + layout.scales_bytes, DType::kU8, scales};
  }
  return view;
}

void Transformer::Impl::set_pages(int32_t slot, const std::vector<int32_t>& list) {
  const int64_t most = pages_per_slot(plan), total = cache_pages(plan);
  FP4T_CHECK(slot >= 0 && slot < plan.max_cache_slots, "slot ", slot, " of ", plan.max_cache_slots);
  FP4T_CHECK(static_cast<int64_t>(list.size()) <= most, list.size(), " pages; a slot has room for ", most);
  for (const int32_t page : list) FP4T_CHECK(page >= 0 && page < total, "page ", page, " of ", total);
  const auto first = pages.begin() + slot * most;
  std::fill(std::copy(list.begin(), list.end(), first), first + most, -1);
  pages_changed = true;
}

void Transformer::Impl::enter_decoding() {
  enter(Phase::kDecode);
  if (!pages_changed) return;
  queue.upload(page_table.data, pages.data(), page_table.bytes());
  pages_changed = false;
}

void Transformer::Impl::copy_pages(const Pass& pass, const std::vector<int32_t>& from,
                                   const std::vector<int32_t>& to) {
  FP4T_CHECK_EQ(from.size(), to.size());
  if (from.empty()) return;
  forget();
  enter_decoding();
  const auto n = static_cast<int64_t>(from.size());
  FP4T_CHECK(n <= token_blocks.tokens.dim(0), n, " pages at once");
  upload(from, token_blocks.tokens);
  upload(to, token_blocks.positions);
  for (size_t l = 0; l < blocks.size(); ++l) {
    run(queue, KvCopyPages{.from = token_blocks.tokens.rows(0, n),
                           .to = token_blocks.positions.rows(0, n),
                           .cache = cache_of(static_cast<int64_t>(l), pass.forward->kv_cache)});
  }
}

TensorView Transformer::Impl::decode(const Pass& pass, const DecodeRows& rows) {
  check_rows(pass, rows);
  forget();
  enter_decoding();
  exchange.await_all_weights();  // outside a recording
  if (const int64_t bucket = recorded_rows(pass, rows)) return decode_recorded(pass, rows, nullptr, bucket);
  upload(rows.tokens, token_blocks.tokens);
  upload(rows.positions, token_blocks.positions);
  upload(rows.slots, token_blocks.groups);
  upload(rows.logit_rows, token_blocks.logit_rows);
  const auto count = static_cast<int64_t>(rows.tokens.size());
  return enqueue_decode(pass,
                        {token_blocks.tokens.rows(0, count), token_blocks.positions.rows(0, count),
                         token_blocks.groups.rows(0, count),
                         token_blocks.logit_rows.rows(0, static_cast<int64_t>(rows.logit_rows.size()))},
                        true);
}

Transformer::Drawn Transformer::Impl::decode_and_draw(const Pass& pass, const DecodeRows& rows,
                                                      const Draws& draws) {
  FP4T_CHECK_EQ(draws.sample_ids.size(), rows.logit_rows.size());
  FP4T_CHECK_EQ(draws.positions.size(), rows.logit_rows.size());
  FP4T_CHECK(!pass.record_router || !token_blocks.router.empty(), "the plan records no routing");
  if (const int64_t bucket = recorded_rows(pass, rows)) return draw_recorded(pass, rows, draws, bucket);
  const TensorView drawn_from = decode(pass, rows);
  if (rows.logit_rows.empty()) return {};
  Download record;
  if (pass.record_router) record = record_of(static_cast<int64_t>(rows.tokens.size()));
  // The call has done with its positions and has no targets: drawing reuses both.
  const int64_t n = drawn_from.dim(0);
  const TensorView ids = token_blocks.sample_ids.rows(0, n), positions = token_blocks.positions.rows(0, n);
  const TensorView tokens = token_blocks.targets.rows(0, n), log_prob = token_blocks.log_prob.rows(0, n);
  queue.upload(ids.data, draws.sample_ids.data(), ids.bytes());
  queue.upload(positions.data, draws.positions.data(), positions.bytes());
  enqueue_draws(drawn_from, draws, ids, positions, tokens, log_prob);
  Download drawn = queue.download(tokens.data, tokens.bytes());
  Download scores = queue.download(log_prob.data, log_prob.bytes());
  return {drawn.values<int32_t>(), scores.values<float>(),
          pass.record_router ? record.values<int32_t>() : std::vector<int32_t>{}};
}

TensorView Transformer::Impl::enqueue_decode(const Pass& pass, const RowInputs& in, bool counting) {
  const ArenaTake take{step_arena};
  const int64_t count = in.tokens.dim(0);
  const bool all_rows = in.logit_rows.empty();
  BatchActs acts = take_batch_acts(plan, dims, {}, count, Keep::kNothing, take);
  int64_t at = 0;  // routers write where a download finds them
  for (size_t l = 0; l < blocks.size() && !token_blocks.router.empty(); ++l) {
    if (!is_moe_layer(plan.model, static_cast<int64_t>(l))) continue;
    acts.layers[l].experts = token_blocks.router.rows(at, count);
    at += count;
  }
  const DecodeHead h = take_decode_head(dims, all_rows ? count : in.logit_rows.dim(0), take);
  Call call = make_call(pass, count, counting);
  call.positions = in.positions;
  call.groups = in.slots;
  if (count > 0) embed(in.tokens, acts.stream[0]);
  for (size_t l = 0; l < blocks.size(); ++l) {
    exchange.use_weights(static_cast<int64_t>(l), layer_after(l));
    const KvCacheView cache = cache_of(static_cast<int64_t>(l), pass.forward->kv_cache);
    blocks[l].forward(call, acts.stream[l], acts.layers[l], &cache, acts.stream[l + 1]);
  }
  if (h.logits.dim(0) == 0) return h.logits;
  TensorView last = acts.stream.back();
  if (!all_rows) {
    run(queue, PermuteRows{.x = last, .token_of = in.logit_rows, .out = h.gathered});
    last = h.gathered;
  }
  final_norm(last, h.final_in, h.final_rstd);
  head->linear().forward(call, h.final_in, {}, {}, h.logits);
  return h.logits;
}

Download Transformer::Impl::record_of(int64_t rows) {
  const TensorView record = token_blocks.router.rows(0, recorded_routers(plan) * rows);
  return queue.download(record.data, record.bytes());
}

void Transformer::Impl::enqueue_draws(const TensorView& from, const Draws& draws,
                                      const TensorView& sample_ids, const TensorView& positions,
                                      const TensorView& tokens, const TensorView& log_prob) {
  run(queue, SampleTokens{.logits = from,
                          .temperature = draws.temperature,
                          .top_p = draws.top_p,
                          .key = draws.key,
                          .sample_ids = sample_ids,
                          .positions = positions,
                          .tokens = tokens,
                          .log_prob = log_prob});
}

// Recorded calls ------------------------------------------------------------------------------------

namespace {

// 1, 2, 4, 8, 12, 16, 24, 32, ...: at most a third of a call's rows are padding.
int64_t bucket_of(int64_t count, int64_t most) {
  int64_t rows = 1;
  while (rows < count && rows + rows / 2 < count) rows *= 2;
  if (rows < count) rows = rows < 8 ? 2 * rows : rows + rows / 2;
  return std::min(rows, most);
}

bool is_row_invariant(const ForwardTable& table, const ModelSpec& model) {
  for (int64_t l = 0; l < model.layers; ++l) {
    for (int m = 0; m < kNumGemmModules; ++m) {
      const auto module = static_cast<Module>(m);
      if (layer_has(model, l, module) && !row_invariant(table.cell(l, module))) return false;
    }
  }
  return row_invariant(table.head);
}

// [layers][bucket][k] as [layers][rows][k].
std::vector<int32_t> without_padding(const std::vector<int32_t>& record, int64_t bucket, int64_t rows,
                                     int64_t top_k) {
  std::vector<int32_t> out;
  for (auto layer = record.begin(); layer != record.end(); layer += bucket * top_k) {
    out.insert(out.end(), layer, layer + rows * top_k);
  }
  return out;
}

bool is_identity(const std::vector<int32_t>& rows, size_t count) {
  if (rows.size() != count) return false;
  for (size_t i = 0; i < count; ++i) {
    if (rows[i] != static_cast<int32_t>(i)) return false;
  }
  return true;
}

}  // namespace

// One token of every sequence, logits of all: the call that decoding repeats. Only where a row's bits depend
// neither on the rows beside it, which padding changes, nor on keys, which a recording would freeze.
int64_t Transformer::Impl::recorded_rows(const Pass& pass, const DecodeRows& rows) {
  if (queue.backend() != Backend::kCuda || !is_identity(rows.logit_rows, rows.tokens.size())) return 0;
  if (calls_together(plan, false)) return 0;  // every call tells other ranks something
  auto known = row_invariance.find(pass.forward);
  if (known == row_invariance.end()) {
    known = row_invariance.emplace(pass.forward, is_row_invariant(*pass.forward, plan.model)).first;
  }
  if (!known->second) return 0;
  return bucket_of(static_cast<int64_t>(rows.tokens.size()),
                   std::min(plan.max_decode_tokens, max_logit_rows(plan)));
}

void Transformer::Impl::prepare_weights(const Call& call) {
  for (Block& block : blocks) {
    for (Linear* l : block.linears()) l->prepare_forward(call);
  }
  head->linear().prepare_forward(call);
}

TensorView Transformer::Impl::replay_decode(const Pass& pass, const RowInputs& in) {
  const int64_t rows = in.tokens.dim(0);
  prepare_weights(make_call(pass, rows, false));
  RecordedCall& r = recorded[{pass.forward, rows}];
  if (!r.warm) {
    r.warm = true;
    return enqueue_decode(pass, in, false);
  }
  if (r.recording.empty()) r.recording = queue.record([&] { r.logits = enqueue_decode(pass, in, false); });
  queue.replay(r.recording);
  return r.logits;
}

// One copy takes all inputs up: the draws' sample ids (64 bits), tokens, positions, slots, the draws'
// positions. Padding rows write to a slot that no sequence has.
TensorView Transformer::Impl::decode_recorded(const Pass& pass, const DecodeRows& rows, const Draws* draws,
                                              int64_t bucket) {
  const auto size = static_cast<size_t>(bucket), count = rows.tokens.size();
  std::vector<int32_t> packed(6 * size, 0);
  const auto part = [&](size_t i) { return packed.begin() + static_cast<int64_t>(i * size); };
  std::copy(rows.tokens.begin(), rows.tokens.end(), part(2));
  std::copy(rows.positions.begin(), rows.positions.end(), part(3));
  std::copy(rows.slots.begin(), rows.slots.end(), part(4));
  std::fill(part(4) + static_cast<int64_t>(count), part(5), static_cast<int32_t>(plan.max_cache_slots));
  if (draws) {
    std::memcpy(packed.data(), draws->sample_ids.data(), count * sizeof(int64_t));
    std::copy(draws->positions.begin(), draws->positions.end(), part(5));
  }
  upload(packed, token_blocks.decode_inputs);
  const auto input = [&](int64_t i) { return token_blocks.decode_inputs.rows(i * bucket, bucket); };
  return replay_decode(pass, {input(2), input(3), input(4), {}}).rows(0, static_cast<int64_t>(count));
}

Transformer::Drawn Transformer::Impl::draw_recorded(const Pass& pass, const DecodeRows& rows,
                                                    const Draws& draws, int64_t bucket) {
  check_rows(pass, rows);
  forget();
  enter_decoding();
  exchange.await_all_weights();
  const TensorView drawn_from = decode_recorded(pass, rows, &draws, bucket);
  const int64_t n = drawn_from.dim(0);
  const TensorView ids = {token_blocks.decode_inputs.data, DType::kI64, {n}};
  const TensorView tokens = token_blocks.decode_outputs.rows(0, n);
  TensorView log_prob = token_blocks.decode_outputs.rows(n, n);
  log_prob.dtype = DType::kF32;
  enqueue_draws(drawn_from, draws, ids, token_blocks.decode_inputs.rows(5 * bucket, n), tokens, log_prob);
  Drawn result;
  Download record;
  if (pass.record_router) record = record_of(bucket);
  result.tokens = queue.download(tokens.data, 2 * tokens.bytes()).values<int32_t>();
  result.log_probs.resize(static_cast<size_t>(n));
  std::memcpy(result.log_probs.data(), result.tokens.data() + n, static_cast<size_t>(n) * sizeof(float));
  result.tokens.resize(static_cast<size_t>(n));
  if (pass.record_router) result.router = without_padding(record.values<int32_t>(), bucket, n, dims.top_k);
  return result;
}

}  // namespace fp4t

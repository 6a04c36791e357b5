// Cached decoding: prefill and token steps; on a GPU token steps are recorded once and replayed.
#include <algorithm>

#include "engine/model/transformer_impl.h"
#include "kernels/ops/run.h"

namespace fp4t {

void Transformer::Impl::check_rows(const Pass& pass, const DecodeRows& rows) const {
  FP4T_CHECK(pass.forward != nullptr, "a pass without a forward table");
  const auto count = static_cast<int64_t>(rows.tokens.size());
  FP4T_CHECK(count > 0 && count <= plan.max_decode_tokens, count, " rows to decode, the plan has room for ",
             plan.max_decode_tokens);
  check_ids(rows.tokens, rows.positions);
  FP4T_CHECK_EQ(rows.slots.size(), rows.tokens.size());
  for (size_t t = 0; t < rows.slots.size(); ++t) {
    FP4T_CHECK(rows.slots[t] >= 0 && rows.slots[t] < plan.max_cache_slots, "slot ", rows.slots[t], " of ",
               plan.max_cache_slots);
    FP4T_CHECK(rows.positions[t] < plan.max_cache_length, "position ", rows.positions[t],
               " in a cache of length ", plan.max_cache_length);
  }
  FP4T_CHECK(static_cast<int64_t>(rows.logit_rows.size()) <= max_logit_rows(plan), rows.logit_rows.size(),
             " rows of logits, the plan has room for ", max_logit_rows(plan));
  for (const int32_t r : rows.logit_rows) FP4T_CHECK(r >= 0 && r < count, "logits of row ", r, " of ", count);
}

KvCacheView Transformer::Impl::cache_of(int64_t layer, Format format) const {
  const CacheLayout layout = cache_layout(plan, format);
  const Shape shape = {cache_slots(plan), plan.max_cache_length, dims.kv_width};
  char* base = static_cast<char*>(caches[static_cast<size_t>(layer)]);
  KvCacheView view;
  view.format = format == Format::kMxfp8 ? Format::kMxfp8 : Format::kBf16;
  view.k = {base, layout.dtype, shape};
  view.v = {base + layout.values_bytes, layout.dtype, shape};
  if (format == Format::kMxfp8) {
    const Shape scales = {shape[0], shape[1], dims.kv_width / 32};
    view.k_scales = {base + 2 * layout.values_bytes, DType::kU8, scales};
    view.v_scales = {base + 2 * layout.values_bytes + layout.scales_bytes, DType::kU8, scales};
  }
  return view;
}

TensorView Transformer::Impl::decode(const Pass& pass, const DecodeRows& rows) {
  check_rows(pass, rows);
  forget();
  enter(Phase::kDecode);
  const int64_t bucket = recorded_rows(pass, rows);
  if (bucket > 0) return decode_recorded(pass, rows, bucket);
  upload_rows(rows);
  return enqueue_decode(pass, static_cast<int64_t>(rows.tokens.size()),
                        static_cast<int64_t>(rows.logit_rows.size()), true);
}

void Transformer::Impl::upload_rows(const DecodeRows& rows) {
  upload(rows.tokens, token_blocks.tokens);
  upload(rows.positions, token_blocks.positions);
  upload(rows.slots, token_blocks.groups);
  upload(rows.logit_rows, token_blocks.logit_rows);
}

TensorView Transformer::Impl::enqueue_decode(const Pass& pass, int64_t count, int64_t num_logits,
                                             bool counting) {
  const ArenaTake take{step_arena};
  BatchActs acts = take_batch_acts(plan, dims, {}, count, Keep::kNothing, take);
  const DecodeHead h = take_decode_head(dims, num_logits, take);
  const Call call = make_call(pass, count, counting);
  embed(call, acts.stream[0]);
  for (size_t l = 0; l < blocks.size(); ++l) {
    const KvCacheView cache = cache_of(static_cast<int64_t>(l), pass.forward->kv_cache);
    blocks[l].forward(call, acts.stream[l], acts.layers[l], &cache, acts.stream[l + 1]);
  }
  if (num_logits == 0) return h.logits;
  run(queue, PermuteRows{.x = acts.stream.back(),
                         .token_of = token_blocks.logit_rows.rows(0, num_logits),
                         .out = h.gathered});
  final_norm(h.gathered, h.final_in, h.final_rstd);
  head->linear().forward(call, h.final_in, {}, {}, h.logits);
  return h.logits;
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

TensorView Transformer::Impl::decode_recorded(const Pass& pass, DecodeRows rows, int64_t bucket) {
  // Padding rows write to a slot that no sequence has.
  const auto size = static_cast<size_t>(bucket);
  const size_t count = rows.tokens.size();
  rows.tokens.resize(size, 0);
  rows.positions.resize(size, 0);
  rows.slots.resize(size, static_cast<int32_t>(plan.max_cache_slots));
  for (size_t i = count; i < size; ++i) rows.logit_rows.push_back(static_cast<int32_t>(i));
  upload_rows(rows);
  prepare_weights(make_call(pass, bucket, false));
  RecordedCall& r = recorded[{pass.forward, bucket}];
  if (r.recording.empty()) {
    if (!r.warm) {
      r.warm = true;
      return enqueue_decode(pass, bucket, bucket, false).rows(0, static_cast<int64_t>(count));
    }
    r.recording = queue.record([&] { r.logits = enqueue_decode(pass, bucket, bucket, false); });
  }
  queue.replay(r.recording);
  return r.logits.rows(0, static_cast<int64_t>(count));
}

}  // namespace fp4t

#include "kernels/ops/attention.h"

#include "kernels/ops/expect.h"

namespace fp4t {

namespace {

template <class Op>
void check_heads(const Op& op) {
  expect_rank(Op::kName, "qkv", op.qkv, 2);
  FP4T_CHECK(op.head_dim > 0 && op.kv_heads > 0 && op.heads > 0 && op.heads % op.kv_heads == 0, Op::kName,
             ": heads ", op.heads, " (must be a multiple of kv_heads), kv_heads ", op.kv_heads, ", head_dim ",
             op.head_dim);
  expect_float(Op::kName, "qkv", op.qkv, {op.qkv.dim(0), (op.heads + 2 * op.kv_heads) * op.head_dim});
}

void check_mxfp8_head(const char* op, int64_t head_dim) {
  FP4T_CHECK(head_dim % 32 == 0, op, ": an mxfp8 cache needs a head_dim that is a multiple of 32, not ",
             head_dim);
}

template <class Op>
void check_cache(const Op& op) {
  const KvCacheView& cache = op.cache;
  const int64_t tokens = op.qkv.dim(0), width = op.kv_heads * op.head_dim;
  expect_tensor(Op::kName, "slots", op.slots, DType::kI32, {tokens});
  expect_tensor(Op::kName, "positions", op.positions, DType::kI32, {tokens});
  expect_rank(Op::kName, "cache.k", cache.k, 3);
  const Shape shape = {cache.k.dim(0), cache.k.dim(1), width};
  const bool codes = cache.format == Format::kMxfp8;
  FP4T_CHECK(codes || cache.format == Format::kBf16, Op::kName, ".cache.format is ", name_of(cache.format),
             ", must be bf16 or mxfp8");
  const DType dtype = codes ? DType::kU8 : op.qkv.dtype;
  expect_tensor(Op::kName, "cache.k", cache.k, dtype, shape);
  expect_tensor(Op::kName, "cache.v", cache.v, dtype, shape);
  if (cache.is_paged()) {
    expect_rank(Op::kName, "cache.table", cache.table, 2);
    expect_tensor(Op::kName, "cache.table", cache.table, DType::kI32,
                  {cache.table.dim(0), cache.table.dim(1)});
    const int64_t length = shape[1];
    FP4T_CHECK(length >= kLeastKvPage && (length & (length - 1)) == 0, Op::kName, ": pages of ", length,
               " positions; must be a power of two from ", kLeastKvPage);
  }
  if (codes) {
    check_mxfp8_head(Op::kName, op.head_dim);
    const Shape scales = {shape[0], shape[1], width / 32};
    expect_tensor(Op::kName, "cache.k_scales", cache.k_scales, DType::kU8, scales);
    expect_tensor(Op::kName, "cache.v_scales", cache.v_scales, DType::kU8, scales);
  }
}

}  // namespace

void AttentionForward::check() const {
  check_heads(*this);
  const int64_t tokens = qkv.dim(0);
  expect_tensor(kName, "doc_begin", doc_begin, DType::kI32, {tokens});
  expect_tensor(kName, "out", out, qkv.dtype, {tokens, heads * head_dim});
  expect_tensor(kName, "lse", lse, DType::kF32, {tokens, heads});
  expect_disjoint(kName, "out", out, "qkv", qkv);
}

void AttentionBackward::check() const {
  check_heads(*this);
  const int64_t tokens = qkv.dim(0);
  expect_tensor(kName, "doc_begin", doc_begin, DType::kI32, {tokens});
  expect_tensor(kName, "out", out, qkv.dtype, {tokens, heads * head_dim});
  expect_tensor(kName, "lse", lse, DType::kF32, {tokens, heads});
  expect_tensor(kName, "dout", dout, qkv.dtype, {tokens, heads * head_dim});
  expect_tensor(kName, "dqkv", dqkv, qkv.dtype, qkv.shape);
  expect_disjoint(kName, "dqkv", dqkv, "qkv", qkv);
  expect_disjoint(kName, "dqkv", dqkv, "out", out);
  expect_disjoint(kName, "dqkv", dqkv, "dout", dout);
}

void KvAppend::check() const {
  check_heads(*this);
  check_cache(*this);
}

void KvCopyPages::check() const {
  expect_rank(kName, "from", from, 1);
  expect_tensor(kName, "from", from, DType::kI32, {from.dim(0)});
  expect_tensor(kName, "to", to, DType::kI32, {from.dim(0)});
  expect_rank(kName, "cache.k", cache.k, 3);
  for (const TensorView* part : {&cache.v, &cache.k_scales, &cache.v_scales}) {
    if (part == &cache.v || part->data) FP4T_CHECK_EQ(part->dim(0), cache.k.dim(0), kName, ": pages");
  }
}

void KvRound::check() const {
  check_heads(*this);
  FP4T_CHECK(format == Format::kMxfp8, kName, ".format is ", name_of(format), ", must be mxfp8");
  check_mxfp8_head(kName, head_dim);
}

void AttentionCached::check() const {
  check_heads(*this);
  check_cache(*this);
  expect_tensor(kName, "out", out, qkv.dtype, {qkv.dim(0), heads * head_dim});
  expect_disjoint(kName, "out", out, "qkv", qkv);
}

}  // namespace fp4t

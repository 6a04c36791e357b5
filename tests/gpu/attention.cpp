// Attention and the key-value cache on the GPU: against the CPU, and cached against packed rows bit for bit.
#include "kernels/ops/attention.h"

#include "tests/support/dense_cases.h"
#include "tests/support/mirror.h"

namespace fp4t::test {
namespace {

using reference::Heads;

// Every path: head dimensions of the tensor cores, padded ones, and the general kernels; groups of one, of an
// odd number and of more than a tile's rows.
const Heads kHeads[] = {{4, 2, 32},  {3, 3, 40},  {8, 2, 64}, {5, 1, 10},
                        {2, 2, 128}, {12, 4, 96}, {7, 1, 72}, {130, 1, 64}};

std::string text_of(const Heads& h) {
  return "heads " + std::to_string(h.heads) + "/" + std::to_string(h.kv_heads) + " x " +
         std::to_string(h.head_dim);
}

float scale_of(const Heads& h) { return 1.0f / std::sqrt(static_cast<float>(h.head_dim)); }

// Tensors of one packed batch in a mirror.
struct Packed {
  Packed(Mirror& m, DType dtype, const std::vector<int32_t>& documents, const Heads& h, float size = 1.0f)
      : heads(h), tokens(static_cast<int64_t>(documents.size())) {
    qkv = m.normal(dtype, {tokens, h.width()}, size);
    doc_begin = m.i32(documents);
    out = m.fresh(dtype, {tokens, h.heads * h.head_dim});
    lse = m.fresh(DType::kF32, {tokens, h.heads});
  }
  AttentionForward forward() const {
    return {.qkv = qkv,
            .heads = heads.heads,
            .kv_heads = heads.kv_heads,
            .head_dim = heads.head_dim,
            .doc_begin = doc_begin,
            .scale = scale_of(heads),
            .out = out,
            .lse = lse};
  }

  Heads heads;
  int64_t tokens;
  TensorView qkv, doc_begin, out, lse;
};

TEST(GpuAttention, forward_and_gradient_match_the_cpu) {
  for (DType dtype : {DType::kBf16, DType::kF32}) {
    for (const Heads& h : kHeads) {
      for (int64_t tokens : {0, 1, 31, 33, 290, 700}) {
        if (h.heads > 100 && tokens > 290) continue;  // the CPU takes long over it
        SCOPED_TRACE(std::string(dtype_name(dtype)) + " " + text_of(h) + " tokens " + std::to_string(tokens));
        Mirror m(static_cast<uint64_t>(tokens));
        const Packed p(m, dtype, random_documents(tokens, tokens > 400 ? 500 : 150, 41), h);
        m.check(p.forward());
        const TensorView dout = m.normal(dtype, p.out.shape);
        m.check(AttentionBackward{.qkv = p.qkv,
                                  .heads = h.heads,
                                  .kv_heads = h.kv_heads,
                                  .head_dim = h.head_dim,
                                  .doc_begin = p.doc_begin,
                                  .scale = scale_of(h),
                                  .out = p.out,
                                  .lse = p.lse,
                                  .dout = dout,
                                  .dqkv = m.fresh(dtype, p.qkv.shape)});
        if (HasFailure()) return;
      }
    }
  }
}

TEST(GpuAttention, several_splits_match_the_cpu) {
  for (const Heads& h : {Heads{2, 1, 128}, Heads{2, 2, 64}}) {
    Mirror m;
    std::vector<int32_t> documents = random_documents(700, 500, 42);
    documents.resize(3400, 700);
    const Packed p(m, DType::kBf16, documents, h);
    m.check(p.forward());
    m.check(AttentionBackward{.qkv = p.qkv,
                              .heads = h.heads,
                              .kv_heads = h.kv_heads,
                              .head_dim = h.head_dim,
                              .doc_begin = p.doc_begin,
                              .scale = scale_of(h),
                              .out = p.out,
                              .lse = p.lse,
                              .dout = m.normal(DType::kBf16, p.out.shape),
                              .dqkv = m.fresh(DType::kBf16, p.qkv.shape)});
  }
}

TEST(GpuAttention, large_scores_do_not_overflow) {
  for (DType dtype : {DType::kBf16, DType::kF32}) {
    Mirror m;
    const Packed p(m, dtype, random_documents(300, 250, 43), {4, 2, 64}, 30.0f);
    m.check(p.forward());
  }
}

// A document alone, and in the middle of a batch: the same rows, forward and backward.
TEST(GpuAttention, a_document_does_not_depend_on_its_batch) {
  for (const Heads& h : {Heads{6, 2, 64}, Heads{2, 2, 128}, Heads{3, 1, 20}}) {
    const std::vector<int32_t> documents = random_documents(2500, 1500, 45);
    Queue gpu = Queue::cuda(0);
    const auto gradients = [&](const std::vector<int32_t>& docs, Mirror& m, const TensorView* rows,
                               const TensorView* grads) {
      const Packed p(m, DType::kBf16, docs, h);
      const TensorView dout = m.normal(DType::kBf16, p.out.shape), dqkv = m.fresh(DType::kBf16, p.qkv.shape);
      if (rows) std::memcpy(p.qkv.data, rows->data, static_cast<size_t>(rows->bytes()));
      if (grads) std::memcpy(dout.data, grads->data, static_cast<size_t>(grads->bytes()));
      m.run_on_gpu(p.forward());
      m.run_on_gpu(AttentionBackward{.qkv = p.qkv,
                                     .heads = h.heads,
                                     .kv_heads = h.kv_heads,
                                     .head_dim = h.head_dim,
                                     .doc_begin = p.doc_begin,
                                     .scale = scale_of(h),
                                     .out = p.out,
                                     .lse = p.lse,
                                     .dout = dout,
                                     .dqkv = dqkv});
      return std::vector<TensorView>{p.out, p.lse, dqkv, p.qkv, dout};
    };
    Mirror batch(7);
    const std::vector<TensorView> all = gradients(documents, batch, nullptr, nullptr);
    const auto total = static_cast<int64_t>(documents.size());
    for (int64_t begin = 0, end; begin < total; begin = end) {
      end = begin + 1;
      while (end < total && documents[static_cast<size_t>(end)] == begin) ++end;
      const int64_t count = end - begin;
      Mirror alone(8);
      const TensorView rows = all[3].rows(begin, count), grads = all[4].rows(begin, count);
      const std::vector<TensorView> one =
          gradients(std::vector<int32_t>(static_cast<size_t>(count), 0), alone, &rows, &grads);
      for (size_t i = 0; i < 3; ++i)
        EXPECT_TRUE(matches_bitwise(all[i].rows(begin, count), one[i])) << text_of(h);
    }
  }
}

// NaN in another document reaches no row; in a later token of the same document no row of an earlier tile.
TEST(GpuAttention, rows_do_not_see_other_documents) {
  const std::vector<int32_t> documents = random_documents(700, 300, 47);
  const Heads h{4, 2, 64};
  Mirror m(9);
  const Packed p(m, DType::kBf16, documents, h);
  m.run_on_gpu(p.forward());
  HostTensor clean(p.out.dtype, p.out.shape);
  std::memcpy(clean.view().data, p.out.data, static_cast<size_t>(p.out.bytes()));
  const int64_t poisoned = 350, begin = documents[350];
  for (int64_t i = 0; i < h.width(); ++i) p.qkv.as<Bf16>()[poisoned * h.width() + i] = {0x7FC0};
  m.run_on_gpu(p.forward());
  for (int64_t t = 0; t < p.tokens; ++t) {
    const bool other =
        documents[static_cast<size_t>(t)] != begin || t - begin < (poisoned - begin) / 128 * 128;
    if (other) {
      EXPECT_TRUE(matches_bitwise(clean.view().rows(t, 1), p.out.rows(t, 1))) << "row " << t;
    } else if (t >= poisoned) {
      EXPECT_TRUE(std::isnan(element(p.out, t * h.heads * h.head_dim))) << "row " << t;
    }
  }
}

TEST(GpuAttention, broken_documents_are_refused) {
  for (const Heads& h : {Heads{2, 1, 32}, Heads{2, 1, 10}}) {
    for (const std::vector<int32_t>& documents :
         {std::vector<int32_t>{1, 1, 1}, {0, 0, 1}, {0, 1, 0}, {0, 2, 2}, {-1, 0, 0}}) {
      Mirror m;
      const Packed p(m, DType::kBf16, documents, h);
      EXPECT_THROW(m.run_on_gpu(p.forward()), InternalError);
    }
  }
}

TEST(GpuAttention, tensors_at_odd_addresses_give_the_same_bits) {
  const Heads h{4, 2, 64};
  const std::vector<int32_t> documents = random_documents(200, 150, 48);
  Mirror m(10);
  const Packed p(m, DType::kBf16, documents, h);
  m.run_on_gpu(p.forward());
  const TensorView qkv_bytes = m.fresh(DType::kBf16, {p.qkv.elements() + 1});
  const TensorView out_bytes = m.fresh(DType::kBf16, {p.out.elements() + 1});
  std::memcpy(qkv_bytes.as<Bf16>() + 1, p.qkv.data, static_cast<size_t>(p.qkv.bytes()));
  AttentionForward op = p.forward();
  op.qkv = {qkv_bytes.as<Bf16>() + 1, DType::kBf16, p.qkv.shape};
  op.out = {out_bytes.as<Bf16>() + 1, DType::kBf16, p.out.shape};
  m.run_on_gpu(op);
  EXPECT_TRUE(matches_bitwise(p.out, op.out));
}

}  // namespace
}  // namespace fp4t::test

FP4T_GPU_TEST_MAIN

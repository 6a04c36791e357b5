// AttentionForward, AttentionBackward, AttentionCached, KvAppend, KvCopyPages, KvRound: values, claims and
// refusals. Gradients are checked against differences in tests/grad/attention.cpp.
#include "kernels/ops/attention.h"

#include <algorithm>
#include <numeric>
#include <random>

#include "kernels/base/numeric.h"
#include "kernels/formats/mxfp8.h"
#include "kernels/ops/run.h"
#include "tests/support/dense_cases.h"

namespace fp4t::test {
namespace {

const reference::Heads kHeads[] = {{4, 2, 32}, {3, 3, 40}, {8, 2, 64}, {5, 1, 10}, {2, 2, 128}, {12, 4, 96}};

TEST(Attention, forward_matches_the_definition) {
  for (const auto& heads : kHeads) {
    for (int64_t tokens : {0, 1, 31, 33, 290}) {
      AttentionCase c(DType::kF32, random_documents(tokens, 150, 41), heads, 41);
      SCOPED_TRACE(c.text());
      Queue queue = Queue::cpu(2);
      c.forward(queue);
      Values lse;
      const Values out = reference::attention(values_of(c.qkv), heads, c.doc_begin, c.scale, lse);
      EXPECT_TRUE(near_values(out, c.out.view(), 1e-5));
      EXPECT_TRUE(near_values(lse, c.lse.view(), 1e-5));
    }
  }
}

TEST(Attention, large_scores_do_not_overflow) {
  AttentionCase c(DType::kF32, random_documents(200, 200, 42), {4, 2, 32}, 42);
  fill_normal(c.qkv, 42, 30.0f);
  Queue queue = Queue::cpu(2);
  c.forward(queue);
  EXPECT_TRUE(near_values(c.expected(values_of(c.qkv)), c.out.view(), 1e-3));
}

TEST(Attention, bf16_is_fp32_on_the_same_values_rounded_once) {
  for (const auto& heads : kHeads) {
    Queue queue = Queue::cpu(2);
    AttentionCase narrow(DType::kBf16, random_documents(150, 70, 43), heads, 43);
    SCOPED_TRACE(narrow.text());
    AttentionCase wide = narrow;
    for (HostTensor* t : {&wide.qkv, &wide.out, &wide.dout, &wide.dqkv}) *t = in_dtype(*t, DType::kF32);
    narrow.forward(queue);
    wide.forward(queue);
    EXPECT_TRUE(matches_bitwise(in_dtype(wide.out, DType::kBf16).view(), narrow.out.view()));
    EXPECT_TRUE(matches_bitwise(wide.lse.view(), narrow.lse.view()));
    wide.out = in_dtype(narrow.out, DType::kF32);
    narrow.backward(queue);
    wide.backward(queue);
    EXPECT_TRUE(matches_bitwise(in_dtype(wide.dqkv, DType::kBf16).view(), narrow.dqkv.view()));
  }
}

TEST(Attention, threads_change_no_bit) {
  for (DType dtype : {DType::kF32, DType::kBf16}) {
    expect_same_with_any_threads([&](Queue& queue) {
      AttentionCase c(dtype, random_documents(700, 300, 44), {6, 2, 32}, 44);
      c.forward(queue);
      c.backward(queue);
      return std::vector<HostTensor>{c.out, c.lse, c.dqkv};
    });
  }
}

// A document alone, and in the middle of a batch: the same rows, forward and backward.
TEST(Attention, a_document_does_not_depend_on_its_batch) {
  Queue queue = Queue::cpu(3);
  AttentionCase batch(DType::kBf16, random_documents(600, 200, 45), {6, 2, 32}, 45);
  batch.forward(queue);
  batch.backward(queue);
  for (int64_t begin = 0; begin < batch.tokens;) {
    int64_t end = begin;
    while (end < batch.tokens && batch.doc_begin[static_cast<size_t>(end)] == begin) ++end;
    const int64_t count = end - begin;
    AttentionCase alone(DType::kBf16, std::vector<int32_t>(static_cast<size_t>(count), 0), {6, 2, 32}, 46);
    for (auto field : {&AttentionCase::qkv, &AttentionCase::dout}) {
      const TensorView rows = (batch.*field).view().rows(begin, count);
      std::memcpy((alone.*field).view().data, rows.data, static_cast<size_t>(rows.bytes()));
    }
    alone.forward(queue);
    alone.backward(queue);
    EXPECT_TRUE(matches_bitwise(batch.out.view().rows(begin, count), alone.out.view()));
    EXPECT_TRUE(matches_bitwise(batch.lse.view().rows(begin, count), alone.lse.view()));
    EXPECT_TRUE(matches_bitwise(batch.dqkv.view().rows(begin, count), alone.dqkv.view()));
    begin = end;
  }
}

// NaN in a later token, or in another document, reaches no earlier row and no other document.
TEST(Attention, rows_see_their_past_alone) {
  Queue queue = Queue::cpu(2);
  const std::vector<int32_t> documents = random_documents(120, 40, 47);
  AttentionCase clean(DType::kF32, documents, {4, 2, 32}, 47), dirty(DType::kF32, documents, {4, 2, 32}, 47);
  const int64_t poisoned = 60, begin = documents[60];
  for (int64_t i = 0; i < 256; ++i) dirty.qkv.as<float>()[poisoned * 256 + i] = NAN;
  clean.forward(queue);
  dirty.forward(queue);
  for (int64_t t = 0; t < 120; ++t) {
    const bool sees = documents[static_cast<size_t>(t)] == begin && t >= poisoned;
    const bool same =
        static_cast<bool>(matches_bitwise(clean.out.view().rows(t, 1), dirty.out.view().rows(t, 1)));
    EXPECT_EQ(same, !sees) << "row " << t;
  }
}

TEST(Attention, broken_documents_are_refused) {
  Queue queue = Queue::cpu(1);
  for (const std::vector<int32_t>& documents :
       {std::vector<int32_t>{1, 1, 1}, {0, 0, 1}, {0, 1, 0}, {0, 2, 2}, {-1, 0, 0}}) {
    AttentionCase c(DType::kF32, documents, {2, 1, 8}, 48);
    EXPECT_THROW(c.forward(queue), InternalError);
    EXPECT_THROW(c.backward(queue), InternalError);
  }
}

// A cache whose slots are handed out from the back, NaN where nothing was written. With `page` > 0 in pages
// of so many positions, which slots have in no order.
class Cache {
 public:
  Cache(Format format, DType dtype, int64_t slots, int64_t max_length, const reference::Heads& h,
        int64_t page = 0)
      : Cache(format, dtype, slots, page > 0 ? ceil_div(max_length, page) : 1, page > 0 ? page : max_length,
              h, page > 0) {}
  KvCacheView view() {
    KvCacheView cache{format_, k_.view(), v_.view(), {}, {}};
    if (format_ != Format::kBf16) {
      cache.k_scales = k_scales_.view();
      cache.v_scales = v_scales_.view();
    }
    if (paged_) cache.table = table_.view();
    return cache;
  }
  HostTensor& table() { return table_; }

 private:
  Cache(Format format, DType dtype, int64_t slots, int64_t pages, int64_t length, const reference::Heads& h,
        bool paged)
      : format_(format),
        paged_(paged),
        k_(format == Format::kMxfp8 ? DType::kU8 : dtype, {slots * pages, length, h.kv_heads * h.head_dim}),
        v_(k_),
        k_scales_(DType::kU8, {slots * pages, length, h.kv_heads * h.head_dim / 32}),
        v_scales_(k_scales_),
        table_(DType::kI32, {slots, pages}) {
    std::vector<int32_t> order(static_cast<size_t>(slots * pages));
    std::iota(order.begin(), order.end(), 0);
    std::shuffle(order.begin(), order.end(), std::mt19937_64(7));
    std::copy(order.begin(), order.end(), table_.view().as<int32_t>());
  }

  Format format_;
  bool paged_;
  HostTensor k_, v_, k_scales_, v_scales_, table_;
};

struct CachedRows {
  std::vector<int64_t> rows;  // of the packed batch
  std::vector<int32_t> slots, positions;
};

// The chosen rows of `c` through the cache: appended, then attended.
void run_cached(Queue& queue, AttentionCase& c, Cache& cache, const CachedRows& pick, HostTensor& out) {
  const auto count = static_cast<int64_t>(pick.rows.size());
  HostTensor qkv(c.qkv.view().dtype, {count, c.heads.width()});
  HostTensor part(c.qkv.view().dtype, {count, c.heads.heads * c.heads.head_dim});
  for (int64_t i = 0; i < count; ++i) {
    const TensorView from = c.qkv.view().rows(pick.rows[static_cast<size_t>(i)], 1);
    std::memcpy(qkv.view().rows(i, 1).data, from.data, static_cast<size_t>(from.bytes()));
  }
  HostTensor slots = i32_tensor(pick.slots), positions = i32_tensor(pick.positions);
  const reference::Heads& h = c.heads;
  run(queue, KvAppend{.qkv = qkv.view(),
                      .heads = h.heads,
                      .kv_heads = h.kv_heads,
                      .head_dim = h.head_dim,
                      .slots = slots.view(),
                      .positions = positions.view(),
                      .cache = cache.view()});
  run(queue, AttentionCached{.qkv = qkv.view(),
                             .heads = h.heads,
                             .kv_heads = h.kv_heads,
                             .head_dim = h.head_dim,
                             .slots = slots.view(),
                             .positions = positions.view(),
                             .cache = cache.view(),
                             .scale = c.scale,
                             .out = part.view()});
  for (int64_t i = 0; i < count; ++i) {
    const TensorView from = part.view().rows(i, 1);
    std::memcpy(out.view().rows(pick.rows[static_cast<size_t>(i)], 1).data, from.data,
                static_cast<size_t>(from.bytes()));
  }
}

// Steps of `chunk` rows of every document at once: 1 is decoding, a large chunk is prefill.
void expect_cached_equals_training(Format format, DType dtype, const reference::Heads& heads, int32_t chunk,
                                   float size, int64_t page = 0) {
  Queue queue = Queue::cpu(2);
  AttentionCase c(dtype, random_documents(640, 200, 49), heads, 49);
  fill_normal(c.qkv, 49, size);
  SCOPED_TRACE(c.text() + ", " + name_of(format) + ", chunk " + std::to_string(chunk) + ", page " +
               std::to_string(page));
  Cache cache(format, dtype, c.tokens, 200, heads, page);
  HostTensor out(dtype, c.out.view().shape);
  for (int32_t step = 0; step < 200; step += chunk) {
    CachedRows pick;
    for (int64_t t = 0; t < c.tokens; ++t) {
      const int32_t first = c.doc_begin[static_cast<size_t>(t)], position = static_cast<int32_t>(t) - first;
      if (position < step || position >= step + chunk) continue;
      pick.rows.push_back(t);
      pick.slots.push_back(static_cast<int32_t>(c.tokens) - 1 - first);
      pick.positions.push_back(position);
    }
    run_cached(queue, c, cache, pick, out);
  }
  if (format == Format::kMxfp8) {
    run(queue, KvRound{.qkv = c.qkv.view(),
                       .heads = heads.heads,
                       .kv_heads = heads.kv_heads,
                       .head_dim = heads.head_dim,
                       .format = format});
  }
  c.forward(queue);
  EXPECT_TRUE(matches_bitwise(c.out.view(), out.view()));
}

TEST(AttentionCached, equals_training_bit_for_bit) {
  for (const auto& heads : {reference::Heads{4, 2, 32}, {6, 2, 64}, {2, 2, 96}, {5, 1, 128}}) {
    for (int32_t chunk : {1, 7, 200}) {
      expect_cached_equals_training(Format::kBf16, DType::kBf16, heads, chunk, 1.0f);
    }
  }
  expect_cached_equals_training(Format::kBf16, DType::kF32, {4, 2, 32}, 13, 1.0f);
  expect_cached_equals_training(Format::kBf16, DType::kF32, {3, 3, 10}, 13, 1.0f);
}

TEST(AttentionCached, equals_training_bit_for_bit_with_an_mxfp8_cache) {
  for (const auto& heads : {reference::Heads{4, 2, 32}, {6, 2, 64}, {2, 2, 96}, {5, 1, 128}}) {
    for (int32_t chunk : {1, 7, 200}) {
      expect_cached_equals_training(Format::kMxfp8, DType::kBf16, heads, chunk, 1.0f);
    }
  }
  // Scales at the bottom of their range: decoded values are not exact in BF16.
  expect_cached_equals_training(Format::kMxfp8, DType::kBf16, {4, 2, 32}, 13, 0x1p-122f);
}

TEST(AttentionCached, pages_change_no_bit) {
  for (int64_t page : {32, 64, 256}) {
    for (int32_t chunk : {1, 45, 200}) {
      expect_cached_equals_training(Format::kBf16, DType::kBf16, {4, 2, 32}, chunk, 1.0f, page);
      expect_cached_equals_training(Format::kMxfp8, DType::kBf16, {6, 2, 64}, chunk, 1.0f, page);
    }
  }
  expect_cached_equals_training(Format::kBf16, DType::kF32, {3, 3, 10}, 13, 1.0f, 32);
}

TEST(AttentionCached, broken_page_tables_are_refused) {
  Queue queue = Queue::cpu(1);
  AttentionCase c(DType::kF32, {0}, {2, 1, 8}, 51);
  HostTensor out(DType::kF32, c.out.view().shape);
  for (int32_t page : {-1, 6, 1 << 30}) {
    Cache cache(Format::kBf16, DType::kF32, 3, 64, c.heads, 32);
    cache.table().view().as<int32_t>()[3] = page;
    EXPECT_NO_THROW(run_cached(queue, c, cache, {{0}, {1}, {31}}, out));
    EXPECT_THROW(run_cached(queue, c, cache, {{0}, {1}, {32}}, out), InternalError);
  }
  for (int64_t page : {16, 48}) {
    Cache cache(Format::kBf16, DType::kF32, 3, 48, c.heads, page);
    EXPECT_THROW(run_cached(queue, c, cache, {{0}, {1}, {0}}, out), InternalError);
  }
}

TEST(KvCopyPages, copies_whole_pages_of_every_part) {
  Queue queue = Queue::cpu(2);
  for (Format format : {Format::kBf16, Format::kMxfp8}) {
    Cache cache(format, DType::kBf16, 4, 32, {2, 1, 64}, 32);
    const KvCacheView view = cache.view();
    std::vector<TensorView> parts = {view.k, view.v};
    if (format == Format::kMxfp8) parts.insert(parts.end(), {view.k_scales, view.v_scales});
    for (size_t p = 0; p < parts.size(); ++p) {
      for (int64_t i = 0; i < parts[p].bytes(); ++i) {
        static_cast<uint8_t*>(parts[p].data)[i] =
            static_cast<uint8_t>(i * 7 + i / 256 + static_cast<int64_t>(p));
      }
    }
    HostTensor from = i32_tensor({2, 2}), to = i32_tensor({0, 3});
    std::vector<std::string> before, after;
    const auto page_of = [](const TensorView& part, int64_t page) {
      const int64_t bytes = part.bytes() / 4;
      return std::string(static_cast<const char*>(part.data) + page * bytes, static_cast<size_t>(bytes));
    };
    for (const TensorView& part : parts) before.push_back(page_of(part, 1) + page_of(part, 2));
    run(queue, KvCopyPages{.from = from.view(), .to = to.view(), .cache = view});
    for (size_t p = 0; p < parts.size(); ++p) {
      EXPECT_EQ(page_of(parts[p], 1) + page_of(parts[p], 2), before[p]);
      EXPECT_EQ(page_of(parts[p], 0), page_of(parts[p], 2));
      EXPECT_EQ(page_of(parts[p], 3), page_of(parts[p], 2));
    }
    HostTensor wrong = i32_tensor({4, 0});
    EXPECT_THROW(run(queue, KvCopyPages{.from = wrong.view(), .to = to.view(), .cache = view}),
                 InternalError);
  }
}

TEST(AttentionCached, threads_change_no_bit) {
  expect_same_with_any_threads([](Queue& queue) {
    AttentionCase c(DType::kBf16, random_documents(300, 90, 50), {4, 2, 32}, 50);
    Cache cache(Format::kMxfp8, DType::kBf16, 300, 90, c.heads);
    CachedRows pick;
    for (int64_t t = 0; t < 300; ++t) {
      pick.rows.push_back(t);
      pick.slots.push_back(c.doc_begin[static_cast<size_t>(t)]);
      pick.positions.push_back(static_cast<int32_t>(t) - pick.slots.back());
    }
    HostTensor out(DType::kBf16, c.out.view().shape);
    run_cached(queue, c, cache, pick, out);
    return std::vector<HostTensor>{out};
  });
}

TEST(AttentionCached, places_outside_the_cache_are_refused) {
  Queue queue = Queue::cpu(1);
  AttentionCase c(DType::kF32, {0}, {2, 1, 8}, 51);
  Cache cache(Format::kBf16, DType::kF32, 3, 5, c.heads);
  HostTensor out(DType::kF32, c.out.view().shape);
  const CachedRows wrong[] = {{{0}, {3}, {0}}, {{0}, {-1}, {0}}, {{0}, {0}, {5}}, {{0}, {0}, {-1}}};
  for (const CachedRows& pick : wrong) EXPECT_THROW(run_cached(queue, c, cache, pick, out), InternalError);
}

// Rounding leaves q alone, changes k and v to codes times scales, and is idempotent.
TEST(KvRound, gives_the_mxfp8_values) {
  for (DType dtype : {DType::kBf16, DType::kF32}) {
    Queue queue = Queue::cpu(2);
    const reference::Heads h = {4, 2, 64};
    HostTensor before = normal_tensor(dtype, {37, h.width()}, 52), after = before;
    const auto round = [&] {
      run(queue, KvRound{.qkv = after.view(),
                         .heads = h.heads,
                         .kv_heads = h.kv_heads,
                         .head_dim = h.head_dim,
                         .format = Format::kMxfp8});
    };
    round();
    for (int64_t t = 0; t < 37; ++t) {
      for (int64_t first = 0; first < h.width(); first += 32) {
        float amax = 0;
        for (int64_t i = first; i < first + 32; ++i) {
          amax = std::max(amax, static_cast<float>(std::fabs(element(before.view(), t * h.width() + i))));
        }
        const float scale = e8m0_value(mxfp8_block_scale(amax));
        for (int64_t i = first; i < first + 32; ++i) {
          const auto x = static_cast<float>(element(before.view(), t * h.width() + i));
          const float expected = first < 4 * 64 ? x : e4m3_value(e4m3_nearest(x / scale)) * scale;
          EXPECT_EQ(expected, element(after.view(), t * h.width() + i));
        }
      }
    }
    const HostTensor once = after;
    round();
    EXPECT_TRUE(once.same_bytes(after));
  }
}

TEST(KvRound, other_formats_and_head_dims_are_refused) {
  Queue queue = Queue::cpu(1);
  HostTensor qkv = normal_tensor(DType::kF32, {1, 3 * 40}, 53);
  KvRound op{.qkv = qkv.view(), .heads = 1, .kv_heads = 1, .head_dim = 40, .format = Format::kMxfp8};
  EXPECT_THROW(run(queue, op), InternalError);
  op.format = Format::kNvfp4;
  EXPECT_THROW(run(queue, op), InternalError);
}

}  // namespace
}  // namespace fp4t::test

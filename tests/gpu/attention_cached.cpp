// The key-value cache on the GPU: codes against the CPU, attention over it against the CPU and, bit for bit,
// against attention of packed rows.
#include <algorithm>
#include <numeric>
#include <random>

#include "kernels/base/numeric.h"
#include "kernels/formats/mxfp8.h"
#include "kernels/ops/attention.h"
#include "tests/support/dense_cases.h"
#include "tests/support/mirror.h"

namespace fp4t::test {
namespace {

using reference::Heads;

std::string text_of(const Heads& h) {
  return "heads " + std::to_string(h.heads) + "/" + std::to_string(h.kv_heads) + " x " +
         std::to_string(h.head_dim);
}

std::vector<int32_t> any_order(int64_t count) {
  std::vector<int32_t> order(static_cast<size_t>(count));
  std::iota(order.begin(), order.end(), 0);
  std::shuffle(order.begin(), order.end(), std::mt19937_64(7));
  return order;
}

KvCacheView cache_of(Mirror& m, Format format, DType dtype, int64_t slots, int64_t max_length,
                     const Heads& h) {
  const int64_t width = h.kv_heads * h.head_dim;
  KvCacheView cache{format, {}, {}, {}, {}};
  const DType type = format == Format::kMxfp8 ? DType::kU8 : dtype;
  cache.k = m.fresh(type, {slots, max_length, width});
  cache.v = m.fresh(type, {slots, max_length, width});
  if (format == Format::kMxfp8) {
    cache.k_scales = m.fresh(DType::kU8, {slots, max_length, width / 32});
    cache.v_scales = m.fresh(DType::kU8, {slots, max_length, width / 32});
  }
  return cache;
}

// The same in pages, which slots have in no order.
KvCacheView paged_cache_of(Mirror& m, Format format, DType dtype, int64_t slots, int64_t pages, int64_t page,
                           const Heads& h) {
  KvCacheView cache = cache_of(m, format, dtype, slots * pages, page, h);
  cache.table = m.i32(any_order(slots * pages));
  cache.table.shape = {slots, pages};
  return cache;
}

// Rows of the cache for which `slots` and `positions` are given.
struct Rows {
  Rows(Mirror& m, const TensorView& packed, const Heads& h, const std::vector<int32_t>& slot_of,
       const std::vector<int32_t>& position_of)
      : qkv(packed), heads(h), slots(m.i32(slot_of)), positions(m.i32(position_of)) {}
  KvAppend append(const KvCacheView& cache) const {
    return {.qkv = qkv,
            .heads = heads.heads,
            .kv_heads = heads.kv_heads,
            .head_dim = heads.head_dim,
            .slots = slots,
            .positions = positions,
            .cache = cache};
  }
  AttentionCached attend(const KvCacheView& cache, const TensorView& out) const {
    return {.qkv = qkv,
            .heads = heads.heads,
            .kv_heads = heads.kv_heads,
            .head_dim = heads.head_dim,
            .slots = slots,
            .positions = positions,
            .cache = cache,
            .scale = 1.0f / std::sqrt(static_cast<float>(heads.head_dim)),
            .out = out};
  }
  TensorView qkv;
  Heads heads;
  TensorView slots, positions;
};

// Runs of 1..40 rows of a slot, in an order of slots that goes back and forth.
void random_places(int64_t rows, int32_t slots, int32_t max_length, std::vector<int32_t>& slot_of,
                   std::vector<int32_t>& position_of) {
  std::mt19937_64 engine(77);
  std::vector<int32_t> next(static_cast<size_t>(slots), 0);
  while (static_cast<int64_t>(slot_of.size()) < rows) {
    const auto slot = static_cast<int32_t>(engine() % static_cast<uint64_t>(slots));
    int32_t& position = next[static_cast<size_t>(slot)];
    for (auto i = static_cast<int64_t>(engine() % 40); i >= 0; --i) {
      if (position == max_length || static_cast<int64_t>(slot_of.size()) == rows) break;
      slot_of.push_back(slot);
      position_of.push_back(position++);
    }
  }
}

TEST(GpuAttentionCached, appending_and_attending_match_the_cpu) {
  for (DType dtype : {DType::kBf16, DType::kF32}) {
    for (Format format : {Format::kBf16, Format::kMxfp8}) {
      for (const Heads& h : {Heads{4, 2, 32}, Heads{3, 3, 40}, Heads{5, 1, 10}, Heads{12, 4, 96},
                             Heads{2, 2, 128}, Heads{80, 1, 64}}) {
        if (format == Format::kMxfp8 && h.head_dim % 32 != 0) continue;
        for (int64_t rows : {0, 1, 33, 400}) {
          SCOPED_TRACE(std::string(dtype_name(dtype)) + " " + name_of(format) + " " + text_of(h) + " rows " +
                       std::to_string(rows));
          Mirror m(static_cast<uint64_t>(rows) + 3);
          std::vector<int32_t> slots, positions;
          random_places(rows, 5, 200, slots, positions);
          const Rows r(m, m.normal(dtype, {rows, h.width()}), h, slots, positions);
          const KvCacheView cache = cache_of(m, format, dtype, 5, 200, h);
          m.check(r.append(cache));
          m.check(r.attend(cache, m.fresh(dtype, {rows, h.heads * h.head_dim})));
          if (HasFailure()) return;
        }
      }
    }
  }
}

TEST(GpuAttentionCached, pages_match_the_cpu) {
  for (Format format : {Format::kBf16, Format::kMxfp8}) {
    for (const Heads& h : {Heads{4, 2, 32}, Heads{12, 4, 96}, Heads{2, 2, 128}}) {
      Mirror m(21);
      std::vector<int32_t> slots, positions;
      random_places(400, 5, 200, slots, positions);
      const Rows r(m, m.normal(DType::kBf16, {400, h.width()}), h, slots, positions);
      const KvCacheView cache = paged_cache_of(m, format, DType::kBf16, 5, 4, 64, h);
      m.check(r.append(cache));
      m.check(r.attend(cache, m.fresh(DType::kBf16, {400, h.heads * h.head_dim})));
      m.check(KvCopyPages{.from = m.i32({1, 1, 7}), .to = m.i32({0, 19, 2}), .cache = cache});
      if (HasFailure()) return;
    }
  }
}

TEST(GpuAttentionCached, pages_outside_of_the_cache_are_refused) {
  const Heads h{2, 1, 32};
  for (int32_t page : {-1, 4, 1 << 30}) {
    Mirror m;
    const Rows r(m, m.normal(DType::kBf16, {2, h.width()}), h, {0, 1}, {3, 40});
    KvCacheView cache = cache_of(m, Format::kBf16, DType::kBf16, 4, 32, h);
    cache.table = m.i32({0, 1, 2, page});
    cache.table.shape = {2, 2};
    EXPECT_THROW(m.run_on_gpu(r.append(cache)), InternalError);
    EXPECT_THROW(m.run_on_gpu(KvCopyPages{.from = m.i32({page}), .to = m.i32({0}), .cache = cache}),
                 InternalError);
  }
}

// Everything that a code can come from: magnitudes over all of FP32, zeros, infinities, NaN.
TEST(GpuAttentionCached, codes_of_extreme_values_match_the_cpu) {
  const Heads h{1, 1, 32};
  for (DType dtype : {DType::kBf16, DType::kF32}) {
    const int64_t rows = 600;
    Mirror m(5);
    const TensorView qkv = m.fresh(dtype, {rows, h.width()});
    std::mt19937_64 engine(6);
    for (int64_t i = 0; i < qkv.elements(); ++i) {
      const int64_t spread = i / h.width() % 3;  // one magnitude a row, a few, or any bits at all
      auto bits = static_cast<uint32_t>(engine());
      if (spread < 2) bits = (bits & 0x807FFFFFu) | static_cast<uint32_t>(i / h.width() * 255 / rows) << 23;
      if (spread == 1) bits -= static_cast<uint32_t>(engine() % 8) << 23;
      if (dtype == DType::kF32) {
        qkv.as<float>()[i] = float_of(bits);
      } else {
        qkv.as<Bf16>()[i] = {static_cast<uint16_t>(bits >> 16)};
      }
    }
    std::vector<int32_t> slots(static_cast<size_t>(rows), 0), positions(static_cast<size_t>(rows));
    std::iota(positions.begin(), positions.end(), 0);
    const Rows r(m, qkv, h, slots, positions);
    m.check(r.append(cache_of(m, Format::kMxfp8, dtype, 1, rows, h)));
    m.check(KvRound{.qkv = qkv, .heads = 1, .kv_heads = 1, .head_dim = 32, .format = Format::kMxfp8});
  }
}

TEST(GpuAttentionCached, rounding_matches_the_cpu) {
  for (DType dtype : {DType::kBf16, DType::kF32}) {
    for (const Heads& h : {Heads{4, 2, 32}, Heads{3, 1, 96}}) {
      for (int64_t rows : {0, 1, 77}) {
        Mirror m(11);
        m.check(KvRound{.qkv = m.normal(dtype, {rows, h.width()}),
                        .heads = h.heads,
                        .kv_heads = h.kv_heads,
                        .head_dim = h.head_dim,
                        .format = Format::kMxfp8});
      }
    }
  }
}

struct EqualityCase {
  Heads heads;
  DType dtype;
  Format format;
  int64_t tokens, longest;
  float size;
};

// The batch once packed, and once through the cache in steps of `chunk` rows of every document (0: all rows
// of a document at once), with rows beyond what was written left as NaN bytes. `page`: positions of a page;
// 0: every slot has one as long as itself.
void expect_equal_in(const EqualityCase& c, const std::vector<int32_t>& chunks, int64_t page) {
  const Heads& h = c.heads;
  const std::vector<int32_t> documents = random_documents(c.tokens, c.longest, 49);
  Mirror packed(12);
  const TensorView qkv = packed.normal(c.dtype, {c.tokens, h.width()}, c.size);
  const TensorView out = packed.fresh(c.dtype, {c.tokens, h.heads * h.head_dim});
  HostTensor unrounded(c.dtype, qkv.shape);
  std::memcpy(unrounded.view().data, qkv.data, static_cast<size_t>(qkv.bytes()));
  if (c.format == Format::kMxfp8) {
    packed.run_on_gpu(KvRound{.qkv = qkv,
                              .heads = h.heads,
                              .kv_heads = h.kv_heads,
                              .head_dim = h.head_dim,
                              .format = Format::kMxfp8});
  }
  packed.run_on_gpu(AttentionForward{.qkv = qkv,
                                     .heads = h.heads,
                                     .kv_heads = h.kv_heads,
                                     .head_dim = h.head_dim,
                                     .doc_begin = packed.i32(documents),
                                     .scale = 1.0f / std::sqrt(static_cast<float>(h.head_dim)),
                                     .out = out,
                                     .lse = packed.fresh(DType::kF32, {c.tokens, h.heads})});
  std::vector<int32_t> slot_of;
  int32_t num_slots = 0;
  for (int64_t t = 0; t < c.tokens; ++t) {
    num_slots += documents[static_cast<size_t>(t)] == t;
    slot_of.push_back(num_slots - 1);
  }
  for (int32_t chunk : chunks) {
    if (!next_is_in_gpu_share()) continue;
    SCOPED_TRACE(text_of(h) + " " + std::string(dtype_name(c.dtype)) + " " + name_of(c.format) + " tokens " +
                 std::to_string(c.tokens) + " chunk " + std::to_string(chunk) + " page " +
                 std::to_string(page));
    Queue gpu = Queue::cuda(0);
    const int64_t max_length = c.longest + 5, width = h.kv_heads * h.head_dim;
    const bool codes = c.format == Format::kMxfp8;
    std::vector<void*> memory;
    const auto on_gpu = [&](DType dtype, const Shape& shape, const void* from) {
      TensorView v{nullptr, dtype, shape};
      v.data = gpu.allocate(shape.elements() * dtype_bytes(dtype));
      memory.push_back(v.data);
      gpu.fill_bytes(v.data, 0xFF, v.bytes());
      if (from) gpu.copy_from_host(v.data, from, v.bytes());
      return v;
    };
    KvCacheView cache{c.format, {}, {}, {}, {}};
    const DType type = codes ? DType::kU8 : c.dtype;
    const int64_t per_slot = page > 0 ? ceil_div(max_length, page) : 1, length = page > 0 ? page : max_length;
    const int64_t pages = num_slots * per_slot;
    cache.k = on_gpu(type, {pages, length, width}, nullptr);
    cache.v = on_gpu(type, {pages, length, width}, nullptr);
    if (codes) {
      cache.k_scales = on_gpu(DType::kU8, {pages, length, width / 32}, nullptr);
      cache.v_scales = on_gpu(DType::kU8, {pages, length, width / 32}, nullptr);
    }
    if (page > 0) cache.table = on_gpu(DType::kI32, {num_slots, per_slot}, any_order(pages).data());
    const int32_t step_size = chunk == 0 ? static_cast<int32_t>(c.longest) : chunk;
    int64_t different = 0;
    for (int32_t step = 0; step < c.longest; step += step_size) {
      std::vector<int64_t> rows;
      std::vector<int32_t> slots, positions;
      for (int64_t t = 0; t < c.tokens; ++t) {
        const auto position = static_cast<int32_t>(t - documents[static_cast<size_t>(t)]);
        if (position < step || position >= step + step_size) continue;
        rows.push_back(t);
        slots.push_back(slot_of[static_cast<size_t>(t)]);
        positions.push_back(position);
      }
      const auto count = static_cast<int64_t>(rows.size());
      if (count == 0) break;
      HostTensor part(c.dtype, {count, h.width()}), got(c.dtype, {count, h.heads * h.head_dim});
      for (int64_t i = 0; i < count; ++i) {
        const TensorView from = unrounded.view().rows(rows[static_cast<size_t>(i)], 1);
        std::memcpy(part.view().rows(i, 1).data, from.data, static_cast<size_t>(from.bytes()));
      }
      const TensorView there = on_gpu(c.dtype, {count, h.width()}, part.view().data);
      const TensorView out_there = on_gpu(c.dtype, {count, h.heads * h.head_dim}, nullptr);
      const TensorView slots_there = on_gpu(DType::kI32, {count}, slots.data());
      const TensorView positions_there = on_gpu(DType::kI32, {count}, positions.data());
      run(gpu, KvAppend{.qkv = there,
                        .heads = h.heads,
                        .kv_heads = h.kv_heads,
                        .head_dim = h.head_dim,
                        .slots = slots_there,
                        .positions = positions_there,
                        .cache = cache});
      run(gpu, AttentionCached{.qkv = there,
                               .heads = h.heads,
                               .kv_heads = h.kv_heads,
                               .head_dim = h.head_dim,
                               .slots = slots_there,
                               .positions = positions_there,
                               .cache = cache,
                               .scale = 1.0f / std::sqrt(static_cast<float>(h.head_dim)),
                               .out = out_there});
      gpu.copy_to_host(got.view().data, out_there.data, out_there.bytes());
      for (int64_t i = 0; i < count && different < 3; ++i) {
        const auto same = matches_bitwise(out.rows(rows[static_cast<size_t>(i)], 1), got.view().rows(i, 1));
        EXPECT_TRUE(same) << "position " << positions[static_cast<size_t>(i)];
        different += !same;
      }
      for (int k = 0; k < 4; ++k) {
        gpu.release(memory.back());
        memory.pop_back();
      }
    }
    for (void* p : memory) gpu.release(p);
  }
}

void expect_equal(const EqualityCase& c, const std::vector<int32_t>& chunks) {
  for (int64_t page : {0, 32, 256}) expect_equal_in(c, chunks, page);
}

TEST(GpuAttentionCached, cached_rows_are_the_packed_rows_bit_for_bit) {
  for (const Heads& h :
       {Heads{4, 2, 32}, Heads{8, 1, 64}, Heads{6, 2, 128}, Heads{3, 3, 40}, Heads{130, 2, 64}}) {
    expect_equal({h, DType::kBf16, Format::kBf16, 700, 300, 1.0f}, {0, 1, 7, 64});
    if (h.head_dim % 32 == 0) expect_equal({h, DType::kBf16, Format::kMxfp8, 700, 300, 1.0f}, {0, 1, 33});
  }
  expect_equal({{4, 2, 128}, DType::kBf16, Format::kBf16, 700, 300, 8.0f}, {0, 1, 64});
}

TEST(GpuAttentionCached, cached_rows_are_the_packed_rows_over_several_splits) {
  for (const Heads& h : {Heads{8, 1, 128}, Heads{2, 2, 64}}) {
    for (Format format : {Format::kBf16, Format::kMxfp8}) {
      expect_equal({h, DType::kBf16, format, 6000, 3300, 2.0f}, {0, 100, 1100});
    }
  }
  expect_equal({{8, 1, 128}, DType::kBf16, Format::kBf16, 2600, 2600, 1.0f}, {1});
}

TEST(GpuAttentionCached, the_general_kernels_agree_with_each_other_bit_for_bit) {
  expect_equal({{3, 1, 10}, DType::kBf16, Format::kBf16, 300, 150, 1.0f}, {0, 1, 7});
  expect_equal({{4, 2, 64}, DType::kF32, Format::kBf16, 300, 150, 1.0f}, {0, 1, 7});
  expect_equal({{4, 2, 64}, DType::kF32, Format::kMxfp8, 300, 150, 1.0f}, {0, 7});
}

TEST(GpuAttentionCached, places_outside_of_the_cache_are_refused) {
  for (const Heads& h : {Heads{2, 1, 32}, Heads{2, 1, 10}}) {
    const std::vector<std::vector<int32_t>> places[] = {
        {{0, 2}, {0, 0}}, {{0, -1}, {0, 0}}, {{0, 1}, {0, 9}}, {{1, 1}, {-1, 0}}};
    for (const auto& place : places) {
      Mirror m;
      const Rows r(m, m.normal(DType::kBf16, {2, h.width()}), h, place[0], place[1]);
      const KvCacheView cache = cache_of(m, Format::kBf16, DType::kBf16, 2, 9, h);
      EXPECT_THROW(m.run_on_gpu(r.append(cache)), InternalError);
      EXPECT_THROW(m.run_on_gpu(r.attend(cache, m.fresh(DType::kBf16, {2, h.heads * h.head_dim}))),
                   InternalError);
    }
  }
}

}  // namespace
}  // namespace fp4t::test

FP4T_GPU_TEST_MAIN

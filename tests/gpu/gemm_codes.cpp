// Products of codes on the GPU against the CPU.
#include "tests/gpu/gemm_operands.h"

namespace fp4t::test {
namespace {

constexpr DType kBf16 = DType::kBf16, kF32 = DType::kF32;
constexpr GroupAxis kRows = GroupAxis::kRows, kCols = GroupAxis::kCols;

void check_dense(const QuantSpec& a_spec, const QuantSpec& b_spec, int64_t rows, int64_t n, int64_t k,
                 DType out) {
  SCOPED_TRACE(detail::concat(describe(a_spec), " x ", describe(b_spec), " ", rows, " x ", n, " x ", k));
  Mirror m;
  const Operand a = coded(m, a_spec, kRows, 1, rows, k, 11), b = coded(m, b_spec, kRows, 1, n, k, 12);
  m.check(Gemm{a, b, output(m, out, {rows, n}), false});
}

TEST(GpuGemmCodes, codes_on_both_sides) {
  const QuantSpec square = nvfp4(BlockShape::k16x16);
  for (const int64_t rows : {1, 8, 33, 200}) {
    for (const int64_t k : {1, 50, 96, 512}) {
      for (const DType out : {kF32, kBf16}) {
        check_dense(nvfp4(), nvfp4(), rows, 47, k, out);
        check_dense(nvfp4(), square, rows, 47, k, out);
        check_dense(square, square, rows, 130, k, out);
        check_dense(row_scaled(), nvfp4(), rows, 64, k, out);
        check_dense(mxfp8(), mxfp8(), rows, 47, k, out);
      }
    }
  }
}

TEST(GpuGemmCodes, rotated_codes_multiply_their_padding_too) {
  check_dense(nvfp4(BlockShape::k1x16, 128), nvfp4(BlockShape::k1x16, 128), 5, 17, 130, kF32);
}

TEST(GpuGemmCodes, codes_with_bf16_run_over_the_logical_depth) {
  for (const QuantSpec& spec : {nvfp4(), nvfp4(BlockShape::k16x16), mxfp8()}) {
    for (const bool transposed : {false, true}) {
      for (const int64_t k : {77, 128}) {
        SCOPED_TRACE(detail::concat(describe(spec), ", transposed ", transposed, ", depth ", k));
        Mirror m;
        const Operand c = coded(m, spec, kRows, 1, 35, k, 31);
        const Operand p = plain(m, kBf16, 18, k, transposed, transposed ? 1 : 0);
        m.check(Gemm{c, p, output(m, kF32, {35, 18}), false});
        m.check(Gemm{p, c, output(m, kF32, {18, 35}), false});
      }
    }
  }
}

TEST(GpuGemmCodes, every_code_and_scale_of_either_format_is_exact) {
  for (const bool fp4 : {true, false}) {
    // Row r has one scale byte; an identity on the other side reads the operand out.
    const int64_t depth = 256, rows = 256;
    Mirror m;
    const Operand a = coded(m, fp4 ? nvfp4() : mxfp8(), kRows, 1, rows, depth, 1);
    const int64_t block = fp4 ? 16 : 32, code_count = code_bytes(a.codes);
    for (int64_t i = 0; i < code_count; ++i) {
      a.codes.codes.as<uint8_t>()[i] = static_cast<uint8_t>(fp4 ? i % 8 * 2 + (i % 8 * 2 + 1) * 16 : i % 256);
    }
    for (int64_t r = 0; r < rows; ++r) {
      // Codes of NaN would spread over whole sums, and scales below 2^-124 leave BF16 (see below).
      int64_t scale = fp4 ? r % 127 : 3 + r % 250;
      for (int64_t b = 0; b < depth / block; ++b) {
        a.codes.block_scales.as<uint8_t>()[r * (depth / block) + b] = static_cast<uint8_t>(scale);
      }
    }
    if (fp4) a.codes.tensor_scale.as<float>()[0] = 1.0f;
    if (!fp4) {
      for (int64_t i = 0; i < code_count; ++i) {
        auto& c = a.codes.codes.as<uint8_t>()[i];
        // Above 2^120 times 448 is infinite; keep to what is finite.
        if ((c & 0x7F) == 0x7F || (i / depth % 250 > 240 && (c & 0x7F) > 0x38)) c = 0x38;
      }
    }
    Operand identity;
    identity.values = m.zeros(kBf16, {depth, depth});
    for (int64_t i = 0; i < depth; ++i) put(identity.values, i * depth + i, 1.0f);
    const TensorView out = output(m, kF32, {rows, depth});
    m.compare_by(out, Ulp(0));
    m.check(Gemm{a, identity, out, false});
  }
}

// The same in the order of few rows: 64 rows of an identity at a time read 64 columns of the weights.
TEST(GpuGemmCodes, every_code_and_scale_beside_few_rows_is_exact) {
  const int64_t depth = 256, n = 256;
  Mirror m;
  Operand b = coded(m, nvfp4(), kRows, 1, n, depth, 1);
  for (int64_t i = 0; i < code_bytes(b.codes); ++i)
    b.codes.codes.as<uint8_t>()[i] = static_cast<uint8_t>(i + i / 128);
  for (int64_t r = 0; r < n; ++r) {
    for (int64_t k = 0; k < depth / 16; ++k) {
      const int64_t scale = r % 127 + (r >= 127 && k % 2 == 1 ? 128 : 0);  // negative ones too, no NaN
      b.codes.block_scales.as<uint8_t>()[r * (depth / 16) + k] = static_cast<uint8_t>(scale);
    }
  }
  b.codes.tensor_scale.as<float>()[0] = 1.0f;
  put_in_stream_order(b);
  for (int64_t first = 0; first < depth; first += 64) {
    Operand identity;
    identity.values = m.zeros(kBf16, {64, depth});
    for (int64_t i = 0; i < 64; ++i) put(identity.values, i * depth + first + i, 1.0f);
    const TensorView out = output(m, kF32, {64, n});
    m.compare_by(out, Ulp(0));
    m.check(Gemm{identity, b, out, false});
  }
}

TEST(GpuGemmCodes, row_scales_that_vanish_in_the_product_are_applied_one_by_one) {
  Mirror m;
  const Operand a = coded(m, row_scaled(), kRows, 1, 8, 64, 41), b = coded(m, nvfp4(), kRows, 1, 20, 64, 42);
  b.codes.tensor_scale.as<float>()[0] = 0x1p-80f;
  a.codes.tensor_scale.as<float>()[3] = 0x1p-60f;  // product subnormal
  a.codes.tensor_scale.as<float>()[5] = 0x1p-75f;  // product 0
  m.check(Gemm{a, b, output(m, kF32, {8, 20}), false});
}

const std::vector<int32_t> kOffsets = {0, 0, 1, 32, 65, 165, 165};
constexpr int64_t kGroups = 6, kCapacity = 170;

TEST(GpuGemmCodes, grouped_rows_find_their_padded_storage) {
  for (const QuantSpec& a_spec : {nvfp4(), nvfp4(BlockShape::k16x16), row_scaled(), mxfp8()}) {
    for (const bool b_square : {false, true}) {
      for (const bool one : {false, true}) {  // activations quantised as one group
        const QuantSpec b_spec = a_spec.format == Format::kMxfp8 ? mxfp8()
                                 : b_square                      ? nvfp4(BlockShape::k16x16)
                                                                 : nvfp4();
        SCOPED_TRACE(detail::concat(describe(a_spec), " x ", describe(b_spec), " one group ", one));
        Mirror m;
        const Operand a = coded(m, a_spec, kRows, one ? 1 : kGroups, kCapacity, 50, 51);
        const Operand b = coded(m, b_spec, kRows, kGroups, kGroups * 23, 50, 52);
        m.check(GroupedGemm{a, b, m.i32(kOffsets), output(m, kF32, {kCapacity, 23})});
      }
    }
  }
}

TEST(GpuGemmCodes, grouped_codes_with_bf16) {
  for (const QuantSpec& spec : {nvfp4(), nvfp4(BlockShape::k16x16), mxfp8()}) {
    for (const int64_t k : {50, 128}) {
      SCOPED_TRACE(detail::concat(describe(spec), " depth ", k));
      Mirror m;
      const Operand weights = coded(m, spec, kRows, kGroups, kGroups * 40, k, 53);
      const Operand rows = coded(m, spec, kRows, kGroups, kCapacity, k, 54);
      const TensorView offsets = m.i32(kOffsets);
      m.check(GroupedGemm{plain(m, kBf16, kCapacity, k, false), weights, offsets,
                          output(m, kBf16, {kCapacity, 40})});
      m.check(GroupedGemm{rows, stacked(m, kBf16, kGroups, 40, k, true, kGroups), offsets,
                          output(m, kF32, {kCapacity, 40})});
    }
  }
}

TEST(GpuGemmCodes, few_rows_beside_nvfp4_weights) {
  for (const QuantSpec& spec : {nvfp4(), nvfp4(BlockShape::k16x16)}) {
    for (const int64_t rows : {1, 7, 9, 17, 40, 64}) {
      for (const int64_t k : {128, 768}) {
        const int64_t n = rows == 17 ? 70 : 136;
        SCOPED_TRACE(detail::concat(describe(spec), " rows ", rows, " k ", k));
        Mirror m;
        const Operand b = streamed(m, spec, 1, n, k, 13);
        m.check(Gemm{coded(m, row_scaled(), kRows, 1, rows, k, 18), b,
                     output(m, rows % 2 == 0 ? kF32 : kBf16, {rows, n}), false});
        const bool accumulate = rows == 9;
        m.check(
            Gemm{plain(m, kBf16, rows, k, false, 1), b, output(m, kF32, {rows, n}, accumulate), accumulate});
      }
    }
  }
  for (const QuantSpec& spec : {nvfp4(), nvfp4(BlockShape::k16x16)}) {
    Mirror m;
    const Operand b = streamed(m, spec, kGroups, kGroups * 88, 384, 14);
    const TensorView offsets = m.i32(kOffsets);
    m.check(
        GroupedGemm{plain(m, kBf16, kCapacity, 384, false), b, offsets, output(m, kF32, {kCapacity, 88})});
    m.check(GroupedGemm{coded(m, row_scaled(), kRows, kGroups, kCapacity, 384, 15), b, offsets,
                        output(m, kBf16, {kCapacity, 88})});
  }
}

HostTensor copy_of(const TensorView& v) {
  HostTensor copy(v.dtype, v.shape);
  std::memcpy(copy.view().data, v.data, static_cast<size_t>(v.bytes()));
  return copy;
}

// The sampler reads weights as codes, the trainer decodes them first; their rows must agree.
TEST(GpuGemmCodes, a_row_has_the_same_bits_beside_few_rows_and_many) {
  for (const int64_t k : {128, 768, 2048}) {
    const int64_t rows = 600, n = 200;
    Mirror m;
    const Operand a = plain(m, kBf16, rows, k, false), b = streamed(m, nvfp4(), 1, n, k, 16);
    const TensorView all = m.fresh(kF32, {rows, n});
    m.run_on_gpu(Gemm{a, b, all, false});
    for (const auto& [begin, count] : {std::pair<int64_t, int64_t>{0, 1}, {3, 5}, {100, 16}, {300, 64}}) {
      Operand part = a;
      part.values = a.values.rows(begin, count);
      const TensorView few = m.fresh(kF32, {count, n});
      m.run_on_gpu(Gemm{part, b, few, false});
      EXPECT_TRUE(matches_bitwise(all.rows(begin, count), few)) << count << " rows, depth " << k;
    }
    const Operand experts = streamed(m, nvfp4(), 4, 4 * n, k, 17);
    const std::vector<int32_t> many = {0, 200, 200, 500, 600}, few = {0, 3, 3, 30, 31};
    const TensorView out = m.fresh(kF32, {rows, n});
    m.run_on_gpu(GroupedGemm{a, experts, m.i32(many), out});
    HostTensor expected = copy_of(out);
    for (size_t g = 0; g < 4; ++g) {
      const int64_t count = few[g + 1] - few[g];
      std::vector<int32_t> bounds(5, 0);
      for (size_t i = g + 1; i < 5; ++i) bounds[i] = static_cast<int32_t>(count);
      Operand part = a;
      part.values = a.values.rows(many[g], count);
      const TensorView own = m.fresh(kF32, {count, n});
      m.run_on_gpu(GroupedGemm{part, experts, m.i32(bounds), own});
      EXPECT_TRUE(matches_bitwise(expected.view().rows(many[g], count), own)) << "group " << g;
    }
  }
}

// Enough blocks for warps that hold two fragments of weights; every group's rows by themselves come to one.
TEST(GpuGemmCodes, wide_groups_have_the_bits_of_narrow_ones) {
  const int64_t groups = 128, n = 896, k = 384;
  Mirror m;
  const Operand b = streamed(m, nvfp4(), groups, groups * n, k, 20);
  const int32_t sizes[] = {0, 1, 5, 8, 9, 0, 17, 0};  // five a group on average
  std::vector<int32_t> bounds = {0};
  for (size_t g = 0; g < static_cast<size_t>(groups); ++g) bounds.push_back(bounds.back() + sizes[g % 8]);
  const int64_t rows = bounds.back();
  const Operand a = plain(m, kBf16, rows, k, false);
  const TensorView offsets = m.i32(bounds), out = m.fresh(kF32, {rows, n});
  m.run_on_gpu(GroupedGemm{a, b, offsets, out});
  for (const int64_t g : {1, 2, 3, 4, 6, 60, 126}) {
    const int64_t begin = bounds[static_cast<size_t>(g)], count = sizes[g % 8];
    Operand part_a = a, part_b = b;
    part_a.values = a.values.rows(begin, count);
    part_b.codes.groups = 1;
    part_b.codes.rows = part_b.codes.padded_rows = n;
    part_b.codes.codes = b.codes.codes.rows(g * n, n);
    part_b.codes.block_scales = b.codes.block_scales.rows(g * n, n);
    part_b.codes.tensor_scale = b.codes.tensor_scale.rows(g, 1);
    const TensorView alone = m.fresh(kF32, {count, n});
    m.run_on_gpu(Gemm{part_a, part_b, alone, false});
    EXPECT_TRUE(matches_bitwise(alone, out.rows(begin, count))) << "group " << g;
  }
  m.check(GroupedGemm{a, b, offsets, output(m, kBf16, {rows, n})});
}

// Rows by index, with scales of their own, beside codes (few rows and many) and beside BF16.
TEST(GpuGemmCodes, rows_by_index_have_the_bits_of_rows_in_order) {
  for (const int64_t k : {128, 768, 96}) {
    for (const bool coded_weights : {true, false}) {
      for (const int64_t each : {1, 3, 40}) {
        SCOPED_TRACE(detail::concat("depth ", k, " codes ", coded_weights, " rows ", each));
        Mirror m;
        const int64_t tokens = 24, rows = 4 * each, n = 72;
        Operand a = plain(m, kBf16, tokens, k, false);
        a.scale = m.normal(kF32, {tokens});
        a.scale_scope = ScaleScope::kRow;
        const Operand b =
            coded_weights ? streamed(m, nvfp4(), 4, 4 * n, k, 19) : stacked(m, kBf16, 4, n, k, false);
        std::vector<int32_t> index, bounds = {0, 0};
        for (int64_t i = 0; i < rows; ++i) index.push_back(static_cast<int32_t>(i * 7 % tokens));
        for (const int64_t end : {each, 3 * each, rows}) bounds.push_back(static_cast<int32_t>(end));
        const TensorView offsets = m.i32(bounds), by_index = output(m, kF32, {rows, n});
        m.check(GroupedGemm{a, b, offsets, by_index, m.i32(index)});
        Operand in_order = plain(m, kBf16, rows, k, false);
        in_order.scale = m.fresh(kF32, {rows});
        in_order.scale_scope = ScaleScope::kRow;
        for (int64_t i = 0; i < rows; ++i) {
          const int64_t from = index[static_cast<size_t>(i)];
          std::memcpy(in_order.values.rows(i, 1).data, a.values.rows(from, 1).data,
                      static_cast<size_t>(2 * k));
          in_order.scale.as<float>()[i] = a.scale.as<float>()[from];
        }
        const TensorView out = m.fresh(kF32, {rows, n}), again = m.fresh(kF32, {rows, n});
        m.run_on_gpu(GroupedGemm{in_order, b, offsets, out});
        m.run_on_gpu(GroupedGemm{a, b, offsets, again, m.i32(index)});
        EXPECT_TRUE(matches_bitwise(out, again));
      }
    }
  }
}

TEST(GpuGemmCodes, grouped_tokens_find_their_padded_storage) {
  for (const QuantSpec& spec : {nvfp4(), nvfp4(BlockShape::k16x16), nvfp4(BlockShape::k1x16, 64),
                                nvfp4(BlockShape::k1x16, 128), mxfp8()}) {
    for (const bool accumulate : {false, true}) {
      SCOPED_TRACE(detail::concat(describe(spec), " accumulate ", accumulate));
      Mirror m;
      const Operand a = coded(m, spec, kCols, kGroups, 20, kCapacity, 61);
      const Operand b = coded(m, spec, kCols, kGroups, 136, kCapacity, 62);
      const TensorView offsets = m.i32(kOffsets);
      m.check(GroupedGemmK{a, b, offsets, output(m, kF32, {kGroups, 20, 136}, accumulate), accumulate});
      if (spec.hadamard != 0) continue;
      const Operand p = plain(m, kBf16, 47, kCapacity, true, kGroups);
      m.check(GroupedGemmK{a, p, offsets, output(m, kF32, {kGroups, 20, 47}, accumulate), accumulate});
      m.check(GroupedGemmK{p, b, offsets, output(m, kF32, {kGroups, 47, 136}, accumulate), accumulate});
    }
  }
}

}  // namespace
}  // namespace fp4t::test

FP4T_GPU_TEST_MAIN

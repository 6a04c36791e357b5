// Reading rows of codes: any range of a row equals the values of its codes, for both group axes.
#include "kernels/formats/decode.h"

#include <gtest/gtest.h>

#include <cstring>
#include <random>
#include <vector>

#include "kernels/base/numeric.h"
#include "kernels/formats/code_order.h"
#include "kernels/formats/e2m1.h"
#include "kernels/formats/e4m3.h"
#include "kernels/formats/e8m0.h"
#include "kernels/formats/groups.h"

namespace fp4t {
namespace {

// A view over random bytes: every byte is a legal code; NaN scales and codes are left out.
struct RandomCodes {
  std::vector<uint8_t> codes, scales;
  QuantView view;
  RandomCodes(const QuantSpec& spec, GroupAxis axis, int64_t groups, int64_t rows, int64_t cols)
      : view(quant_layout(spec, axis, groups, rows, cols)) {
    std::mt19937 engine(7);
    codes.resize(static_cast<size_t>(code_bytes(view)));
    scales.resize(static_cast<size_t>(block_scale_bytes(view)));
    for (uint8_t& c : codes) c = static_cast<uint8_t>(engine() % 127 | (engine() & 0x80));
    for (uint8_t& s : scales) s = static_cast<uint8_t>(engine() % 127);
    view.codes.data = codes.data();
    view.block_scales.data = scales.data();
  }
  // Value at column `col` of row `row` of the matrix [padded_rows, length] that starts at `base`.
  float value(int64_t base, int64_t length, int64_t row, int64_t col) const {
    const int64_t outer = outer_padding(view.spec);
    const int64_t element = base * view.padded_rows + row * length + col;
    const int64_t block = block_length(view.spec);
    const int64_t scale =
        base / block * (view.padded_rows / outer) + row / outer * (length / block) + col / block;
    const uint8_t s = scales[static_cast<size_t>(scale)];
    if (view.spec.format == Format::kMxfp8) {
      return e4m3_value(codes[static_cast<size_t>(element)]) * e8m0_value(s);
    }
    const uint32_t byte = codes[static_cast<size_t>(element / 2)];
    return e2m1_value(element % 2 ? byte >> 4 : byte) * e4m3_value(s);
  }
};

std::vector<QuantSpec> specs() {
  QuantSpec nvfp4{.format = Format::kNvfp4}, tiles{.format = Format::kNvfp4, .block = BlockShape::k16x16};
  return {nvfp4, tiles, QuantSpec{.format = Format::kMxfp8}};
}

TEST(Decode, any_range_of_a_row_equals_its_codes) {
  for (const QuantSpec& spec : specs()) {
    const RandomCodes r(spec, GroupAxis::kRows, 1, 19, 70);
    const int64_t length = r.view.padded_cols;
    for (int64_t row = 0; row < r.view.padded_rows; ++row) {
      for (int64_t begin : {0, 1, 16, 31, 48}) {
        for (int64_t count : {0, 1, 15, 16, 33, 48}) {
          std::vector<float> out(static_cast<size_t>(count) + 1, -1.0f);
          decode_row(r.view, row, begin, count, out.data());
          for (int64_t i = 0; i < count; ++i) {
            ASSERT_EQ(out[static_cast<size_t>(i)], r.value(0, length, row, begin + i))
                << describe(spec) << " row " << row << " col " << begin + i;
          }
          ASSERT_EQ(out.back(), -1.0f) << "wrote beyond the range";
        }
      }
    }
  }
}

TEST(Decode, the_order_of_few_rows_turns_back_and_decodes_alike) {
  const QuantSpec spec{.format = Format::kNvfp4};
  RandomCodes r(spec, GroupAxis::kRows, 1, 7, 96);
  std::vector<float> natural(96), stream(96);
  for (int64_t row = 0; row < 7; ++row) {
    decode_row(r.view, row, 0, 96, natural.data());
    QuantView v = r.view;
    v.order = CodeOrder::kStream;
    std::vector<uint8_t> codes(r.codes.begin(), r.codes.end());
    for (size_t i = 0; i < codes.size(); i += 16) {
      uint32_t before[4], there[4], back[4];
      std::memcpy(before, &codes[i], sizeof before);
      to_stream(before, there);
      to_natural(there, back);
      ASSERT_EQ(std::memcmp(before, back, sizeof back), 0);
      std::memcpy(&codes[i], there, sizeof there);
    }
    v.codes.data = codes.data();
    for (const auto& [begin, count] : {std::pair<int64_t, int64_t>{0, 96}, {16, 32}, {33, 1}, {7, 50}}) {
      decode_row(v, row, begin, count, stream.data());
      for (int64_t i = 0; i < count; ++i) {
        ASSERT_EQ(bits_of(stream[static_cast<size_t>(i)]), bits_of(natural[static_cast<size_t>(begin + i)]))
            << "row " << row << " col " << begin + i;
      }
    }
  }
}

TEST(Decode, every_code_gives_the_bits_of_its_value) {
  for (const Format format : {Format::kNvfp4, Format::kMxfp8}) {
    const QuantSpec spec{.format = format};
    RandomCodes r(spec, GroupAxis::kRows, 1, 1, format == Format::kNvfp4 ? 512 : 256);
    for (size_t i = 0; i < r.codes.size(); ++i) r.codes[i] = static_cast<uint8_t>(i);
    std::vector<float> out(static_cast<size_t>(r.view.cols));
    decode_row(r.view, 0, 0, r.view.cols, out.data());
    for (int64_t i = 0; i < r.view.cols; ++i) {
      ASSERT_EQ(bits_of(out[static_cast<size_t>(i)]), bits_of(r.value(0, r.view.cols, 0, i)))
          << describe(spec) << " col " << i;
    }
  }
}

TEST(Decode, groups_along_the_contraction_are_matrices_of_their_own) {
  const std::vector<int32_t> offsets = {0, 5, 5, 69, 102};
  for (const QuantSpec& spec : specs()) {
    const RandomCodes r(spec, GroupAxis::kCols, 4, 18, 102);
    for (const GroupSpan& g : group_spans(102, 4, offsets.data(), contraction_padding(spec))) {
      for (int64_t row = 0; row < 18; ++row) {
        std::vector<float> out(static_cast<size_t>(g.stored_count));
        decode_group_row(r.view, g.stored_begin, g.stored_count, row, 0, g.stored_count, out.data());
        for (int64_t i = 0; i < g.stored_count; ++i) {
          ASSERT_EQ(out[static_cast<size_t>(i)], r.value(g.stored_begin, g.stored_count, row, i))
              << describe(spec) << " group at " << g.begin << " row " << row << " col " << i;
        }
      }
    }
  }
}

TEST(GroupSpans, pads_every_group_by_itself_and_refuses_bad_offsets) {
  const std::vector<int32_t> offsets = {0, 0, 1, 33, 64};
  const auto spans = group_spans(64, 4, offsets.data(), 32);
  EXPECT_EQ(spans[0].stored_count, 0);
  EXPECT_EQ(spans[1].stored_count, 32);
  EXPECT_EQ(spans[2].stored_begin, 32);
  EXPECT_EQ(spans[2].stored_count, 32);
  EXPECT_EQ(spans[3].stored_begin, 64);
  EXPECT_EQ(spans[3].begin, 33);
  EXPECT_THROW(group_spans(63, 4, offsets.data(), 32), InternalError);
  const std::vector<int32_t> falling = {0, 8, 4};
  EXPECT_THROW(group_spans(64, 2, falling.data(), 32), InternalError);
  EXPECT_THROW(group_spans(65, 2, nullptr, 32), InternalError);
}

}  // namespace
}  // namespace fp4t

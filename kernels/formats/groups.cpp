#include "kernels/formats/groups.h"

#include "kernels/base/numeric.h"

namespace fp4t {

std::vector<GroupSpan> group_spans(int64_t total, int64_t groups, const int32_t* offsets, int64_t multiple) {
  FP4T_CHECK(groups >= 1, groups, " groups");
  std::vector<GroupSpan> spans(static_cast<size_t>(groups));
  const int64_t equal = offsets ? 0 : div_exact(total, groups);
  int64_t stored = 0;
  for (int64_t g = 0; g < groups; ++g) {
    GroupSpan& s = spans[static_cast<size_t>(g)];
    s.begin = offsets ? offsets[g] : g * equal;
    s.count = (offsets ? offsets[g + 1] : (g + 1) * equal) - s.begin;
    FP4T_CHECK(s.begin >= 0 && s.count >= 0 && s.begin + s.count <= total, "group ", g, " is [", s.begin,
               ", ", s.begin + s.count, ") of ", total);
    s.stored_begin = stored;
    s.stored_count = align_up(s.count, multiple);
    stored += s.stored_count;
  }
  return spans;
}

QuantView part_of_groups(const QuantView& whole, int64_t first, int64_t count, const int32_t* offsets) {
  FP4T_CHECK(first >= 0 && count >= 1 && first + count <= whole.groups, "groups [", first, ", ",
             first + count, ") of ", whole.groups);
  const QuantSpec& spec = whole.spec;
  const bool by_rows = whole.group_axis == GroupAxis::kRows;
  const int64_t multiple = by_rows ? outer_padding(spec) : contraction_padding(spec);
  const std::vector<GroupSpan> spans =
      group_spans(by_rows ? whole.rows : whole.cols, whole.groups, offsets, multiple);
  const GroupSpan &a = spans[static_cast<size_t>(first)], &z = spans[static_cast<size_t>(first + count - 1)];
  const int64_t length = z.begin + z.count - a.begin;
  QuantView part = quant_layout(spec, whole.group_axis, count, by_rows ? length : whole.rows,
                                by_rows ? whole.cols : length);
  part.order = whole.order;
  const int64_t before = a.stored_begin * (by_rows ? whole.padded_cols : whole.padded_rows);
  const int64_t per_byte = spec.format == Format::kNvfp4 ? 2 : 1;
  part.codes.data = static_cast<uint8_t*>(whole.codes.data) + before / per_byte;
  part.block_scales.data =
      static_cast<uint8_t*>(whole.block_scales.data) + before / (block_length(spec) * outer_padding(spec));
  if (whole.tensor_scale.empty()) return part;
  const bool by_row = spec.format == Format::kNvfp4 && spec.scale_scope == ScaleScope::kRow;
  part.tensor_scale =
      by_row ? whole.tensor_scale.rows(a.begin, length) : whole.tensor_scale.rows(first, count);
  return part;
}

}  // namespace fp4t

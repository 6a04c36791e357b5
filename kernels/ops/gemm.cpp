#include "kernels/ops/gemm.h"

namespace fp4t {

namespace {

// An operand with its role and the number of groups that the op has.
struct Side {
  const Operand& operand;
  const char* role;  // "a" or "b", for messages
  int64_t groups;

  bool coded() const { return !operand.codes.empty(); }
  Format format() const {
    if (coded()) return operand.codes.spec.format;
    return operand.values.dtype == DType::kBf16 ? Format::kBf16 : Format::kFp32;
  }
  int32_t hadamard() const { return coded() ? operand.codes.spec.hadamard : 0; }
};

void check_scale_count(const Side& s, const TensorView& scale) {
  FP4T_CHECK(scale.dtype == DType::kF32, s.role, ": tensor scale is ", dtype_name(scale.dtype));
  FP4T_CHECK(scale.elements() == 1 || scale.elements() == s.groups, s.role, ": ", scale.elements(),
             " tensor scales for ", s.groups, " groups");
}

void check_plain(const Side& s, int rank) {
  const TensorView& v = s.operand.values;
  FP4T_CHECK(v.dtype == DType::kF32 || v.dtype == DType::kBf16, s.role, ": values are ", dtype_name(v.dtype));
  FP4T_CHECK_EQ(v.shape.rank(), rank, s.role, ": values are ", v.shape);
  const TensorView& scale = s.operand.scale;
  if (s.operand.scale_scope == ScaleScope::kTensor) {
    if (!scale.empty()) check_scale_count(s, scale);
    return;
  }
  FP4T_CHECK(s.role[0] == 'a' && !s.operand.transposed && rank == 2, s.role,
             ": row scales belong to rows of a");
  FP4T_CHECK(scale.dtype == DType::kF32, s.role, ": row scales are ", dtype_name(scale.dtype));
  FP4T_CHECK_EQ(scale.elements(), v.dim(0), s.role, ": row scales");
}

void check_codes(const Side& s, GroupAxis axis) {
  const QuantView& q = s.operand.codes;
  FP4T_CHECK(s.operand.values.empty() && s.operand.scale.empty() && !s.operand.transposed, s.role,
             ": codes come without values, scale and transposition");
  FP4T_CHECK(q.spec.quantised(), s.role, ": codes of format ", name_of(q.spec.format));
  FP4T_CHECK(q.group_axis == axis, s.role, ": codes are grouped along the wrong axis");
  FP4T_CHECK(q.order == CodeOrder::kNatural ||
                 (s.role[0] == 'b' && q.spec.format == Format::kNvfp4 && axis == GroupAxis::kRows),
             s.role, ": codes in the order of products of few rows");
  FP4T_CHECK(q.groups == 1 || q.groups == s.groups, s.role, ": codes of ", q.groups, " groups for ",
             s.groups);
  FP4T_CHECK(q.codes.dtype == DType::kU8 && q.block_scales.dtype == DType::kU8, s.role, ": codes are bytes");
  FP4T_CHECK(q.padded_rows >= q.rows && q.padded_cols >= q.cols, s.role, ": stored ", q.padded_rows, " x ",
             q.padded_cols, " is less than logical ", q.rows, " x ", q.cols);
  const int64_t stored = q.padded_rows * q.padded_cols;
  const int64_t per_byte = q.spec.format == Format::kNvfp4 ? 2 : 1;
  FP4T_CHECK_EQ(q.codes.elements() * per_byte, stored, s.role, ": code bytes of ", describe(q.spec));
  FP4T_CHECK_EQ(q.block_scales.elements() * block_length(q.spec) * outer_padding(q.spec), stored, s.role,
                ": block scales of ", describe(q.spec));
  if (q.spec.format != Format::kNvfp4) {
    // Only codes that were made from scaled ones carry a scale (Quantize.input_scale).
    if (!q.tensor_scale.empty()) check_scale_count(s, q.tensor_scale);
  } else if (q.spec.scale_scope == ScaleScope::kRow) {
    FP4T_CHECK(axis == GroupAxis::kRows && s.role[0] == 'a', s.role, ": row scales belong to rows of a");
    FP4T_CHECK(q.tensor_scale.dtype == DType::kF32, s.role, ": tensor scale is ",
               dtype_name(q.tensor_scale.dtype));
    FP4T_CHECK_EQ(q.tensor_scale.elements(), q.rows, s.role, ": row scales");
  } else {
    check_scale_count(s, q.tensor_scale);
  }
}

void check_side(const Side& s, int rank, GroupAxis axis) {
  if (s.coded()) {
    check_codes(s, axis);
  } else {
    FP4T_CHECK(!s.operand.values.empty(), s.role, ": neither values nor codes");
    check_plain(s, rank);
  }
}

void check_pair(const Side& a, const Side& b) {
  const bool mixed = (a.coded() && !b.coded() && b.format() == Format::kBf16) ||
                     (b.coded() && !a.coded() && a.format() == Format::kBf16);
  FP4T_CHECK(a.format() == b.format() || mixed, "no product of ", name_of(a.format()), " with ",
             name_of(b.format()));
  FP4T_CHECK_EQ(a.hadamard(), b.hadamard(), "both operands are rotated alike or none is");
  if (a.coded() && b.coded() && a.hadamard() != 0) {
    FP4T_CHECK(a.operand.codes.spec.signs == b.operand.codes.spec.signs, "rotations with different signs");
  }
}

// Rows and contraction of an operand whose values are a matrix, or one of a stack of matrices.
int64_t outer_of(const Operand& o) {
  if (!o.codes.empty()) return o.codes.rows;
  const int last = o.values.shape.rank() - 1;
  return o.values.dim(o.transposed ? last : last - 1);
}
int64_t depth_of(const Operand& o) {
  if (!o.codes.empty()) return o.codes.cols;
  const int last = o.values.shape.rank() - 1;
  return o.values.dim(o.transposed ? last - 1 : last);
}

void check_depths(const Side& a, const Side& b) {
  FP4T_CHECK_EQ(depth_of(a.operand), depth_of(b.operand), "contraction of a and b");
  if (a.coded() && b.coded() && a.operand.codes.group_axis == GroupAxis::kRows) {
    FP4T_CHECK_EQ(a.operand.codes.padded_cols, b.operand.codes.padded_cols, "padded contraction");
  }
}

void check_out(const TensorView& out, const Shape& shape, bool accumulate) {
  FP4T_CHECK(out.dtype == DType::kF32 || (out.dtype == DType::kBf16 && !accumulate), "out is ",
             dtype_name(out.dtype), accumulate ? ", accumulating" : "");
  FP4T_CHECK_EQ(out.shape, shape, "out");
}

int64_t groups_of(const TensorView& offsets) {
  FP4T_CHECK(offsets.dtype == DType::kI32 && offsets.shape.rank() == 1 && offsets.dim(0) >= 2, "offsets are ",
             dtype_name(offsets.dtype), " ", offsets.shape);
  return offsets.dim(0) - 1;
}

}  // namespace

void Gemm::check() const {
  const Side sa{a, "a", 1}, sb{b, "b", 1};
  check_side(sa, 2, GroupAxis::kRows);
  check_side(sb, 2, GroupAxis::kRows);
  check_pair(sa, sb);
  check_depths(sa, sb);
  check_out(out, {outer_of(a), outer_of(b)}, accumulate);
}

void GroupedGemm::check() const {
  const int64_t groups = groups_of(offsets);
  const Side sa{a, "a", groups}, sb{b, "b", groups};
  check_side(sa, 2, GroupAxis::kRows);
  check_side(sb, 3, GroupAxis::kRows);
  check_pair(sa, sb);
  check_depths(sa, sb);
  FP4T_CHECK(!a.transposed, "rows of a are cut into groups: no transposition");
  if (sb.coded()) {
    FP4T_CHECK_EQ(b.codes.groups, groups, "groups of b");
    FP4T_CHECK_EQ(b.codes.rows % groups, 0, "rows of b's codes by groups");
  } else {
    FP4T_CHECK_EQ(b.values.dim(0), groups, "groups of b");
  }
  if (!a_rows.empty()) {
    FP4T_CHECK(!sa.coded() && a_rows.dtype == DType::kI32 && a_rows.shape.rank() == 1, "a_rows are ",
               dtype_name(a_rows.dtype), " ", a_rows.shape, sa.coded() ? ", of codes" : "");
  }
  const int64_t rows = a_rows.empty() ? outer_of(a) : a_rows.dim(0);
  check_out(out, {rows, sb.coded() ? b.codes.rows / groups : outer_of(b)}, false);
}

void GroupedGemmK::check() const {
  const int64_t groups = groups_of(offsets);
  const Side sa{a, "a", groups}, sb{b, "b", groups};
  check_side(sa, 2, GroupAxis::kCols);
  check_side(sb, 2, GroupAxis::kCols);
  check_pair(sa, sb);
  check_depths(sa, sb);
  for (const Side* s : {&sa, &sb}) {
    if (s->coded()) {
      FP4T_CHECK_EQ(s->operand.codes.groups, groups, s->role, ": groups of the codes");
    } else {
      FP4T_CHECK(s->operand.transposed, s->role, ": values are stored tokens first (transposed)");
    }
  }
  check_out(out, {groups, outer_of(a), outer_of(b)}, accumulate);
}

}  // namespace fp4t

#include "kernels/ops/gemm.h"

#include <cstring>
#include <vector>

#include "kernels/base/numeric.h"
#include "kernels/cpu/gemm_driver.h"
#include "kernels/formats/groups.h"
#include "kernels/ops/run.h"

namespace fp4t::cpu {

namespace {

// Plain values of one group, from element `begin` on.
GemmSource plain_source(const Operand& o, int64_t begin) {
  GemmSource s;
  const TensorView& v = o.values;
  s.kind = v.dtype == DType::kBf16 ? GemmSource::Kind::kBf16 : GemmSource::Kind::kF32;
  s.data = static_cast<const char*>(v.data) + begin * dtype_bytes(v.dtype);
  s.stride = v.dim(v.shape.rank() - 1);
  s.depth_outer = o.transposed;
  return s;
}

// Codes of a kRows view, from stored row `row0` on.
GemmSource row_codes(const Operand& o, int64_t row0) {
  GemmSource s;
  s.kind = GemmSource::Kind::kCodes;
  s.codes = &o.codes;
  s.row0 = row0;
  return s;
}

// Rows of `a` or `b` that belong to group g: `logical` of plain values, `stored` of codes.
GemmSource row_source(const Operand& o, int64_t logical, int64_t stored) {
  return o.codes.empty() ? plain_source(o, logical * o.values.dim(1)) : row_codes(o, stored);
}

// Tokens of group g of a wgrad operand.
GemmSource token_source(const Operand& o, const GroupSpan& span) {
  if (o.codes.empty()) return plain_source(o, span.begin * o.values.dim(1));
  GemmSource s = row_codes(o, 0);
  s.stored_begin = span.stored_begin;
  s.stored_count = span.stored_count;
  return s;
}

// Contraction padding of wgrad operands; equal on both sides when both are codes.
int64_t token_padding(const Operand& o) { return o.codes.empty() ? 1 : contraction_padding(o.codes.spec); }

// Scale of group g: operands carry none, one for all groups, or one each.
const float* scale_of(const Operand& o, int64_t g) {
  const TensorView& scale = o.codes.empty() ? o.scale : o.codes.tensor_scale;
  if (scale.empty()) return nullptr;
  return scale.as<float>() + (scale.elements() == 1 ? 0 : g);
}

// Scales of a group whose rows of `a` start at logical row `row0`.
GemmScales scales_of(const Operand& a, const Operand& b, int64_t g, int64_t row0) {
  GemmScales s;
  s.b = scale_of(b, g);
  s.a_per_row = a.codes.empty()
                    ? a.scale_scope == ScaleScope::kRow && !a.scale.empty()
                    : a.codes.spec.scale_scope == ScaleScope::kRow && a.codes.spec.format == Format::kNvfp4;
  const TensorView& scale = a.codes.empty() ? a.scale : a.codes.tensor_scale;
  s.a = s.a_per_row ? scale.as<float>() + row0 : scale_of(a, g);
  return s;
}

// Codes on both sides multiply their padding too: after a rotation it holds real codes.
int64_t row_depth(const Operand& a, const Operand& b) {
  if (!a.codes.empty() && !b.codes.empty()) return a.codes.padded_cols;
  const Operand& plain = a.codes.empty() ? a : b;
  const int last = plain.values.shape.rank() - 1;
  return plain.values.dim(plain.transposed ? last - 1 : last);
}

GemmOutput output_of(const TensorView& out, int64_t begin, int64_t stride, bool accumulate) {
  return {static_cast<char*>(out.data) + begin * dtype_bytes(out.dtype), out.dtype, stride, accumulate};
}

// Rows of [n, ...] by index, one after another.
std::vector<char> gathered(const TensorView& from, const TensorView& index) {
  const int64_t row = from.bytes() / from.dim(0);
  std::vector<char> to(static_cast<size_t>(index.dim(0) * row));
  for (int64_t r = 0; r < index.dim(0); ++r) {
    const int32_t at = index.as<int32_t>()[r];
    FP4T_CHECK(at >= 0 && at < from.dim(0), GroupedGemm::kName, ": row ", at, " of ", from.dim(0));
    std::memcpy(to.data() + r * row, static_cast<const char*>(from.data) + at * row,
                static_cast<size_t>(row));
  }
  return to;
}

// The same product of rows that lie as `out` has them.
void run_gathered(Queue& queue, GroupedGemm op) {
  const int64_t rows = op.a_rows.dim(0);
  std::vector<char> values = gathered(op.a.values, op.a_rows), scale;
  op.a.values = {values.data(), op.a.values.dtype, {rows, op.a.values.dim(1)}};
  if (op.a.scale_scope == ScaleScope::kRow && !op.a.scale.empty()) {
    scale = gathered(op.a.scale, op.a_rows);
    op.a.scale = {scale.data(), DType::kF32, {rows}};
  }
  op.a_rows = {};
  cpu::run(queue, op);
}

// Kept between calls, so that calls allocate nothing once warm.
std::vector<GemmProblem>& fresh_problems() {
  thread_local std::vector<GemmProblem> problems;
  problems.clear();
  return problems;
}

}  // namespace

void run(Queue& queue, const Gemm& op) {
  auto& problems = fresh_problems();
  const int64_t rows = op.out.dim(0), cols = op.out.dim(1);
  problems.push_back({rows, cols, row_depth(op.a, op.b), row_source(op.a, 0, 0), row_source(op.b, 0, 0),
                      scales_of(op.a, op.b, 0, 0), output_of(op.out, 0, cols, op.accumulate)});
  multiply(queue, problems);
}

void run(Queue& queue, const GroupedGemm& op) {
  if (!op.a_rows.empty()) return run_gathered(queue, op);
  auto& problems = fresh_problems();
  const int64_t groups = op.offsets.dim(0) - 1, cols = op.out.dim(1);
  const int64_t depth = row_depth(op.a, op.b);
  // Codes that were made as one group are not padded between groups.
  const int64_t a_padding = op.a.codes.empty() || op.a.codes.groups == 1 ? 1 : outer_padding(op.a.codes.spec);
  const int64_t b_rows = op.b.codes.empty() ? 0 : align_up(cols, outer_padding(op.b.codes.spec));
  const auto spans = group_spans(op.out.dim(0), groups, op.offsets.as<int32_t>(), a_padding);
  for (int64_t g = 0; g < groups; ++g) {
    const GroupSpan& span = spans[static_cast<size_t>(g)];
    if (span.count == 0) continue;
    const GemmSource b =
        op.b.codes.empty() ? plain_source(op.b, g * cols * depth) : row_codes(op.b, g * b_rows);
    problems.push_back({span.count, cols, depth, row_source(op.a, span.begin, span.stored_begin), b,
                        scales_of(op.a, op.b, g, span.begin),
                        output_of(op.out, span.begin * cols, cols, false)});
  }
  multiply(queue, problems);
}

void run(Queue& queue, const GroupedGemmK& op) {
  auto& problems = fresh_problems();
  const int64_t groups = op.out.dim(0), rows = op.out.dim(1), cols = op.out.dim(2);
  const bool coded = !op.a.codes.empty() && !op.b.codes.empty();
  const int64_t tokens = op.a.codes.empty() ? op.a.values.dim(0) : op.a.codes.cols;
  const int32_t* offsets = op.offsets.as<int32_t>();
  const auto a_spans = group_spans(tokens, groups, offsets, token_padding(op.a));
  const auto b_spans = group_spans(tokens, groups, offsets, token_padding(op.b));
  for (int64_t g = 0; g < groups; ++g) {
    const GroupSpan& sa = a_spans[static_cast<size_t>(g)];
    const GroupSpan& sb = b_spans[static_cast<size_t>(g)];
    problems.push_back({rows, cols, coded ? sa.stored_count : sa.count, token_source(op.a, sa),
                        token_source(op.b, sb), scales_of(op.a, op.b, g, 0),
                        output_of(op.out, g * rows * cols, cols, op.accumulate)});
  }
  multiply(queue, problems);
}

}  // namespace fp4t::cpu

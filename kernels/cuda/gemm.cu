// The three products: operands prepared (codes to BF16), then one launch of a core.
#include "kernels/ops/gemm.h"

#include "kernels/base/numeric.h"
#include "kernels/cuda/gather.cuh"
#include "kernels/cuda/gemm_cores.h"
#include "kernels/cuda/gemm_operand.h"
#include "kernels/ops/run.h"

namespace fp4t::cuda {

namespace {

void set_scale(GemmSide& side, const Operand& o) {
  const bool coded = !o.codes.empty();
  const TensorView& scale = coded ? o.codes.tensor_scale : o.scale;
  if (scale.empty()) return;
  const bool rows =
      coded ? o.codes.spec.format == Format::kNvfp4 && o.codes.spec.scale_scope == ScaleScope::kRow
            : o.scale_scope == ScaleScope::kRow;
  side.scale = scale.as<float>();
  side.scale_of = rows ? ScaleOf::kRow : scale.elements() == 1 ? ScaleOf::kAll : ScaleOf::kGroup;
}

// Values as they are stored; a stack of matrices has them one after another. F32 has its own core and
// pointers.
GemmSide plain_side(const Operand& o) {
  const TensorView& v = o.values;
  const int last = v.shape.rank() - 1;
  GemmSide side;
  if (v.dtype == DType::kBf16) side.data = v.as<Bf16>();
  side.mn_major = o.transposed;
  side.ld = v.dim(last);
  if (last == 2) side.group_stride = v.dim(1) * v.dim(2);
  set_scale(side, o);
  return side;
}

// Codes of `rows` logical rows, decoded.
GemmSide decoded_side(Queue& queue, Workspace& workspace, const Operand& o, const StoredRows& place,
                      int64_t rows) {
  GemmSide side;
  side.ld = o.codes.padded_cols;
  Bf16* values = workspace.take<Bf16>(rows * side.ld);
  decode_rows(queue, o.codes, place, rows, values);
  side.data = values;
  set_scale(side, o);
  return side;
}

// Whether the core that keeps weights as codes takes the product.
bool streams_codes(const GemmProblem& p, const Operand& a, const Operand& b) {
  if (b.codes.empty() || a.transposed || !stream_takes_codes(p, b.codes)) return false;
  return !a.codes.empty() || copy_bytes(plain_side(a)) == 16;
}

// Codes on both sides multiply their padding too: after a rotation it holds real codes.
int64_t row_depth(const Operand& a, const Operand& b) {
  if (!a.codes.empty() && !b.codes.empty()) return a.codes.padded_cols;
  const Operand& plain = a.codes.empty() ? a : b;
  const int last = plain.values.shape.rank() - 1;
  return plain.values.dim(plain.transposed ? last - 1 : last);
}

void set_out(GemmProblem& p, const TensorView& out, bool accumulate) {
  p.out = out.data;
  p.out_dtype = out.dtype;
  p.ld_out = p.n;
  p.accumulate = accumulate;
}

void set_groups(GemmProblem& p, GemmMode mode, const TensorView& offsets) {
  p.mode = mode;
  p.offsets = offsets.as<int32_t>();
  p.groups = offsets.dim(0) - 1;
}

// Rows of a in storage, those of no group left out.
StoredRows grouped_rows(const GemmProblem& p, const Operand& a) {
  StoredRows place;
  place.offsets = p.offsets;
  place.groups = static_cast<int32_t>(p.groups);
  if (a.codes.empty()) return place;
  place.padding = static_cast<int32_t>(outer_padding(a.codes.spec));
  // Codes that were made as one group are not padded between groups.
  if (a.codes.groups > 1 && place.padding > 1) place.kind = StoredRows::Kind::kOffsets;
  return place;
}

// The rows of a that the product names, with their scales, one after another.
void gather_side(Queue& queue, Workspace& workspace, const GroupedGemm& op, GemmSide& side) {
  const auto place = [&](const TensorView& from) {
    TensorView to = from;
    to.shape = {op.a_rows.dim(0), from.dim(1)};
    to.data = workspace.bytes(to.bytes());
    gather(queue, op.kName, from, op.a_rows, to);
    return to;
  };
  side.data = place(op.a.values).as<Bf16>();
  if (side.scale_of != ScaleOf::kRow) return;
  side.scale = place(op.a.scale.reshape({op.a.scale.elements(), 1})).as<float>();
}

void multiply(Queue& queue, const GemmProblem& p, const Operand& a, const Operand& b) {
  const auto& other = context_of(queue).dense_product;
  const bool fp32 = a.codes.empty() && a.values.dtype == DType::kF32;
  if (other && !fp32 && p.mode == GemmMode::kDense && other(p)) return;
  if (fp32) {
    context_of(queue).product_kernel = "cuda fp32 fma";
    launch_fp32(queue, p, a.values.as<float>(), b.values.as<float>());
  } else if (stream_takes(p)) {
    launch_stream_bf16(queue, p);
  } else if (wgmma_takes(queue, p)) {
    context_of(queue).product_kernel = "cuda wgmma";
    launch_wgmma(queue, p);
  } else {
    launch_mma(queue, p);
  }
}

}  // namespace

void launch_mma(Queue& queue, const GemmProblem& p) {
  switch (choose_mma(p, context_of(queue).sm_count)) {
#define FP4T_GEMM_MMA(name, tile_m, tile_n, warp_m, warp_n)                  \
  case MmaVariant::k##name:                                                  \
    context_of(queue).product_kernel = "cuda mma.sync " #tile_m "x" #tile_n; \
    return launch_##name(queue, p);
#include "kernels/cuda/gemm_variants.inc"
#undef FP4T_GEMM_MMA
  }
}

void run(Queue& queue, const Gemm& op) {
  Workspace workspace(queue);
  GemmProblem p;
  p.m = op.out.dim(0), p.n = op.out.dim(1), p.k = row_depth(op.a, op.b);
  set_out(p, op.out, op.accumulate);
  p.a = op.a.codes.empty() ? plain_side(op.a) : decoded_side(queue, workspace, op.a, {}, p.m);
  if (streams_codes(p, op.a, op.b)) {
    set_scale(p.b, op.b);
    return launch_stream_nvfp4(queue, p, op.b.codes);
  }
  p.b = op.b.codes.empty() ? plain_side(op.b) : decoded_side(queue, workspace, op.b, {}, p.n);
  multiply(queue, p, op.a, op.b);
}

void run(Queue& queue, const GroupedGemm& op) {
  Workspace workspace(queue);
  GemmProblem p;
  set_groups(p, GemmMode::kGroupedM, op.offsets);
  p.m = op.out.dim(0), p.n = op.out.dim(1), p.k = row_depth(op.a, op.b);
  set_out(p, op.out, false);
  const StoredRows rows = grouped_rows(p, op.a);
  p.a = op.a.codes.empty() ? plain_side(op.a) : decoded_side(queue, workspace, op.a, rows, p.m);
  if (streams_codes(p, op.a, op.b)) {
    set_scale(p.b, op.b);
    RowIndex index;
    if (!op.a_rows.empty()) index = {op.a_rows.as<int32_t>(), op.a.values.dim(0)};
    return launch_stream_nvfp4(queue, p, op.b.codes, index);
  }
  if (!op.a_rows.empty()) gather_side(queue, workspace, op, p.a);
  if (op.b.codes.empty()) {
    p.b = plain_side(op.b);
  } else {
    StoredRows place;
    place.kind = StoredRows::Kind::kEqual;
    place.count = p.n;
    place.stored_count = align_up(p.n, outer_padding(op.b.codes.spec));
    p.b = decoded_side(queue, workspace, op.b, place, p.groups * p.n);
    p.b.group_stride = p.n * p.b.ld;
  }
  multiply(queue, p, op.a, op.b);
}

void run(Queue& queue, const GroupedGemmK& op) {
  Workspace workspace(queue);
  GemmProblem p;
  set_groups(p, GemmMode::kGroupedK, op.offsets);
  p.m = op.out.dim(1), p.n = op.out.dim(2);
  const bool a_coded = !op.a.codes.empty(), b_coded = !op.b.codes.empty();
  p.k = a_coded ? op.a.codes.cols : op.a.values.dim(0);
  const int32_t* offsets = p.offsets;
  int32_t* padded = nullptr;
  if (a_coded || b_coded) {
    padded = workspace.take<int32_t>(p.groups + 1);
    pad_offsets(queue, offsets, p.groups, contraction_padding((a_coded ? op.a : op.b).codes.spec), padded);
  }
  if (a_coded && b_coded) {  // padding is multiplied too, and tokens stay contiguous
    p.k = op.a.codes.padded_cols;
    p.offsets = padded;
    p.offset_multiple = 32;
  }
  const auto side = [&](const Operand& o) {
    if (o.codes.empty()) return plain_side(o);
    GemmSide s;
    s.mn_major = !(a_coded && b_coded);
    s.ld = s.mn_major ? align_up(o.codes.rows, 8) : o.codes.padded_cols;
    Bf16* values = workspace.take<Bf16>((s.mn_major ? o.codes.cols : o.codes.rows) * s.ld);
    if (s.mn_major) {
      decode_tokens(queue, o.codes, offsets, padded, values);
    } else {
      decode_columns(queue, o.codes, padded, values);
    }
    s.data = values;
    set_scale(s, o);
    return s;
  };
  p.a = side(op.a);
  p.b = side(op.b);
  set_out(p, op.out, op.accumulate);
  multiply(queue, p, op.a, op.b);
}

}  // namespace fp4t::cuda

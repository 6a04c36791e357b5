// Quantize on the GPU: one small kernel lays out the groups, one pass takes the maxima (unless the format
// has block scales only), one pass codes, one small kernel adds the statistics.
#include <algorithm>

#include "kernels/base/numeric.h"
#include "kernels/cuda/code_order.h"
#include "kernels/cuda/load.cuh"
#include "kernels/cuda/quantize_squares.cuh"
#include "kernels/cuda/quantize_stripes.cuh"
#include "kernels/ops/run.h"

namespace fp4t::cuda {

namespace {

Coder coder_of(const QuantSpec& spec) {
  if (spec.format == Format::kMxfp8) return Coder::kMxfp8;
  if (spec.rounding == Rounding::kMsEden) return Coder::kMsEden;
  if (spec.block == BlockShape::k16x16) return Coder::kTile;
  return spec.scale_rule == ScaleRule::kFourOverSix ? Coder::kFourOverSix : Coder::kPlain;
}

// Tiles that the groups can have at most, whatever the offsets say.
int64_t most_tiles(const Quantize& q, const QuantJob& job) {
  const int64_t rows = q.x.dim(0), cols = q.x.dim(1);
  const auto tiles = [](int64_t n, int64_t tile, int64_t groups) { return ceil_div(n, tile) + groups; };
  return job.column ? tiles(cols + job.outer, kTileRows, 1) *
                          tiles(rows + job.groups * job.depth_multiple, kTileDepth, job.groups)
                    : tiles(rows + job.groups * job.outer, kTileRows, job.groups) *
                          ceil_div(job.padded_cols, kTileDepth);
}

QuantJob job_of(const Quantize& q) {
  const QuantSpec& spec = q.out.spec;
  const bool column = q.orientation == Orientation::kColumn;
  const int64_t outer = outer_padding(spec), cols = q.x.dim(1);
  QuantJob job{};
  job.x = reinterpret_cast<const uint16_t*>(q.x.as<Bf16>());
  job.cols = narrow<int32_t>(cols);
  job.width = column ? align_up(cols, outer) : q.out.padded_cols;
  job.padded_cols = q.out.padded_cols;
  job.groups = narrow<int32_t>(q.out.groups);
  job.outer = static_cast<int32_t>(outer);
  job.depth_multiple = static_cast<int32_t>(contraction_padding(spec));
  job.column = column;
  job.vectors = cols % kVector == 0 && aligned16(job.x);
  job.codes = q.out.codes.as<uint8_t>();
  job.wide_codes = aligned16(job.codes);
  job.spec = spec;
  for (uint32_t round = 0; round < 10; ++round) {
    job.draw_keys.lo[round] = q.draw_key.lo + round * 0x9E3779B9u;
    job.draw_keys.hi[round] = q.draw_key.hi + round * 0xBB67AE85u;
  }
  job.first_expert = q.first_expert;
  job.signs = hadamard_signs(spec.signs, q.signs_key);
  job.input_scale = q.input_scale.empty() ? nullptr : q.input_scale.as<float>();
  job.block_scales = q.out.block_scales.as<uint8_t>();
  job.tensor_scale = q.out.tensor_scale.empty() ? nullptr : q.out.tensor_scale.as<float>();
  return job;
}

// The job with its workspace, laid out.
QuantJob prepare(Queue& queue, Workspace& workspace, const Quantize& q) {
  QuantJob job = job_of(q);
  const int64_t tiles = most_tiles(q, job);
  FP4T_CHECK(q.x.dim(0) < INT32_MAX && tiles < INT32_MAX, "x ", q.x.shape);
  const bool counting = !q.stats.empty();
  job.spans = workspace.take<QuantSpan>(job.groups + 1);
  job.amax = workspace.take<uint32_t>(q.out.spec.scale_scope == ScaleScope::kRow ? q.x.dim(0) : job.groups);
  if (counting) job.counts = workspace.take<unsigned long long>(kNumQuantCounts);
  if (counting && q.measure_error) job.energies = workspace.take<double>(kNumEnergies * tiles);
  launch_layout(queue, q.kName, job, q.offsets.empty() ? nullptr : q.offsets.as<int32_t>(), q.x.dim(0));
  return job;
}

}  // namespace

void run(Queue& queue, const Quantize& q) {
  Workspace workspace(queue);
  const QuantJob job = prepare(queue, workspace, q);
  const Coder coder = coder_of(q.out.spec);
  const bool stripes = takes_stripes(job, coder);
  if (stripes && job.spec.hadamard != 0) {
    launch_stripes_amax(queue, stripe_job(job), false);
  } else if (q.out.spec.format == Format::kNvfp4) {
    launch_amax(queue, job);
  }
  if (stripes) {
    launch_stripes(queue, stripe_job(job), false);
  } else if (takes_rows(job, coder)) {
    launch_rows(queue, job);
  } else {
    job.column ? launch_encode_column(queue, job, coder) : launch_encode_row(queue, job, coder);
  }
  if (job.counts) launch_stats(queue, job, q.stats.as<double>());
  if (q.out.order == CodeOrder::kStream) put_in_stream_order(queue, q.out);
}

namespace {

// Whether the kernels for stripes code both.
bool takes_both(const QuantizeBoth& q, const QuantJob& row, const QuantJob& column) {
  return share_a_reading(q.row.out.spec, q.column.out.spec) && takes_rows(row, coder_of(row.spec)) &&
         takes_stripes(column, coder_of(column.spec)) && !q.row.measure_error && !q.column.measure_error;
}

}  // namespace

void run(Queue& queue, const QuantizeBoth& q) {
  QuantJob row = job_of(q.row), column = job_of(q.column);
  const bool squares = takes_squares(q, row, column);
  if (!squares && !takes_both(q, row, column)) {
    run(queue, q.row);
    run(queue, q.column);
    return;
  }
  Workspace workspace(queue);
  row = prepare(queue, workspace, q.row);
  column = prepare(queue, workspace, q.column);
  if (column.spec.hadamard == 0) {  // the maxima are the same
    launch_amax(queue, row);
    column.amax = row.amax;
  }
  if (squares) {
    launch_squares(
        queue, {row, column, narrow<int32_t>(q.row.x.dim(0)), narrow<int32_t>(q.row.x.dim(0) / row.groups)});
  } else {
    StripeJob s = stripe_job(column);
    s.row = row;
    if (column.spec.hadamard != 0) launch_stripes_amax(queue, s, true);
    launch_stripes(queue, s, true);
  }
  if (row.counts) launch_stats(queue, row, q.row.stats.as<double>());
  if (column.counts) launch_stats(queue, column, q.column.stats.as<double>());
  if (q.row.out.order == CodeOrder::kStream) put_in_stream_order(queue, q.row.out);
}

}  // namespace fp4t::cuda

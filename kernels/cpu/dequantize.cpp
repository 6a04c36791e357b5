// Dequantize on the CPU (values: kernels/formats/decode.h).
#include <atomic>
#include <cmath>
#include <vector>

#include "kernels/base/numeric.h"
#include "kernels/formats/bf16.h"
#include "kernels/formats/decode.h"
#include "kernels/formats/groups.h"
#include "kernels/ops/run.h"

namespace fp4t::cpu {

namespace {

constexpr int64_t kChunkElements = 1 << 15;
constexpr int64_t kSpan = 1024;  // elements decoded at a time

// Where a run of logical elements of one row lies in storage.
struct Source {
  const QuantView* view;
  const GroupSpan* group;  // null for kRows
  int64_t stored_row;
};

void decode_span(const Source& s, int64_t begin, int64_t count, float* out) {
  if (s.group) {
    decode_group_row(*s.view, s.group->stored_begin, s.group->stored_count, s.stored_row, begin, count, out);
  } else {
    decode_row(*s.view, s.stored_row, begin, count, out);
  }
}

// Decodes `count` elements of one row to out[at ...]; returns how many BF16 could not hold.
int64_t write_row(const Dequantize& d, const Source& source, int64_t count, float scale, int64_t at) {
  int64_t inexact = 0;
  for (int64_t begin = 0; begin < count; begin += kSpan) {
    float value[kSpan];
    const int64_t n = std::min(kSpan, count - begin);
    decode_span(source, begin, n, value);
    if (d.scale != DecodeScale::kBlock) {
      for (int64_t i = 0; i < n; ++i) value[i] *= scale;
    }
    if (d.out.dtype == DType::kF32) {
      std::copy_n(value, n, d.out.as<float>() + at + begin);
      continue;
    }
    Bf16* out = d.out.as<Bf16>() + at + begin;
    int32_t differ = 0;
    for (int64_t i = 0; i < n; ++i) {
      out[i] = f32_to_bf16(value[i]);
      differ += (bits_of(value[i]) & 0xFFFFu) != 0u ? 1 : 0;
    }
    inexact += differ;
  }
  return inexact;
}

// Every row of every group: body(source, logical row, first logical column, columns, tensor scale index).
template <class Body>
void for_rows(Queue& queue, const Dequantize& d, const std::vector<GroupSpan>& spans, const Body& body) {
  const QuantView& v = d.x;
  const bool row_scope = v.spec.scale_scope == ScaleScope::kRow;
  for (size_t g = 0; g < spans.size(); ++g) {
    const GroupSpan& s = spans[g];
    const bool rows_cut = v.group_axis == GroupAxis::kRows;
    const int64_t rows = rows_cut ? s.count : v.rows;
    const int64_t cols = rows_cut ? v.cols : s.count;
    const int64_t chunk = std::max<int64_t>(1, kChunkElements / std::max<int64_t>(1, cols));
    parallel_for(queue, rows, chunk, [&](int64_t begin, int64_t end) {
      for (int64_t r = begin; r < end; ++r) {
        const int64_t row = rows_cut ? s.begin + r : r;
        const Source source{&v, rows_cut ? nullptr : &s, rows_cut ? s.stored_begin + r : r};
        body(source, row, rows_cut ? 0 : s.begin, cols, row_scope ? row : static_cast<int64_t>(g));
      }
    });
  }
}

}  // namespace

void run(Queue& queue, const Dequantize& d) {
  const QuantView& v = d.x;
  const bool rows_cut = v.group_axis == GroupAxis::kRows;
  const int64_t total = rows_cut ? v.rows : v.cols;
  const int64_t multiple = rows_cut ? outer_padding(v.spec) : contraction_padding(v.spec);
  const int32_t* offsets = d.offsets.empty() ? nullptr : d.offsets.as<int32_t>();
  const float* scales = v.tensor_scale.empty() ? nullptr : v.tensor_scale.as<float>();
  std::atomic<int64_t> inexact{0};
  for_rows(queue, d, group_spans(total, v.groups, offsets, multiple),
           [&](const Source& source, int64_t row, int64_t col, int64_t cols, int64_t scale) {
             inexact += write_row(d, source, cols, scales ? scales[scale] : 1.0f, row * v.cols + col);
           });
  if (!d.inexact.empty()) *d.inexact.as<double>() += static_cast<double>(inexact);
}

}  // namespace fp4t::cpu

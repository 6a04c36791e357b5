// Quantize on the CPU: a scan of the input (maxima, non-finite values), then tiles of 16 rows. Work is cut
// by size alone, sums are taken in the order of the cuts, so the thread count changes nothing.
#include <algorithm>
#include <atomic>
#include <cstring>
#include <vector>

#include "kernels/base/numeric.h"
#include "kernels/cpu/quantize_block.h"
#include "kernels/formats/bf16.h"
#include "kernels/formats/code_order.h"
#include "kernels/formats/groups.h"
#include "kernels/formats/ms_eden.h"
#include "kernels/formats/nvfp4.h"
#include "kernels/ops/run.h"

namespace fp4t::cpu {

namespace {

// One piece of work: rows [row_begin, row_end) (from a multiple of 16) by elements [k_begin, k_end).
struct Piece {
  int64_t region, row_begin, row_end, k_begin, k_end;
};

constexpr int64_t kPieceElements = 1 << 14;

int64_t elements_of(const Piece& p) { return (p.row_end - p.row_begin) * (p.k_end - p.k_begin); }

std::vector<GroupSpan> spans_of(const Quantize& q, int64_t multiple) {
  const int32_t* offsets = q.offsets.empty() ? nullptr : q.offsets.as<int32_t>();
  return group_spans(q.x.dim(0), q.out.groups, offsets, multiple);
}

// Fields that both orientations share, from what differs: the shape and the stored elements before it.
Region make_region(const Quantize& q, int64_t group, int64_t rows, int64_t cols, int64_t elements_before) {
  const QuantSpec& spec = q.out.spec;
  const int64_t per_byte = spec.format == Format::kNvfp4 ? 2 : 1;
  const int64_t outer = outer_padding(spec);
  Region r;
  r.stride = q.x.dim(1);
  r.rows = rows;
  r.cols = cols;
  r.padded_rows = align_up(rows, outer);
  r.length = align_up(cols, contraction_padding(spec));
  r.codes = q.out.codes.as<uint8_t>() + elements_before / per_byte;
  r.block_scales = q.out.block_scales.as<uint8_t>() + elements_before / (block_length(spec) * outer);
  if (!q.input_scale.empty()) r.input_scale = q.input_scale.as<float>()[group];
  if (q.first_expert >= 0) {
    r.draw_base = static_cast<uint64_t>(q.first_expert + group + 1) << 40;
  }
  return r;
}

std::vector<Region> make_regions(const Quantize& q, const std::vector<GroupSpan>& spans) {
  const bool row = q.orientation == Orientation::kRow;
  const bool row_scope = q.out.spec.scale_scope == ScaleScope::kRow;
  float* tensor_scale = q.out.tensor_scale.empty() ? nullptr : q.out.tensor_scale.as<float>();
  std::vector<Region> regions;
  for (size_t g = 0; g < spans.size(); ++g) {
    const GroupSpan& s = spans[g];
    const int64_t width = row ? q.out.padded_cols : align_up(q.x.dim(1), outer_padding(q.out.spec));
    const int64_t group = static_cast<int64_t>(g);
    Region r = row ? make_region(q, group, s.count, q.x.dim(1), s.stored_begin * width)
                   : make_region(q, group, q.x.dim(1), s.count, s.stored_begin * width);
    r.x = q.x.as<Bf16>() + s.begin * q.x.dim(1);
    r.transposed = !row;
    if (tensor_scale) r.tensor_scale = tensor_scale + (row_scope ? s.begin : group);
    regions.push_back(r);
  }
  return regions;
}

std::vector<Piece> make_pieces(const std::vector<Region>& regions) {
  std::vector<Piece> pieces;
  for (size_t g = 0; g < regions.size(); ++g) {
    const Region& r = regions[g];
    // Transposed reads take whole cache lines of 32 BF16 values; rows are read as far as the cache likes.
    const int64_t rows = r.transposed ? 128 : kLanes;
    const int64_t depth = r.transposed ? kUnit : kPieceElements / kLanes;
    for (int64_t k = 0; k < r.length; k += depth) {
      for (int64_t row = 0; row < r.padded_rows; row += rows) {
        pieces.push_back({static_cast<int64_t>(g), row, std::min(row + rows, r.padded_rows), k,
                          std::min(k + depth, r.length)});
      }
    }
  }
  return pieces;
}

// Pieces in runs of about kPieceElements, so that small ones do not pay a hand-over each.
template <class Body>
void for_pieces(Queue& queue, const std::vector<Piece>& pieces, const Body& body) {
  if (pieces.empty()) return;
  const int64_t chunk = std::max<int64_t>(1, kPieceElements / std::max<int64_t>(1, elements_of(pieces[0])));
  parallel_for(queue, static_cast<int64_t>(pieces.size()), chunk, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) body(i);
  });
}

// Calls body(tile, unit, row0, k0) for the loaded and rotated tiles of a piece.
template <class Body>
void for_tiles(const CoderSettings& settings, const Region& region, const Piece& p, const Body& body) {
  Tile tile;
  for (int64_t k = p.k_begin; k < p.k_end; k += kUnit) {
    const int unit = static_cast<int>(std::min<int64_t>(kUnit, p.k_end - k));
    for (int64_t row = p.row_begin; row < p.row_end; row += kLanes) {
      load_tile(region, row, k, unit, tile);
      rotate_tile(settings, unit, tile);
      body(tile, unit, row, k);
    }
  }
}

// Largest magnitude of every row of x as BF16 bits (NaN left out), and the count of NaN and Inf.
struct Scan {
  std::vector<uint16_t> row_amax;
  int64_t non_finite = 0;
};

// Largest magnitude of a row; adds its non-finite values to the count.
uint16_t scan_row(const uint16_t* x, int64_t cols, int64_t& non_finite) {
  constexpr int kWidth = 16;
  constexpr int64_t kSpan = int64_t{kWidth} << 14;  // a 16-bit counter cannot overflow in it
  typedef int16_t I16 __attribute__((vector_size(2 * kWidth)));
  int16_t amax[kWidth] = {};
  for (int64_t begin = 0; begin < cols; begin += kSpan) {
    const int64_t end = std::min(cols, begin + kSpan);
    I16 top = {}, count = {};
    for (int64_t c = begin; c < end; c += kWidth) {
      I16 bits = {};
      if (c + kWidth <= end) {
        std::memcpy(&bits, x + c, sizeof(bits));
      } else {
        std::memcpy(&bits, x + c, static_cast<size_t>(end - c) * 2);
      }
      const I16 a = bits & int16_t{0x7FFF};
      const I16 number = a & (a <= int16_t{0x7F80});  // NaN counts as 0
      top = number > top ? number : top;
      count -= a >= int16_t{0x7F80};  // a true comparison is -1
    }
    for (int i = 0; i < kWidth; ++i) {
      amax[i] = std::max<int16_t>(amax[i], top[i]);
      non_finite += count[i];
    }
  }
  return static_cast<uint16_t>(*std::max_element(amax, amax + kWidth));
}

Scan scan_input(Queue& queue, const TensorView& x) {
  Scan scan;
  const int64_t rows = x.dim(0), cols = x.dim(1);
  scan.row_amax.resize(static_cast<size_t>(rows));
  std::atomic<int64_t> total{0};
  const uint16_t* data = reinterpret_cast<const uint16_t*>(x.as<Bf16>());
  const int64_t chunk = std::max<int64_t>(1, 4 * kPieceElements / std::max<int64_t>(1, cols));
  parallel_for(queue, rows, chunk, [&](int64_t begin, int64_t end) {
    int64_t non_finite = 0;
    for (int64_t r = begin; r < end; ++r) {
      scan.row_amax[static_cast<size_t>(r)] = scan_row(data + r * cols, cols, non_finite);
    }
    total += non_finite;
  });
  scan.non_finite = total;
  return scan;
}

// Largest magnitude of each region after its rotation.
std::vector<float> rotated_amax(Queue& queue, const CoderSettings& settings,
                                const std::vector<Region>& regions, const std::vector<Piece>& pieces) {
  std::vector<float> of_piece(pieces.size());
  for_pieces(queue, pieces, [&](int64_t i) {
    const Piece& p = pieces[static_cast<size_t>(i)];
    alignas(64) Lanes amax = {};
    for_tiles(settings, regions[static_cast<size_t>(p.region)], p,
              [&](const Tile& tile, int unit, int64_t, int64_t) { tile_amax(tile, unit, amax); });
    of_piece[static_cast<size_t>(i)] = *std::max_element(amax, amax + kLanes);
  });
  std::vector<float> out(regions.size(), 0.0f);
  for (size_t i = 0; i < pieces.size(); ++i) {
    float& a = out[static_cast<size_t>(pieces[i].region)];
    a = std::max(a, of_piece[i]);
  }
  return out;
}

// Largest magnitude of each row of a region after its rotation; row scope only.
std::vector<float> rotated_row_amax(Queue& queue, const CoderSettings& settings, const Region& region) {
  std::vector<float> out(static_cast<size_t>(region.rows));
  parallel_for(queue, region.rows, kLanes, [&](int64_t begin, int64_t end) {
    alignas(64) Lanes amax = {};
    for_tiles(settings, region, {0, begin, end, 0, region.length},
              [&](const Tile& tile, int unit, int64_t, int64_t) { tile_amax(tile, unit, amax); });
    std::copy_n(amax, end - begin, out.begin() + begin);
  });
  return out;
}

TensorScale tensor_scale_of(const QuantSpec& spec, float amax) {
  if (spec.rounding == Rounding::kMsEden) return {1.0f, ms_eden_tensor_scale(amax)};
  return nvfp4_tensor_scale(spec.scale_rule, spec.scale_round, spec.headroom, amax);
}

// The scales in force while coding: one a region, or one a row of every region.
using RegionScales = std::vector<std::vector<TensorScale>>;

RegionScales nvfp4_scales(Queue& queue, const Quantize& q, const CoderSettings& settings, const Scan& scan,
                          const std::vector<GroupSpan>& spans, const std::vector<Region>& regions,
                          const std::vector<Piece>& pieces) {
  const bool row_scope = settings.spec.scale_scope == ScaleScope::kRow;
  const bool rotated = settings.spec.hadamard != 0;
  const std::vector<float> rotated_max =
      rotated && !row_scope ? rotated_amax(queue, settings, regions, pieces) : std::vector<float>();
  RegionScales scales(regions.size());
  for (size_t g = 0; g < regions.size(); ++g) {
    std::vector<float> amax;
    if (rotated) {
      amax = row_scope ? rotated_row_amax(queue, settings, regions[g]) : std::vector{rotated_max[g]};
    } else {
      uint16_t top = 0;
      for (int64_t r = spans[g].begin; r < spans[g].begin + spans[g].count; ++r) {
        const uint16_t a = scan.row_amax[static_cast<size_t>(r - spans[0].begin)];
        if (row_scope) amax.push_back(bf16_to_f32({a}));
        top = std::max(top, a);
      }
      if (!row_scope) amax = {bf16_to_f32({top})};
    }
    for (float a : amax) scales[g].push_back(tensor_scale_of(q.out.spec, a));
  }
  return scales;
}

LaneScales lane_scales(const std::vector<TensorScale>& scales, bool row_scope, int64_t row0) {
  LaneScales out;
  for (int l = 0; l < kLanes; ++l) {
    const size_t i = row_scope ? static_cast<size_t>(row0 + l) : 0;
    const TensorScale s = i < scales.size() ? scales[i] : TensorScale{1.0f, 1.0f};
    out.encode[l] = s.encode;
    out.decode[l] = s.decode;
  }
  return out;
}

void write_tensor_scales(const std::vector<Region>& regions, const RegionScales& scales) {
  for (size_t g = 0; g < regions.size(); ++g) {
    for (size_t i = 0; i < scales[g].size(); ++i) {
      regions[g].tensor_scale[i] = scales[g][i].decode * regions[g].input_scale;
    }
  }
}

int64_t blocks_of(const QuantSpec& spec, const Region& r) {
  // Rotation fills its whole group with data.
  const int64_t filled = spec.hadamard != 0 ? align_up(r.cols, spec.hadamard) : r.cols;
  return ceil_div(r.rows, outer_padding(spec)) * ceil_div(filled, block_length(spec));
}

void add_stats(const Quantize& q, const Scan& scan, const std::vector<Region>& regions,
               const std::vector<QuantCounts>& counts) {
  double* stats = q.stats.as<double>();
  stats[kStatNonFinite] += static_cast<double>(scan.non_finite);
  for (const Region& r : regions) {
    stats[kStatElements] += static_cast<double>(r.rows * r.cols);
    stats[kStatBlocks] += static_cast<double>(blocks_of(q.out.spec, r));
  }
  for (const QuantCounts& c : counts) {
    stats[kStatFlushed] += static_cast<double>(c.flushed);
    stats[kStatClipped] += static_cast<double>(c.clipped);
    stats[kStatChoseFour] += static_cast<double>(c.chose_four);
    stats[kStatInexact] += static_cast<double>(c.inexact);
    if (!q.measure_error) continue;
    stats[kStatErrorEnergy] += c.error_energy;
    stats[kStatSignalEnergy] += c.signal_energy;
    stats[kStatErrorSignal] += c.error_signal;
  }
}

void put_in_stream_order(Queue& queue, const QuantView& v) {
  parallel_for(queue, code_bytes(v) / 16, kPieceElements / 32, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      uint8_t* p = v.codes.as<uint8_t>() + i * 16;
      uint32_t natural[4], stream[4];
      std::memcpy(natural, p, sizeof(natural));
      to_stream(natural, stream);
      std::memcpy(p, stream, sizeof(stream));
    }
  });
}

}  // namespace

void run(Queue& queue, const Quantize& q) {
  const QuantSpec& spec = q.out.spec;
  const bool nvfp4 = spec.format == Format::kNvfp4;
  const bool counting = !q.stats.empty();
  const CoderSettings settings{spec, q.draw_key, hadamard_signs(spec.signs, q.signs_key), counting,
                               counting && q.measure_error};
  const std::vector<GroupSpan> spans =
      spans_of(q, q.orientation == Orientation::kRow ? outer_padding(spec) : contraction_padding(spec));
  const std::vector<Region> regions = make_regions(q, spans);
  const std::vector<Piece> pieces = make_pieces(regions);

  Scan scan;
  if (counting || (nvfp4 && spec.hadamard == 0)) {
    const int64_t begin = spans.front().begin, end = spans.back().begin + spans.back().count;
    scan = scan_input(queue, q.x.rows(begin, end - begin));
  }
  RegionScales scales(regions.size());
  if (nvfp4) {
    scales = nvfp4_scales(queue, q, settings, scan, spans, regions, pieces);
  } else {
    for (auto& s : scales) s.push_back({1.0f, 1.0f});
  }
  if (!q.out.tensor_scale.empty()) write_tensor_scales(regions, scales);

  std::vector<QuantCounts> counts(pieces.size());
  for_pieces(queue, pieces, [&](int64_t i) {
    const Piece& p = pieces[static_cast<size_t>(i)];
    const Region& region = regions[static_cast<size_t>(p.region)];
    const std::vector<TensorScale>& of_region = scales[static_cast<size_t>(p.region)];
    for_tiles(settings, region, p, [&](const Tile& tile, int unit, int64_t row, int64_t k) {
      QuantCounts& c = counts[static_cast<size_t>(i)];
      if (nvfp4) {
        code_tile_nvfp4(settings, region, row, k, unit, tile,
                        lane_scales(of_region, spec.scale_scope == ScaleScope::kRow, row), c);
      } else {
        code_tile_mxfp8(settings, region, row, k, unit, tile, c);
      }
    });
  });
  if (counting) add_stats(q, scan, regions, counts);
  if (q.out.order == CodeOrder::kStream) put_in_stream_order(queue, q.out);
}

void run(Queue& queue, const QuantizeBoth& q) {
  run(queue, q.row);
  run(queue, q.column);
}

}  // namespace fp4t::cpu

// out[r, :] = table[index[r], :], rows of whole words; an index out of range is a fault, and its row stays
// unwritten. A warp moves a row, with enough words in flight that few warps fill the memory.
#pragma once

#include <algorithm>

#include "kernels/base/numeric.h"
#include "kernels/cuda/fault.cuh"
#include "kernels/cuda/load.cuh"

namespace fp4t::cuda {

inline constexpr int kGatherThreads = 256;
inline constexpr int kGatherInFlight = 8;  // words of one lane: a row of 4 KiB in one go

template <class Word>
__global__ void __launch_bounds__(kGatherThreads)
    gather_rows(const Word* table, int64_t table_rows, const int32_t* index, int64_t rows, int64_t words,
                Word* out, FaultSink sink) {
  const int64_t warp = (int64_t{blockIdx.x} * kGatherThreads + threadIdx.x) / 32;
  const int64_t warps = int64_t{gridDim.x} * (kGatherThreads / 32);
  const int lane = static_cast<int>(threadIdx.x) % 32;
  for (int64_t r = warp; r < rows; r += warps) {
    const int32_t from = index[r];
    if (from < 0 || from >= table_rows) {
      if (lane == 0) report(sink, FaultKind::kIndex, r, from);
      continue;
    }
    const Word* source = table + from * words;
    Word* target = out + r * words;
    for (int64_t first = lane; first < words; first += 32 * kGatherInFlight) {
      Word w[kGatherInFlight];
#pragma unroll
      for (int i = 0; i < kGatherInFlight; ++i) {
        if (first + 32 * i < words) w[i] = source[first + 32 * i];
      }
#pragma unroll
      for (int i = 0; i < kGatherInFlight; ++i) {
        if (first + 32 * i < words) target[first + 32 * i] = w[i];
      }
    }
  }
}

template <class Word>
void launch_gather(Queue& queue, const char* op, const TensorView& table, const TensorView& index,
                   const TensorView& out) {
  const int64_t rows = index.dim(0), row_bytes = table.dim(1) * dtype_bytes(table.dtype);
  const Context& c = context_of(queue);
  const int64_t blocks = std::min<int64_t>(ceil_div(rows, kGatherThreads / 32), int64_t{c.sm_count} * 64);
  gather_rows<Word><<<static_cast<unsigned>(blocks), kGatherThreads, 0, c.stream>>>(
      static_cast<const Word*>(table.data), table.dim(0), index.as<int32_t>(), rows,
      row_bytes / static_cast<int64_t>(sizeof(Word)), static_cast<Word*>(out.data), fault_sink(queue, op));
  check_launch(op);
}

inline void gather(Queue& queue, const char* op, const TensorView& table, const TensorView& index,
                   const TensorView& out) {
  if (index.dim(0) == 0 || table.dim(1) == 0) return;
  const int64_t row_bytes = table.dim(1) * dtype_bytes(table.dtype);
  if (row_bytes % 16 == 0 && aligned16(table.data) && aligned16(out.data)) {
    launch_gather<uint4>(queue, op, table, index, out);
  } else if (dtype_bytes(table.dtype) % 4 == 0) {
    launch_gather<uint32_t>(queue, op, table, index, out);
  } else if (dtype_bytes(table.dtype) == 2) {
    launch_gather<uint16_t>(queue, op, table, index, out);
  } else {
    launch_gather<uint8_t>(queue, op, table, index, out);
  }
}

// The same the other way round: row t of `from` to the rows index[t, :] of out. A warp takes a row of `from`.
template <class Word>
__global__ void __launch_bounds__(kGatherThreads)
    scatter_rows(const Word* from, int64_t count, const int32_t* index, int copies, int64_t words, Word* out,
                 int64_t out_rows, FaultSink sink) {
  const int64_t row = (int64_t{blockIdx.x} * kGatherThreads + threadIdx.x) / 32;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  if (row >= count) return;
  for (int64_t first = lane; first - lane < words; first += 32 * kGatherInFlight) {
    Word w[kGatherInFlight];
#pragma unroll
    for (int i = 0; i < kGatherInFlight; ++i) {
      if (first + 32 * i < words) w[i] = from[row * words + first + 32 * i];
    }
    for (int j = 0; j < copies; ++j) {
      const int32_t to = index[row * copies + j];
      if (to < 0 || to >= out_rows) {
        if (lane == 0) report(sink, FaultKind::kIndex, row * copies + j, to);
        continue;
      }
      Word* target = out + to * words + first;
#pragma unroll
      for (int i = 0; i < kGatherInFlight; ++i) {
        if (first + 32 * i < words) target[32 * i] = w[i];
      }
    }
  }
}

inline void scatter(Queue& queue, const char* op, const TensorView& from, const TensorView& index,
                    const TensorView& out) {
  if (index.elements() == 0 || from.dim(1) == 0) return;
  const int64_t rows = from.dim(0), words = from.dim(1) * dtype_bytes(from.dtype) / 16;
  scatter_rows<uint4>
      <<<static_cast<unsigned>(ceil_div(rows, kGatherThreads / 32)), kGatherThreads, 0, stream_of(queue)>>>(
          static_cast<const uint4*>(from.data), rows, index.as<int32_t>(), narrow<int>(index.dim(1)), words,
          static_cast<uint4*>(out.data), out.dim(0), fault_sink(queue, op));
  check_launch(op);
}

}  // namespace fp4t::cuda

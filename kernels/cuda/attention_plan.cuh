// What every attention kernel shares: the layout of a packed row, the checks of documents, and the list of
// tiles of rows. A tile lies inside one document, at a multiple of its height from the document's first
// token, so that blocks of keys counted from there are the same for all rows of the tile.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "kernels/cuda/fault.cuh"

namespace fp4t::cuda {

// Where the heads lie in a packed row [q heads | k heads | v heads].
struct HeadShape {
  int64_t heads, kv_heads, head_dim;
  __host__ __device__ int64_t group() const { return heads / kv_heads; }
  __host__ __device__ int64_t width() const { return (heads + 2 * kv_heads) * head_dim; }
  __host__ __device__ int64_t q(int64_t head) const { return head * head_dim; }
  __host__ __device__ int64_t k(int64_t kv_head) const { return (heads + kv_head) * head_dim; }
  __host__ __device__ int64_t v(int64_t kv_head) const { return (heads + kv_heads + kv_head) * head_dim; }
};

// Whether token t begins a document or continues its predecessor's; else a fault.
// `begin` and `before` are doc_begin of t and of t - 1.
__device__ inline bool check_document(int64_t t, int32_t begin, int32_t before, const FaultSink& sink) {
  const bool good = begin == t || (begin >= 0 && begin < t && begin == before);
  if (!good) report(sink, FaultKind::kIndex, t, begin);
  return good;
}
__device__ inline bool check_document(const int32_t* doc_begin, int64_t t, const FaultSink& sink) {
  return check_document(t, doc_begin[t], t > 0 ? doc_begin[t - 1] : 0, sink);
}

struct AttentionTile {
  int32_t begin, rows;         // tokens [begin, begin + rows)
  int32_t doc_begin, doc_end;  // of their document
};

// On the device: costliest tiles first, so that what runs last is short.
struct AttentionTiles {
  int32_t* count;
  int32_t* next;         // 0 at first: for blocks that draw their work
  AttentionTile* tiles;  // [tokens]: as many as there may be
};

enum class TileCost : uint8_t { kKeysBefore, kQueriesAfter };

// Lists the tiles of `height` rows; none, and a fault, where doc_begin is broken. The memory is taken from
// `workspace`.
AttentionTiles plan_tiles(Queue& queue, Workspace& workspace, const char* op, const int32_t* doc_begin,
                          int64_t tokens, int height, TileCost cost);

}  // namespace fp4t::cuda

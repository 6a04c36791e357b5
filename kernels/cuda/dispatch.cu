// Lists of tokens that travel to experts of other ranks, by counting sorts (row_sort.cuh): without chunks one
// of the visits, and one of the guests' rows.
#include <algorithm>

#include "kernels/base/numeric.h"
#include "kernels/cuda/context.h"
#include "kernels/cuda/fault.cuh"
#include "kernels/cuda/row_sort.cuh"
#include "kernels/ops/dispatch.h"
#include "kernels/ops/run.h"

namespace fp4t::cuda {

namespace {

// ExpertSplit in the integers that a GPU divides fast.
struct Split {
  int experts, ranks, chunks, local;
  explicit Split(const ExpertSplit& s)
      : experts(narrow<int>(s.experts)),
        ranks(narrow<int>(s.ranks)),
        chunks(narrow<int>(s.chunks)),
        local(narrow<int>(s.local())) {}
  __device__ int rank_of(int expert) const { return expert / local; }
  __device__ int chunk_of(int expert) const { return ((expert % local + 1) * chunks - 1) / local; }
  __device__ int chunk_begin(int chunk) const { return local * chunk / chunks; }
  int kinds() const { return narrow<int>(int64_t{chunks} * ranks); }
};

// Several sorts of the same rows at once, each with so many keys: [sort][key] for [key] in SortSpace.
struct Sorts {
  SortSpace space;  // of all of them
  int keys, width;  // of a sort; keys of a row
  int64_t rows;
};
Sorts make_sorts(Workspace& workspace, int count, int keys, int64_t rows, int width) {
  const int64_t blocks = std::max<int64_t>(1, ceil_div(rows, kSortRows));
  const int all = narrow<int>(int64_t{count} * keys);
  return {{workspace.take<uint32_t>(all * blocks), workspace.take<int32_t>(all * blocks),
           workspace.take<int32_t>(all), all, blocks},
          keys,
          width,
          rows};
}

// body(row, its place in the block, which of its keys) for every key of the block's rows.
template <class Body>
__device__ void for_keys(const Sorts& s, const Body& body) {
  const int64_t first = int64_t{blockIdx.x} * kSortRows, left = s.rows - first;
  const int pairs = static_cast<int>(left < kSortRows ? left : kSortRows) * s.width;
  for (int i = static_cast<int>(threadIdx.x); i < pairs; i += static_cast<int>(blockDim.x)) {
    body(first + i / s.width, i / s.width, i % s.width);
  }
}

// keys(sort, row, j): the j-th key of the row, -1 for none.
template <class Keys>
__global__ void __launch_bounds__(kSortThreads) mark_rows(Sorts s, Keys keys) {
  extern __shared__ uint32_t marks[];
  const int sort = static_cast<int>(blockIdx.y);
  for (int k = static_cast<int>(threadIdx.x); k < s.keys; k += kSortThreads) marks[k] = 0;
  __syncthreads();
  for_keys(s, [&](int64_t row, int r, int j) {
    const int key = keys(sort, row, j);
    if (key >= 0) atomicOr(&marks[key], 1u << r);
  });
  __syncthreads();
  uint32_t* masks = s.space.masks + int64_t{sort} * s.keys * s.space.blocks + blockIdx.x;
  for (int k = static_cast<int>(threadIdx.x); k < s.keys; k += kSortThreads) {
    masks[k * s.space.blocks] = marks[k];
  }
}

// Calls put(sort, row, j, place) for every key, and in one block of each sort
// put.finish(sort, key, the first place of every key, the key's rows).
template <class Keys, class Put>
__global__ void __launch_bounds__(kSortThreads) place_sorted(Sorts s, Keys keys, Put put) {
  extern __shared__ int32_t offsets[];
  __shared__ int scratch[kScanScratch];
  const int sort = static_cast<int>(blockIdx.y);
  const int32_t* counts = s.space.counts + sort * s.keys;
  key_offsets(
      s.keys, [&](int k) { return counts[k]; }, offsets, scratch);
  const int64_t blocks = s.space.blocks, at = int64_t{sort} * s.keys * blocks + blockIdx.x;
  for_keys(s, [&](int64_t row, int r, int j) {
    const int key = keys(sort, row, j);
    if (key < 0) return;
    const int below = __popc(s.space.masks[at + key * blocks] & ((1u << r) - 1));
    put(sort, row, j, offsets[key] + s.space.bases[at + key * blocks] + below);
  });
  if (blockIdx.x != 0) return;
  for (int k = static_cast<int>(threadIdx.x); k < s.keys; k += kSortThreads) {
    put.finish(sort, k, offsets, counts[k]);
  }
}

// Room for a word a kind of rows.
template <class Kernel>
int shared_bytes_for(const Context& c, const char* op, int kinds, Kernel kernel) {
  const int64_t bytes = int64_t{4} * kinds;
  FP4T_CHECK(bytes + 1024 <= c.shared_bytes_per_block, op, ": ", kinds, " kinds of rows need ", bytes,
             " bytes of shared memory, this GPU has ", c.shared_bytes_per_block);
  FP4T_CUDA(
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes)));
  return static_cast<int>(bytes);
}

dim3 grid_of(const Sorts& s) {
  return dim3(static_cast<unsigned>(s.space.blocks), static_cast<unsigned>(s.space.keys / s.keys));
}

template <class Keys>
void mark_and_count(const Context& c, const char* op, const Sorts& s, const Keys& keys) {
  const int bytes = shared_bytes_for(c, op, s.keys, mark_rows<Keys>);
  mark_rows<<<grid_of(s), kSortThreads, static_cast<size_t>(bytes), c.stream>>>(s, keys);
  check_launch(op);
  count_before(c, op, s.space);
}

template <class Keys, class Put>
void sort(const Context& c, const char* op, const Sorts& s, const Keys& keys, const Put& put) {
  mark_and_count(c, op, s, keys);
  const int bytes = shared_bytes_for(c, op, s.keys, place_sorted<Keys, Put>);
  place_sorted<<<grid_of(s), kSortThreads, static_cast<size_t>(bytes), c.stream>>>(s, keys, put);
  check_launch(op);
}

struct StoredKeys {
  const int32_t* keys;  // [sort][rows][width]
  int64_t stride;       // of a sort
  int width;
  __device__ int operator()(int sort, int64_t row, int j) const {
    return keys[sort * stride + row * width + j];
  }
};

// Visits ---------------------------------------------------------------------------------------------------

struct VisitArgs {
  const int32_t* experts;
  int64_t tokens;
  int top_k, most;
  Split split;
  const int64_t* first_row;  // null: all visits are listed
  int64_t begin, end;
  SortSpace by_expert;  // of the tokens, with first_row
  int32_t *rank_of, *place_of, *counts;
  int32_t* keys;  // [sort][tokens][most]
  FaultSink sink;
};

// Rows that tokens before this one bring to the rank.
__device__ int64_t rows_before(const VisitArgs& a, int64_t token, int rank) {
  const int64_t block = token / kSortRows;
  const uint32_t below = (1u << (token % kSortRows)) - 1;
  int64_t rows = 0;
  for (int e = rank * a.split.local; e < (rank + 1) * a.split.local; ++e) {
    const int64_t at = e * a.by_expert.blocks + block;
    rows += a.by_expert.bases[at] + __popc(a.by_expert.masks[at] & below);
  }
  return rows;
}

__device__ int chosen_expert(const VisitArgs& a, int64_t token, int j) {
  const int e = a.experts[token * a.top_k + j];
  return e >= 0 && e < a.split.experts ? e : 0;  // reported where it is first read
}

// The visits of one token, by rank; adds the rows of those that are listed to `rows_of`, by expert.
__device__ void find_token_visits(const VisitArgs& a, int64_t token, int32_t* rows_of) {
  for (int j = 0; j < a.top_k; ++j) {
    const int e = a.experts[token * a.top_k + j];
    if (e < 0 || e >= a.split.experts) report(a.sink, FaultKind::kIndex, token, e);
  }
  const int64_t all = a.tokens * a.most;
  int last = -1;
  for (int slot = 0; slot < a.most; ++slot) {
    int rank = a.split.ranks, come = a.split.chunks, leave = -1;
    for (int j = 0; j < a.top_k; ++j) {
      const int e = chosen_expert(a, token, j), r = a.split.rank_of(e), c = a.split.chunk_of(e);
      if (r <= last || r > rank) continue;
      come = r < rank ? c : min(come, c);
      leave = r < rank ? c : max(leave, c);
      rank = r;
    }
    const int64_t at = token * a.most + slot;
    const bool none = rank == a.split.ranks;
    a.rank_of[at] = none ? -1 : rank;
    if (none) a.place_of[at] = -1;
    bool listed = !none;
    if (listed && a.first_row) {
      const int64_t row = a.first_row[rank] + rows_before(a, token, rank);
      listed = row >= a.begin && row < a.end;
    }
    a.keys[at] = listed ? rank : -1;
    if (a.split.chunks > 1) {
      a.keys[all + at] = listed ? come * a.split.ranks + rank : -1;
      a.keys[2 * all + at] = listed ? leave * a.split.ranks + rank : -1;
    }
    for (int j = 0; listed && j < a.top_k; ++j) {
      const int e = chosen_expert(a, token, j);
      if (a.split.rank_of(e) == rank) atomicAdd(&rows_of[e], 1);
    }
    last = rank;
  }
}

__global__ void __launch_bounds__(kSortThreads) find_visits(VisitArgs a) {
  extern __shared__ int32_t rows_of[];  // by expert
  for (int e = static_cast<int>(threadIdx.x); e < a.split.experts; e += kSortThreads) rows_of[e] = 0;
  __syncthreads();
  const int64_t token = int64_t{blockIdx.x} * kSortThreads + threadIdx.x;
  if (token < a.tokens) find_token_visits(a, token, rows_of);
  __syncthreads();
  for (int e = static_cast<int>(threadIdx.x); e < a.split.experts; e += kSortThreads) {
    if (rows_of[e] != 0) atomicAdd(&a.counts[e], rows_of[e]);
  }
}

struct ExpertKeys {
  const int32_t* experts;
  int num_experts, top_k;
  __device__ int operator()(int, int64_t row, int j) const {
    const int e = experts[row * top_k + j];
    return e < num_experts ? e : -1;  // find_visits reports it
  }
};

struct PutVisits {
  int32_t *asked, *sent, *place_of, *counts;
  int64_t room;  // of the lists
  int experts, kinds, most, first;
  bool chunked;
  FaultSink sink;
  __device__ void operator()(int sort, int64_t token, int slot, int place) const {
    const auto t = static_cast<int32_t>(token);
    if (first + place >= room) return report(sink, FaultKind::kIndex, token, first + place);
    if (sort == 0) asked[first + place] = t;
    if (sort == 1 || !chunked) sent[first + place] = t;
    if (sort == 2 || !chunked) place_of[token * most + slot] = first + place;
  }
  __device__ void finish(int sort, int kind, const int32_t*, int count) const {
    if (sort == 1 || !chunked) counts[experts + kind] = count;
    if (sort == 2 || !chunked) counts[experts + kinds + kind] = count;
  }
};

// Guests ---------------------------------------------------------------------------------------------------

struct GuestArgs {
  const int32_t *choices, *come_from;
  int64_t guests, rows;
  int top_k, first;  // of this rank's experts
  Split split;
  int32_t absent;
  int32_t *experts, *row_of, *leaving, *guest_of, *choice_of, *offsets;
  int32_t* keys;           // [2][guests]: by the chunk of the first expert and rank, of the last and rank
  int32_t *came, *leaves;  // [guests], null without chunks: guests come and leave in their order
  FaultSink sink;
  __device__ bool here(int expert) const { return expert >= first && expert < first + split.local; }
};

__global__ void __launch_bounds__(kSortThreads) find_stays(GuestArgs a) {
  const int64_t g = int64_t{blockIdx.x} * kSortThreads + threadIdx.x;
  if (g >= a.guests) return;
  int from = 0;
  for (int64_t before = a.come_from[0]; before <= g && from + 1 < a.split.ranks;)
    before += a.come_from[++from];
  int come = a.split.chunks, leave = -1;
  for (int j = 0; j < a.top_k; ++j) {
    const int e = a.choices[g * a.top_k + j];
    if (!a.here(e)) continue;
    come = min(come, a.split.chunk_of(e));
    leave = max(leave, a.split.chunk_of(e));
  }
  if (leave < 0) come = leave = 0;  // place_sorted reports it
  a.keys[g] = come * a.split.ranks + from;
  a.keys[a.guests + g] = leave * a.split.ranks + from;
}

struct PutStays {
  int32_t *came, *leaves;
  __device__ void operator()(int sort, int64_t guest, int, int place) const {
    (sort == 0 ? came : leaves)[guest] = place;
  }
  __device__ void finish(int, int, const int32_t*, int) const {}
};

struct GuestKeys {
  const int32_t* choices;
  int first, local, top_k;
  __device__ int operator()(int, int64_t row, int j) const {
    const int e = choices[row * top_k + j] - first;
    return e >= 0 && e < local ? e : -1;
  }
};

struct PutRows {
  GuestArgs a;
  __device__ void operator()(int, int64_t guest, int j, int row) const {
    if (row >= a.rows) return report(a.sink, FaultKind::kIndex, guest, row);
    const int32_t came = a.came ? a.came[guest] : static_cast<int32_t>(guest);
    const int64_t leaves = a.leaves ? a.leaves[guest] : guest;
    a.row_of[leaves * a.top_k + j] = row;
    a.guest_of[row] = came;
    a.choice_of[row] = came * a.top_k + j;
  }
  // Chunk after chunk, each expert's first row and the last's end.
  __device__ void finish(int, int expert, const int32_t* first_row, int count) const {
    const int chunk = a.split.chunk_of(expert);
    const int row = first_row[expert] - first_row[a.split.chunk_begin(chunk)];
    a.offsets[expert + chunk] = row;
    if (expert + 1 == a.split.chunk_begin(chunk + 1)) a.offsets[expert + chunk + 1] = row + count;
    const int end = first_row[expert] + count;
    if (expert + 1 == a.split.local && end != a.rows) report(a.sink, FaultKind::kIndex, a.rows, end);
  }
};

// What a guest's choices say of themselves, in the order in which guests leave.
__global__ void __launch_bounds__(kSortThreads) write_guests(GuestArgs a) {
  const int64_t g = int64_t{blockIdx.x} * kSortThreads + threadIdx.x;
  if (g >= a.guests) return;
  const int64_t leaves = a.leaves ? a.leaves[g] : g;
  a.leaving[leaves] = a.came ? a.came[g] : static_cast<int32_t>(g);
  bool any = false;
  for (int j = 0; j < a.top_k; ++j) {
    const int32_t e = a.choices[g * a.top_k + j];
    if (e < 0 || e >= a.split.experts) report(a.sink, FaultKind::kIndex, g, e);
    const bool here = a.here(e);
    a.experts[leaves * a.top_k + j] = here ? e : -1;
    if (!here) a.row_of[leaves * a.top_k + j] = a.absent;
    any = any || here;
  }
  if (!any) report(a.sink, FaultKind::kIndex, g, -1);
  if (g > 0) return;
  int64_t come = 0;
  for (int r = 0; r < a.split.ranks; ++r) come += a.come_from[r];
  if (come != a.guests) report(a.sink, FaultKind::kIndex, a.guests, static_cast<int32_t>(come));
}

}  // namespace

void run(Queue& queue, const DispatchTokens& op) {
  const Context& c = context_of(queue);
  const int64_t tokens = op.experts.dim(0);
  const int top_k = narrow<int>(op.experts.dim(1)), most = narrow<int>(op.rank_of.dim(1));
  const Split split(op.split);
  const bool chunked = split.chunks > 1;
  const int sorts = chunked ? 3 : 1;
  Workspace workspace(queue);
  VisitArgs a{op.experts.as<int32_t>(),
              tokens,
              top_k,
              most,
              split,
              op.first_row.empty() ? nullptr : op.first_row.as<int64_t>(),
              op.begin,
              op.end,
              {},
              op.rank_of.as<int32_t>(),
              op.place_of.as<int32_t>(),
              op.counts.as<int32_t>(),
              workspace.take<int32_t>(sorts * tokens * most),
              fault_sink(queue, op.kName)};
  FP4T_CUDA(cudaMemsetAsync(a.counts, 0, static_cast<size_t>(op.counts.bytes()), c.stream));
  if (a.first_row) {
    const Sorts by_expert = make_sorts(workspace, 1, split.experts, tokens, top_k);
    mark_and_count(c, op.kName, by_expert, ExpertKeys{a.experts, split.experts, top_k});
    a.by_expert = by_expert.space;
  }
  if (tokens > 0) {
    const int bytes = shared_bytes_for(c, op.kName, split.experts, find_visits);
    find_visits<<<static_cast<unsigned>(ceil_div(tokens, kSortThreads)), kSortThreads,
                  static_cast<size_t>(bytes), c.stream>>>(a);
    check_launch(op.kName);
  }
  sort(c, op.kName, make_sorts(workspace, sorts, split.kinds(), tokens, most),
       StoredKeys{a.keys, tokens * most, most},
       PutVisits{op.asked.as<int32_t>(), op.sent.as<int32_t>(), a.place_of, a.counts, tokens * most,
                 split.experts, split.kinds(), most, narrow<int>(op.first), chunked, a.sink});
}

void run(Queue& queue, const PlaceGuests& op) {
  const Context& c = context_of(queue);
  const Split split(op.split);
  const int64_t guests = op.choices.dim(0);
  const int top_k = narrow<int>(op.choices.dim(1));
  const bool chunked = split.chunks > 1;
  Workspace workspace(queue);
  GuestArgs a{op.choices.as<int32_t>(),
              op.come_from.as<int32_t>(),
              guests,
              op.guest_of.dim(0),
              top_k,
              narrow<int>(op.rank * split.local),
              split,
              narrow<int32_t>(op.absent),
              op.experts.as<int32_t>(),
              op.row_of.as<int32_t>(),
              op.leaving.as<int32_t>(),
              op.guest_of.as<int32_t>(),
              op.choice_of.as<int32_t>(),
              op.offsets.as<int32_t>(),
              nullptr,
              nullptr,
              nullptr,
              fault_sink(queue, op.kName)};
  const auto blocks = static_cast<unsigned>(ceil_div(guests, kSortThreads));
  if (chunked && guests > 0) {
    a.keys = workspace.take<int32_t>(2 * guests);
    a.came = workspace.take<int32_t>(guests);
    a.leaves = workspace.take<int32_t>(guests);
    find_stays<<<blocks, kSortThreads, 0, c.stream>>>(a);
    check_launch(op.kName);
    sort(c, op.kName, make_sorts(workspace, 2, split.kinds(), guests, 1), StoredKeys{a.keys, guests, 1},
         PutStays{a.came, a.leaves});
  }
  if (guests > 0) {
    write_guests<<<blocks, kSortThreads, 0, c.stream>>>(a);
    check_launch(op.kName);
  }
  sort(c, op.kName, make_sorts(workspace, 1, split.local, guests, top_k),
       GuestKeys{a.choices, a.first, split.local, top_k}, PutRows{a});
}

}  // namespace fp4t::cuda

// The key-value cache of decoding: pages that sequences share, and what a layer's part of it takes.
#pragma once

#include <cstdint>

#include "engine/plan/plan.h"
#include "kernels/base/dtype.h"

namespace fp4t {

// Sequences that a cache holds; on a GPU one more than the plan's, for rows that fill up a recorded call.
int64_t cache_slots(const Plan& plan);
// Positions of a page of the key-value cache: few are wasted behind a sequence's end, and what a warp reads
// together lies in one.
inline constexpr int64_t kKvPage = 32;
// Pages that the longest sequence has; pages of the cache, on a GPU one more for rows that fill up a recorded
// call. Sequences of one prompt share the pages that it fills.
int64_t pages_per_slot(const Plan& plan);
int64_t cache_pages(const Plan& plan);
inline int64_t page_table_bytes(const Plan& plan) {
  return cache_slots(plan) * pages_per_slot(plan) * static_cast<int64_t>(sizeof(int32_t));
}

// Bytes of one layer's key-value cache in a format; its four parts follow one another, 64-byte aligned.
struct CacheLayout {
  DType dtype;
  int64_t values_bytes, scales_bytes;  // of k; v has as many
  int64_t total_bytes() const { return 2 * (values_bytes + scales_bytes); }
};
CacheLayout cache_layout(const Plan& plan, Format format);
int64_t max_cache_bytes(const Plan& plan);

}  // namespace fp4t

#include "engine/plan/cache_layout.h"

#include <algorithm>

#include "engine/plan/operands.h"
#include "kernels/base/numeric.h"

namespace fp4t {

int64_t cache_slots(const Plan& plan) {
  return plan.max_cache_slots + (plan.machine.backend == Backend::kCuda ? 1 : 0);
}

int64_t pages_per_slot(const Plan& plan) { return ceil_div(plan.max_cache_length, kKvPage); }

int64_t cache_pages(const Plan& plan) {
  // One more: where two begin with one prompt, the page that it begins is kept for the second.
  const int64_t all = plan.max_cache_slots > 0 ? plan.max_cache_slots * pages_per_slot(plan) + 1 : 0;
  const int64_t pages = plan.max_cache_pages > 0 ? std::min(plan.max_cache_pages, all) : all;
  return pages + cache_slots(plan) - plan.max_cache_slots;
}

CacheLayout cache_layout(const Plan& plan, Format format) {
  const int64_t values = cache_pages(plan) * kKvPage * plan.model.kv_heads * plan.model.head_dim;
  CacheLayout c;
  c.dtype = format == Format::kMxfp8 ? DType::kU8 : plan.act;
  c.values_bytes = align_up(values * dtype_bytes(c.dtype), 64);
  c.scales_bytes = format == Format::kMxfp8 ? align_up(values / 32, 64) : 0;
  return c;
}

int64_t max_cache_bytes(const Plan& plan) {
  int64_t bytes = 0;
  for (const TablePair& tables : table_pairs(plan)) {
    bytes = std::max(bytes, cache_layout(plan, tables.forward->kv_cache).total_bytes());
  }
  return bytes;
}

}  // namespace fp4t

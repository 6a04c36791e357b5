#include "kernels/formats/groups.h"

#include "kernels/base/numeric.h"

namespace fp4t {

std::vector<GroupSpan> group_spans(int64_t total, int64_t groups, const int32_t* offsets, int64_t multiple) {
  FP4T_CHECK(groups >= 1, groups, " groups");
  std::vector<GroupSpan> spans(static_cast<size_t>(groups));
  const int64_t equal = offsets ? 0 : div_exact(total, groups);
  int64_t stored = 0;
  for (int64_t g = 0; g < groups; ++g) {
    GroupSpan& s = spans[static_cast<size_t>(g)];
    s.begin = offsets ? offsets[g] : g * equal;
    s.count = (offsets ? offsets[g + 1] : (g + 1) * equal) - s.begin;
    FP4T_CHECK(s.begin >= 0 && s.count >= 0 && s.begin + s.count <= total, "group ", g, " is [", s.begin,
               ", ", s.begin + s.count, ") of ", total);
    s.stored_begin = stored;
    s.stored_count = align_up(s.count, multiple);
    stored += s.stored_count;
  }
  return spans;
}

}  // namespace fp4t

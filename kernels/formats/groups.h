// Where the groups (experts) of a matrix lie: their logical span, and their span in the padded storage
// of a QuantView. Host only.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels/formats/quant.h"

namespace fp4t {

struct GroupSpan {
  int64_t begin = 0;         // first logical element along the grouped axis
  int64_t count = 0;         // logical elements
  int64_t stored_begin = 0;  // the same in storage, where every group is padded by itself
  int64_t stored_count = 0;
};

// Spans of `groups` groups whose bounds are offsets[0 .. groups], each padded to `multiple`. A null
// `offsets` means equal groups of total / groups. Throws InternalError when the offsets decrease or
// leave [0, total].
std::vector<GroupSpan> group_spans(int64_t total, int64_t groups, const int32_t* offsets, int64_t multiple);

// Groups [first, first + count) of a matrix as one of their own: the bytes that these groups have in it.
QuantView part_of_groups(const QuantView& whole, int64_t first, int64_t count, const int32_t* offsets);

}  // namespace fp4t

// Documents of a packed batch, from the index of each token's first token.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels/base/tensor.h"

namespace fp4t::cpu {

struct RowSpan {
  int64_t begin, end;
};

inline std::vector<RowSpan> documents_of(const TensorView& doc_begin, const char* op) {
  const int32_t* first = doc_begin.as<int32_t>();
  std::vector<RowSpan> documents;
  for (int64_t t = 0; t < doc_begin.dim(0); ++t) {
    if (first[t] == t) {
      documents.push_back({t, t + 1});
    } else {
      FP4T_CHECK(!documents.empty() && first[t] == documents.back().begin, op, ".doc_begin[", t, "] is ",
                 first[t], ": neither ", t, " nor its predecessor's document");
      documents.back().end = t + 1;
    }
  }
  return documents;
}

}  // namespace fp4t::cpu

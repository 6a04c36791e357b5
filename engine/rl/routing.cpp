#include "engine/rl/routing.h"

#include <algorithm>

#include "kernels/base/check.h"

namespace fp4t {

RoutingShape RoutingShape::of(const ModelSpec& model) {
  RoutingShape s;
  if (model.moe.experts == 0) return s;
  s.layers = model.layers - model.moe.dense_layers;
  s.top_k = model.moe.top_k;
  s.experts = model.moe.experts;
  return s;
}

void append_routing(const RoutingShape& shape, const std::vector<int32_t>& record, int64_t rows, int64_t row,
                    std::vector<uint8_t>& bytes) {
  FP4T_CHECK_EQ(static_cast<int64_t>(record.size()), shape.layers * rows * shape.top_k);
  for (int64_t l = 0; l < shape.layers; ++l) {
    for (int64_t j = 0; j < shape.top_k; ++j) {
      const auto expert =
          static_cast<uint32_t>(record[static_cast<size_t>((l * rows + row) * shape.top_k + j)]);
      bytes.push_back(static_cast<uint8_t>(expert & 255));
      if (shape.expert_bytes() == 2) bytes.push_back(static_cast<uint8_t>(expert >> 8));
    }
  }
}

std::vector<int32_t> joined_routing(const RoutingShape& shape,
                                    const std::vector<const std::vector<uint8_t>*>& parts) {
  const auto row_bytes = static_cast<size_t>(shape.row_bytes()),
             width = static_cast<size_t>(shape.expert_bytes());
  const auto layer_bytes = static_cast<size_t>(shape.top_k) * width;
  std::vector<int32_t> joined;
  for (size_t l = 0; l < static_cast<size_t>(shape.layers); ++l) {
    for (const std::vector<uint8_t>* part : parts) {
      FP4T_CHECK_EQ(part->size() % row_bytes, size_t{0},
                    "a recorded routing that is no whole number of rows");
      for (size_t row = 0; row < part->size(); row += row_bytes) {
        const uint8_t* at = part->data() + row + l * layer_bytes;
        for (int64_t j = 0; j < shape.top_k; ++j, at += width) {
          const int32_t expert = width == 2 ? at[0] | at[1] << 8 : at[0];
          if (expert >= shape.experts) {
            throw BadDataError(
                detail::concat("a recorded routing names expert ", expert, " of ", shape.experts));
          }
          joined.push_back(expert);
        }
      }
    }
  }
  return joined;
}

std::vector<int64_t> rows_that_differ(const RoutingShape& shape, const std::vector<int32_t>& a,
                                      const std::vector<int32_t>& b, int64_t rows) {
  FP4T_CHECK_EQ(static_cast<int64_t>(a.size()), shape.layers * rows * shape.top_k);
  FP4T_CHECK_EQ(a.size(), b.size());
  std::vector<int64_t> counts(static_cast<size_t>(shape.layers), 0);
  auto x = a.begin(), y = b.begin();
  for (int64_t& count : counts) {
    for (int64_t row = 0; row < rows; ++row, x += shape.top_k, y += shape.top_k) {
      const auto has = [&](int32_t expert) {
        return std::find(y, y + shape.top_k, expert) != y + shape.top_k;
      };
      count += std::all_of(x, x + shape.top_k, has) ? 0 : 1;
    }
  }
  return counts;
}

}  // namespace fp4t

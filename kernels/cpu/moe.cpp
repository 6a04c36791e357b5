// Rows to experts and back.
#include "kernels/ops/moe.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "kernels/cpu/rows.h"
#include "kernels/ops/run.h"

namespace fp4t::cpu {

namespace {

void load_part(const TensorView& view, int64_t first, float* out, int64_t n) {
  for_float_type(view.dtype, [&](auto type) { load_row(view.as<decltype(type)>() + first, out, n); });
}

void store_part(const float* x, const TensorView& view, int64_t first, int64_t n) {
  for_float_type(view.dtype, [&](auto type) { store_row(x, view.as<decltype(type)>() + first, n); });
}

// One expert's output for the token.
struct Leaf {
  int32_t expert;
  int32_t row;
  float gate;
};

// A token's leaves in the order of experts.
void load_leaves(const CombineExperts& op, int64_t token, std::vector<Leaf>& leaves) {
  const int64_t top_k = op.row_of.dim(1), rows = op.y.dim(0);
  leaves.clear();
  for (int64_t j = 0; j < top_k; ++j) {
    const int64_t i = token * top_k + j;
    const Leaf leaf{op.experts.as<int32_t>()[i], op.row_of.as<int32_t>()[i],
                    op.gates.empty() ? 1.0f : op.gates.as<float>()[i]};
    if (op.partial && leaf.expert == -1) continue;
    FP4T_CHECK(leaf.expert >= 0 && leaf.expert < op.num_experts && leaf.row >= 0 && leaf.row < rows, op.kName,
               ": token ", token, " has expert ", leaf.expert, " in row ", leaf.row);
    leaves.push_back(leaf);
  }
  std::sort(leaves.begin(), leaves.end(), [](const Leaf& a, const Leaf& b) { return a.expert < b.expert; });
}

// Sums columns [first, first + n) of the leaves along the tree that halves [low, high).
template <class T>
class TreeSum {
 public:
  TreeSum(const CombineExperts& op, int64_t first, int64_t n)
      : y_(op.y.as<T>() + first), stride_(op.y.dim(1)), n_(n), weighted_(!op.gates.empty()) {}

  void sum(const Leaf* begin, const Leaf* end, int64_t low, int64_t high, float* out) const {
    if (end - begin == 1) {
      load_row(y_ + begin->row * stride_, out, n_);
      if (weighted_) {
        for (int64_t i = 0; i < n_; ++i) out[i] = begin->gate * out[i];
      }
      return;
    }
    FP4T_CHECK(high - low > 1, "expert ", begin->expert, " twice for one token");
    const int64_t middle = (low + high) / 2;
    const Leaf* split = begin;
    while (split != end && split->expert < middle) ++split;
    if (split == begin) return sum(begin, end, middle, high, out);
    if (split == end) return sum(begin, end, low, middle, out);
    float right[kBlock];
    sum(begin, split, low, middle, out);
    sum(split, end, middle, high, right);
    for (int64_t i = 0; i < n_; ++i) out[i] = out[i] + right[i];
  }

 private:
  const T* y_;
  int64_t stride_, n_;
  bool weighted_;
};

template <class T>
void combine(Queue& queue, const CombineExperts& op) {
  const int64_t tokens = op.out.dim(0), width = op.out.dim(1);
  parallel_for(queue, tokens, rows_per_chunk(width), [&](int64_t begin, int64_t end) {
    std::vector<Leaf> leaves;
    float out[kBlock], other[kBlock];
    for (int64_t t = begin; t < end; ++t) {
      load_leaves(op, t, leaves);
      for (int64_t first = 0; first < width; first += kBlock) {
        const int64_t n = std::min(kBlock, width - first), place = t * width + first;
        if (leaves.empty()) {
          std::fill(out, out + n, 0.0f);
        } else {
          TreeSum<T>(op, first, n).sum(leaves.data(), leaves.data() + leaves.size(), 0, op.num_experts, out);
        }
        for (const TensorView& addend : {op.shared, op.residual}) {
          if (addend.empty()) continue;
          load_part(addend, place, other, n);
          for (int64_t i = 0; i < n; ++i) out[i] = out[i] + other[i];
        }
        store_part(out, op.out, place, n);
      }
    }
  });
}

// Sums of products of several pairs of rows, each in index order; side by side to hide the latency.
constexpr int64_t kPairs = 8;

void sum_in_order(const float (*products)[kBlock], int64_t n, float* sums) {
  float acc[kPairs];
  std::copy(sums, sums + kPairs, acc);
  for (int64_t i = 0; i < n; ++i) {
    for (int64_t p = 0; p < kPairs; ++p) acc[p] = acc[p] + products[p][i];
  }
  std::copy(acc, acc + kPairs, sums);
}

template <class T>
class CombineGradient {
 public:
  explicit CombineGradient(const CombineExpertsBackward& op)
      : op_(op),
        width_(op.dout.dim(1)),
        top_k_(op.gates.dim(1)),
        row_of_(op.row_of.empty() ? nullptr : op.row_of.as<int32_t>()),
        dout_of_(op.dout_of.empty() ? nullptr : op.dout_of.as<int32_t>()),
        dout_(op.dout.as<T>()),
        y_(op.y.as<T>()),
        dy_(op.dy.as<T>()) {}

  // Pairs [first, first + count) of the flat [T, k]; count <= kPairs.
  void pairs(int64_t first, int64_t count) const {
    const float* gates = op_.gates.as<float>();
    float products[kPairs][kBlock] = {};
    float sums[kPairs] = {};
    for (int64_t c = 0; c < width_; c += kBlock) {
      const int64_t n = std::min(kBlock, width_ - c);
      for (int64_t p = 0; p < count; ++p) {
        const int64_t token = (first + p) / top_k_, row = row_of_ ? row_of_[first + p] : first + p;
        const int64_t grad = dout_of_ ? dout_of_[token] : token;
        one(dout_ + grad * width_ + c, y_ + row * width_ + c, gates[first + p], n, products[p],
            dy_ + row * width_ + c);
      }
      sum_in_order(products, n, sums);
    }
    std::copy(sums, sums + count, op_.dgates.as<float>() + first);
  }

 private:
  static void one(const T* dout, const T* y, float gate, int64_t n, float* product, T* dy) {
    float grad[kBlock];
    load_row(dout, grad, n);
    load_row(y, product, n);
    for (int64_t i = 0; i < n; ++i) product[i] = grad[i] * product[i];
    for (int64_t i = 0; i < n; ++i) grad[i] = gate * grad[i];
    store_row(grad, dy, n);
  }

  const CombineExpertsBackward& op_;
  int64_t width_, top_k_;
  const int32_t *row_of_, *dout_of_;  // may be null
  const T *dout_, *y_;
  T* dy_;
};

void check_rows(const char* op, const TensorView& indices, int64_t rows) {
  const int32_t* index = indices.as<int32_t>();
  for (int64_t i = 0; i < indices.elements(); ++i) {
    FP4T_CHECK(index[i] >= 0 && index[i] < rows, op, ": row ", index[i], " of ", rows);
  }
}

}  // namespace

void run(Queue& queue, const PermuteRows& op) {
  check_rows(op.kName, op.token_of, op.x.dim(0));
  const int64_t row_bytes = op.x.dim(1) * dtype_bytes(op.x.dtype);
  const int32_t* token_of = op.token_of.as<int32_t>();
  const auto* x = static_cast<const char*>(op.x.data);
  auto* out = static_cast<char*>(op.out.data);
  parallel_for(queue, op.token_of.dim(0), rows_per_chunk(op.x.dim(1)), [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      std::memcpy(out + r * row_bytes, x + token_of[r] * row_bytes, static_cast<size_t>(row_bytes));
    }
  });
}

void run(Queue& queue, const CombineExperts& op) {
  for_float_type(op.y.dtype, [&](auto type) { combine<decltype(type)>(queue, op); });
}

void run(Queue& queue, const CombineExpertsBackward& op) {
  if (!op.row_of.empty()) check_rows(op.kName, op.row_of, op.y.dim(0));
  if (!op.dout_of.empty()) check_rows(op.kName, op.dout_of, op.dout.dim(0));
  const int64_t pairs = op.gates.elements();
  const int64_t chunk = kPairs * std::max<int64_t>(1, rows_per_chunk(op.dout.dim(1)) / kPairs);
  for_float_type(op.dout.dtype, [&](auto type) {
    const CombineGradient<decltype(type)> gradient(op);
    parallel_for(queue, pairs, chunk, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; i += kPairs) gradient.pairs(i, std::min(kPairs, end - i));
    });
  });
}

}  // namespace fp4t::cpu

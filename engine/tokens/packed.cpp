#include "engine/tokens/packed.h"

#include <algorithm>

#include "kernels/base/check.h"
#include "kernels/base/numeric.h"

namespace fp4t {

void append_piece(Sequence& sequence, const int32_t* tokens, size_t count, int32_t next,
                  const uint8_t* trained) {
  const auto first = static_cast<int32_t>(sequence.tokens.size());
  for (size_t i = 0; i < count; ++i) {
    sequence.tokens.push_back(tokens[i]);
    const bool is_target = i + 1 == count || !trained || trained[i + 1] != 0;
    sequence.targets.push_back(i + 1 == count ? next : is_target ? tokens[i + 1] : -1);
    sequence.positions.push_back(static_cast<int32_t>(i));
    sequence.doc_begin.push_back(first);
  }
}

void fill_up(Sequence& sequence, int64_t length, int32_t end_of_document) {
  const size_t before = sequence.tokens.size();
  const std::vector<int32_t> filler(static_cast<size_t>(length) - before, end_of_document);
  append_piece(sequence, filler.data(), filler.size(), -1);
  std::fill(sequence.targets.begin() + static_cast<std::ptrdiff_t>(before), sequence.targets.end(), -1);
}

PackedDocuments::PackedDocuments(const TokenStore& store, std::vector<int64_t> order, int64_t length,
                                 int32_t end_of_document)
    : store_(store), order_(std::move(order)), length_(length), eod_(end_of_document) {
  ends_.reserve(order_.size());
  int64_t tokens = 0;
  for (const int64_t document : order_) ends_.push_back(tokens += store_.size(document));
}

int64_t PackedDocuments::sequences() const { return ceil_div(tokens(), length_); }

Sequence PackedDocuments::sequence(int64_t n) const {
  FP4T_CHECK(n >= 0 && n < sequences(), n, " of ", sequences());
  Sequence sequence;
  std::vector<int32_t> tokens;
  int64_t at = n * length_;
  const int64_t end = std::min(at + length_, this->tokens());
  auto i = static_cast<size_t>(std::upper_bound(ends_.begin(), ends_.end(), at) - ends_.begin());
  for (; at < end; ++i) {
    const int64_t size = store_.size(order_[i]);
    const int64_t from = at - (ends_[i] - size);
    const int64_t to = std::min(size, from + end - at);
    const bool goes_on = to < size;
    tokens.resize(static_cast<size_t>(to - from + goes_on));
    store_.read(order_[i], from, to + goes_on, tokens.data());
    const auto count = static_cast<size_t>(to - from);
    const uint8_t* trained = store_.trained(order_[i], from);
    const bool trains_next = goes_on && (!trained || trained[count] != 0);
    append_piece(sequence, tokens.data(), count, trains_next ? tokens[count] : -1, trained);
    at += to - from;
  }
  fill_up(sequence, length_, eod_);
  return sequence;
}

}  // namespace fp4t

#include "engine/tokens/bpe.h"

#include <xxhash.h>

#include <algorithm>
#include <cstring>

#include "kernels/base/check.h"

namespace fp4t {

namespace {

// Up to here looking at all pairs after each merge is quicker than keeping them in a heap.
constexpr size_t kShortWord = 96;
constexpr size_t kKnownWords = size_t{1} << 15;

}  // namespace

BpeModel::Scratch::Scratch() : known_(kKnownWords) {}

BpeModel::BpeModel(std::vector<std::string> tokens, const std::vector<Merge>& merges, bool ignore_merges)
    : tokens_(std::move(tokens)), ignore_merges_(ignore_merges) {
  ids_.reserve(tokens_.size());
  for (size_t i = 0; i < tokens_.size(); ++i) {
    if (!tokens_[i].empty()) ids_.emplace(tokens_[i], static_cast<int32_t>(i));
  }
  for (int b = 0; b < 256; ++b) {
    const char byte = static_cast<char>(b);
    byte_ids_[static_cast<size_t>(b)] = token_of({&byte, 1});
    if (byte_ids_[static_cast<size_t>(b)] < 0) {
      throw BadDataError(detail::concat("the vocabulary has no token for the byte ", b));
    }
  }
  size_t slots = 16;
  while (slots < 2 * merges.size()) slots *= 2;
  merges_.resize(slots);
  mask_ = slots - 1;
  for (size_t rank = 0; rank < merges.size(); ++rank) {
    const Merge& m = merges[rank];
    add_merge(uint64_t{static_cast<uint32_t>(m.left)} << 32 | static_cast<uint32_t>(m.right),
              uint64_t{rank} << 32 | static_cast<uint32_t>(m.result));
  }
}

void BpeModel::add_merge(uint64_t pair, uint64_t rank_and_result) {
  size_t i = slot_of(pair);
  while (merges_[i].pair != kNoMerge && merges_[i].pair != pair) i = (i + 1) & mask_;
  merges_[i] = {pair, rank_and_result};  // of a pair that is listed twice the last counts
}

int32_t BpeModel::token_of(std::string_view bytes) const {
  const auto found = ids_.find(bytes);
  return found == ids_.end() ? -1 : found->second;
}

const std::string& BpeModel::bytes_of(int32_t id) const {
  static const std::string kNone;
  return id >= 0 && static_cast<size_t>(id) < tokens_.size() ? tokens_[static_cast<size_t>(id)] : kNone;
}

void BpeModel::encode(std::string_view word, Scratch& scratch, std::vector<int32_t>& out) const {
  if (word.size() == 1) return out.push_back(byte_ids_[static_cast<uint8_t>(word[0])]);
  constexpr size_t kMostBytes = std::tuple_size_v<decltype(Scratch::Known::bytes)>;
  if (word.size() > kMostBytes) return merge_word(word, scratch, out);
  Scratch::Known& known = scratch.known_[XXH3_64bits(word.data(), word.size()) & (kKnownWords - 1)];
  if (known.size == word.size() && std::memcmp(known.bytes.data(), word.data(), word.size()) == 0) {
    out.insert(out.end(), known.ids.begin(), known.ids.begin() + known.count);
    return;
  }
  const size_t before = out.size();
  merge_word(word, scratch, out);
  const size_t count = out.size() - before;
  if (count > known.ids.size()) return;
  known.size = static_cast<uint8_t>(word.size());
  known.count = static_cast<uint8_t>(count);
  std::memcpy(known.bytes.data(), word.data(), word.size());
  std::copy(out.begin() + static_cast<std::ptrdiff_t>(before), out.end(), known.ids.begin());
}

void BpeModel::merge_word(std::string_view word, Scratch& scratch, std::vector<int32_t>& out) const {
  if (word.empty()) return;
  if (ignore_merges_) {
    const int32_t whole = token_of(word);
    if (whole >= 0) return out.push_back(whole);
  }
  if (word.size() <= kShortWord) return merge_short(word, scratch, out);
  FP4T_CHECK(word.size() < INT32_MAX, "a word of ", word.size(), " bytes");
  merge_long(word, scratch, out);
}

void BpeModel::merge_short(std::string_view word, Scratch& scratch, std::vector<int32_t>& out) const {
  const size_t begin = out.size();
  for (const char c : word) out.push_back(byte_ids_[static_cast<uint8_t>(c)]);
  int32_t* ids = out.data() + begin;
  size_t n = word.size();
  scratch.ranks_.assign(n, kNoMerge);
  uint64_t* ranks = scratch.ranks_.data();
  for (size_t i = 0; i + 1 < n; ++i) ranks[i] = merge_of(ids[i], ids[i + 1]);
  while (n > 1) {
    const size_t best = static_cast<size_t>(std::min_element(ranks, ranks + n - 1) - ranks);  // leftmost
    if (ranks[best] == kNoMerge) break;
    ids[best] = static_cast<int32_t>(ranks[best] & 0xFFFFFFFFu);
    std::copy(ids + best + 2, ids + n, ids + best + 1);
    std::copy(ranks + best + 1, ranks + n, ranks + best);
    --n;
    ranks[n - 1] = kNoMerge;
    if (best + 1 < n) ranks[best] = merge_of(ids[best], ids[best + 1]);
    if (best > 0) ranks[best - 1] = merge_of(ids[best - 1], ids[best]);
  }
  out.resize(begin + n);
}

// The same with a heap: of pairs that a merge has taken apart the entries stay, and are seen when they come
// up.
void BpeModel::merge_long(std::string_view word, Scratch& scratch, std::vector<int32_t>& out) const {
  auto& parts = scratch.parts_;
  auto& heap = scratch.heap_;
  const auto last = static_cast<int32_t>(word.size()) - 1;
  parts.resize(word.size());
  heap.clear();
  for (int32_t i = 0; i <= last; ++i) {
    parts[static_cast<size_t>(i)] = {byte_ids_[static_cast<uint8_t>(word[static_cast<size_t>(i)])], i - 1,
                                     i == last ? -1 : i + 1};
  }
  const auto later = [](const Scratch::Candidate& a, const Scratch::Candidate& b) {
    return a.rank != b.rank ? a.rank > b.rank : a.at > b.at;
  };
  const auto consider = [&](int32_t at) {
    if (at < 0 || parts[static_cast<size_t>(at)].next < 0) return;
    const int32_t left = parts[static_cast<size_t>(at)].id;
    const int32_t right = parts[static_cast<size_t>(parts[static_cast<size_t>(at)].next)].id;
    const uint64_t merge = merge_of(left, right);
    if (merge == kNoMerge) return;
    heap.push_back({static_cast<uint32_t>(merge >> 32), at, left, right});
    std::push_heap(heap.begin(), heap.end(), later);
  };
  for (int32_t i = 0; i < last; ++i) consider(i);
  while (!heap.empty()) {
    std::pop_heap(heap.begin(), heap.end(), later);
    const Scratch::Candidate c = heap.back();
    heap.pop_back();
    Scratch::Part& left = parts[static_cast<size_t>(c.at)];
    if (left.id != c.left || left.next < 0 || parts[static_cast<size_t>(left.next)].id != c.right) continue;
    Scratch::Part& right = parts[static_cast<size_t>(left.next)];
    left.id = static_cast<int32_t>(merge_of(c.left, c.right) & 0xFFFFFFFFu);
    left.next = right.next;
    right.id = -1;
    if (left.next >= 0) parts[static_cast<size_t>(left.next)].previous = c.at;
    consider(left.previous);
    consider(c.at);
  }
  for (int32_t i = 0; i >= 0; i = parts[static_cast<size_t>(i)].next)
    out.push_back(parts[static_cast<size_t>(i)].id);
}

}  // namespace fp4t

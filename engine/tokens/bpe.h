// Byte-pair encoding of one word: its bytes are tokens, and of all neighbours that the merges join, those
// with the lowest rank are joined first, the leftmost of equal ones, until none are left (Sennrich, Haddow
// and Birch 2016, on bytes as GPT-2 does it).
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

namespace fp4t {

struct Merge {
  int32_t left, right, result;
};

class BpeModel {
 public:
  // `tokens`: bytes of each id, empty where there is none. `merges` in the order of their ranks. With
  // `ignore_merges` a word that is a token is that token. Throws BadDataError when a byte has no token.
  BpeModel(std::vector<std::string> tokens, const std::vector<Merge>& merges, bool ignore_merges);
  BpeModel(const BpeModel&) = delete;  // a copy's ids_ would look into this one's tokens_
  BpeModel& operator=(const BpeModel&) = delete;

  // What one thread needs: room for a word, and words that it has seen.
  class Scratch {
   public:
    Scratch();

   private:
    friend class BpeModel;
    struct Known {
      std::array<char, 30> bytes;
      uint8_t size = 0;  // 0: empty
      uint8_t count = 0;
      std::array<int32_t, 6> ids;
    };
    struct Part {
      int32_t id, previous, next;  // neighbours by index, -1 at the ends
    };
    struct Candidate {
      uint32_t rank;
      int32_t at;           // index of the left part
      int32_t left, right;  // ids, to see whether it still stands
    };
    std::vector<Known> known_;
    std::vector<Part> parts_;
    std::vector<uint64_t> ranks_;  // of the pair that begins at a part: rank and result
    std::vector<Candidate> heap_;
  };

  void encode(std::string_view word, Scratch& scratch, std::vector<int32_t>& out) const;
  // The token of these bytes, -1 when there is none.
  int32_t token_of(std::string_view bytes) const;
  // Bytes of an id; empty when there is no such token.
  const std::string& bytes_of(int32_t id) const;
  int64_t size() const { return static_cast<int64_t>(tokens_.size()); }

 private:
  static constexpr uint64_t kNoMerge = ~uint64_t{0};

  // Rank (upper half) and result of joining two tokens.
  uint64_t merge_of(int32_t left, int32_t right) const {
    const uint64_t pair = uint64_t{static_cast<uint32_t>(left)} << 32 | static_cast<uint32_t>(right);
    for (size_t i = slot_of(pair);; i = (i + 1) & mask_) {
      if (merges_[i].pair == pair) return merges_[i].rank_and_result;
      if (merges_[i].pair == kNoMerge) return kNoMerge;
    }
  }
  size_t slot_of(uint64_t pair) const {
    pair *= 0x9E3779B97F4A7C15u;  // 2^64 by the golden ratio
    return static_cast<size_t>(pair >> 32) & mask_;
  }
  void add_merge(uint64_t pair, uint64_t rank_and_result);
  void merge_word(std::string_view word, Scratch& scratch, std::vector<int32_t>& out) const;
  void merge_short(std::string_view word, Scratch& scratch, std::vector<int32_t>& out) const;
  void merge_long(std::string_view word, Scratch& scratch, std::vector<int32_t>& out) const;

  struct Slot {
    uint64_t pair = kNoMerge, rank_and_result = kNoMerge;
  };
  std::vector<std::string> tokens_;
  std::unordered_map<std::string_view, int32_t> ids_;  // keys lie in tokens_
  std::array<int32_t, 256> byte_ids_{};
  std::vector<Slot> merges_;
  size_t mask_ = 0;
  bool ignore_merges_;
};

}  // namespace fp4t

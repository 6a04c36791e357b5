// Memory with a lifetime. An Arena is one allocation with named blocks, filled from the bottom; a
// ScratchScope gives back, last in first out, what was taken since it was opened. The plan sums the
// bytes first (engine/plan/memory.h), so running out is an error that names block and arena.
// Non-goals: freeing single blocks, growing.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "kernels/base/tensor.h"

namespace fp4t {

class Queue;

enum class Poison : uint8_t { kNone, kNan };  // kNan: every fresh block is filled with 0xFF bytes

class Arena {
 public:
  // Allocates `capacity_bytes` on the queue's backend. Throws Error when the memory is not there.
  Arena(Queue& queue, std::string name, int64_t capacity_bytes, Poison poison);
  ~Arena();
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;

  // A block of its own, 256-byte aligned. The contents are undefined (NaN when poisoned).
  TensorView take(const std::string& block, DType dtype, const Shape& shape);
  void* take_bytes(const std::string& block, int64_t bytes);

  const std::string& name() const { return name_; }
  int64_t capacity_bytes() const { return capacity_; }
  int64_t used_bytes() const { return used_; }
  int64_t high_water_bytes() const { return high_water_; }
  // Bytes that `take` would use for a block of this many bytes.
  static int64_t block_bytes(int64_t bytes);

  // For ScratchScope and for overlaying phases: back to an earlier fill level.
  void rewind(int64_t used_bytes);
  // Up again to a level that was given back: blocks above this one hold what they held, if nothing has been
  // taken there since.
  void reclaim(int64_t used_bytes);

 private:
  Queue& queue_;
  std::string name_;
  int64_t capacity_ = 0;
  int64_t used_ = 0;
  int64_t high_water_ = 0;
  Poison poison_;
  char* base_ = nullptr;
};

// Last-in first-out scratch: whatever is taken from `arena` in this scope is given back at its end.
class ScratchScope {
 public:
  explicit ScratchScope(Arena& arena) : arena_(arena), mark_(arena.used_bytes()) {}
  ~ScratchScope() { arena_.rewind(mark_); }
  ScratchScope(const ScratchScope&) = delete;
  ScratchScope& operator=(const ScratchScope&) = delete;
  TensorView take(const std::string& block, DType dtype, const Shape& shape) {
    return arena_.take(block, dtype, shape);
  }

 private:
  Arena& arena_;
  int64_t mark_;
};

}  // namespace fp4t

// What ranks exchange of the parameters: gradients on their way to the owner of each element, weights on
// their way back, at the edges of an update or, by parallel.zero, of every block (engine/comm/README.md). In
// rounds over buffers that the plan has priced.
#pragma once

#include <memory>
#include <vector>

#include "engine/comm/comm.h"
#include "engine/model/params.h"
#include "engine/plan/run_layout.h"

namespace fp4t {

class ShardExchange {
 public:
  // Takes its buffers from `arena`; nothing on one rank, where every call is the identity.
  ShardExchange(Queue& queue, Communicator& comm, const Plan& plan, std::vector<Param>& params, Arena& arena);

  Communicator& comm() { return comm_; }
  // The ranks that hold the same experts as this one; all ranks where experts are not spread.
  Communicator& replicas() { return replicas_ ? *replicas_ : comm_; }

  // An accumulation begins: what owners have of gradients counts as zero.
  void begin_gradients();
  // After a block's backward on every rank, where gradients are scattered: they are added to what the owners
  // have, in FP32 in rank order, and their memory is the next block's.
  void scatter_gradients(int64_t layer);
  // The rest: every gradient's owned elements become the sum over the ranks that hold them, added in FP32 in
  // rank order. What a rank does not own is undefined afterwards.
  void sum_gradients();

  // Every weight that products read (the copy, or the master where there is none) gets the owners' elements;
  // of weights that come block by block, what came is void.
  void gather_weights();
  // Before a block's forward and backward: its weights are there, and those of `next` (-1: none) on their
  // way.
  void use_weights(int64_t layer, int64_t next);

 private:
  class Rounds;
  // A row of parameters and the ranks that hold it alike.
  struct Shared {
    Communicator& comm;
    const ShardRow& row;
  };
  std::vector<Shared> all_shared();
  // A block's parameters in a row; layer -1: those before and after the blocks.
  std::vector<Span> ranges_of(const ShardRow& row, int64_t layer) const;

  // Adds a range up at the owners: in place in the gradients, or onto what the owners have.
  enum class Into : uint8_t { kGradients, kOwned };
  void sum(const Shared& shared, const Span& range, Into into);
  void add_to_owned(const ShardRow& row, const Span& range, const TensorView& sum);
  void copy_gradients(const ShardRow& row, const Span& range, char* bytes, bool pack);

  // Weights of a range that blocks share the memory of, or those that stay.
  enum class Which : uint8_t { kStaying, kShared };
  void gather(const Shared& shared, const Span& range, Which which, int64_t first_round = 0);
  void begin_ahead(int64_t layer);
  void end_ahead();
  int64_t weight_bytes(const ShardRow& row, const Span& range, Which which) const;
  // Of any member, in a round.
  int64_t largest_bytes(const Shared& shared, const Rounds& rounds, int64_t round, Which which) const;
  void pack_weights(const ShardRow& row, const Span& range, Which which, char* bytes);
  void unpack_weights(const ShardRow& row, const Span& range, Which which, const char* bytes);

  Queue& queue_;
  Communicator& comm_;
  const Plan& plan_;
  std::vector<Param>& params_;
  std::unique_ptr<Communicator> replicas_;  // where experts are spread
  ExchangeBlocks blocks_;
  // The first round of a block's weights that are on their way, by row.
  struct Ahead {
    std::unique_ptr<PendingCall> call;  // null: the row has none of this block
    int64_t bytes = 0;
  };
  std::vector<Ahead> ahead_;
  int64_t ahead_layer_ = -1;
  std::vector<bool> owned_begun_;  // by layer: the owners' gradients hold something
  int64_t placed_[kCopyPlaces];    // layers whose weights are there; -1: none
};

}  // namespace fp4t

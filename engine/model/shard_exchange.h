// What ranks exchange of the parameters: gradients on their way to the owner of each element, weights on
// their way back, at the edges of an update or, by parallel.zero, of every block (engine/comm/README.md).
// Weights travel from place to place; sums go in rounds over a buffer that the plan has priced.
//
// On a GPU all of it is enqueued beside the model's queue, which waits where it needs what came.
#pragma once

#include <memory>
#include <vector>

#include "engine/comm/comm.h"
#include "engine/model/aside.h"
#include "engine/model/params.h"
#include "engine/plan/run_layout.h"

namespace fp4t {

class ShardExchange {
 public:
  // Takes its buffer from `arena`; nothing on one rank, where every call is the identity.
  ShardExchange(Queue& queue, Communicator& comm, const Plan& plan, std::vector<Param>& params, Arena& arena);

  // For decisions, over host memory.
  Communicator& comm() { return comm_; }
  // The ranks that hold the same experts as this one; all ranks where experts are not spread.
  Communicator& replicas() { return replicas_ ? *replicas_ : comm_; }
  // Throws what has gone wrong with exchanges that are on their way.
  void check();

  // An accumulation begins: what owners have of gradients counts as zero.
  void begin_gradients();
  // Before a block's backward, where gradients are scattered: the memory of its gradients is free.
  void claim_gradients(int64_t layer);
  // After it, on every rank: they are added to what the owners have, in FP32 in rank order, and their memory
  // is another block's.
  void scatter_gradients(int64_t layer);
  // After the last backward of an update, where they are not scattered: a block's gradients are complete, and
  // become sums now.
  void sum_block(int64_t layer);
  // Likewise those of the parameters before the blocks, or after them, scattered or not.
  enum class Outside : uint8_t { kBefore, kAfter };
  void sum_outside(Outside part);
  // The rest: every gradient's owned elements become the sum over the ranks that hold them, added in FP32 in
  // rank order. What a rank does not own is undefined afterwards.
  void sum_gradients();

  // Every weight that products read (the copy, or the master where there is none) gets the owners' elements;
  // of weights that come block by block, what came is void. On a GPU they are on their way then.
  void gather_weights();
  // Before anything reads them: what stays of a block's weights is there; layer -1: those outside the blocks.
  void await_weights(int64_t layer);
  void await_all_weights();
  // Before a block's forward and backward: its weights are there, and those of `next` (-1: none) on their
  // way.
  void use_weights(int64_t layer, int64_t next);

 private:
  class Rounds;
  // A row of parameters and the ranks that hold it alike.
  struct Shared {
    Communicator& comm;  // of tensors
    const ShardRow& row;
  };
  std::vector<Shared> all_shared();
  // A block's parameters in a row; layer -1: those before and after the blocks.
  std::vector<Span> ranges_of(const ShardRow& row, int64_t layer) const;

  // Adds a range up at the owners: in place in the gradients, or onto what the owners have.
  enum class Into : uint8_t { kGradients, kOwned };
  void sum_round(const Shared& shared, const Rounds& rounds, int64_t round, Into into);
  void sum(const Shared& shared, const Span& range, Into into);
  // What others bring for some spans of the row, sums of as many terms as there are senders: from each the
  // elements that `mine` lists, one sender after another without this one.
  struct Arriving {
    std::vector<int64_t> from;  // members, in the order of the sum
    int64_t own;                // index of this one
    std::vector<Span> mine;
    int64_t elements() const;
  };
  // Sends `to_each` member its spans and takes what arrives.
  void send_gradients(const Shared& shared, const std::vector<std::pair<int64_t, Span>>& to_each,
                      const Arriving& arriving);
  // Sums what has arrived: into the gradients where they are, or where they belong.
  void sum_arrived(const Shared& shared, const Arriving& arriving, Into into);
  void sum_terms(const Param& param, const Span& elements, const Arriving& arriving, int64_t at, Into into);
  TensorView gradient_of(const Param& param, const Span& elements) const;

  // Weights of a range that blocks share the memory of, or those that stay: from their owners to all.
  enum class Which : uint8_t { kStaying, kShared };
  std::unique_ptr<PendingCall> begin_gather(const Shared& shared, const Span& range, Which which);
  // Pieces of the row from and to members.
  struct Passing {
    int64_t piece, from, to;
  };
  std::unique_ptr<PendingCall> begin_passing(const Shared& shared, const Span& range, Which which,
                                             const std::vector<Passing>& passing);
  void list_weights(const ShardRow& row, const Span& range, Which which, int to, std::vector<Part>& parts);
  void make_copies(const ShardRow& row, const Span& range);
  void begin_coming(int64_t layer);
  void end_coming();

  Queue& queue_;
  Aside aside_;
  Communicator& comm_;
  const Plan& plan_;
  std::vector<Param>& params_;
  std::unique_ptr<Communicator> replicas_;  // where experts are spread
  // Of tensors, on a GPU; on the CPU they travel over the two above.
  std::unique_ptr<Communicator> tensors_, replica_tensors_;
  TensorView there_;  // F32: a round's parts from all other ranks
  // Weights of a block on their way.
  int64_t coming_layer_ = -1;
  std::vector<std::unique_ptr<PendingCall>> coming_;
  Mark coming_mark_;
  std::vector<Mark> arrived_;            // by layer + 1: behind the last gather of weights that stay
  Mark scattered_[kMostGradientPlaces];  // behind the last exchange from each place
  std::vector<bool> owned_begun_;        // by layer: the owners' gradients hold something
  std::vector<bool> summed_;             // by layer: its gradients are sums over ranks already
  bool outside_summed_[2] = {};          // by Outside: likewise
  int64_t placed_[kCopyPlaces];          // layers whose weights are there; -1: none
};

}  // namespace fp4t

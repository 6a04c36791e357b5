// What ranks exchange of the parameters at the edges of an update: gradients on their way to the owner of
// each element, weights on their way back (engine/comm/README.md). In rounds over buffers that the plan has
// priced.
#pragma once

#include <memory>
#include <vector>

#include "engine/comm/comm.h"
#include "engine/model/params.h"
#include "engine/plan/layout.h"

namespace fp4t {

class ShardExchange {
 public:
  // Takes its buffers from `arena`; nothing on one rank, where every call is the identity.
  ShardExchange(Queue& queue, Communicator& comm, const Plan& plan, std::vector<Param>& params, Arena& arena);

  Communicator& comm() { return comm_; }
  // The ranks that hold the same experts as this one; all ranks where experts are not spread.
  Communicator& replicas() { return replicas_ ? *replicas_ : comm_; }

  // Every gradient's owned elements become the sum over the ranks that hold them, added in FP32 in rank
  // order. What a rank does not own is undefined afterwards.
  void sum_gradients();

  // Every weight that products read (the copy, or the master where there is none) gets the owners' elements.
  void gather_weights();

 private:
  // A row of parameters and the ranks that hold it alike.
  struct Shared {
    Communicator& comm;
    const ShardRow& row;
  };
  std::vector<Shared> all_shared();
  void sum_gradients(const Shared& shared);
  void gather_weights(const Shared& shared);

  // Views of a parameter that has all that is held of it.
  using ViewOf = TensorView (*)(const Param&);
  // Copies between the parameters' elements in a range of the row and consecutive bytes; returns their
  // number.
  enum class Way : uint8_t { kPack, kUnpack };
  int64_t copy(const ShardRow& row, const Span& range, ViewOf view_of, char* bytes, Way way);
  int64_t weight_bytes(const ShardRow& row, const Span& range) const;

  Queue& queue_;
  Communicator& comm_;
  const Plan& plan_;
  std::vector<Param>& params_;
  std::unique_ptr<Communicator> replicas_;  // where experts are spread
  TensorView here_, there_;                 // F32 [exchange_elements()]
};

}  // namespace fp4t

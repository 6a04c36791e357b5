// What ranks exchange of the parameters at the edges of an update: gradients on their way to the owner of
// each element, weights on their way back (engine/comm/README.md). In rounds over buffers that the plan has
// priced.
#pragma once

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

  // Every gradient's owned elements become the sum over ranks, added in FP32 in rank order. What a rank does
  // not own is undefined afterwards.
  void sum_gradients();

  // Every weight that products read (the copy, or the master where there is none) gets the owners' elements.
  void gather_weights();

 private:
  // The part of a rank's piece that a round moves; empty when the piece is over.
  Span part_in_round(int64_t rank, int64_t round) const;
  int64_t num_rounds() const;
  int64_t weight_bytes(const Span& row) const;
  enum class Way : uint8_t { kPack, kUnpack };
  // Copies between the parameters' elements in a range of the row and consecutive bytes; returns their
  // number.
  int64_t copy_gradients(const Span& row, char* bytes, Way way);
  int64_t copy_weights(const Span& row, char* bytes, Way way);

  Queue& queue_;
  Communicator& comm_;
  const Plan& plan_;
  std::vector<Param>& params_;
  int64_t round_elements_;   // of one rank's piece
  TensorView here_, there_;  // F32 [ranks * round_elements]
};

}  // namespace fp4t

// Tokens on their way to experts of other ranks and back (DESIGN.md section 6; engine/comm/README.md). One
// object a model. All ranks of the group make the same calls, also those that have no tokens of their own.
#pragma once

#include <memory>
#include <vector>

#include "engine/comm/comm.h"
#include "engine/model/trip.h"
#include "engine/plan/layout.h"
#include "kernels/base/queue.h"

namespace fp4t {

class ExpertExchange {
 public:
  ExpertExchange(Queue& queue, Communicator& comm, const Plan& plan);

  bool spreads() const { return group_ != nullptr; }
  int64_t group_rank() const { return group_->rank(); }

  // A trip of a call's tokens, and the smallest sample id of all ranks, which keys what the experts draw.
  struct Begun {
    Trip trip;
    uint32_t sample_id;
  };
  // `choices` I32 [T, k], without rows on a rank that has no tokens.
  Begun begin(const TensorView& choices, uint32_t sample_id);

  // The rows of `field` [T, w] of the tokens of a round, to where they go; `sent` [S, w] holds them
  // meanwhile. `out` [G, w] begins with the guests' rows then. Of any type, as many bytes a row in all three.
  void bring(const Trip& trip, const Trip::Round& round, const TensorView& field, const TensorView& sent,
             const TensorView& out);
  // The guests' rows back: `returned` [S, w] has them in the order of trip.sent.
  void bring_back(const Trip::Round& round, const TensorView& guests, const TensorView& returned);

 private:
  Queue& queue_;
  TripSizes sizes_;
  int64_t round_rows_;
  std::unique_ptr<Communicator> group_;  // ranks that share the experts; null where each has all
};

}  // namespace fp4t

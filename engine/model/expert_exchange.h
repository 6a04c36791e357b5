// Tokens on their way to experts of other ranks and back (DESIGN.md section 6; engine/comm/README.md). One
// object a model. All ranks of the group make the same calls, also those that have no tokens of their own.
#pragma once

#include <memory>
#include <vector>

#include "engine/comm/comm.h"
#include "engine/model/aside.h"
#include "engine/model/trip.h"
#include "engine/plan/dims.h"
#include "kernels/base/queue.h"

namespace fp4t {

class ExpertExchange {
 public:
  ExpertExchange(Queue& queue, Communicator& comm, const Plan& plan);

  bool spreads() const { return group_ != nullptr; }
  int64_t group_rank() const { return group_->rank(); }
  // Throws what has gone wrong with exchanges that are on their way.
  void check() {
    if (tensors_) tensors_->check();
  }

  // A trip of a call's tokens, what they chose, and the smallest sample id of all ranks, which keys what the
  // experts draw.
  struct Begun {
    Trip trip;
    std::vector<int32_t> choices;  // [T, k]
    uint32_t sample_id = 0;
  };
  // `choices` I32 [T, k], without rows on a rank that has no tokens. The host waits for them: where tokens go
  // is decided there.
  Begun begin(const TensorView& choices, uint32_t sample_id);
  // What the guests of a round chose, [G, k].
  std::vector<int32_t> bring_choices(const Begun& begun, const Trip::Round& round);

  // The rows of `field` [T, w] of the tokens of a round, to where they go; `tokens` I32 [S] is trip.sent,
  // `sent` [S, w] holds the rows meanwhile. `out` [G, w] begins with the guests' rows then. Of any type, as
  // many bytes a row in all three.
  void bring(const Trip::Round& round, const TensorView& field, const TensorView& tokens,
             const TensorView& sent, const TensorView& out);
  // The guests' rows back: `returned` [S, w] has them in the order of trip.sent.
  void bring_back(const Trip::Round& round, const TensorView& guests, const TensorView& returned);

 private:
  void exchange(const void* in, const std::vector<int64_t>& send, void* out,
                const std::vector<int64_t>& receive);

  Queue& queue_;
  Aside aside_;
  TripSizes sizes_;
  int64_t round_rows_;
  std::unique_ptr<Communicator> group_;    // ranks that share the experts; null where each has all
  std::unique_ptr<Communicator> tensors_;  // of the same, on a GPU; on the CPU tensors travel over `group_`
};

}  // namespace fp4t

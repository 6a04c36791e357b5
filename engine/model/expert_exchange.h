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
#include "kernels/base/threads.h"

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
    int64_t chunks = 1;
    std::vector<int32_t> choices;  // [T, k]
    uint32_t sample_id = 0;
  };
  // `choices` I32 [T, k], without rows on a rank that has no tokens. The host waits for them: where tokens go
  // is decided there.
  Begun begin(const TensorView& choices, uint32_t sample_id);
  // What the guests of a round chose, and where that puts their rows; from then on the round knows which sums
  // go back with which chunk. `absent`: the row of a choice that is elsewhere.
  GuestRows bring_choices(const Begun& begun, Trip::Round& round, int32_t absent);

  // What goes to experts: rows of `field` [T, w]; `sent` [S, w] holds those of a round meanwhile, and `out`
  // [G, w] begins with the guests' then, in the order in which they came. Of any type, as many bytes a row in
  // all three.
  struct Field {
    TensorView field, sent, out;
  };
  // Begins to bring a round's tokens to where they go, chunk by chunk; `tokens` I32 [S] is trip.sent. The
  // buffers are the exchange's until finish().
  void bring(const Trip::Round& round, const std::vector<Field>& fields, const TensorView& tokens);
  // What came with a chunk, and with those before it, is there.
  void await(int64_t chunk);
  // What goes back: of the guests' rows those that leave with a chunk; `returned` [S, w] has what comes in
  // the order of trip.place_of.
  struct Sums {
    TensorView guests, returned;
  };
  void bring_back(const Trip::Round& round, int64_t chunk, const std::vector<Sums>& sums);
  // All of it has come.
  void finish();

 private:
  // How many tokens come in every round and chunk.
  void hear_of_rounds(const std::vector<TripCounts>& matrix, std::vector<Trip::Round>& rounds);
  // One exchange of what a chunk has of all fields: `from` and `to` begin with its first rows.
  struct Rows {
    char *from, *to;
    int64_t bytes;  // of a row
  };
  void exchange(const Trip::Flow& flow, const std::vector<Rows>& rows);

  Queue& queue_;
  Aside aside_;
  const Plan& plan_;
  ModelDims dims_;
  TripSizes sizes_;
  ThreadPool threads_;
  // Begun and not waited for, in order, and marks behind them; the first are a round's chunks on their way
  // there.
  std::vector<std::unique_ptr<PendingCall>> calls_;
  std::vector<Mark> marks_;
  size_t awaited_ = 0;
  std::unique_ptr<Communicator> group_;    // ranks that share the experts; null where each has all
  std::unique_ptr<Communicator> tensors_;  // of the same, on a GPU; on the CPU tensors travel over `group_`
};

}  // namespace fp4t

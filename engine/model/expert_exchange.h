// Tokens on their way to experts of other ranks and back (DESIGN.md section 6; engine/comm/README.md). One
// object a model. All ranks of the group make the same calls, also those that have no tokens of their own.
#pragma once

#include <memory>
#include <vector>

#include "engine/comm/comm.h"
#include "engine/model/aside.h"
#include "engine/model/trip.h"
#include "engine/plan/dims.h"
#include "engine/plan/scratch_layout.h"
#include "engine/plan/step_layout.h"
#include "kernels/base/queue.h"

namespace fp4t {

class ExpertExchange {
 public:
  ExpertExchange(Queue& queue, Communicator& comm, const Plan& plan);

  bool spreads() const { return group_ != nullptr; }
  // Throws what has gone wrong with exchanges that are on their way.
  void check() {
    if (tensors_) tensors_->check();
  }

  // A trip of a call's tokens, and the smallest sample id of all ranks, which keys what the experts draw.
  struct Begun {
    Trip trip;
    uint32_t sample_id = 0;
  };
  // Lists where the tokens of acts.experts go, in acts.asked, sent, rank_of and place_of; on a rank that has
  // no tokens they have no rows. The host waits for the counts, which all ranks tell each other.
  Begun begin(const LayerActs& acts, const TripScratch& t, uint32_t sample_id);

  // What goes to experts: rows of `field` [T, w]; `sent` [S, w] holds those of a round meanwhile, and `out`
  // [G, w] begins with the guests' then, in the order in which they came. Of any type, as many bytes a row in
  // all three.
  struct Field {
    TensorView field, sent, out;
  };
  // Begins to bring a round's tokens to where they go, chunk by chunk; `tokens` I32 [S] is acts.sent.
  // `choices`: what they chose, all of it with the first chunk, by `asked`, which is acts.asked. The buffers
  // are the exchange's until finish().
  void bring(const Trip::Round& round, const std::vector<Field>& fields, const TensorView& tokens,
             const Field& choices = {}, const TensorView& asked = {});
  // What the round's guests chose has come: where that puts their rows, in acts.guest_experts, guest_row_of,
  // guest_of, guest_choice, expert_offsets and t.leaving. `absent`: the row of a choice that is elsewhere.
  void place(const Trip& trip, const Trip::Round& round, const LayerActs& acts, const TripScratch& t,
             int64_t absent);
  // What came with a chunk, and with those before it, is there.
  void await(int64_t chunk);
  // What goes back: of the guests' rows those that leave with a chunk; `returned` [S, w] has what comes in
  // the order of acts.place_of.
  struct Sums {
    TensorView guests, returned;
  };
  void bring_back(const Trip::Round& round, int64_t chunk, const std::vector<Sums>& sums);
  // All of it has come.
  void finish();

 private:
  // The counts of every rank, and the smallest of their sample ids.
  std::vector<int32_t> tell_counts(const std::vector<int32_t>& mine, uint32_t& sample_id);
  DispatchTokens listing(const LayerActs& acts, const TripScratch& t, const ExpertSplit& split) const;
  std::vector<int32_t> list_visits(const DispatchTokens& op);
  // The rounds of a trip that needs several: which tokens one takes depends on the rows of each.
  void list_rounds(DispatchTokens op, const TripCounts& all, int64_t count, const TripScratch& t, Trip& trip);
  // One exchange: of every field as many rows as the flow says, from and to its first ones on.
  struct Rows {
    const Trip::Flow& flow;
    char *from, *to;
    int64_t bytes;  // of a row
  };
  void exchange(const std::vector<Rows>& rows);
  // Rows of a field in the order in which they go; returns them and where they arrive.
  Rows gather(const Field& f, const TensorView& tokens, const Trip::Flow& flow);

  Queue& queue_;
  Aside aside_;
  const Plan& plan_;
  ModelDims dims_;
  ExpertSplit split_{};
  // Begun and not waited for, in order, and marks behind them; the first are a round's chunks on their way
  // there.
  std::vector<std::unique_ptr<PendingCall>> calls_;
  std::vector<Mark> marks_;
  size_t awaited_ = 0;
  std::unique_ptr<Communicator> group_;    // ranks that share the experts; null where each has all
  std::unique_ptr<Communicator> tensors_;  // of the same, on a GPU; on the CPU tensors travel over `group_`
};

}  // namespace fp4t

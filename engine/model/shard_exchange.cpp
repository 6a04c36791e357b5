#include "engine/model/shard_exchange.h"

#include <algorithm>

#include "engine/model/call.h"
#include "engine/plan/wire.h"
#include "kernels/base/numeric.h"
#include "kernels/ops/run.h"

namespace fp4t {

// The rounds in which ranks exchange a range of a segment: of every member's piece in it, so many elements
// each.
class ShardExchange::Rounds {
 public:
  Rounds(const Plan& plan, const ShardRow& row, size_t segment, const Span& range)
      : row_(row), segment_(segment), range_(range), elements_(round_elements(plan, row)) {
    int64_t most = 0;
    for (int64_t m = 0; m < row.members(); ++m) most = std::max(most, piece(m).count());
    count_ = most == 0 ? 0 : ceil_div(most, elements_);
  }
  int64_t count() const { return count_; }
  // Empty when the member's piece is over.
  Span part(int64_t member, int64_t round) const {
    const Span p = piece(member);
    const int64_t begin = std::min(p.begin + round * elements_, p.end);
    return {begin, std::min(begin + elements_, p.end)};
  }

  Span piece(int64_t member) const {
    const Span p = row_.piece(segment_, member);
    const int64_t begin = std::clamp(p.begin, range_.begin, range_.end);
    return {begin, std::clamp(p.end, begin, range_.end)};
  }

 private:
  const ShardRow& row_;
  size_t segment_;
  Span range_;
  int64_t elements_, count_ = 0;
};

ShardExchange::ShardExchange(Queue& queue, Communicator& comm, const Plan& plan, std::vector<Param>& params,
                             Arena& arena)
    : queue_(queue), aside_(queue, plan.shards.is_sharded()), comm_(comm), plan_(plan), params_(params) {
  FP4T_CHECK_EQ(static_cast<int64_t>(comm.size()), plan.axes.ranks(),
                "ranks of the communicator, of the plan");
  std::fill(std::begin(placed_), std::end(placed_), -1);
  summed_ = owned_begun_ = std::vector<bool>(static_cast<size_t>(plan.model.layers), false);
  if (!plan.shards.is_sharded()) return;
  if (plan.shards.spreads_experts()) {
    replicas_ = comm.split(static_cast<int>(plan.axes.expert_index(comm.rank())), comm.rank());
  }
  if (queue.backend() == Backend::kCuda) {
    tensors_ = make_on_device(comm, aside_.queue(), transport_of(plan));
    if (replicas_) replica_tensors_ = make_on_device(*replicas_, aside_.queue(), transport_of(plan));
  }
  arrived_.resize(static_cast<size_t>(plan.model.layers) + 1);
  there_ = take_exchange(plan, ArenaTake{arena});
}

void ShardExchange::check() {
  for (Communicator* c : {tensors_.get(), replica_tensors_.get()}) {
    if (c) c->check();
  }
}

std::vector<ShardExchange::Shared> ShardExchange::all_shared() {
  std::vector<Shared> list;
  if (!plan_.shards.is_sharded()) return list;
  list.push_back({tensors_ ? *tensors_ : comm_, plan_.shards.everywhere()});
  if (replicas_) {
    list.push_back({replica_tensors_ ? *replica_tensors_ : *replicas_,
                    plan_.shards.experts(plan_.axes.expert_index(comm_.rank()))});
  }
  return list;
}

std::vector<Span> ShardExchange::ranges_of(const ShardRow& row, int64_t layer) const {
  return fp4t::ranges_of(plan_, row, layer);
}

// Gradients ------------------------------------------------------------------------------------------

void ShardExchange::begin_gradients() {
  owned_begun_.assign(owned_begun_.size(), false);
  summed_.assign(summed_.size(), false);
  outside_summed_[0] = outside_summed_[1] = false;
}

void ShardExchange::sum_block(int64_t layer) {
  aside_.begin();
  for (const Shared& shared : all_shared()) {
    for (const Span& range : ranges_of(shared.row, layer)) sum(shared, range, Into::kGradients);
  }
  summed_[static_cast<size_t>(layer)] = true;
}

void ShardExchange::sum_outside(Outside part) {
  const auto index = static_cast<size_t>(part);
  aside_.begin();
  for (const Shared& shared : all_shared()) sum(shared, ranges_of(shared.row, -1)[index], Into::kGradients);
  outside_summed_[index] = true;
}

void ShardExchange::claim_gradients(int64_t layer) {
  queue_.wait_for(scattered_[layer % gradient_places(plan_)]);
}

void ShardExchange::scatter_gradients(int64_t layer) {
  aside_.begin();
  for (const Shared& shared : all_shared()) {
    for (const Span& range : ranges_of(shared.row, layer)) sum(shared, range, Into::kOwned);
  }
  scattered_[layer % gradient_places(plan_)] = aside_.mark();
  owned_begun_[static_cast<size_t>(layer)] = true;
}

void ShardExchange::sum_gradients() {
  const bool any_outside = outside_summed_[0] || outside_summed_[1];
  const bool blocks_are_done = scatters_gradients(plan_) || any_outside ||
                               std::find(summed_.begin(), summed_.end(), true) != summed_.end();
  if (!blocks_are_done) {
    aside_.begin();
    for (const Shared& shared : all_shared()) sum(shared, {0, shared.row.length()}, Into::kGradients);
  } else {
    for (const Outside part : {Outside::kBefore, Outside::kAfter}) {
      if (!outside_summed_[static_cast<size_t>(part)]) sum_outside(part);
    }
  }
  aside_.begin();
  for (const Param& p : params_) {
    if (p.owned_gradient.empty() || owned_begun_[static_cast<size_t>(p.info.layer)]) continue;
    aside_.queue().fill_bytes(p.owned_gradient.data, 0, p.owned_gradient.bytes());
  }
  aside_.end();
}

void ShardExchange::sum(const Shared& shared, const Span& range, Into into) {
  shared.row.for_segments(range, [&](size_t segment, const Span& inside) {
    const Rounds rounds(plan_, shared.row, segment, inside);
    for (int64_t round = 0; round < rounds.count(); ++round) sum_round(shared, rounds, round, into);
  });
}

// All at once, or where there are domains: a rank first gets, of its own domain, what belongs to the ranks of
// its place in all domains; their sums, which take the place of its own gradients, go to their owners then.
void ShardExchange::sum_round(const Shared& shared, const Rounds& rounds, int64_t round, Into into) {
  const RowDomains d = row_domains(plan_, shared.row);
  const int64_t own = shared.comm.rank(), domain = d.domain(own), place = d.place(own);
  std::vector<std::pair<int64_t, Span>> to_each;
  Arriving inside{{}, place, {}};
  for (int64_t p = 0; p < d.size; ++p) {
    inside.from.push_back(d.member(domain, p));
    for (int64_t other = 0; other < d.count; ++other) {
      to_each.emplace_back(d.member(domain, p), rounds.part(d.member(other, p), round));
    }
  }
  for (int64_t other = 0; other < d.count; ++other) {
    inside.mine.push_back(rounds.part(d.member(other, place), round));
  }
  send_gradients(shared, to_each, inside);
  if (d.count == 1) return sum_arrived(shared, inside, into);
  sum_arrived(shared, inside, Into::kGradients);
  to_each.clear();
  Arriving across{{}, domain, {rounds.part(own, round)}};
  for (int64_t other = 0; other < d.count; ++other) {
    across.from.push_back(d.member(other, place));
    to_each.emplace_back(across.from.back(), rounds.part(across.from.back(), round));
  }
  send_gradients(shared, to_each, across);
  sum_arrived(shared, across, into);
}

int64_t ShardExchange::Arriving::elements() const {
  int64_t n = 0;
  for (const Span& span : mine) n += span.count();
  return n;
}

// From where they are to `there_`.
void ShardExchange::send_gradients(const Shared& shared, const std::vector<std::pair<int64_t, Span>>& to_each,
                                   const Arriving& arriving) {
  const int own = shared.comm.rank();
  std::vector<Part> send, receive;
  for (const auto& [member, span] : to_each) {
    if (member == own) continue;
    const int to = static_cast<int>(member);
    shared.row.for_parts(span, [&](size_t p, const Span& elements) {
      const TensorView part = gradient_of(params_[p], elements);
      send.push_back({to, part.data, part.bytes()});
    });
  }
  char* next = static_cast<char*>(there_.data);
  for (const int64_t member : arriving.from) {
    if (member == own) continue;
    for (const Span& span : arriving.mine) {
      shared.row.for_parts(span, [&](size_t p, const Span& elements) {
        const int64_t bytes = gradient_of(params_[p], elements).bytes();
        receive.push_back({static_cast<int>(member), next, bytes});
        next += bytes;
      });
    }
  }
  shared.comm.exchange(send, receive);
}

void ShardExchange::sum_arrived(const Shared& shared, const Arriving& arriving, Into into) {
  int64_t at = 0;
  for (const Span& span : arriving.mine) {
    shared.row.for_parts(span, [&](size_t p, const Span& elements) {
      sum_terms(params_[p], elements, arriving, at, into);
      at += elements.count();
    });
  }
}

TensorView ShardExchange::gradient_of(const Param& param, const Span& elements) const {
  const TensorView part = elements_of(param, param.gradient, elements);
  FP4T_CHECK(part.dtype == DType::kF32, "gradient of ", param.info.name);
  return part;
}

// In the order of the terms, the last straight to where the sum belongs. Others' are `elements` from `at` on
// in what each has sent; partial sums take the places of terms that have been added.
void ShardExchange::sum_terms(const Param& param, const Span& elements, const Arriving& arriving, int64_t at,
                              Into into) {
  const auto terms = static_cast<int64_t>(arriving.from.size());
  const TensorView mine = gradient_of(param, elements);
  const auto term = [&](int64_t i) {
    if (i == arriving.own) return mine;
    const int64_t sender = i < arriving.own ? i : i - 1;
    return TensorView{static_cast<float*>(there_.data) + sender * arriving.elements() + at, DType::kF32,
                      mine.shape};
  };
  TensorView to = mine;
  bool adds = false;
  if (into == Into::kOwned) {
    to = owned_gradient(param, plan_.shards.owned(param.info, comm_.rank()), elements);
    adds = owned_begun_[static_cast<size_t>(param.info.layer)];
  }
  TensorView sum = term(0);
  for (int64_t i = 1; i < terms; ++i) {
    const TensorView next = term(i);
    const bool ends = i == terms - 1 && !adds;
    const TensorView out = ends ? to : sum.data == mine.data ? next : sum;
    run(aside_.queue(), LinearCombination{1.0f, sum, 1.0f, next, out});
    sum = out;
  }
  if (adds) {
    run(aside_.queue(), LinearCombination{1.0f, to, 1.0f, sum, to});
  } else if (sum.data != to.data) {  // one rank
    aside_.queue().copy(to.data, sum.data, to.bytes());
  }
}

// Weights --------------------------------------------------------------------------------------------

void ShardExchange::gather_weights() {
  end_coming();
  std::fill(std::begin(placed_), std::end(placed_), -1);
  if (!tensors_) {
    for (const Shared& shared : all_shared()) {
      begin_gather(shared, {0, shared.row.length()}, Which::kStaying)->wait();
    }
    return;
  }
  aside_.begin();
  for (int64_t layer = -1; layer < plan_.model.layers; ++layer) {
    for (const Shared& shared : all_shared()) {
      for (const Span& range : ranges_of(shared.row, layer)) {
        begin_gather(shared, range, Which::kStaying)->wait();
      }
    }
    arrived_[static_cast<size_t>(layer + 1)] = aside_.mark();
  }
}

void ShardExchange::await_weights(int64_t layer) {
  if (!tensors_) return;
  Mark& mark = arrived_[static_cast<size_t>(layer + 1)];
  queue_.wait_for(mark);
  mark = Mark();
}

void ShardExchange::await_all_weights() {
  for (int64_t layer = -1; layer < plan_.model.layers; ++layer) await_weights(layer);
}

void ShardExchange::use_weights(int64_t layer, int64_t next) {
  await_weights(layer);
  if (!gathers_weights(plan_)) return;
  end_coming();
  if (placed_[layer % kCopyPlaces] != layer) {
    begin_coming(layer);
    end_coming();
  }
  if (next >= 0 && placed_[next % kCopyPlaces] != next) begin_coming(next);
}

// To their place, which is not that of the block before.
void ShardExchange::begin_coming(int64_t layer) {
  aside_.begin();
  for (const Shared& shared : all_shared()) {
    for (const Span& range : ranges_of(shared.row, layer)) {
      make_copies(shared.row, range);
      coming_.push_back(begin_gather(shared, range, Which::kShared));
    }
  }
  coming_mark_ = aside_.mark();
  coming_layer_ = layer;
}

void ShardExchange::end_coming() {
  if (coming_layer_ < 0) return;
  for (const auto& call : coming_) call->wait();
  queue_.wait_for(coming_mark_);
  placed_[coming_layer_ % kCopyPlaces] = coming_layer_;
  coming_.clear();
  coming_layer_ = -1;
}

// From each owner to all; where there are domains, to the rank of its place in each of the others, and from
// there to the domain.
std::unique_ptr<PendingCall> ShardExchange::begin_gather(const Shared& shared, const Span& range,
                                                         Which which) {
  const RowDomains d = row_domains(plan_, shared.row);
  const int64_t own = shared.comm.rank(), domain = d.domain(own), place = d.place(own);
  std::vector<Passing> across, inside;
  for (int64_t other = 0; other < d.count; ++other) {
    if (other == domain) continue;
    across.push_back({own, own, d.member(other, place)});
    across.push_back({d.member(other, place), d.member(other, place), own});
  }
  for (int64_t p = 0; p < d.size; ++p) {
    if (p == place) continue;
    for (int64_t other = 0; other < d.count; ++other) {
      inside.push_back({d.member(other, place), own, d.member(domain, p)});
      inside.push_back({d.member(other, p), d.member(domain, p), own});
    }
  }
  if (!across.empty()) begin_passing(shared, range, which, across)->wait();
  return begin_passing(shared, range, which, inside);
}

std::unique_ptr<PendingCall> ShardExchange::begin_passing(const Shared& shared, const Span& range,
                                                          Which which, const std::vector<Passing>& passing) {
  std::vector<Part> send, receive;
  shared.row.for_segments(range, [&](size_t segment, const Span& inside) {
    const Rounds whole(plan_, shared.row, segment, inside);
    for (const Passing& p : passing) {
      const bool sends = p.from == shared.comm.rank();
      list_weights(shared.row, whole.piece(p.piece), which, static_cast<int>(sends ? p.to : p.from),
                   sends ? send : receive);
    }
  });
  return shared.comm.begin_exchange(send, receive);
}

void ShardExchange::list_weights(const ShardRow& row, const Span& range, Which which, int rank,
                                 std::vector<Part>& parts) {
  row.for_parts(range, [&](size_t p, const Span& elements) {
    const Param& param = params_[p];
    if (param.shares_copy != (which == Which::kShared)) return;
    const TensorView part = elements_of(param, operand_of(param), elements);
    parts.push_back({rank, part.data, part.bytes()});
  });
}

// Of what this rank owns of the range, from its masters.
void ShardExchange::make_copies(const ShardRow& row, const Span& range) {
  row.for_parts(range, [&](size_t p, const Span& elements) {
    const Param& param = params_[p];
    const Span owned = plan_.shards.owned(param.info, comm_.rank());
    const Span mine = {std::max(elements.begin, owned.begin), std::min(elements.end, owned.end)};
    if (!param.shares_copy || mine.count() <= 0) return;
    const TensorView master = master_of(param, owned).rows(mine.begin - owned.begin, mine.count());
    const TensorView to = elements_of(param, operand_of(param), mine);
    if (master.dtype == to.dtype) {
      aside_.queue().copy(to.data, master.data, to.bytes());
    } else {
      run(aside_.queue(), Cast{.x = master, .out = to});
    }
  });
}

}  // namespace fp4t

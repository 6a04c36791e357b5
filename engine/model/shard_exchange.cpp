#include "engine/model/shard_exchange.h"

#include <algorithm>

#include "engine/model/call.h"
#include "kernels/base/numeric.h"
#include "kernels/ops/run.h"

namespace fp4t {

// The rounds in which ranks exchange a range of a row: of every member's piece in it, so many elements each.
class ShardExchange::Rounds {
 public:
  Rounds(const ShardRow& row, const Span& range) : row_(row), range_(range), elements_(round_elements(row)) {
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

 private:
  Span piece(int64_t member) const {
    const Span p = row_.piece(member);
    const int64_t begin = std::clamp(p.begin, range_.begin, range_.end);
    return {begin, std::clamp(p.end, begin, range_.end)};
  }

  const ShardRow& row_;
  Span range_;
  int64_t elements_, count_ = 0;
};

ShardExchange::ShardExchange(Queue& queue, Communicator& comm, const Plan& plan, std::vector<Param>& params,
                             Arena& arena)
    : queue_(queue), comm_(comm), plan_(plan), params_(params) {
  FP4T_CHECK_EQ(static_cast<int64_t>(comm.size()), plan.axes.ranks(),
                "ranks of the communicator, of the plan");
  std::fill(std::begin(placed_), std::end(placed_), -1);
  owned_begun_.assign(static_cast<size_t>(plan.model.layers), false);
  if (!plan.shards.is_sharded()) return;
  FP4T_CHECK(queue.backend() == Backend::kCpu, "ranks exchange host buffers");
  if (plan.shards.spreads_experts()) {
    replicas_ = comm.split(static_cast<int>(plan.axes.expert_index(comm.rank())), comm.rank());
  }
  blocks_ = take_exchange(plan, ArenaTake{arena});
}

std::vector<ShardExchange::Shared> ShardExchange::all_shared() {
  std::vector<Shared> list;
  if (!plan_.shards.is_sharded()) return list;
  list.push_back({comm_, plan_.shards.everywhere()});
  if (replicas_) list.push_back({*replicas_, plan_.shards.experts(plan_.axes.expert_index(comm_.rank()))});
  return list;
}

std::vector<Span> ShardExchange::ranges_of(const ShardRow& row, int64_t layer) const {
  const auto first = std::find_if(params_.begin(), params_.end(), [&](const Param& p) {
    return layer < 0 ? p.info.layer >= 0 : p.info.layer == layer;
  });
  const auto end = std::find_if(first, params_.end(), [&](const Param& p) {
    return layer < 0 ? p.info.layer < 0 : p.info.layer != layer;
  });
  const auto begin_index = static_cast<size_t>(first - params_.begin()),
             end_index = static_cast<size_t>(end - params_.begin());
  if (layer >= 0) return {row.range(begin_index, end_index)};
  return {row.range(0, begin_index), row.range(end_index, params_.size())};
}

// Gradients ------------------------------------------------------------------------------------------

void ShardExchange::begin_gradients() { owned_begun_.assign(owned_begun_.size(), false); }

void ShardExchange::scatter_gradients(int64_t layer) {
  for (const Shared& shared : all_shared()) {
    for (const Span& range : ranges_of(shared.row, layer)) sum(shared, range, Into::kOwned);
  }
  owned_begun_[static_cast<size_t>(layer)] = true;
}

void ShardExchange::sum_gradients() {
  for (const Shared& shared : all_shared()) {
    if (!scatters_gradients(plan_)) {
      sum(shared, {0, shared.row.length()}, Into::kGradients);
    } else {
      for (const Span& range : ranges_of(shared.row, -1)) sum(shared, range, Into::kGradients);
    }
  }
  for (const Param& p : params_) {
    if (p.owned_gradient.empty() || owned_begun_[static_cast<size_t>(p.info.layer)]) continue;
    queue_.fill_bytes(p.owned_gradient.data, 0, p.owned_gradient.bytes());
  }
}

void ShardExchange::sum(const Shared& shared, const Span& range, Into into) {
  const ShardRow& row = shared.row;
  const int64_t ranks = shared.comm.size();
  const Rounds rounds(row, range);
  std::vector<int64_t> send(static_cast<size_t>(ranks)), receive(static_cast<size_t>(ranks));
  for (int64_t round = 0; round < rounds.count(); ++round) {
    const Span mine = rounds.part(shared.comm.rank(), round);
    char* next = static_cast<char*>(blocks_.here.data);
    for (int64_t r = 0; r < ranks; ++r) {
      const auto i = static_cast<size_t>(r);
      const Span part = rounds.part(r, round);
      copy_gradients(row, part, next, true);
      send[i] = part.count() * dtype_bytes(DType::kF32);
      next += send[i];
      receive[i] = mine.count() * dtype_bytes(DType::kF32);
    }
    shared.comm.all_to_all(blocks_.here.data, send, blocks_.there.data, receive);
    if (mine.count() == 0) continue;
    const TensorView all = {blocks_.there.data, DType::kF32, {ranks, mine.count()}};
    const TensorView sum = all.rows(0, 1);
    for (int64_t r = 1; r < ranks; ++r) {
      run(queue_, LinearCombination{1.0f, sum, 1.0f, all.rows(r, 1), sum});
    }
    if (into == Into::kGradients) {
      copy_gradients(row, mine, static_cast<char*>(sum.data), false);
    } else {
      add_to_owned(row, mine, sum.reshape({mine.count()}));
    }
  }
}

void ShardExchange::copy_gradients(const ShardRow& row, const Span& range, char* bytes, bool pack) {
  row.for_parts(range, [&](size_t p, const Span& elements) {
    const TensorView part = elements_of(params_[p], params_[p].gradient, elements);
    FP4T_CHECK(part.dtype == DType::kF32, "gradient of ", params_[p].info.name);
    if (pack) {
      queue_.copy(bytes, part.data, part.bytes());
    } else {
      queue_.copy(part.data, bytes, part.bytes());
    }
    bytes += part.bytes();
  });
}

void ShardExchange::add_to_owned(const ShardRow& row, const Span& range, const TensorView& sum) {
  int64_t at = 0;
  row.for_parts(range, [&](size_t p, const Span& elements) {
    const Param& param = params_[p];
    const Span owned = plan_.shards.owned(param.info, comm_.rank());
    const TensorView part = sum.rows(at, elements.count()), to = owned_gradient(param, owned, elements);
    if (owned_begun_[static_cast<size_t>(param.info.layer)]) {
      run(queue_, LinearCombination{1.0f, to, 1.0f, part, to});
    } else {
      queue_.copy(to.data, part.data, part.bytes());
    }
    at += elements.count();
  });
}

// Weights --------------------------------------------------------------------------------------------

void ShardExchange::gather_weights() {
  end_ahead();
  std::fill(std::begin(placed_), std::end(placed_), -1);
  for (const Shared& shared : all_shared()) gather(shared, {0, shared.row.length()}, Which::kStaying);
}

void ShardExchange::use_weights(int64_t layer, int64_t next) {
  if (!gathers_weights(plan_)) return;
  end_ahead();
  int64_t& placed = placed_[layer % kCopyPlaces];
  if (placed != layer) {
    for (const Shared& shared : all_shared()) {
      for (const Span& range : ranges_of(shared.row, layer)) gather(shared, range, Which::kShared);
    }
    placed = layer;
  }
  if (next >= 0 && placed_[next % kCopyPlaces] != next) begin_ahead(next);
}

void ShardExchange::begin_ahead(int64_t layer) {
  size_t i = 0;
  for (const Shared& shared : all_shared()) {
    const Rounds rounds(shared.row, ranges_of(shared.row, layer).front());
    const int64_t bytes = largest_bytes(shared, rounds, 0, Which::kShared);
    char* here = static_cast<char*>(blocks_.ahead_here[i].data);
    Ahead ahead;
    if (bytes > 0) {
      pack_weights(shared.row, rounds.part(shared.comm.rank(), 0), Which::kShared, here);
      ahead = {shared.comm.begin_all_gather(here, blocks_.ahead_there[i].data, bytes), bytes};
    }
    ahead_.push_back(std::move(ahead));
    ++i;
  }
  ahead_layer_ = layer;
}

// What came goes to its place, which is not that of the block before.
void ShardExchange::end_ahead() {
  if (ahead_layer_ < 0) return;
  size_t i = 0;
  for (const Shared& shared : all_shared()) {
    const Span range = ranges_of(shared.row, ahead_layer_).front();
    const Rounds rounds(shared.row, range);
    Ahead& ahead = ahead_[i];
    if (ahead.call) {
      ahead.call->wait();
      const char* there = static_cast<const char*>(blocks_.ahead_there[i].data);
      for (int64_t r = 0; r < shared.comm.size(); ++r) {
        unpack_weights(shared.row, rounds.part(r, 0), Which::kShared, there + r * ahead.bytes);
      }
    }
    gather(shared, range, Which::kShared, 1);
    ++i;
  }
  placed_[ahead_layer_ % kCopyPlaces] = ahead_layer_;
  ahead_.clear();
  ahead_layer_ = -1;
}

int64_t ShardExchange::largest_bytes(const Shared& shared, const Rounds& rounds, int64_t round,
                                     Which which) const {
  int64_t bytes = 0;
  for (int64_t r = 0; r < shared.comm.size(); ++r) {
    bytes = std::max(bytes, weight_bytes(shared.row, rounds.part(r, round), which));
  }
  return bytes;
}

void ShardExchange::gather(const Shared& shared, const Span& range, Which which, int64_t first_round) {
  const ShardRow& row = shared.row;
  const int64_t ranks = shared.comm.size();
  const Rounds rounds(row, range);
  for (int64_t round = first_round; round < rounds.count(); ++round) {
    const int64_t bytes = largest_bytes(shared, rounds, round, which);
    if (bytes == 0) continue;
    char* all = static_cast<char*>(blocks_.there.data);
    pack_weights(row, rounds.part(shared.comm.rank(), round), which, static_cast<char*>(blocks_.here.data));
    shared.comm.all_gather(blocks_.here.data, all, bytes);
    for (int64_t r = 0; r < ranks; ++r) {
      const bool has_own = which == Which::kStaying && r == shared.comm.rank();
      if (!has_own) unpack_weights(row, rounds.part(r, round), which, all + r * bytes);
    }
  }
}

int64_t ShardExchange::weight_bytes(const ShardRow& row, const Span& range, Which which) const {
  int64_t bytes = 0;
  row.for_parts(range, [&](size_t p, const Span& elements) {
    if (params_[p].shares_copy != (which == Which::kShared)) return;
    bytes += elements.count() * dtype_bytes(operand_of(params_[p]).dtype);
  });
  return bytes;
}

void ShardExchange::pack_weights(const ShardRow& row, const Span& range, Which which, char* bytes) {
  row.for_parts(range, [&](size_t p, const Span& elements) {
    const Param& param = params_[p];
    if (param.shares_copy != (which == Which::kShared)) return;
    const TensorView to = {bytes, operand_of(param).dtype, {elements.count()}};
    if (which == Which::kStaying) {
      queue_.copy(bytes, elements_of(param, operand_of(param), elements).data, to.bytes());
    } else {
      const Span owned = plan_.shards.owned(param.info, comm_.rank());
      const TensorView master = master_of(param, owned).rows(elements.begin - owned.begin, elements.count());
      if (master.dtype == to.dtype) {
        queue_.copy(bytes, master.data, to.bytes());
      } else {
        run(queue_, Cast{.x = master, .out = to});
      }
    }
    bytes += to.bytes();
  });
}

void ShardExchange::unpack_weights(const ShardRow& row, const Span& range, Which which, const char* bytes) {
  row.for_parts(range, [&](size_t p, const Span& elements) {
    const Param& param = params_[p];
    if (param.shares_copy != (which == Which::kShared)) return;
    const TensorView to = elements_of(param, operand_of(param), elements);
    queue_.copy(to.data, bytes, to.bytes());
    bytes += to.bytes();
  });
}

}  // namespace fp4t

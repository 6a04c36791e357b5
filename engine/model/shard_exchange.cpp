#include "engine/model/shard_exchange.h"

#include <algorithm>

#include "engine/model/call.h"
#include "kernels/base/numeric.h"
#include "kernels/ops/run.h"

namespace fp4t {

namespace {

// The part of a member's piece that a round moves; empty when the piece is over.
Span part_in_round(const ShardRow& row, int64_t member, int64_t round) {
  const Span piece = row.piece(member);
  const int64_t elements = round_elements(row);
  const int64_t begin = std::min(piece.begin + round * elements, piece.end);
  return {begin, std::min(begin + elements, piece.end)};
}

int64_t num_rounds(const ShardRow& row) {
  return row.largest_piece() == 0 ? 0 : ceil_div(row.largest_piece(), round_elements(row));
}

TensorView gradient_of(const Param& p) { return p.gradient; }

}  // namespace

ShardExchange::ShardExchange(Queue& queue, Communicator& comm, const Plan& plan, std::vector<Param>& params,
                             Arena& arena)
    : queue_(queue), comm_(comm), plan_(plan), params_(params) {
  FP4T_CHECK_EQ(static_cast<int64_t>(comm.size()), plan.axes.ranks(),
                "ranks of the communicator, of the plan");
  if (!plan.shards.is_sharded()) return;
  FP4T_CHECK(queue.backend() == Backend::kCpu, "ranks exchange host buffers");
  if (plan.shards.spreads_experts()) {
    replicas_ = comm.split(static_cast<int>(plan.axes.expert_index(comm.rank())), comm.rank());
  }
  const ExchangeBlocks blocks = take_exchange(plan, ArenaTake{arena});
  here_ = blocks.here;
  there_ = blocks.there;
}

std::vector<ShardExchange::Shared> ShardExchange::all_shared() {
  std::vector<Shared> list;
  if (!plan_.shards.is_sharded()) return list;
  list.push_back({comm_, plan_.shards.everywhere()});
  if (replicas_) list.push_back({*replicas_, plan_.shards.experts(plan_.axes.expert_index(comm_.rank()))});
  return list;
}

int64_t ShardExchange::copy(const ShardRow& row, const Span& range, ViewOf view_of, char* bytes, Way way) {
  int64_t at = 0;
  row.for_parts(range, [&](size_t p, const Span& elements) {
    const TensorView part = elements_of(params_[p], view_of(params_[p]), elements);
    if (way == Way::kPack) queue_.copy(bytes + at, part.data, part.bytes());
    if (way == Way::kUnpack) queue_.copy(part.data, bytes + at, part.bytes());
    at += part.bytes();
  });
  return at;
}

int64_t ShardExchange::weight_bytes(const ShardRow& row, const Span& range) const {
  int64_t bytes = 0;
  row.for_parts(range, [&](size_t p, const Span& elements) {
    bytes += elements.count() * dtype_bytes(operand_of(params_[p]).dtype);
  });
  return bytes;
}

void ShardExchange::sum_gradients() {
  for (const Param& p : params_) {
    FP4T_CHECK(!plan_.shards.is_sharded() || p.gradient.dtype == DType::kF32, "gradient of ", p.info.name);
  }
  for (const Shared& shared : all_shared()) sum_gradients(shared);
}

void ShardExchange::sum_gradients(const Shared& shared) {
  const ShardRow& row = shared.row;
  const int64_t ranks = shared.comm.size();
  std::vector<int64_t> send(static_cast<size_t>(ranks)), receive(static_cast<size_t>(ranks));
  for (int64_t round = 0; round < num_rounds(row); ++round) {
    const Span mine = part_in_round(row, shared.comm.rank(), round);
    char* next = static_cast<char*>(here_.data);
    for (int64_t r = 0; r < ranks; ++r) {
      const auto i = static_cast<size_t>(r);
      send[i] = copy(row, part_in_round(row, r, round), gradient_of, next, Way::kPack);
      next += send[i];
      receive[i] = mine.count() * dtype_bytes(DType::kF32);
    }
    shared.comm.all_to_all(here_.data, send, there_.data, receive);
    if (mine.count() == 0) continue;
    const TensorView all = {there_.data, DType::kF32, {ranks, mine.count()}};
    const TensorView sum = all.rows(0, 1);
    for (int64_t r = 1; r < ranks; ++r) {
      run(queue_, LinearCombination{1.0f, sum, 1.0f, all.rows(r, 1), sum});
    }
    copy(row, mine, gradient_of, static_cast<char*>(sum.data), Way::kUnpack);
  }
}

void ShardExchange::gather_weights() {
  for (const Shared& shared : all_shared()) gather_weights(shared);
}

void ShardExchange::gather_weights(const Shared& shared) {
  const ShardRow& row = shared.row;
  const int64_t ranks = shared.comm.size();
  for (int64_t round = 0; round < num_rounds(row); ++round) {
    int64_t bytes = 0;
    for (int64_t r = 0; r < ranks; ++r) {
      bytes = std::max(bytes, weight_bytes(row, part_in_round(row, r, round)));
    }
    char* all = static_cast<char*>(there_.data);
    copy(row, part_in_round(row, shared.comm.rank(), round), operand_of, static_cast<char*>(here_.data),
         Way::kPack);
    shared.comm.all_gather(here_.data, all, bytes);
    for (int64_t r = 0; r < ranks; ++r) {
      if (r != shared.comm.rank()) {
        copy(row, part_in_round(row, r, round), operand_of, all + r * bytes, Way::kUnpack);
      }
    }
  }
}

}  // namespace fp4t

#include "engine/model/shard_exchange.h"

#include <algorithm>

#include "engine/model/call.h"
#include "kernels/base/numeric.h"
#include "kernels/ops/run.h"

namespace fp4t {

ShardExchange::ShardExchange(Queue& queue, Communicator& comm, const Plan& plan, std::vector<Param>& params,
                             Arena& arena)
    : queue_(queue), comm_(comm), plan_(plan), params_(params), round_elements_(exchange_elements(plan)) {
  FP4T_CHECK_EQ(static_cast<int64_t>(comm.size()), plan.axes.ranks(),
                "ranks of the communicator, of the plan");
  if (!plan.shards.is_sharded()) return;
  FP4T_CHECK(queue.backend() == Backend::kCpu, "ranks exchange host buffers");
  const ExchangeBlocks blocks = take_exchange(plan, ArenaTake{arena});
  here_ = blocks.here;
  there_ = blocks.there;
}

int64_t ShardExchange::num_rounds() const { return ceil_div(plan_.shards.largest_row(), round_elements_); }

Span ShardExchange::part_in_round(int64_t rank, int64_t round) const {
  const Span piece = plan_.shards.row(rank);
  const int64_t begin = std::min(piece.begin + round * round_elements_, piece.end);
  return {begin, std::min(begin + round_elements_, piece.end)};
}

int64_t ShardExchange::copy_gradients(const Span& row, char* bytes, Way way) {
  int64_t at = 0;
  plan_.shards.for_parts(row, [&](size_t p, const Span& elements) {
    const TensorView part = elements_of(params_[p].gradient, elements);
    FP4T_CHECK(part.dtype == DType::kF32, "gradient of ", params_[p].info.name);
    if (way == Way::kPack) queue_.copy(bytes + at, part.data, part.bytes());
    if (way == Way::kUnpack) queue_.copy(part.data, bytes + at, part.bytes());
    at += part.bytes();
  });
  return at;
}

int64_t ShardExchange::copy_weights(const Span& row, char* bytes, Way way) {
  int64_t at = 0;
  plan_.shards.for_parts(row, [&](size_t p, const Span& elements) {
    const TensorView part = elements_of(operand_of(params_[p]), elements);
    if (way == Way::kPack) queue_.copy(bytes + at, part.data, part.bytes());
    if (way == Way::kUnpack) queue_.copy(part.data, bytes + at, part.bytes());
    at += part.bytes();
  });
  return at;
}

int64_t ShardExchange::weight_bytes(const Span& row) const {
  int64_t bytes = 0;
  plan_.shards.for_parts(row, [&](size_t p, const Span& elements) {
    bytes += elements.count() * dtype_bytes(operand_of(params_[p]).dtype);
  });
  return bytes;
}

void ShardExchange::sum_gradients() {
  if (!plan_.shards.is_sharded()) return;
  const int64_t ranks = plan_.axes.ranks();
  std::vector<int64_t> send(static_cast<size_t>(ranks)), receive(static_cast<size_t>(ranks));
  for (int64_t round = 0; round < num_rounds(); ++round) {
    const Span mine = part_in_round(comm_.rank(), round);
    char* next = static_cast<char*>(here_.data);
    for (int64_t r = 0; r < ranks; ++r) {
      const auto i = static_cast<size_t>(r);
      send[i] = copy_gradients(part_in_round(r, round), next, Way::kPack);
      next += send[i];
      receive[i] = mine.count() * dtype_bytes(DType::kF32);
    }
    comm_.all_to_all(here_.data, send, there_.data, receive);
    if (mine.count() == 0) continue;
    const TensorView all = {there_.data, DType::kF32, {ranks, mine.count()}};
    const TensorView sum = all.rows(0, 1);
    for (int64_t r = 1; r < ranks; ++r) {
      run(queue_, LinearCombination{1.0f, sum, 1.0f, all.rows(r, 1), sum});
    }
    copy_gradients(mine, static_cast<char*>(sum.data), Way::kUnpack);
  }
}

void ShardExchange::gather_weights() {
  if (!plan_.shards.is_sharded()) return;
  const int64_t ranks = plan_.axes.ranks();
  for (int64_t round = 0; round < num_rounds(); ++round) {
    int64_t bytes = 0;
    for (int64_t r = 0; r < ranks; ++r) bytes = std::max(bytes, weight_bytes(part_in_round(r, round)));
    char* all = static_cast<char*>(there_.data);
    copy_weights(part_in_round(comm_.rank(), round), static_cast<char*>(here_.data), Way::kPack);
    comm_.all_gather(here_.data, all, bytes);
    for (int64_t r = 0; r < ranks; ++r) {
      if (r != comm_.rank()) copy_weights(part_in_round(r, round), all + r * bytes, Way::kUnpack);
    }
  }
}

}  // namespace fp4t

// What every communicator must do, whatever its buffers are: checked with buffers of `queue`, on all ranks at
// once. No check leaves early: the others would wait.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <vector>

#include "engine/comm/comm.h"
#include "kernels/base/queue.h"

namespace fp4t::test {

// Memory of a queue, filled from host memory, read back to it.
template <class T>
class Buffer {
 public:
  Buffer(Queue& queue, const std::vector<T>& values) : queue_(queue), count_(values.size()) {
    data_ = queue.allocate(bytes());
    queue.copy_from_host(data_, values.data(), bytes());
  }
  Buffer(Queue& queue, int64_t count) : Buffer(queue, std::vector<T>(static_cast<size_t>(count))) {}
  ~Buffer() { queue_.release(data_); }
  Buffer(const Buffer&) = delete;

  T* data() const { return static_cast<T*>(data_); }
  int64_t bytes() const { return static_cast<int64_t>(count_ * sizeof(T)); }
  std::vector<T> values() const {
    std::vector<T> list(count_);
    queue_.copy_to_host(list.data(), data_, bytes());
    return list;
  }

 private:
  Queue& queue_;
  size_t count_;
  void* data_;
};

// What rank r holds at place i: sums of these depend on their order.
inline double value_of(int r, int64_t i) {
  const double big = (r + i) % 3 == 0 ? 1e16 : (r + i) % 3 == 1 ? -1e16 : 1.0;
  return big + r * 0.37 + static_cast<double>(i % 7);
}

template <class T>
T sum_at(int ranks, int64_t i) {
  auto sum = static_cast<T>(value_of(0, i));
  for (int r = 1; r < ranks; ++r) sum += static_cast<T>(value_of(r, i));
  return sum;
}

template <class T>
void sums_are_in_rank_order(Communicator& comm, Queue& queue) {
  for (const int64_t n : {0, 1, 5, 40000}) {
    std::vector<T> values, expected;
    for (int64_t i = 0; i < n; ++i) {
      values.push_back(static_cast<T>(value_of(comm.rank(), i)));
      expected.push_back(sum_at<T>(comm.size(), i));
    }
    const Buffer<T> buffer(queue, values);
    comm.all_reduce(buffer.data(), n, ReduceOp::kSum);
    EXPECT_EQ(buffer.values(), expected) << n;
  }
}

inline void a_maximum_keeps_a_nan(Communicator& comm, Queue& queue) {
  for (int bad = 0; bad < comm.size(); ++bad) {
    const Buffer<double> buffer(
        queue, std::vector<double>{comm.rank() * 1.5, comm.rank() == bad ? std::nan("") : comm.rank()});
    comm.all_reduce(buffer.data(), 2, ReduceOp::kMax);
    EXPECT_EQ(buffer.values()[0], (comm.size() - 1) * 1.5);
    EXPECT_TRUE(std::isnan(buffer.values()[1])) << bad;
  }
}

inline void gathers_and_broadcasts_whole(Communicator& comm, Queue& queue) {
  for (const int64_t n : {0, 1, 3, 1000}) {
    std::vector<int64_t> mine(static_cast<size_t>(n)), all;
    std::iota(mine.begin(), mine.end(), 1000 * comm.rank());
    for (int64_t i = 0; i < n * comm.size(); ++i) all.push_back(1000 * (i / n) + i % n);
    const Buffer<int64_t> in(queue, mine), out(queue, n * comm.size());
    comm.all_gather(in.data(), out.data(), in.bytes());
    EXPECT_EQ(out.values(), all);
    for (int root = 0; root < comm.size(); ++root) {
      const Buffer<int64_t> sent(queue, mine);
      comm.broadcast(sent.data(), sent.bytes(), root);
      std::vector<int64_t> of_root(static_cast<size_t>(n));
      std::iota(of_root.begin(), of_root.end(), 1000 * root);
      EXPECT_EQ(sent.values(), of_root) << root;
    }
  }
}

// Bytes that r sends to t: none for some pairs.
inline int64_t ragged(int r, int t) { return (r * 5 + t * 3) % 4 == 0 ? 0 : 11 * r + 7 * t + 1; }
inline char byte_of(int r, int t, int64_t i) { return static_cast<char>(r * 31 + t * 7 + i); }

struct RaggedBytes {
  std::vector<int64_t> send, receive;
  std::vector<char> sent, expected;
};
inline RaggedBytes ragged_bytes(const Communicator& comm) {
  RaggedBytes b;
  for (int t = 0; t < comm.size(); ++t) {
    b.send.push_back(ragged(comm.rank(), t));
    b.receive.push_back(ragged(t, comm.rank()));
    for (int64_t i = 0; i < b.send.back(); ++i) b.sent.push_back(byte_of(comm.rank(), t, i));
    for (int64_t i = 0; i < b.receive.back(); ++i) b.expected.push_back(byte_of(t, comm.rank(), i));
  }
  return b;
}

inline void all_to_all_delivers_ragged_parts(Communicator& comm, Queue& queue) {
  const RaggedBytes b = ragged_bytes(comm);
  const Buffer<char> out(queue, b.sent), in(queue, static_cast<int64_t>(b.expected.size()));
  comm.all_to_all(out.data(), b.send, in.data(), b.receive);
  EXPECT_EQ(in.values(), b.expected);
}

// Two parts for every pair, cut at a third, so that only their order tells them apart; received in another
// order of ranks than sent; with another call in between.
inline void parts_arrive_in_order(Communicator& comm, Queue& queue) {
  const RaggedBytes b = ragged_bytes(comm);
  const Buffer<char> out(queue, b.sent), in(queue, static_cast<int64_t>(b.expected.size()));
  std::vector<Part> send, receive;
  const auto cut = [](char* data, const std::vector<int64_t>& bytes, std::vector<Part>& parts) {
    for (size_t r = 0; r < bytes.size(); ++r) {
      const int64_t first = bytes[r] / 3;
      parts.push_back({static_cast<int>(r), data, first});
      parts.push_back({static_cast<int>(r), data + first, bytes[r] - first});
      data += bytes[r];
    }
  };
  cut(out.data(), b.send, send);
  cut(in.data(), b.receive, receive);
  std::stable_sort(receive.begin(), receive.end(),
                   [](const Part& x, const Part& y) { return x.rank > y.rank; });
  const auto call = comm.begin_exchange(send, receive);
  comm.barrier();
  call->wait();
  EXPECT_EQ(in.values(), b.expected);
}

inline void reduce_scatter_sums_in_rank_order(Communicator& comm, Queue& queue) {
  const int64_t n = 9;
  std::vector<float> values, expected;
  for (int64_t i = 0; i < n * comm.size(); ++i) {
    values.push_back(static_cast<float>(value_of(comm.rank(), i)));
  }
  for (int64_t i = 0; i < n; ++i) expected.push_back(sum_at<float>(comm.size(), comm.rank() * n + i));
  const Buffer<float> in(queue, values), out(queue, n);
  comm.reduce_scatter(in.data(), out.data(), n);
  EXPECT_EQ(out.values(), expected);
}

inline void splits_by_colour_in_the_order_of_keys(Communicator& comm, Queue& queue) {
  const auto part = comm.split(comm.rank() % 2, -comm.rank());
  const int same = (comm.size() + 1 - comm.rank() % 2) / 2;
  EXPECT_EQ(part->size(), same);
  EXPECT_EQ(part->rank(), same - 1 - comm.rank() / 2);
  const Buffer<double> sum(queue, std::vector<double>{comm.rank() * 1.0});
  part->all_reduce(sum.data(), 1, ReduceOp::kSum);
  double expected = 0;
  for (int r = comm.rank() % 2; r < comm.size(); r += 2) expected += r;
  EXPECT_EQ(sum.values()[0], expected);
}

inline void check_collectives(Communicator& comm, Queue& queue) {
  sums_are_in_rank_order<double>(comm, queue);
  sums_are_in_rank_order<float>(comm, queue);
  a_maximum_keeps_a_nan(comm, queue);
  gathers_and_broadcasts_whole(comm, queue);
  all_to_all_delivers_ragged_parts(comm, queue);
  parts_arrive_in_order(comm, queue);
  reduce_scatter_sums_in_rank_order(comm, queue);
  splits_by_colour_in_the_order_of_keys(comm, queue);
}

}  // namespace fp4t::test

// Collectives between real processes. Every rank runs every test; started by mpirun (tests/CMakeLists.txt).
//   --pieces=BYTES cuts messages into pieces of that many bytes, as messages beyond 2^30 bytes are.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdlib>
#include <limits>
#include <numeric>
#include <string>

#include "engine/comm/agree.h"
#include "engine/comm/ending.h"
#include "engine/comm/mpi.h"

namespace fp4t::test {
namespace {

Communicator* g_comm = nullptr;  // one MPI a process

int rank() { return g_comm->rank(); }
int size() { return g_comm->size(); }

// What rank r holds at place i: sums of these depend on their order.
double value_of(int r, int64_t i) {
  const double big = (r + i) % 3 == 0 ? 1e16 : (r + i) % 3 == 1 ? -1e16 : 1.0;
  return big + r * 0.37 + static_cast<double>(i % 7);
}

TEST(Comm, sums_are_taken_in_rank_order) {
  for (const int64_t n : {0, 1, 5, 40000}) {
    std::vector<double> values;
    std::vector<float> floats;
    for (int64_t i = 0; i < n; ++i) {
      values.push_back(value_of(rank(), i));
      floats.push_back(static_cast<float>(value_of(rank(), i)));
    }
    g_comm->all_reduce(values.data(), n, ReduceOp::kSum);
    g_comm->all_reduce(floats.data(), n, ReduceOp::kSum);
    for (int64_t i = 0; i < n; ++i) {
      double sum = value_of(0, i);
      auto float_sum = static_cast<float>(sum);
      for (int r = 1; r < size(); ++r) {
        sum += value_of(r, i);
        float_sum += static_cast<float>(value_of(r, i));
      }
      ASSERT_EQ(values[static_cast<size_t>(i)], sum) << i;
      ASSERT_EQ(floats[static_cast<size_t>(i)], float_sum) << i;
    }
  }
}

TEST(Comm, a_maximum_with_a_nan_on_any_rank_is_nan) {
  for (int bad = 0; bad < size(); ++bad) {
    double values[2] = {rank() * 1.5, rank() == bad ? std::nan("") : rank()};
    g_comm->all_reduce(values, 2, ReduceOp::kMax);
    EXPECT_EQ(values[0], (size() - 1) * 1.5);
    EXPECT_TRUE(std::isnan(values[1])) << bad;
  }
}

TEST(Comm, gathers_and_broadcasts_whole) {
  for (const int64_t n : {0, 1, 3, 1000}) {
    std::vector<int64_t> mine(static_cast<size_t>(n)), all(static_cast<size_t>(n * size()));
    std::iota(mine.begin(), mine.end(), 1000 * rank());
    g_comm->all_gather(mine.data(), all.data(), n * 8);
    for (int64_t i = 0; i < n * size(); ++i) {
      ASSERT_EQ(all[static_cast<size_t>(i)], 1000 * (i / n) + i % n);
    }
    std::vector<int64_t> later(all.size());
    const auto call = g_comm->begin_all_gather(mine.data(), later.data(), n * 8);
    g_comm->barrier();  // in between
    call->wait();
    EXPECT_EQ(later, all);
    for (int root = 0; root < size(); ++root) {
      std::vector<int64_t> sent = mine;
      g_comm->broadcast(sent.data(), n * 8, root);
      for (int64_t i = 0; i < n; ++i) ASSERT_EQ(sent[static_cast<size_t>(i)], 1000 * root + i);
    }
  }
}

// Bytes that r sends to t: none for some pairs.
int64_t ragged(int r, int t) { return (r * 5 + t * 3) % 4 == 0 ? 0 : 11 * r + 7 * t + 1; }

TEST(Comm, all_to_all_delivers_ragged_parts_and_nothing_where_there_is_none) {
  std::vector<int64_t> send, receive;
  std::string out, in;
  for (int t = 0; t < size(); ++t) {
    send.push_back(ragged(rank(), t));
    receive.push_back(ragged(t, rank()));
    for (int64_t i = 0; i < send.back(); ++i) out += static_cast<char>(rank() * 31 + t * 7 + i);
  }
  in.resize(static_cast<size_t>(std::accumulate(receive.begin(), receive.end(), int64_t{0})));
  g_comm->all_to_all(out.data(), send, in.data(), receive);
  size_t at = 0;
  for (int r = 0; r < size(); ++r) {
    for (int64_t i = 0; i < ragged(r, rank()); ++i) {
      ASSERT_EQ(in[at++], static_cast<char>(r * 31 + rank() * 7 + i)) << "from " << r << " at " << i;
    }
  }
}

TEST(Comm, a_part_of_another_size_than_expected_is_an_error_with_both_sizes) {
  const auto ranks = static_cast<size_t>(size());
  const std::vector<int64_t> send(ranks, 24), receive(ranks, 16);
  std::string out(24 * ranks, 'x'), in(24 * ranks, 'y');
  try {
    g_comm->all_to_all(out.data(), send, in.data(), receive);
    ADD_FAILURE() << "not noticed";
  } catch (const CommunicationError& e) {
    EXPECT_NE(std::string(e.what()).find("sends 24 bytes"), std::string::npos) << e.what();
    EXPECT_NE(std::string(e.what()).find("expects 16"), std::string::npos) << e.what();
  }
}

TEST(Comm, reduce_scatter_sums_in_rank_order) {
  const int64_t n = 9;
  std::vector<float> in, out(n);
  for (int64_t i = 0; i < n * size(); ++i) in.push_back(static_cast<float>(value_of(rank(), i)));
  g_comm->reduce_scatter(in.data(), out.data(), n);
  for (int64_t i = 0; i < n; ++i) {
    const int64_t place = rank() * n + i;
    auto sum = static_cast<float>(value_of(0, place));
    for (int r = 1; r < size(); ++r) sum += static_cast<float>(value_of(r, place));
    ASSERT_EQ(out[static_cast<size_t>(i)], sum) << i;
  }
}

TEST(Comm, splits_by_colour_in_the_order_of_keys) {
  const auto part = g_comm->split(rank() % 2, -rank());
  const int same = (size() + 1 - rank() % 2) / 2;
  ASSERT_EQ(part->size(), same);
  EXPECT_EQ(part->rank(), same - 1 - rank() / 2);
  double sum = rank();
  part->all_reduce(&sum, 1, ReduceOp::kSum);
  double expected = 0;
  for (int r = rank() % 2; r < size(); r += 2) expected += r;
  EXPECT_EQ(sum, expected);
}

TEST(Comm, ranks_of_one_host_know_each_other) {
  EXPECT_EQ(g_comm->local_size(), size());  // mpirun without a host file
  EXPECT_EQ(g_comm->local_rank(), rank());
  EXPECT_GE(threads_of_rank(0, *g_comm), 1);
  EXPECT_EQ(threads_of_rank(5, *g_comm), 5);
}

TEST(Agree, texts_of_any_length_and_sums_by_name) {
  const auto texts = gather_texts(*g_comm, std::string(static_cast<size_t>(3 * rank()), 'a'));
  ASSERT_EQ(texts.size(), static_cast<size_t>(size()));
  for (int r = 0; r < size(); ++r)
    EXPECT_EQ(texts[static_cast<size_t>(r)].size(), static_cast<size_t>(3 * r));
  EXPECT_EQ(broadcast_text(*g_comm, rank() == size() - 1 ? "last" : "x", size() - 1), "last");

  std::map<std::string, double> mine = {{"all", value_of(rank(), 1)}};
  if (rank() == 1) mine["one"] = 4.5;
  mine["rank " + std::to_string(rank())] = 1;
  const auto sums = sum_by_name(*g_comm, mine);
  double expected = value_of(0, 1);
  for (int r = 1; r < size(); ++r) expected += value_of(r, 1);
  EXPECT_EQ(sums.at("all"), expected);
  EXPECT_EQ(sums.at("one"), 4.5);
  EXPECT_EQ(sums.size(), static_cast<size_t>(size() + 2));
}

TEST(Agree, a_fact_that_differs_is_named_with_its_rank) {
  const int last = size() - 1;
  EXPECT_EQ(first_difference(*g_comm, {}), "");
  EXPECT_EQ(first_difference(*g_comm, {{"a", "1"}, {"b", "2"}}), "");
  const std::string who = "rank " + std::to_string(last) + ": ";
  const bool odd = rank() == last;
  EXPECT_EQ(first_difference(*g_comm, {{"a", odd ? "9" : "1"}, {"b", "2"}}), who + "a");
  EXPECT_EQ(first_difference(*g_comm, {{"a", "1"}, {"b", "2"}, {"c", odd ? "31" : "3"}}), who + "c");
  std::map<std::string, std::string> fewer = {{"a", "1"}};
  if (!odd) fewer["b"] = "2";
  EXPECT_EQ(first_difference(*g_comm, fewer), who + "b");
}

TEST(Agree, what_rank_zero_throws_is_thrown_everywhere) {
  int calls = 0;
  on_rank_zero(*g_comm, [&] { ++calls; });
  EXPECT_EQ(calls, rank() == 0 ? 1 : 0);
  try {
    on_rank_zero(*g_comm, [] { throw BadDataError("spoilt"); });
    ADD_FAILURE() << "not thrown";
  } catch (const Error& e) {
    EXPECT_EQ(e.code(), ExitCode::kBadData);
    EXPECT_STREQ(e.what(), "spoilt");
  }
}

}  // namespace
}  // namespace fp4t::test

int main(int argc, char** argv) {
  ::testing::InitGoogleTest(&argc, argv);
  fp4t::MpiOptions options;
  for (int i = 1; i < argc; ++i) {
    const std::string word = argv[i];
    if (word.rfind("--pieces=", 0) == 0) options.largest_message = std::atoll(word.c_str() + 9);
  }
  const auto comm = fp4t::make_mpi(options);
  fp4t::test::g_comm = comm.get();
  if (comm->size() < 2) {
    std::printf("needs at least two ranks\n");
    return 1;
  }
  return RUN_ALL_TESTS();
}

// Collectives between real processes. Every rank runs every test; started by mpirun (tests/CMakeLists.txt).
//   --pieces=BYTES cuts messages into pieces of that many bytes, as messages beyond 2^30 bytes are.
#include <gtest/gtest.h>

#include <cstdlib>
#include <string>

#include "engine/comm/agree.h"
#include "engine/comm/device.h"
#include "engine/comm/mpi.h"
#include "tests/support/collectives.h"

namespace fp4t::test {
namespace {

Communicator* g_comm = nullptr;  // one MPI a process

int rank() { return g_comm->rank(); }
int size() { return g_comm->size(); }

TEST(Comm, does_what_every_communicator_must) {
  Queue queue = Queue::cpu(1);
  check_collectives(*g_comm, queue);
}

// On a queue of the CPU, where both sides of the copies can be looked at.
TEST(Comm, staged_through_host_memory_does_the_same) {
  Queue queue = Queue::cpu(1);
  const auto staged = make_staged(*g_comm, queue);
  check_collectives(*staged, queue);
  EXPECT_EQ(staged->local_size(), g_comm->local_size());
  EXPECT_GT(staged->waited_seconds(), 0);
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

// The pool under back-to-back jobs: every chunk once, nothing of one job reaches the next.
#include "kernels/base/threads.h"

#include <gtest/gtest.h>
#include <sys/resource.h>

#include <atomic>
#include <chrono>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "kernels/base/check.h"

namespace fp4t {
namespace {

TEST(ThreadPool, runs_every_chunk_once_in_many_small_jobs) {
  for (const int threads : {1, 2, 5}) {
    ThreadPool pool(threads);
    for (int64_t job = 0; job < 3000; ++job) {
      const int64_t n = job % 23, chunk = 1 + job % 4;
      std::vector<std::atomic<int>> seen(static_cast<size_t>(n));
      pool.run(n, chunk, [&](int64_t begin, int64_t end) {
        ASSERT_TRUE(begin % chunk == 0 && end == std::min(n, begin + chunk)) << begin << " " << end;
        for (int64_t i = begin; i < end; ++i) ++seen[static_cast<size_t>(i)];
      });
      for (const auto& count : seen)
        ASSERT_EQ(count.load(), 1) << "job " << job << ", " << threads << " threads";
    }
  }
}

TEST(ThreadPool, waits_for_chunks_that_others_still_run) {
  ThreadPool pool(3);
  for (int job = 0; job < 20; ++job) {
    std::atomic<int> done{0};
    pool.run(6, 1, [&](int64_t begin, int64_t) {
      std::this_thread::sleep_for(std::chrono::microseconds(100 * (begin % 3)));
      ++done;
    });
    ASSERT_EQ(done.load(), 6);
  }
}

TEST(ThreadPool, rethrows_the_failure_of_a_chunk_and_stays_usable) {
  ThreadPool pool(3);
  for (int job = 0; job < 50; ++job) {
    EXPECT_THROW(pool.run(9, 1,
                          [](int64_t i, int64_t) {
                            if (i == 4) throw std::runtime_error("chunk 4");
                          }),
                 std::runtime_error);
    std::atomic<int> done{0};
    pool.run(9, 1, [&](int64_t, int64_t) { ++done; });
    ASSERT_EQ(done.load(), 9);
  }
}

#if !defined(__SANITIZE_ADDRESS__)  // its shadow memory does not fit under the limit
TEST(ThreadPool, more_threads_than_the_system_gives_are_an_error) {
  rlimit before{};
  ASSERT_EQ(getrlimit(RLIMIT_AS, &before), 0);
  rlimit small = before;
  small.rlim_cur = rlim_t{2} << 30;  // stacks of 8 MiB: a few hundred fit
  ASSERT_EQ(setrlimit(RLIMIT_AS, &small), 0);
  std::string message;
  try {
    ThreadPool pool(4000);
  } catch (const RecipeError& e) {
    message = e.what();
  }
  ASSERT_EQ(setrlimit(RLIMIT_AS, &before), 0);
  EXPECT_NE(message.find("4000 threads"), std::string::npos) << message;
}
#endif

}  // namespace
}  // namespace fp4t

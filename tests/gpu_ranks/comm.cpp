// Collectives over device buffers: staged through host memory, several ranks on one GPU; over NCCL, a GPU
// each (with one rank every call goes through NCCL, too; from NCCL 2.30 on NCCL_MULTI_RANK_GPU_ENABLE=1 lets
// several share a GPU). Every rank runs every test; started by mpirun.
#include <chrono>
#include <cstdlib>

#include "engine/comm/device.h"
#include "engine/comm/mpi.h"
#include "kernels/ops/elementwise.h"
#include "kernels/ops/run.h"
#include "tests/support/collectives.h"

namespace fp4t::test {
namespace {

Communicator* g_comm = nullptr;  // one MPI a process

int gpu_of_rank() { return g_comm->rank() % cuda::device_count(); }
bool one_gpu_each() { return cuda::device_count() >= g_comm->size() || nccl_shares_gpus(); }

#define NEEDS_NCCL()                                            \
  if (!built_with_nccl()) GTEST_SKIP() << "built without NCCL"; \
  if (!one_gpu_each()) GTEST_SKIP() << "fewer GPUs than ranks: " << cuda::device_count()

TEST(GpuComm, staged_through_host_memory_does_what_every_communicator_must) {
  Queue queue = Queue::cuda(gpu_of_rank());
  const auto comm = make_on_device(*g_comm, queue, Transport::kHost);
  check_collectives(*comm, queue);
}

TEST(GpuComm, nccl_does_what_every_communicator_must) {
  NEEDS_NCCL();
  Queue queue = Queue::cuda(gpu_of_rank());
  const auto comm = make_on_device(*g_comm, queue, Transport::kNccl);
  check_collectives(*comm, queue);
  comm->check();
}

// A call reads what was enqueued before it and is there for what comes after, with no wait of the host
// between.
void calls_take_their_place_in_the_queue(Communicator& comm, Queue& queue) {
  const int64_t n = int64_t{4} << 20;
  const Buffer<float> x(queue, n), y(queue, n * comm.size());
  for (int round = 0; round < 5; ++round) {
    const TensorView view = {x.data(), DType::kF32, {n}};
    queue.fill_bytes(x.data(), 0, x.bytes());
    const std::vector<float> ones(static_cast<size_t>(n), static_cast<float>(comm.rank() + 1));
    queue.upload(x.data(), ones.data(), 4);
    for (int i = 0; i < 20; ++i) run(queue, LinearCombination{2.0f, view, 0.0f, {}, view});
    comm.all_gather(x.data(), y.data(), x.bytes());
    const TensorView all = {y.data(), DType::kF32, {n * comm.size()}};
    run(queue, LinearCombination{0.5f, all, 0.0f, {}, all});
    const std::vector<float> got = y.values();
    for (int r = 0; r < comm.size(); ++r) {
      EXPECT_EQ(got[static_cast<size_t>(r * n)], static_cast<float>(r + 1) * 524288.0f) << r;
      EXPECT_EQ(got[static_cast<size_t>(r * n + 1)], 0.0f) << r;
    }
  }
}

TEST(GpuComm, calls_take_their_place_in_the_queue) {
  Queue queue = Queue::cuda(gpu_of_rank());
  const auto staged = make_on_device(*g_comm, queue, Transport::kHost);
  calls_take_their_place_in_the_queue(*staged, queue);
  NEEDS_NCCL();
  const auto nccl = make_on_device(*g_comm, queue, Transport::kNccl);
  calls_take_their_place_in_the_queue(*nccl, queue);
}

// On a queue beside another one: what the other does meanwhile neither disturbs it nor waits, up to the mark.
TEST(GpuComm, a_call_beside_the_main_queue_is_waited_for_at_its_mark) {
  Queue main = Queue::cuda(gpu_of_rank()), aside = main.beside();
  const Transport transport = built_with_nccl() && one_gpu_each() ? Transport::kNccl : Transport::kHost;
  const auto comm = make_on_device(*g_comm, aside, transport);
  const int64_t n = int64_t{1} << 20;
  const Buffer<float> x(main, n), y(main, n * comm->size());
  const TensorView view = {x.data(), DType::kF32, {n}}, all = {y.data(), DType::kF32, {n * comm->size()}};
  const std::vector<float> one = {1.0f + static_cast<float>(comm->rank())};
  for (int round = 0; round < 5; ++round) {
    main.upload(x.data(), one.data(), 4);
    for (int i = 0; i < 50; ++i) run(main, LinearCombination{1.0f, view, 0.0f, {}, view});
    aside.wait_for(main.mark());
    comm->all_gather(x.data(), y.data(), x.bytes());
    main.wait_for(aside.mark());
    run(main, LinearCombination{2.0f, all, 0.0f, {}, all});
    const std::vector<float> got = y.values();
    for (int r = 0; r < comm->size(); ++r) {
      EXPECT_EQ(got[static_cast<size_t>(r * n)], 2.0f + 2.0f * static_cast<float>(r));
    }
  }
  main.synchronize();
  EXPECT_GE(main.counts().held_seconds, 0);
}

// Held while the other queue works: at least some of that time, and not the time before.
TEST(GpuQueue, counts_the_time_that_it_stands_still_for_another) {
  Queue main = Queue::cuda(gpu_of_rank()), aside = main.beside();
  const int64_t n = int64_t{32} << 20;
  const Buffer<float> x(main, n);
  const TensorView view = {x.data(), DType::kF32, {n}};
  main.synchronize();
  EXPECT_EQ(main.counts().held_seconds, 0);
  const auto begin = std::chrono::steady_clock::now();
  for (int i = 0; i < 100; ++i) run(aside, LinearCombination{1.0f, view, 0.0f, {}, view});
  main.wait_for(aside.mark());
  main.synchronize();
  const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  const double held = main.counts().held_seconds;
  EXPECT_GT(held, 0.2 * seconds);
  EXPECT_LE(held, seconds);
  main.wait_for(aside.mark());
  main.synchronize();
  EXPECT_LT(main.counts().held_seconds - held, 0.1 * seconds);
}

// One rank does not come: the others' call is given up within the time-out, and the queue goes on.
TEST(GpuComm, a_rank_that_does_not_come_is_noticed_in_the_queue) {
  NEEDS_NCCL();
  if (g_comm->size() < 2) GTEST_SKIP() << "one rank";
  Queue queue = Queue::cuda(gpu_of_rank());
  const double before = g_comm->timeout();
  {
    const auto comm = make_on_device(*g_comm, queue, Transport::kNccl);
    const Buffer<char> x(queue, 64), y(queue, 64 * comm->size());
    comm->all_gather(x.data(), y.data(), 64);  // connected
    queue.synchronize();
    g_comm->barrier();
    if (g_comm->rank() > 0) {
      g_comm->set_timeout(2);
      comm->all_gather(x.data(), y.data(), 64);
      queue.synchronize();
      EXPECT_THROW(comm->check(), WatchdogError);
      EXPECT_THROW(comm->all_gather(x.data(), y.data(), 64), WatchdogError);
      g_comm->set_timeout(before);
    }
    g_comm->barrier();
    g_comm->set_timeout(2);  // of the first rank's end: the others have given up and do not end with it
  }
  g_comm->set_timeout(before);
  g_comm->barrier();
}

// Rates of the links, beside what scripts/bench/nccl_ceilings.py reaches: bytes that a rank sends over time.
TEST(GpuComm, rates_are_printed) {
  NEEDS_NCCL();
  if (g_comm->size() < 2) GTEST_SKIP() << "one rank";
  Queue queue = Queue::cuda(gpu_of_rank());
  const auto comm = make_on_device(*g_comm, queue, Transport::kNccl);
  for (const int64_t mib : {1, 16, 256, 1024}) {
    const int64_t bytes = mib << 20;
    const Buffer<char> x(queue, bytes), y(queue, bytes);
    const int64_t part = bytes / comm->size();
    const std::vector<int64_t> parts(static_cast<size_t>(comm->size()), part);
    const auto rate = [&](const char* name, const std::function<void()>& call) {
      for (int i = 0; i < 5; ++i) call();
      queue.synchronize();
      g_comm->barrier();
      const auto begin = std::chrono::steady_clock::now();
      for (int i = 0; i < 20; ++i) call();
      queue.synchronize();
      const double seconds =
          std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count() / 20;
      const double sent = static_cast<double>(part) * (comm->size() - 1);
      if (g_comm->rank() == 0) {
        std::printf("%s %ld MiB: %.0f us, %.0f GB/s\n", name, static_cast<long>(mib), seconds * 1e6,
                    sent / seconds * 1e-9);
      }
      EXPECT_GT(sent / seconds, 0);
    };
    rate("all_to_all", [&] { comm->all_to_all(x.data(), parts, y.data(), parts); });
    rate("all_gather", [&] { comm->all_gather(x.data(), y.data(), part); });
  }
}

}  // namespace
}  // namespace fp4t::test

int main(int argc, char** argv) {
  ::testing::InitGoogleTest(&argc, argv);
  if (fp4t::cuda::device_count() == 0) {
    std::fprintf(stderr, "skipped: no GPU on this machine\n");
    return 77;
  }
  const auto comm = fp4t::make_mpi();
  fp4t::test::g_comm = comm.get();
  return RUN_ALL_TESTS();
}

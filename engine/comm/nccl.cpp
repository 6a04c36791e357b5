// n ranks with a GPU each, over NCCL. The only file outside kernels/cuda that includes CUDA's headers.
//
// Nothing here waits for other ranks without an end: the communicator does not block (NCCL's nonblocking
// mode), so that set-up and enqueuing are looked at until they are over or late; what is enqueued is watched
// by a thread, since the host may stand in a launch or in a wait for the device, which only aborting NCCL's
// kernels ends.
#include <cuda_runtime.h>
#include <nccl.h>

#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <deque>
#include <exception>
#include <functional>
#include <mutex>
#include <string>
#include <thread>

#include "engine/comm/device_base.h"

namespace fp4t {

namespace {

using Clock = std::chrono::steady_clock;
double seconds_since(Clock::time_point begin) {
  return std::chrono::duration<double>(Clock::now() - begin).count();
}

void check_cuda(cudaError_t status, const char* what) {
  if (status != cudaSuccess) throw CommunicationError(detail::concat(what, ": ", cudaGetErrorString(status)));
}

class Done : public PendingCall {
 public:
  void wait() override {}
};

class Nccl : public DeviceCommunicator {
 public:
  Nccl(std::unique_ptr<Communicator> host_in, Queue& queue_in)
      : DeviceCommunicator(std::move(host_in), queue_in),
        stream_(static_cast<cudaStream_t>(queue_in.native_stream())),
        exceptions_(std::uncaught_exceptions()) {
    // Multicast in the switch sums in its own order, and not every machine lets a job set it up.
    setenv("NCCL_NVLS_ENABLE", "0", 0);
    check_cuda(cudaGetDevice(&device_), "cudaGetDevice");
    int least = 0, greatest = 0;
    check_cuda(cudaDeviceGetStreamPriorityRange(&least, &greatest), "cudaDeviceGetStreamPriorityRange");
    check_cuda(cudaStreamCreateWithPriority(&wire_, cudaStreamNonBlocking, greatest),
               "cudaStreamCreateWithPriority");
    try {
      connect();
    } catch (...) {
      give_up();
      cudaStreamDestroy(wire_);
      throw;
    }
    watcher_ = std::thread([this] { watch(); });
  }

  ~Nccl() override {
    // With an exception on its way the others may be in the middle of something: no waiting for them.
    const bool orderly = std::uncaught_exceptions() <= exceptions_;
    if (orderly) cudaStreamSynchronize(stream_);  // watched
    {
      const std::lock_guard lock(mutex_);
      ending_ = true;
    }
    wake_.notify_all();
    watcher_.join();
    if (orderly) {
      finish();
    } else {
      give_up();
    }
    for (const Call& c : calls_) release(c);
    for (cudaEvent_t e : spare_) cudaEventDestroy(e);
    cudaStreamDestroy(wire_);
  }

  void check() override {
    const std::lock_guard lock(mutex_);
    throw_failure();
  }

  std::unique_ptr<PendingCall> begin_exchange(const std::vector<Part>& send,
                                              const std::vector<Part>& receive) override {
    const auto pass_on = [&] {
      for (const Part& p : receive) {
        if (p.rank == rank() || p.bytes == 0) continue;
        expect(ncclRecv(p.data, static_cast<size_t>(p.bytes), ncclInt8, p.rank, comm_, wire_), "ncclRecv");
      }
      for (const Part& p : send) {
        if (p.rank == rank() || p.bytes == 0) continue;
        expect(ncclSend(p.data, static_cast<size_t>(p.bytes), ncclInt8, p.rank, comm_, wire_), "ncclSend");
      }
    };
    enqueue("exchange", pass_on, [&] {
      copy_own_parts(rank(), send, receive,
                     [this](void* to, const void* from, int64_t bytes) { queue().copy(to, from, bytes); });
    });
    return std::make_unique<Done>();
  }

  void all_gather(const void* in, void* out, int64_t bytes) override {
    FP4T_CHECK(bytes >= 0, bytes, " bytes");
    if (bytes == 0) return;
    enqueue("all_gather", [&] {
      expect(ncclAllGather(in, out, static_cast<size_t>(bytes), ncclInt8, comm_, wire_), "ncclAllGather");
    });
  }

  void broadcast(void* data, int64_t bytes, int root) override {
    FP4T_CHECK(root >= 0 && root < size(), "root ", root, " of ", size());
    if (bytes == 0) return;
    enqueue("broadcast", [&] {
      expect(ncclBroadcast(data, data, static_cast<size_t>(bytes), ncclInt8, root, comm_, wire_),
             "ncclBroadcast");
    });
  }

  std::unique_ptr<Communicator> split(int colour, int key) override {
    return std::make_unique<Nccl>(host().split(colour, key), queue());
  }

 private:
  // A call that the device has not finished, as far as is known: it may begin after `ready`, and ends before
  // `done`.
  struct Call {
    const char* name;
    cudaEvent_t ready, done;
    bool begun = false;
    Clock::time_point since{};
  };

  void connect() {
    ncclUniqueId id{};
    std::string problem;
    if (rank() == 0) {
      const ncclResult_t made = ncclGetUniqueId(&id);
      if (made != ncclSuccess) problem = ncclGetErrorString(made);
    }
    int64_t size_of_problem = static_cast<int64_t>(problem.size());
    host().broadcast(&size_of_problem, sizeof(size_of_problem), 0);
    if (size_of_problem > 0)
      throw CommunicationError("NCCL cannot begin: ncclGetUniqueId on rank 0: " + problem);
    host().broadcast(&id, sizeof(id), 0);
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    config.blocking = 0;
    expect(ncclCommInitRankConfig(&comm_, size(), id, rank(), &config), "ncclCommInitRankConfig");
    settle("set-up");
  }

  void expect(ncclResult_t result, const char* what) {
    if (result == ncclSuccess || result == ncclInProgress) return;
    const char* const more = ncclGetLastError(comm_);
    throw CommunicationError(detail::concat(what, " among ", size(), " ranks: ", ncclGetErrorString(result),
                                            more && *more ? detail::concat(" (", more, ")") : ""));
  }

  // Looks until NCCL has taken up what it was given.
  void settle(const char* call) {
    const auto begin = Clock::now();
    for (int64_t look = 0;; ++look) {
      ncclResult_t state = ncclInProgress;
      const ncclResult_t asked = ncclCommGetAsyncError(comm_, &state);
      expect(asked, "ncclCommGetAsyncError");
      if (state != ncclInProgress) return expect(state, call);
      const double seconds = seconds_since(begin);
      if (timeout() > 0 && seconds > timeout()) throw late(call, size(), seconds, timeout());
      constexpr int64_t kAtOnce = 2000;
      if (look > kAtOnce) std::this_thread::sleep_for(std::chrono::microseconds(50));
    }
  }

  // `beside`: what the queue does while NCCL's kernels run.
  void enqueue(const char* name, const std::function<void()>& body,
               const std::function<void()>& beside = {}) {
    const std::lock_guard lock(mutex_);
    throw_failure();
    limit_ = timeout();
    Call call{name, event(), event()};
    try {
      check_cuda(cudaEventRecord(call.ready, stream_), "cudaEventRecord");
      check_cuda(cudaStreamWaitEvent(wire_, call.ready), "cudaStreamWaitEvent");
      if (beside) beside();
      expect(ncclGroupStart(), "ncclGroupStart");
      try {
        body();
      } catch (...) {
        ncclGroupEnd();
        throw;
      }
      expect(ncclGroupEnd(), "ncclGroupEnd");
      settle(name);
      check_cuda(cudaEventRecord(call.done, wire_), "cudaEventRecord");
      check_cuda(cudaStreamWaitEvent(stream_, call.done), "cudaStreamWaitEvent");
    } catch (const Error& e) {
      release(call);
      failure_ = e.what();
      late_ = e.code() == ExitCode::kWatchdog;
      give_up();
      throw;
    }
    calls_.push_back(call);
    wake_.notify_all();
  }

  // Of the thread that watches.
  void watch() {
    cudaSetDevice(device_);
    std::unique_lock lock(mutex_);
    while (!ending_) {
      if (calls_.empty() || !failure_.empty()) {
        wake_.wait(lock);
        continue;
      }
      look();
      wake_.wait_for(lock, std::chrono::milliseconds(20));
    }
  }

  void look() {
    while (!calls_.empty() && cudaEventQuery(calls_.front().done) == cudaSuccess) {
      spare_.push_back(calls_.front().ready);
      spare_.push_back(calls_.front().done);
      calls_.pop_front();
    }
    if (!comm_) return;
    ncclResult_t state = ncclSuccess;
    if (ncclCommGetAsyncError(comm_, &state) != ncclSuccess ||
        (state != ncclSuccess && state != ncclInProgress)) {
      return fail(detail::concat("NCCL among ", size(), " ranks: ", ncclGetErrorString(state)), false);
    }
    if (calls_.empty()) return;
    Call& first = calls_.front();
    if (!first.begun && cudaEventQuery(first.ready) == cudaSuccess) {
      first.begun = true;
      first.since = Clock::now();
    }
    if (!first.begun || limit_ <= 0) return;
    const double seconds = seconds_since(first.since);
    if (seconds > limit_) fail(late(first.name, size(), seconds, limit_).what(), true);
  }

  void fail(const std::string& message, bool is_late) {
    failure_ = message;
    late_ = is_late;
    give_up();
  }

  void throw_failure() const {
    if (failure_.empty()) return;
    if (late_) throw WatchdogError(failure_);
    throw CommunicationError(failure_);
  }

  void give_up() {
    if (comm_) ncclCommAbort(comm_);
    comm_ = nullptr;
  }

  // Together with the others, whose last calls may still read this rank's buffers.
  void finish() {
    if (!comm_) return;
    try {
      expect(ncclCommFinalize(comm_), "ncclCommFinalize");
      settle("end");
    } catch (const Error&) {
      return give_up();
    }
    ncclCommDestroy(comm_);
    comm_ = nullptr;
  }

  cudaEvent_t event() {
    cudaEvent_t e = nullptr;
    if (!spare_.empty()) {
      e = spare_.back();
      spare_.pop_back();
      return e;
    }
    check_cuda(cudaEventCreateWithFlags(&e, cudaEventDisableTiming), "cudaEventCreate");
    return e;
  }
  void release(const Call& call) {
    cudaEventDestroy(call.ready);
    cudaEventDestroy(call.done);
  }

  cudaStream_t stream_;
  // Where NCCL's kernels run, between two events of the queue's: blocks of theirs go before blocks of
  // products that wait for room, so that what others wait for does not.
  cudaStream_t wire_ = nullptr;
  int device_ = 0;
  int exceptions_;  // on their way when it was made
  ncclComm_t comm_ = nullptr;

  std::mutex mutex_;  // of all that follows, and of calls of NCCL
  std::condition_variable wake_;
  std::deque<Call> calls_;
  std::vector<cudaEvent_t> spare_;
  double limit_ = 0;  // the time-out, seconds
  std::string failure_;
  bool late_ = false;
  bool ending_ = false;
  std::thread watcher_;
};

}  // namespace

bool built_with_nccl() { return true; }

bool nccl_shares_gpus() {
  constexpr int kFirst = NCCL_VERSION(2, 30, 0);
  const char* const enabled = std::getenv("NCCL_MULTI_RANK_GPU_ENABLE");
  int version = 0;
  return enabled && std::string(enabled) == "1" && ncclGetVersion(&version) == ncclSuccess &&
         version >= kFirst;
}

std::unique_ptr<Communicator> make_nccl(Communicator& host, Queue& queue) {
  return std::make_unique<Nccl>(host.split(0, host.rank()), queue);
}

}  // namespace fp4t

// n ranks over host buffers.
#include "engine/comm/mpi.h"

#define OMPI_SKIP_MPICXX 1
#include <mpi.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <exception>
#include <memory>
#include <thread>

#include "engine/comm/ending.h"
#include "kernels/base/text.h"

namespace fp4t {

namespace {

void check_mpi(int code, const char* call) {
  if (code == MPI_SUCCESS) return;
  char text[MPI_MAX_ERROR_STRING] = {};
  int length = 0;
  MPI_Error_string(code, text, &length);
  throw CommunicationError(detail::concat(call, ": ", text));
}

template <class T>
T reduced(T a, T b, ReduceOp op) {
  if (op == ReduceOp::kSum) return a + b;
  if (std::isnan(a) || std::isnan(b)) return std::isnan(a) ? a : b;
  return std::max(a, b);
}

class Mpi : public Communicator {
 public:
  enum class Kind : uint8_t { kWorld, kPart };
  // What a communicator shares with those that were split from it.
  struct Family {
    double timeout = 0, waited = 0;  // seconds
  };

  Mpi(MPI_Comm comm, Kind kind, int local_rank, int local_size, const MpiOptions& options,
      std::shared_ptr<Family> family)
      : comm_(comm),
        kind_(kind),
        family_(std::move(family)),
        local_rank_(local_rank),
        local_size_(local_size),
        options_(options),
        at_once_seconds_(static_cast<int>(std::thread::hardware_concurrency()) >= 2 * local_size ? 2e-3 : 0),
        exceptions_(std::uncaught_exceptions()) {
    FP4T_CHECK(options.largest_message >= 1 && options.largest_message <= INT32_MAX, options.largest_message,
               " bytes a message");
    check_mpi(MPI_Comm_set_errhandler(comm_, MPI_ERRORS_RETURN), "MPI_Comm_set_errhandler");
    check_mpi(MPI_Comm_rank(comm_, &rank_), "MPI_Comm_rank");
    check_mpi(MPI_Comm_size(comm_, &size_), "MPI_Comm_size");
  }
  Mpi(const Mpi&) = delete;
  ~Mpi() override {
    // With an exception on its way the others may be in the middle of something: end_after_error() decides.
    if (std::uncaught_exceptions() > exceptions_) return;
    MPI_Comm_free(&comm_);
    if (kind_ == Kind::kWorld) MPI_Finalize();
  }

  int rank() const override { return rank_; }
  int size() const override { return size_; }
  int local_rank() const override { return local_rank_; }
  int local_size() const override { return local_size_; }
  void set_timeout(double seconds) override { family_->timeout = seconds; }
  double timeout() const override { return family_->timeout; }
  double waited_seconds() const override { return family_->waited; }
  void barrier() override {
    complete("barrier", [&](MPI_Request* request) { return MPI_Ibarrier(comm_, request); });
  }
  void all_reduce(double* values, int64_t n, ReduceOp op) override { reduce_all(values, n, op); }
  void all_reduce(float* values, int64_t n, ReduceOp op) override { reduce_all(values, n, op); }

  void all_gather(const void* in, void* out, int64_t bytes) override {
    FP4T_CHECK(bytes >= 0, bytes, " bytes");
    if (bytes <= options_.largest_message) {
      const auto n = static_cast<int>(bytes);
      complete("all_gather", [&](MPI_Request* request) {
        return MPI_Iallgather(in, n, MPI_BYTE, out, n, MPI_BYTE, comm_, request);
      });
      return;
    }
    const std::vector<int64_t> all(static_cast<size_t>(size_), bytes);
    char* own = static_cast<char*>(const_cast<void*>(in));
    transfer(std::vector<char*>(all.size(), own), all, static_cast<char*>(out), all);
  }

  std::unique_ptr<PendingCall> begin_exchange(const std::vector<Part>& send,
                                              const std::vector<Part>& receive) override {
    std::vector<MPI_Request> requests;
    for (const Part& p : receive) receive_pieces(p, requests);
    for (const Part& p : send) send_pieces(p, requests);
    copy_own_parts(rank_, send, receive, [](void* to, const void* from, int64_t bytes) {
      if (bytes > 0) std::memcpy(to, from, static_cast<size_t>(bytes));
    });
    return std::make_unique<Pending>(*this, std::move(requests));
  }

  void reduce_scatter(const float* in, float* out, int64_t n) override {
    const auto ranks = static_cast<size_t>(size_);
    const std::vector<int64_t> bytes(ranks, n * static_cast<int64_t>(sizeof(float)));
    std::vector<float> parts(static_cast<size_t>(n) * ranks);
    all_to_all(in, bytes, parts.data(), bytes);
    for (int64_t i = 0; i < n; ++i) {
      float sum = parts[static_cast<size_t>(i)];
      for (size_t r = 1; r < ranks; ++r) sum += parts[r * static_cast<size_t>(n) + static_cast<size_t>(i)];
      out[i] = sum;
    }
  }

  void all_to_all(const void* in, const std::vector<int64_t>& send, void* out,
                  const std::vector<int64_t>& receive) override {
    const auto ranks = static_cast<size_t>(size_);
    FP4T_CHECK(send.size() == ranks && receive.size() == ranks, "counts for ", send.size(), " and ",
               receive.size(), " of ", size_, " ranks");
    // A few bytes more, and a mismatch is an error with both sizes instead of a hang.
    std::vector<int64_t> announced(ranks);
    complete("all_to_all", [&](MPI_Request* request) {
      return MPI_Ialltoall(send.data(), 1, MPI_INT64_T, announced.data(), 1, MPI_INT64_T, comm_, request);
    });
    for (size_t r = 0; r < ranks; ++r) {
      if (announced[r] == receive[r]) continue;
      throw CommunicationError(detail::concat("rank ", r, " sends ", announced[r], " bytes, rank ", rank_,
                                              " expects ", receive[r]));
    }
    std::vector<char*> from(ranks);
    char* next = static_cast<char*>(const_cast<void*>(in));
    for (size_t r = 0; r < ranks; ++r) {
      from[r] = next;
      next += send[r];
    }
    transfer(from, send, static_cast<char*>(out), receive);
  }

  void broadcast(void* data, int64_t bytes, int root) override {
    FP4T_CHECK(root >= 0 && root < size_, "root ", root, " of ", size_);
    char* at = static_cast<char*>(data);
    for (int64_t left = bytes; left > 0;) {
      const int64_t n = std::min(left, options_.largest_message);
      complete("broadcast", [&](MPI_Request* request) {
        return MPI_Ibcast(at, static_cast<int>(n), MPI_BYTE, root, comm_, request);
      });
      at += n;
      left -= n;
    }
  }

  std::unique_ptr<Communicator> split(int colour, int key) override {
    MPI_Comm part = MPI_COMM_NULL;
    check_mpi(MPI_Comm_split(comm_, colour, key, &part), "MPI_Comm_split");
    return std::make_unique<Mpi>(part, Kind::kPart, local_rank_, local_size_, options_, family_);
  }

 private:
  class Pending : public PendingCall {
   public:
    Pending(Mpi& comm, std::vector<MPI_Request> requests) : comm_(comm), requests_(std::move(requests)) {}
    void wait() override { comm_.wait("exchange", requests_); }

   private:
    Mpi& comm_;
    std::vector<MPI_Request> requests_;
  };

  template <class Start>
  void complete(const char* call, const Start& start) {
    std::vector<MPI_Request> requests(1, MPI_REQUEST_NULL);
    check_mpi(start(requests.data()), call);
    wait(call, requests);
  }

  // Looks again and again: at once for a while, then with pauses far below what a step takes. Large messages
  // move on only while somebody looks, so where a rank has cores of its own, the while is as long as they
  // take.
  void wait(const char* call, std::vector<MPI_Request>& requests) {
    using Clock = std::chrono::steady_clock;
    const auto begin = Clock::now();
    for (int64_t look = 0;; ++look) {
      int done = 0;
      check_mpi(MPI_Testall(static_cast<int>(requests.size()), requests.data(), &done, MPI_STATUSES_IGNORE),
                call);
      if (done) {
        family_->waited += std::chrono::duration<double>(Clock::now() - begin).count();
        return;
      }
      constexpr int64_t kAtOnce = 50;
      const double seconds = look < kAtOnce ? 0 : std::chrono::duration<double>(Clock::now() - begin).count();
      if (look < kAtOnce || seconds < at_once_seconds_) {
        std::this_thread::yield();
        continue;
      }
      if (family_->timeout > 0 && seconds > family_->timeout) throw late(call, size_, seconds, timeout());
      std::this_thread::sleep_for(std::chrono::microseconds(seconds < 0.01 ? 5 : 200));
    }
  }

  // Piece after piece; both sides of a pair cut alike.
  template <class Post>
  void for_pieces(const Part& part, const Post& post) {
    FP4T_CHECK(part.bytes >= 0 && part.rank >= 0 && part.rank < size_, part.bytes, " bytes, rank ",
               part.rank);
    if (part.rank == rank_) return;
    for (int64_t at = 0; at < part.bytes; at += options_.largest_message) {
      post(static_cast<char*>(part.data) + at,
           static_cast<int>(std::min(part.bytes - at, options_.largest_message)));
    }
  }
  void receive_pieces(const Part& part, std::vector<MPI_Request>& requests) {
    for_pieces(part, [&](char* to, int n) {
      requests.emplace_back();
      check_mpi(MPI_Irecv(to, n, MPI_BYTE, part.rank, 0, comm_, &requests.back()), "MPI_Irecv");
    });
  }
  void send_pieces(const Part& part, std::vector<MPI_Request>& requests) {
    for_pieces(part, [&](char* from, int n) {
      requests.emplace_back();
      check_mpi(MPI_Isend(from, n, MPI_BYTE, part.rank, 0, comm_, &requests.back()), "MPI_Isend");
    });
  }

  void transfer(const std::vector<char*>& from, const std::vector<int64_t>& send, char* to,
                const std::vector<int64_t>& receive) {
    std::vector<Part> sent, received;
    std::vector<int64_t> offset(receive.size());
    for (size_t r = 1; r < receive.size(); ++r) offset[r] = offset[r - 1] + receive[r - 1];
    for (int step = 0; step < size_; ++step) {
      const int source = (rank_ + size_ - step) % size_, target = (rank_ + step) % size_;
      const auto s = static_cast<size_t>(source), t = static_cast<size_t>(target);
      received.push_back({source, to + offset[s], receive[s]});
      sent.push_back({target, from[t], send[t]});
    }
    begin_exchange(sent, received)->wait();
  }

  // Every rank adds all values up itself, in rank order.
  template <class T>
  void reduce_all(T* values, int64_t n, ReduceOp op) {
    constexpr int64_t kPiece = 16384;
    const auto ranks = static_cast<int64_t>(size_);
    std::vector<T> all(static_cast<size_t>(std::min(n, kPiece) * ranks));
    for (int64_t begin = 0; begin < n; begin += kPiece) {
      const int64_t count = std::min(kPiece, n - begin);
      all_gather(values + begin, all.data(), count * static_cast<int64_t>(sizeof(T)));
      for (int64_t i = 0; i < count; ++i) {
        T result = all[static_cast<size_t>(i)];
        for (int64_t r = 1; r < ranks; ++r) {
          result = reduced(result, all[static_cast<size_t>(r * count + i)], op);
        }
        values[begin + i] = result;
      }
    }
  }

  MPI_Comm comm_;
  Kind kind_;
  std::shared_ptr<Family> family_;
  int rank_ = 0, size_ = 1, local_rank_, local_size_;
  MpiOptions options_;
  double at_once_seconds_;  // that a wait takes a core
  int exceptions_;          // on their way when it was made
};

}  // namespace

bool built_with_mpi() { return true; }

std::unique_ptr<Communicator> make_mpi(const MpiOptions& options) {
  int provided = 0;
  check_mpi(MPI_Init_thread(nullptr, nullptr, MPI_THREAD_FUNNELED, &provided), "MPI_Init_thread");
  FP4T_CHECK(provided >= MPI_THREAD_FUNNELED, "MPI beside threads: level ", provided);
  check_mpi(MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN), "MPI_Comm_set_errhandler");
  MPI_Comm host = MPI_COMM_NULL;
  check_mpi(MPI_Comm_split_type(MPI_COMM_WORLD, MPI_COMM_TYPE_SHARED, 0, MPI_INFO_NULL, &host),
            "MPI_Comm_split_type");
  int local_rank = 0, local_size = 1;
  check_mpi(MPI_Comm_rank(host, &local_rank), "MPI_Comm_rank");
  check_mpi(MPI_Comm_size(host, &local_size), "MPI_Comm_size");
  check_mpi(MPI_Comm_free(&host), "MPI_Comm_free");
  // A copy: MPI_COMM_WORLD itself is left to the ending.
  MPI_Comm world = MPI_COMM_NULL;
  check_mpi(MPI_Comm_dup(MPI_COMM_WORLD, &world), "MPI_Comm_dup");
  return std::make_unique<Mpi>(world, Mpi::Kind::kWorld, local_rank, local_size, options,
                               std::make_shared<Mpi::Family>());
}

// Ending ---------------------------------------------------------------------------------------------

namespace {

// How long a rank waits for the others to end as well: decisions that ranks take together reach all of them
// within one collective.
constexpr auto kPatience = std::chrono::seconds(3);

bool all_arrive() {
  MPI_Request request = MPI_REQUEST_NULL;
  if (MPI_Ibarrier(MPI_COMM_WORLD, &request) != MPI_SUCCESS) return false;
  const auto end = std::chrono::steady_clock::now() + kPatience;
  for (int done = 0;;) {
    if (MPI_Test(&request, &done, MPI_STATUS_IGNORE) != MPI_SUCCESS) return false;
    if (done) return true;
    if (std::chrono::steady_clock::now() > end) return false;
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
}

}  // namespace

int end_after_error(int code, const std::string& message) {
  int initialised = 0, finalised = 0, rank = 0, size = 1;
  MPI_Initialized(&initialised);
  MPI_Finalized(&finalised);
  const bool connected = initialised && !finalised;
  if (connected) {
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &size);
  }
  const auto say = [&] {
    const std::string who = size > 1 && rank > 0 ? detail::concat("rank ", rank, ": ") : "";
    std::fprintf(stderr, "fp4train: %s%s\n", who.c_str(), printable_lines(message).c_str());
    std::fflush(stderr);
  };
  // What a call that was given up would still bring has no place to go any more: no waiting then.
  const bool gave_up = code == static_cast<int>(ExitCode::kWatchdog);
  if (rank == 0) say();
  if (!connected) return code;
  if (!gave_up && all_arrive()) {
    int first = code;
    MPI_Bcast(&first, 1, MPI_INT, 0, MPI_COMM_WORLD);
    if (rank != 0 && first != code) say();
    MPI_Finalize();
    return code;
  }
  if (rank != 0) say();
  MPI_Abort(MPI_COMM_WORLD, code);
  return code;
}

}  // namespace fp4t

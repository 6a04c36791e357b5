#include "kernels/base/threads.h"

#include <atomic>
#include <condition_variable>
#include <exception>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

#include "kernels/base/check.h"
#include "kernels/base/numeric.h"

namespace fp4t {

struct ThreadPool::State {
  std::mutex mutex;
  std::condition_variable start, finish;
  std::vector<std::thread> workers;
  const std::function<void(int64_t, int64_t)>* body = nullptr;
  int64_t n = 0, chunk = 1, num_chunks = 0;
  std::atomic<int64_t> next{0};
  int64_t generation = 0;
  bool open = false;  // a job is there to join; the caller closes it when no chunk is left
  int active = 0;     // workers inside the job
  bool stop = false;
  std::exception_ptr error;

  void join() {
    {
      std::lock_guard lock(mutex);
      stop = true;
    }
    start.notify_all();
    for (auto& w : workers) w.join();
  }

  void work() {
    for (;;) {
      const int64_t c = next.fetch_add(1);
      if (c >= num_chunks) return;
      try {
        (*body)(c * chunk, std::min(n, (c + 1) * chunk));
      } catch (...) {
        std::lock_guard lock(mutex);
        if (!error) error = std::current_exception();
      }
    }
  }

  void loop() {
    int64_t seen = 0;
    for (;;) {
      {
        std::unique_lock lock(mutex);
        start.wait(lock, [&] { return stop || generation != seen; });
        if (stop) return;
        seen = generation;
        if (!open) continue;  // woken too late: others did it all, nobody waits for us
        ++active;
      }
      work();
      std::lock_guard lock(mutex);
      if (--active == 0) finish.notify_one();
    }
  }
};

ThreadPool::ThreadPool(int num_threads) : state_(std::make_unique<State>()) {
  FP4T_CHECK(num_threads >= 1, num_threads, " threads");
  try {
    for (int i = 1; i < num_threads; ++i) state_->workers.emplace_back([this] { state_->loop(); });
  } catch (const std::system_error& e) {
    const size_t started = state_->workers.size() + 1;
    state_->join();
    throw RecipeError(detail::concat("run.threads: ", num_threads, " threads, and the system gives ", started,
                                     " (", e.what(), ")"));
  }
}

ThreadPool::~ThreadPool() { state_->join(); }

int ThreadPool::size() const { return static_cast<int>(state_->workers.size()) + 1; }

void ThreadPool::run(int64_t n, int64_t chunk, const std::function<void(int64_t, int64_t)>& body) {
  if (n <= 0) return;
  FP4T_CHECK(chunk >= 1, "chunk ", chunk);
  State& s = *state_;
  const int64_t chunks = ceil_div(n, chunk);
  if (s.workers.empty() || chunks == 1) {
    for (int64_t c = 0; c < chunks; ++c) body(c * chunk, std::min(n, (c + 1) * chunk));
    return;
  }
  {
    std::lock_guard lock(s.mutex);
    s.body = &body;
    s.n = n;
    s.chunk = chunk;
    s.num_chunks = chunks;
    s.next = 0;
    s.open = true;
    s.error = nullptr;
    ++s.generation;
  }
  s.start.notify_all();
  s.work();
  std::unique_lock lock(s.mutex);
  s.open = false;
  s.finish.wait(lock, [&] { return s.active == 0; });
  if (s.error) std::rethrow_exception(s.error);
}

}  // namespace fp4t

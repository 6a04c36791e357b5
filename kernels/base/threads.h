// A fixed pool of threads for the CPU bodies. Work is cut into chunks by size alone, never by the
// number of threads, so the same chunks (and the same bits) arise on any machine.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>

namespace fp4t {

class ThreadPool {
 public:
  explicit ThreadPool(int num_threads);  // >= 1; the caller is one of them
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int size() const;

  // Calls body(begin, end) for [0, n) in chunks of `chunk` (the last may be shorter), in any order and
  // on any thread; returns when all are done. The first exception of a body is rethrown here. Not
  // reentrant: a body must not call run() on the same pool.
  void run(int64_t n, int64_t chunk, const std::function<void(int64_t, int64_t)>& body);

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace fp4t

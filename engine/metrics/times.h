// times.jsonl: when the lines of metrics.jsonl were written, {"line", "seconds"} each. It is no part of what
// a run computes: what cannot be read of an earlier process's is left out.
#pragma once

#include <chrono>
#include <cstdint>
#include <cstdio>
#include <memory>
#include <string>

namespace fp4t {

class TimesWriter {
 public:
  // Keeps the times of the first `keep_lines` lines of metrics.jsonl in <run_dir>/times.jsonl; the clock goes
  // on from the last of them. Throws SaveError, as adding does.
  TimesWriter(const std::string& run_dir, int64_t keep_lines);
  // Line `line` of metrics.jsonl was written now. Flushed at once.
  void add(int64_t line);

 private:
  std::string path_;
  std::chrono::steady_clock::time_point start_;
  double earlier_ = 0;
  std::unique_ptr<std::FILE, int (*)(std::FILE*)> file_{nullptr, std::fclose};
};

}  // namespace fp4t

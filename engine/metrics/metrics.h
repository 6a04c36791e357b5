// What a run reports: metrics.jsonl (the truth, one object a step, first line a header), a TensorBoard
// event file, console lines, summary.json. Times and rates never go to metrics.jsonl: when its lines were
// written stands in times.jsonl beside it.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace fp4t {

// One step's figures in order of appearance; values are doubles or texts already encoded as JSON.
struct MetricsRecord {
  std::vector<std::pair<std::string, double>> numbers;
  std::vector<std::pair<std::string, std::string>> texts;          // plain text, gets escaped
  std::vector<std::pair<std::string, std::vector<double>>> lists;  // expert load, errors by layer
};

class MetricsWriter {
 public:
  // Opens <run_dir>/metrics.jsonl, keeping the first `keep_lines` lines (a header counts) and cutting the
  // rest; 0 starts a new file with `header_json` as its first line. The first write opens a new TensorBoard
  // file. Throws BadDataError, and cuts nothing, when a line to keep is damaged: the report would be refused
  // for it at the end. Throws SaveError, as every write does.
  MetricsWriter(const std::string& run_dir, int64_t keep_lines, const std::string& header_json);
  ~MetricsWriter();

  // Appends one line {"kind": kind, "stage": stage, "step": step, ...}; also to TensorBoard under
  // "<stage>/<key>" at `global_step`, and to times.jsonl {"line": its number, "seconds": of the run, without
  // those of processes between a checkpoint and their end}. Flushed at once.
  void write(const std::string& kind, const std::string& stage, int64_t step, int64_t global_step,
             const MetricsRecord& record);
  int64_t lines() const;
  // On disk when it returns: before a checkpoint counts these lines. Throws SaveError.
  void sync();

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

// Console: one line a step; carriage-return progress only on a terminal. Rank 0 only.
class Console {
 public:
  // Launchers show each rank a terminal that is none: its output is kPlain.
  enum class Screen : uint8_t { kFound, kPlain };
  explicit Console(const std::string& run_dir,
                   Screen screen = Screen::kFound);  // logs to <run_dir>/log.txt, too
  Console();                                         // of every other rank: silent
  ~Console();
  void line(const std::string& text);  // information
  void warn(const std::string& text);
  // A transient status inside a step ("sampling 120/512"): replaced by the next line on a terminal; on a
  // plain output printed at most every 10 seconds, so that nothing is silent for long.
  void status(const std::string& text);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

// <run_dir>/report.html from <run_dir>/{metrics.jsonl, times.jsonl, summary.json, plan.json}: self-contained,
// curves as SVG. Draws what is there; throws BadDataError when the files are damaged, naming file and line,
// and MissingInputError without metrics.jsonl. The same of several runs beside each other, at `path`.
void write_report(const std::string& run_dir);
void write_report(const std::vector<std::string>& run_dirs, const std::string& path);

// The folder and those above it. Throws SaveError.
void make_run_folder(const std::string& path);

// Atomic small-file write (temporary file, fsync, rename). Throws SaveError.
void write_text_file(const std::string& path, const std::string& text);

}  // namespace fp4t

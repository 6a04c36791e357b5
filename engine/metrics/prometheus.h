// The newest figures of a run as a text file in Prometheus' exposition format (version 0.0.4), for the
// textfile collector of node_exporter. Replaced whole by rename, so that no reader sees half of it; it is not
// synced, as it says nothing that metrics.jsonl does not.
#pragma once

#include <cstdint>
#include <map>
#include <string>

#include "engine/metrics/metrics.h"

namespace fp4t {

class PrometheusFile {
 public:
  // Whether a file can be put there; leaves nothing behind. Throws SaveError with the system's reason.
  static void check_place(const std::string& path);

  // Every sample carries {run="...", stage="..."}. Writes a first file. Throws SaveError, as update does.
  PrometheusFile(const std::string& path, const std::string& run);

  // A line of metrics.jsonl: its numbers become gauges fp4train_<key>, or fp4train_eval_<key> of kind "eval";
  // what follows a first dot in a key is the label `of`. Of "step" lines the step and the tokens so far are
  // counters, fp4train_steps_total and fp4train_tokens_total.
  void update(const std::string& kind, const std::string& stage, int64_t step, const MetricsRecord& record,
              double unix_seconds);
  std::string text() const;

 private:
  struct Family {
    std::string type, help;
    std::map<std::string, double> samples;  // by labels
  };
  void set(const std::string& name, const char* type, const std::string& help, const std::string& labels,
           double value);
  void write() const;

  std::string path_, run_;
  std::map<std::string, Family> families_;
};

}  // namespace fp4t

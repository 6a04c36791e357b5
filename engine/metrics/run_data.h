// A run folder as the report sees it: metrics.jsonl read once, line by line, into columns. A run of a million
// steps needs the memory of its numbers, not of its text. Whatever a file holds that is not what a run writes
// is passed over, but for lines that are no metrics at all.
#pragma once

#include <cstdint>
#include <limits>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

namespace fp4t {

// Lines of one kind ("step", "eval") of a stage, in the order of the file.
struct MetricRows {
  // What a chart's x may be: the step, tokens of the stage so far, seconds since the stage's first line; NaN
  // where it is not known.
  std::vector<double> step, tokens, seconds;
  // By key: row and value; NaN for a value that is not finite.
  std::map<std::string, std::vector<std::pair<int32_t, double>>> columns;
};

// Figures of one quantised operand in one layer, summed over the lines that measured it.
struct OperandFigures {
  enum Figure { kError, kFlushed, kClipped, kChoseFour, kBias, kNumFigures };
  double sum[kNumFigures] = {};
  double count[kNumFigures] = {};
  double mean(int figure) const { return count[figure] > 0 ? sum[figure] / count[figure] : kMissing; }
  static constexpr double kMissing = std::numeric_limits<double>::quiet_NaN();
};

struct ExpertLoad {
  double step = 0;
  std::vector<std::vector<double>> layers;  // [MoE layer][expert] tokens
};

struct TextSample {
  double step = 0;
  std::string name, text;
};

// One completion of a rollout file (engine/stage/rollout_files.h).
struct RolloutSample {
  double step = 0, reward = 0;
  std::string prompt, answer, completion, verdict;
};

struct StageData {
  std::string name;
  MetricRows steps, evals;
  std::map<std::string, std::map<int64_t, OperandFigures>> operands;  // "attn.qkv.fprop.act", by layer
  ExpertLoad first_load, last_load;                                   // no layers: none
  std::vector<TextSample> samples;
  int64_t samples_left_out = 0;         // between the first and the newest
  std::vector<RolloutSample> rollouts;  // some of the first and of the newest file
  bool has(const std::string& kind, const std::string& key) const {
    return (kind == "eval" ? evals : steps).columns.count(key) > 0;
  }
};

struct RunData {
  std::string dir;
  std::string label;                             // how the page calls it
  nlohmann::ordered_json header, summary, plan;  // null when they are not there
  std::vector<StageData> stages;                 // in the order of the run
  std::vector<std::string> notes;                // what is missing or cut
  const StageData* stage(const std::string& name) const;
};

// Adds completions of <dir>/rollouts to the stages (run_rollouts.cpp); what cannot be read is noted.
void read_rollouts(RunData& run);

// Throws MissingInputError without metrics.jsonl, and BadDataError for a file or a line that is damaged,
// naming it; a last line that a killed process tore is noted.
RunData read_run(const std::string& dir);

}  // namespace fp4t

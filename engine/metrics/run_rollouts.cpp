// Completions for the report: of the first and the newest rollout file of every stage those with the largest
// and those with the smallest rewards.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <filesystem>
#include <sstream>

#include "engine/metrics/run_data.h"
#include "kernels/base/check.h"
#include "kernels/base/text.h"
#include "kernels/base/text_file.h"

namespace fp4t {

namespace {

constexpr size_t kSamplesOfAnEnd = 4;  // best and worst, of a file
constexpr size_t kMostSampleBytes = 8000;

struct RolloutFile {
  long stage = 0, step = 0;
  std::filesystem::path path;
};

std::vector<RolloutFile> rollout_files(RunData& run) {
  std::vector<RolloutFile> files;
  const std::string folder = run.dir + "/rollouts";
  std::error_code error;
  for (std::filesystem::directory_iterator it(folder, error), end; !error && it != end; it.increment(error)) {
    RolloutFile file;
    int read = 0;
    const std::string name = it->path().filename().string();
    if (std::sscanf(name.c_str(), "stage-%ld-step-%ld.jsonl%n", &file.stage, &file.step, &read) != 2)
      continue;
    if (read != static_cast<int>(name.size())) continue;
    file.path = it->path();
    files.push_back(file);
  }
  if (error && error != std::errc::no_such_file_or_directory)
    run.notes.push_back("cannot list " + printable(folder) + ": " + error.message());
  std::sort(files.begin(), files.end(), [](const RolloutFile& a, const RolloutFile& b) {
    return std::pair(a.stage, a.step) < std::pair(b.stage, b.step);
  });
  return files;
}

std::string sample_text(const nlohmann::json& line, const char* key) {
  const auto it = line.find(key);
  if (it == line.end() || !it->is_string()) return "";
  std::string text = *it;
  if (text.size() > kMostSampleBytes) text = text.substr(0, kMostSampleBytes) + " [cut]";
  return text;
}

// Completions of a file, and the name of its stage; returns how many lines are damaged.
int64_t read_file(const RolloutFile& file, std::string& stage, std::vector<RolloutSample>& samples) {
  std::istringstream in(read_text_file(file.path));
  int64_t damaged = 0;
  for (std::string text; std::getline(in, text);) {
    const auto line = nlohmann::json::parse(text, nullptr, false);
    if (!line.is_object() || !line.contains("completion")) {
      ++damaged;
      continue;
    }
    stage = sample_text(line, "stage");
    const auto reward = line.find("reward");
    const bool is_number = reward != line.end() && reward->is_number();
    samples.push_back({static_cast<double>(file.step), is_number ? reward->get<double>() : std::nan(""),
                       sample_text(line, "prompt"), sample_text(line, "answer"),
                       sample_text(line, "completion"), sample_text(line, "verdict")});
  }
  return damaged;
}

// The ends of the order by reward; what has no reward counts as the worst.
void keep_ends(std::vector<RolloutSample>& samples) {
  const auto key = [](const RolloutSample& s) { return std::isnan(s.reward) ? -INFINITY : s.reward; };
  std::stable_sort(samples.begin(), samples.end(),
                   [&](const RolloutSample& a, const RolloutSample& b) { return key(a) > key(b); });
  if (samples.size() <= 2 * kSamplesOfAnEnd) return;
  samples.erase(samples.begin() + kSamplesOfAnEnd, samples.end() - kSamplesOfAnEnd);
}

}  // namespace

void read_rollouts(RunData& run) {
  const std::vector<RolloutFile> files = rollout_files(run);
  int64_t damaged = 0;
  for (size_t i = 0; i < files.size(); ++i) {
    const bool first = i == 0 || files[i - 1].stage != files[i].stage;
    const bool last = i + 1 == files.size() || files[i + 1].stage != files[i].stage;
    if (!first && !last) continue;
    std::string name;
    std::vector<RolloutSample> samples;
    try {
      damaged += read_file(files[i], name, samples);
    } catch (const Error& e) {
      run.notes.push_back(std::string(e.what()) + "; it is left out");
      continue;
    }
    keep_ends(samples);
    for (StageData& stage : run.stages) {
      if (stage.name == name) stage.rollouts.insert(stage.rollouts.end(), samples.begin(), samples.end());
    }
  }
  if (damaged > 0)
    run.notes.push_back(std::to_string(damaged) + " lines of rollouts are damaged and left out.");
}

}  // namespace fp4t

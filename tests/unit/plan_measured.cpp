// The model of step times and the plan's memory against what scripts/bench/RESULTS.md records, read from that
// file: a change in either is noticed. Bounds: 15% of time, 2% of memory.
#include <gtest/gtest.h>

#include <fstream>
#include <sstream>

#include "tests/support/predictions.h"

namespace fp4t::test {
namespace {

// The `index`-th number in a cell of the first table row that begins so, below a heading.
double measured(const std::string& heading, const std::string& row, size_t cell = 1, size_t index = 0) {
  std::ifstream file(source_path("scripts/bench/RESULTS.md"));
  std::string line;
  while (std::getline(file, line) && line.find(heading) != 0) {
  }
  while (std::getline(file, line) && line.find("| " + row + " |") != 0) {
  }
  std::vector<std::string> cells;
  std::stringstream parts(line);
  for (std::string part; std::getline(parts, part, '|');) cells.push_back(part);
  if (cells.size() <= cell + 1) {
    ADD_FAILURE() << "RESULTS.md has no row " << row << " below " << heading;
    return 0;
  }
  std::vector<double> numbers;
  std::string digits;
  for (const char c : cells[cell + 1] + " ") {
    if (std::isdigit(static_cast<unsigned char>(c)) || (c == '.' && !digits.empty())) {
      digits += c;
    } else if (c != ',' && !digits.empty()) {
      numbers.push_back(std::stod(digits));
      digits.clear();
    }
  }
  return numbers.size() > index ? numbers[index] : 0;
}

constexpr const char* kWhole = "## Whole model";
constexpr double kTime = 0.15, kMemory = 0.02;

void expect_within(const std::string& what, double predicted, double found, double bound) {
  std::printf("%-44s predicted %9.3f measured %9.3f  %+.1f%%\n", what.c_str(), predicted, found,
              (predicted / found - 1) * 100);
  EXPECT_NEAR(predicted / found, 1, bound) << what;
}

Planned on_h200(const std::string& recipe, const std::string& preset) {
  return planned("configs/bench/" + recipe + ".yaml", "h200", 1, {"precision={preset: " + preset + "}"});
}

// Milliseconds of a step from tokens a second.
double ms_of(double tokens_per_s) { return 32768 / tokens_per_s * 1e3; }

void expect_step(const std::string& recipe, const std::string& preset, double forward_backward,
                 double whole) {
  const Planned p = on_h200(recipe, preset);
  const StagePrediction stage = p.prediction().stages.at(0);
  const std::string name = recipe + " " + preset;
  expect_within(name + ", forward+backward, ms", stage.forward_backward_seconds * 1e3,
                ms_of(forward_backward), kTime);
  expect_within(name + ", whole step, ms", stage.step_seconds() * 1e3, ms_of(whole), kTime);
}

double gib(const Plan& plan) { return static_cast<double>(plan.memory.total_bytes()) / 0x1p30; }

TEST(PlanMeasured, q6_in_bf16) {
  expect_step("q6", "bf16", measured(kWhole, "Q6, 32,768 tokens, BF16, forward+backward"),
              measured(kWhole, "Q6 whole step; forced balance"));
  const Planned p = on_h200("q6", "bf16");
  const double update = p.prediction().stages[0].phases[static_cast<size_t>(Phase::kUpdate)].total();
  expect_within("q6, update, ms", update * 1e3,
                measured(kWhole, "Q6 optimizer step (norm, clip, AdamW, copies)"), kTime);
  expect_within("q6, GiB", gib(p.plan()), measured(kWhole, "Q6 memory"), kMemory);
}

TEST(PlanMeasured, q6_in_emulated_nvfp4) {
  expect_step("q6", "nvidia_nvfp4", measured(kWhole, "Q6 `nvidia_nvfp4` over our BF16, forward+backward"),
              measured(kWhole, "the same, whole step"));
}

TEST(PlanMeasured, m2_in_bf16) {
  expect_step("m2", "bf16", measured(kWhole, "M2, 32,768 tokens, BF16, forward+backward"),
              measured(kWhole, "M2 whole step"));
  const Planned p = on_h200("m2", "bf16");
  const double update = p.prediction().stages[0].phases[static_cast<size_t>(Phase::kUpdate)].total();
  expect_within("m2, update, ms", update * 1e3, measured(kWhole, "M2 optimizer step"), kTime);
  expect_within("m2, GiB", gib(p.plan()), measured(kWhole, "M2 memory"), kMemory);
}

TEST(PlanMeasured, m2_in_emulated_nvfp4) {
  const char* row = "M2 `nvidia_nvfp4` over our BF16, forward+backward; whole step";
  expect_step("m2", "nvidia_nvfp4", measured(kWhole, row, 1, 0), measured(kWhole, row, 1, 1));
}

TEST(PlanMeasured, q6_decodes) {
  for (const auto& [preset, cell] : {std::pair{"bf16", size_t{1}}, {"rl_nvfp4", size_t{3}}}) {
    const Planned p = on_h200("q6", preset);
    for (const int64_t batch : {1, 16, 64, 256}) {
      const double rate = measured("### Decoding", std::to_string(batch), cell);
      const double ms =
          decode_call_ms(p.plan(), p.machine, p.plan().stages[0].precision.sampler.at(0), batch, 1024);
      expect_within(std::string("q6 ") + preset + ", decode " + std::to_string(batch) + ", ms", ms,
                    static_cast<double>(batch) / rate * 1e3, kTime);
    }
  }
}

TEST(PlanMeasured, the_quickstart_on_two_cores) {
  const char* heading = "## On a CPU";
  const Planned p = planned("configs/quickstart.yaml", "cpu");
  expect_within("quickstart, cpu, ms", p.prediction().stages.at(0).step_seconds() * 1e3,
                measured(heading, "the recipe's own", 2), kTime);
  for (const char* preset : {"bf16", "mxfp8", "nvidia_nvfp4", "quartet2"}) {
    const Planned q =
        planned("configs/quickstart.yaml", "cpu", 1, {std::string("precision={preset: ") + preset + "}"});
    expect_within(std::string("quickstart ") + preset + ", cpu, ms",
                  q.prediction().stages.at(0).step_seconds() * 1e3,
                  measured(heading, std::string("`") + preset + "`", 2), kTime);
  }
}

}  // namespace
}  // namespace fp4t::test

// The model of step times and the plan's memory against what scripts/bench/RESULTS.md records, read from that
// file: a change in either is noticed. Bounds: 15% of time, 2% of memory.
#include <gtest/gtest.h>

#include <fstream>
#include <sstream>

#include "tests/support/predictions.h"

namespace fp4t::test {
namespace {

// The numbers in a cell of the first table row that begins so, below a heading of a page.
std::vector<double> numbers_in(const std::string& page, const std::string& heading, const std::string& row,
                               size_t cell) {
  std::ifstream file(source_path(page));
  std::string line;
  while (std::getline(file, line) && line.find(heading) != 0) {
  }
  while (std::getline(file, line) && line.find("| " + row + " |") != 0) {
  }
  std::vector<std::string> cells;
  std::stringstream parts(line);
  for (std::string part; std::getline(parts, part, '|');) cells.push_back(part);
  std::vector<double> numbers;
  if (cells.size() <= cell + 1) return numbers;
  std::string digits;
  for (const char c : cells[cell + 1] + " ") {
    if (std::isdigit(static_cast<unsigned char>(c)) || (c == '.' && !digits.empty())) {
      digits += c;
    } else if (!digits.empty() && !std::isdigit(static_cast<unsigned char>(c)) && c != ',') {
      numbers.push_back(std::stod(digits));
      digits.clear();
    }
  }
  return numbers;
}

// Of RESULTS.md.
double measured(const std::string& heading, const std::string& row, size_t cell = 1, size_t index = 0) {
  const std::vector<double> numbers = numbers_in("scripts/bench/RESULTS.md", heading, row, cell);
  EXPECT_GT(numbers.size(), index) << "RESULTS.md has no row " << row << " below " << heading;
  return numbers.size() > index ? numbers[index] : 0;
}

// Of the table in engine/plan/README.md, whose last column is what is predicted now: rounded as printed.
void expect_in_readme(const std::string& row, size_t index, double predicted, double step) {
  const std::vector<double> numbers = numbers_in("engine/plan/README.md", "### Against measurement", row, 3);
  ASSERT_GT(numbers.size(), index) << row;
  EXPECT_NEAR(numbers[index], predicted, step / 2 * 1.001) << "engine/plan/README.md, " << row;
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

void expect_step(const std::string& recipe, const std::string& preset, const std::string& row,
                 double forward_backward, double whole) {
  const Planned p = on_h200(recipe, preset);
  const StagePrediction stage = p.prediction().stages.at(0);
  const std::string name = recipe + " " + preset;
  expect_within(name + ", forward+backward, ms", stage.forward_backward_seconds * 1e3,
                ms_of(forward_backward), kTime);
  expect_within(name + ", whole step, ms", stage.step_seconds() * 1e3, ms_of(whole), kTime);
  expect_in_readme(row, 0, stage.forward_backward_seconds * 1e3, 0.1);
  expect_in_readme(row, 2, stage.step_seconds() * 1e3, 0.1);  // behind a percentage
}

double gib(const Plan& plan) { return static_cast<double>(plan.memory.total_bytes()) / 0x1p30; }

TEST(PlanMeasured, q6_in_bf16) {
  expect_step("q6", "bf16", "Q6, BF16, forward+backward; whole step",
              measured(kWhole, "Q6, 32,768 tokens, BF16, forward+backward"),
              measured(kWhole, "Q6 whole step; forced balance"));
  const Planned p = on_h200("q6", "bf16");
  const double update = p.prediction().stages[0].phases[static_cast<size_t>(Phase::kUpdate)].total();
  expect_within("q6, update, ms", update * 1e3,
                measured(kWhole, "Q6 optimizer step (norm, clip, AdamW, copies)"), kTime);
  expect_within("q6, GiB", gib(p.plan()), measured(kWhole, "Q6 memory"), kMemory);
  expect_in_readme("optimizer step: Q6; M2", 0, update * 1e3, 0.1);
  expect_in_readme("memory, GiB: Q6; M2", 0, gib(p.plan()), 0.01);
}

TEST(PlanMeasured, q6_in_emulated_nvfp4) {
  expect_step("q6", "nvidia_nvfp4", "Q6, `nvidia_nvfp4`",
              measured(kWhole, "Q6 `nvidia_nvfp4` over our BF16, forward+backward"),
              measured(kWhole, "the same, whole step"));
}

TEST(PlanMeasured, m2_in_bf16) {
  expect_step("m2", "bf16", "M2, BF16", measured(kWhole, "M2, 32,768 tokens, BF16, forward+backward"),
              measured(kWhole, "M2 whole step"));
  const Planned p = on_h200("m2", "bf16");
  const double update = p.prediction().stages[0].phases[static_cast<size_t>(Phase::kUpdate)].total();
  expect_within("m2, update, ms", update * 1e3, measured(kWhole, "M2 optimizer step"), kTime);
  expect_within("m2, GiB", gib(p.plan()), measured(kWhole, "M2 memory"), kMemory);
  expect_in_readme("optimizer step: Q6; M2", 2, update * 1e3, 0.1);
  expect_in_readme("memory, GiB: Q6; M2", 1, gib(p.plan()), 0.01);
}

TEST(PlanMeasured, m2_in_emulated_nvfp4) {
  const char* row = "M2 `nvidia_nvfp4` over our BF16, forward+backward; whole step";
  expect_step("m2", "nvidia_nvfp4", "M2, `nvidia_nvfp4`", measured(kWhole, row, 1, 0),
              measured(kWhole, row, 1, 1));
}

TEST(PlanMeasured, q6_decodes) {
  for (const auto& [preset, cell] : {std::pair{"bf16", size_t{1}}, {"rl_nvfp4", size_t{3}}}) {
    const Planned p = on_h200("q6", preset);
    size_t index = 0;
    for (const int64_t batch : {1, 16, 64, 256}) {
      const double rate = measured("### Decoding", std::to_string(batch), cell);
      const double ms =
          decode_call_ms(p.plan(), p.machine, p.plan().stages[0].precision.sampler.at(0), batch, 1024);
      expect_within(std::string("q6 ") + preset + ", decode " + std::to_string(batch) + ", ms", ms,
                    static_cast<double>(batch) / rate * 1e3, kTime);
      const bool plain = std::string(preset) == "bf16";
      expect_in_readme(plain ? "Q6 decode, BF16, batch 1, 16, 64, 256" : "Q6 decode, `rl_nvfp4`", index++, ms,
                       0.01);
    }
  }
}

// Whole steps of 32,768 tokens a GPU; memory without CUDA's context, which is there before a plan is made.
TEST(PlanMeasured, two_gpus) {
  constexpr const char* kTwo = "## Two GPUs";
  constexpr double kContextMib = 536;
  const struct {
    const char *results, *readme;
    size_t memory_cell;
    std::vector<std::string> sets;
  } layouts[] = {{"data parallel (`zero: 1`)", "two H200, data parallel: Q6; M2", 2, {"parallel.zero=1"}},
                 {"`zero: 3`", "two H200, `zero: 3`: Q6; M2", 3, {"parallel.zero=3"}},
                 {"`expert: 2`, `expert_chunks: 1`",
                  "two H200, `expert: 2`, one chunk: Q6; M2",
                  4,
                  {"parallel.expert=2"}}};
  const std::string memory =
      "two H200, memory, GiB, CUDA's context left out: Q6 data, `zero: 3`, `expert: 2`";
  size_t layout_index = 0;
  for (const auto& layout : layouts) {
    size_t recipe_index = 0;
    for (const std::string recipe : {"q6", "m2"}) {
      std::vector<std::string> sets = {"precision={preset: bf16}", "stages[0].pretrain.batch.tokens=65536"};
      sets.insert(sets.end(), layout.sets.begin(), layout.sets.end());
      const Planned p = planned("configs/bench/" + recipe + ".yaml", "h200", 2, sets);
      const double ms = p.prediction().stages.at(0).step_seconds() * 1e3;
      const std::string name = recipe + ", two GPUs, " + layout.sets[0];
      expect_within(name + ", ms", ms, measured(kTwo, layout.results, recipe == "q6" ? 1 : 4), kTime);
      expect_in_readme(layout.readme, 2 * recipe_index, ms, 1);
      const double used =
          measured(kTwo, recipe == "q6" ? "Q6 memory" : "M2 memory (data parallel and `zero: 3`: 0052baa)",
                   layout.memory_cell) -
          kContextMib;
      expect_within(name + ", GiB", gib(p.plan()), used / 1024, kMemory);
      if (recipe == "q6") expect_in_readme(memory, layout_index, gib(p.plan()), 0.01);
      ++recipe_index;
    }
    ++layout_index;
  }
}

TEST(PlanMeasured, the_quickstart_on_two_cores) {
  const char* heading = "## On a CPU";
  const Planned p = planned("configs/quickstart.yaml", "cpu");
  expect_within("quickstart, cpu, ms", p.prediction().stages.at(0).step_seconds() * 1e3,
                measured(heading, "the recipe's own", 2), kTime);
  expect_in_readme("quickstart, two CPU cores", 0, p.prediction().stages.at(0).step_seconds() * 1e3, 0.1);
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

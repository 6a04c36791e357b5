// The quickstart's model learns on the GPU as it does on the CPU: the loss of each of the first 20 steps.
#include <cmath>

#include "tests/support/gpu_main.h"
#include "tests/support/runs_in_process.h"

namespace fp4t::test {
namespace {

constexpr double kNats = 2e-3;
constexpr int kSteps = 20;

// The quickstart on a small text, with its precision exchanged where a preset is named.
std::vector<std::string> overrides(const std::string& device, const std::string& preset) {
  std::vector<std::string> list = {"run.device=" + device,
                                   "run.dir=" + device,
                                   "run.resume=never",
                                   "stages[0].pretrain.steps=" + std::to_string(kSteps),
                                   "stages[0].pretrain.data[0].paths=text",
                                   "stages[0].pretrain.eval.tokens=2048",
                                   "stages[1].rl.steps=1",
                                   "stages[1].rl.sampling.prompts=2",
                                   "stages[1].rl.eval.task_problems=4"};
  if (!preset.empty()) list.push_back("precision={preset: " + preset + "}");
  return list;
}

class GpuLosses : public testing::TestWithParam<std::string> {};

TEST_P(GpuLosses, of_twenty_steps_agree_with_the_cpus) {
  const ScratchFolder folder;
  write_corpus(folder.path());
  const std::string recipe = read_text(from_environment("FP4T_TEST_SOURCE") + "/configs/quickstart.yaml");
  for (const char* device : {"cpu", "cuda"}) run_here(folder.path(), recipe, overrides(device, GetParam()));
  const auto cpu = step_figures(folder / "cpu", "pretrain", "loss");
  const auto gpu = step_figures(folder / "cuda", "pretrain", "loss");
  ASSERT_EQ(cpu.size(), static_cast<size_t>(kSteps));
  ASSERT_EQ(gpu.size(), cpu.size());
  double worst = 0;
  for (size_t i = 0; i < cpu.size(); ++i) {
    EXPECT_LE(std::abs(cpu[i] - gpu[i]), kNats) << "step " << i + 1 << ": " << cpu[i] << ", " << gpu[i];
    worst = std::max(worst, std::abs(cpu[i] - gpu[i]));
  }
  EXPECT_LT(cpu.back(), cpu.front());
  std::printf("%s: losses differ by at most %.2g nat\n",
              GetParam().empty() ? "quickstart" : GetParam().c_str(), worst);
}

INSTANTIATE_TEST_SUITE_P(Precision, GpuLosses,
                         testing::Values("", "fp32", "bf16", "mxfp8", "nvidia_nvfp4", "quartet2"),
                         [](const auto& i) { return i.param.empty() ? "quickstart" : i.param; });

}  // namespace
}  // namespace fp4t::test

FP4T_GPU_TEST_MAIN

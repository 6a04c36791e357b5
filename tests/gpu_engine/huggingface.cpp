// The fp32 preset on a GPU against Hugging Face transformers: the same bounds as on the CPU.
#include "tests/support/gpu_main.h"
#include "tests/support/huggingface_oracle.h"

namespace fp4t::test {
namespace {

TEST(GpuHuggingFace, qwen3_moe_loss_logits_and_every_gradient_match_the_library) {
  matches_oracle("qwen3_moe", "none", probe_machine("cuda", 2));
  matches_oracle("qwen3_moe", "block", probe_machine("cuda", 2));
}

TEST(GpuHuggingFace, llama_loss_logits_and_every_gradient_match_the_library) {
  matches_oracle("llama", "none", probe_machine("cuda", 2));
}

TEST(GpuHuggingFace, qwen3_and_mixtral_match_the_library) {
  matches_oracle("qwen3", "none", probe_machine("cuda", 2));
  matches_oracle("mixtral", "none", probe_machine("cuda", 2));
}

}  // namespace
}  // namespace fp4t::test

FP4T_GPU_TEST_MAIN

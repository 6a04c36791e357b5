// Import, forward and backward against Hugging Face transformers (tests/support/huggingface_oracle.h).
#include "gtest/gtest.h"
#include "tests/support/huggingface_oracle.h"

namespace fp4t::test {
namespace {

TEST(HuggingFace, qwen3_moe_loss_logits_and_every_gradient_match_the_library) {
  matches_oracle("qwen3_moe", "none", probe_machine("cpu", 2));
  matches_oracle("qwen3_moe", "block", probe_machine("cpu", 2));
}

TEST(HuggingFace, llama_loss_logits_and_every_gradient_match_the_library) {
  matches_oracle("llama", "none", probe_machine("cpu", 2));
  matches_oracle("llama", "block", probe_machine("cpu", 2));
}

TEST(HuggingFace, qwen3_loss_logits_and_every_gradient_match_the_library) {
  matches_oracle("qwen3", "none", probe_machine("cpu", 2));
}

TEST(HuggingFace, mixtral_loss_logits_and_every_gradient_match_the_library) {
  matches_oracle("mixtral", "none", probe_machine("cpu", 2));
}

}  // namespace
}  // namespace fp4t::test

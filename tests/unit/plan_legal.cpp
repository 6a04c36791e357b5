// Every combination that NUMERICS.md section 0.0 forbids is refused with its reason, and its neighbours
// pass.
#include "engine/plan/legal.h"

#include <gtest/gtest.h>

namespace fp4t {
namespace {

QuantSpec nvfp4() {
  QuantSpec s;
  s.format = Format::kNvfp4;
  return s;
}
QuantSpec with(Format f) {
  QuantSpec s;
  s.format = f;
  return s;
}
QuantSpec ms_eden() {
  QuantSpec s = nvfp4();
  s.rounding = Rounding::kMsEden;
  s.hadamard = 128;
  s.signs = Signs::kFresh;
  return s;
}

std::string joined(const std::vector<std::string>& problems) {
  std::string text;
  for (const std::string& p : problems) text += p + "\n";
  return text;
}
std::string operand(const QuantSpec& s, GemmRole g = GemmRole::kFprop, OperandRole o = OperandRole::kAct) {
  return joined(problems_of_operand(s, g, o));
}

#define EXPECT_HAS(text, part) EXPECT_NE((text).find(part), std::string::npos) << "in: " << (text)

TEST(PlanLegal, defaults_of_every_format_are_legal) {
  for (const Format f : {Format::kBf16, Format::kFp32, Format::kMxfp8, Format::kNvfp4}) {
    EXPECT_EQ(operand(with(f)), "") << name_of(f);
    EXPECT_EQ(joined(problems_of_pair(with(f), with(f))), "") << name_of(f);
  }
  EXPECT_EQ(operand(ms_eden(), GemmRole::kDgrad, OperandRole::kGrad), "");
}

TEST(PlanLegal, other_formats_take_no_nvfp4_keys) {
  QuantSpec s = with(Format::kMxfp8);
  s.rounding = Rounding::kStochastic;
  EXPECT_HAS(operand(s), "only nvfp4 takes");
  QuantSpec source = with(Format::kBf16);
  source.source = Source::kForward;
  EXPECT_EQ(operand(source, GemmRole::kDgrad, OperandRole::kWeight), "");
  EXPECT_HAS(operand(source), "fprop is the forward");
}

TEST(PlanLegal, row_scope_is_for_fprop_activations_in_rows) {
  QuantSpec s = nvfp4();
  s.scale_scope = ScaleScope::kRow;
  EXPECT_EQ(operand(s), "");
  EXPECT_HAS(operand(s, GemmRole::kFprop, OperandRole::kWeight), "only for the activation of fprop");
  EXPECT_HAS(operand(s, GemmRole::kWgrad, OperandRole::kAct), "only for the activation of fprop");
  s.block = BlockShape::k16x16;
  EXPECT_HAS(operand(s), "needs 1x16");
}

TEST(PlanLegal, stochastic_excludes_four_over_six_and_headroom_needs_stochastic_amax) {
  QuantSpec s = nvfp4();
  s.rounding = Rounding::kStochastic;
  s.headroom = Headroom::k17over16;
  EXPECT_EQ(operand(s, GemmRole::kDgrad, OperandRole::kGrad), "");
  s.scale_rule = ScaleRule::kFourOverSix;
  EXPECT_HAS(operand(s), "stochastic rounding excludes four_over_six");
  QuantSpec nearest = nvfp4();
  nearest.headroom = Headroom::k17over16;
  EXPECT_HAS(operand(nearest), "headroom goes only with stochastic");
}

TEST(PlanLegal, hadamard_excludes_16x16_and_its_keys_need_it) {
  QuantSpec s = nvfp4();
  s.hadamard = 16;
  EXPECT_EQ(operand(s), "");
  s.block = BlockShape::k16x16;
  EXPECT_HAS(operand(s), "hadamard excludes 16x16");
  s = nvfp4();
  s.signs = Signs::kFresh;
  EXPECT_HAS(operand(s), "signs without hadamard");
  s = nvfp4();
  s.hadamard_out = HadamardOut::kBf16;
  EXPECT_HAS(operand(s), "hadamard_out without hadamard");
  s = nvfp4();
  s.hadamard = 24;
  EXPECT_HAS(operand(s), "hadamard 24 is none of");
}

TEST(PlanLegal, ms_eden_excludes_what_the_contract_lists) {
  QuantSpec s = ms_eden();
  s.scale_rule = ScaleRule::kFourOverSix;
  EXPECT_HAS(operand(s), "ms_eden excludes four_over_six");
  s = ms_eden();
  s.scale_round = ScaleRound::kPow2;
  EXPECT_HAS(operand(s), "ms_eden excludes scale_round pow2");
  s = ms_eden();
  s.scale_scope = ScaleScope::kRow;
  EXPECT_HAS(operand(s), "ms_eden excludes scale_scope row");
  s = ms_eden();
  s.block = BlockShape::k16x16;
  EXPECT_HAS(operand(s), "ms_eden excludes 16x16");
  s = ms_eden();
  s.signs = Signs::kFixed;
  EXPECT_HAS(operand(s), "fresh signs");
}

TEST(PlanLegal, both_operands_of_a_gemm_must_fit) {
  EXPECT_EQ(joined(problems_of_pair(nvfp4(), with(Format::kBf16))), "");
  EXPECT_EQ(joined(problems_of_pair(with(Format::kBf16), with(Format::kMxfp8))), "");
  EXPECT_HAS(joined(problems_of_pair(nvfp4(), with(Format::kMxfp8))), "no block-scaled tensor core");
  EXPECT_HAS(joined(problems_of_pair(with(Format::kFp32), with(Format::kBf16))), "every cell");
  QuantSpec rotated = nvfp4();
  rotated.hadamard = 16;
  EXPECT_HAS(joined(problems_of_pair(rotated, nvfp4())), "hadamard must be the same");
  EXPECT_HAS(joined(problems_of_pair(rotated, with(Format::kBf16))), "hadamard must be the same");
  QuantSpec fresh = rotated;
  fresh.signs = Signs::kFresh;
  EXPECT_HAS(joined(problems_of_pair(rotated, fresh)), "hadamard must be the same");
  QuantSpec nearest = ms_eden();
  nearest.rounding = Rounding::kNearest;
  EXPECT_HAS(joined(problems_of_pair(ms_eden(), nearest)), "ms_eden must be on both");
}

TEST(PlanLegal, nearest_1x16_weights_must_not_be_quantised_anew_for_dgrad) {
  EXPECT_HAS(joined(problems_of_weights(nvfp4(), nvfp4())), "see different weights");
  QuantSpec square = nvfp4();
  square.block = BlockShape::k16x16;
  EXPECT_EQ(joined(problems_of_weights(square, square)), "");
  QuantSpec forward = nvfp4();
  forward.source = Source::kForward;
  EXPECT_EQ(joined(problems_of_weights(nvfp4(), forward)), "");
  EXPECT_EQ(joined(problems_of_weights(nvfp4(), ms_eden())), "");
  EXPECT_EQ(joined(problems_of_weights(nvfp4(), with(Format::kMxfp8))), "");
  EXPECT_EQ(joined(problems_of_weights(nvfp4(), with(Format::kBf16))), "");
}

TEST(PlanLegal, the_forward_as_a_source_of_rows_needs_powers_of_two) {
  QuantSpec row = nvfp4();
  row.scale_scope = ScaleScope::kRow;
  QuantSpec bf16 = with(Format::kBf16);
  bf16.source = Source::kForward;
  EXPECT_HAS(joined(problems_of_activations(row, bf16)), "needs scale_round pow2");
  row.scale_round = ScaleRound::kPow2;
  EXPECT_EQ(joined(problems_of_activations(row, bf16)), "");
  QuantSpec rotated = nvfp4();
  rotated.hadamard = 32;
  EXPECT_HAS(joined(problems_of_weights(rotated, bf16)), "without hadamard");
}

}  // namespace
}  // namespace fp4t

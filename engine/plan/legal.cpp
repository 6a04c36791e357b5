#include "engine/plan/legal.h"

namespace fp4t {

namespace {

using Reasons = std::vector<std::string>;

void check_keys_have_format(const QuantSpec& s, Reasons& problems) {
  if (s.format == Format::kNvfp4) return;
  QuantSpec plain;
  plain.format = s.format;
  plain.source = s.source;
  if (s != plain) {
    problems.push_back(std::string("only nvfp4 takes block, scale, rounding and hadamard keys, this is ") +
                       name_of(s.format));
  }
}

void check_rounding(const QuantSpec& s, Reasons& problems) {
  const bool ms_eden = s.rounding == Rounding::kMsEden;
  if (s.rounding == Rounding::kStochastic && s.scale_rule == ScaleRule::kFourOverSix) {
    problems.push_back("stochastic rounding excludes four_over_six: the choice would follow the draw");
  }
  if (s.headroom == Headroom::k17over16 &&
      (s.rounding != Rounding::kStochastic || s.scale_rule != ScaleRule::kAmax)) {
    problems.push_back("headroom goes only with stochastic rounding and scale_rule amax");
  }
  if (!ms_eden) return;
  if (s.block == BlockShape::k16x16) problems.push_back("ms_eden excludes 16x16 blocks: use 1x16");
  if (s.scale_scope == ScaleScope::kRow) problems.push_back("ms_eden excludes scale_scope row: use tensor");
  if (s.scale_round == ScaleRound::kPow2) problems.push_back("ms_eden excludes scale_round pow2: use fp32");
  if (s.scale_rule == ScaleRule::kFourOverSix) {
    problems.push_back("ms_eden excludes four_over_six: use amax");
  }
  if (s.hadamard == 0 || s.signs != Signs::kFresh) {
    problems.push_back("ms_eden needs a hadamard rotation with fresh signs");
  }
}

void check_rotation(const QuantSpec& s, Reasons& problems) {
  const bool known =
      s.hadamard == 0 || s.hadamard == 16 || s.hadamard == 32 || s.hadamard == 64 || s.hadamard == 128;
  if (!known) {
    problems.push_back("hadamard " + std::to_string(s.hadamard) + " is none of none, 16, 32, 64, 128");
  }
  if (s.hadamard != 0 && s.block == BlockShape::k16x16) {
    problems.push_back("hadamard excludes 16x16 blocks: a rotation along one axis does not transpose");
  }
  if (s.hadamard == 0 && s.signs != Signs::kFixed) problems.push_back("signs without hadamard");
  if (s.hadamard == 0 && s.hadamard_out != HadamardOut::kFp32) {
    problems.push_back("hadamard_out without hadamard");
  }
}

}  // namespace

Reasons problems_of_operand(const QuantSpec& s, GemmRole gemm, OperandRole operand) {
  Reasons problems;
  check_keys_have_format(s, problems);
  if (s.scale_scope == ScaleScope::kRow) {
    if (gemm != GemmRole::kFprop || operand != OperandRole::kAct) {
      problems.push_back("scale_scope row is legal only for the activation of fprop");
    } else if (s.block != BlockShape::k1x16) {
      problems.push_back("scale_scope row needs 1x16 blocks (row is the default of RL forward activations)");
    }
  }
  if (s.source == Source::kForward && gemm == GemmRole::kFprop) {
    problems.push_back("source forward is for dgrad and wgrad: fprop is the forward");
  }
  if (s.source == Source::kForward && s.format == Format::kFp32) {
    problems.push_back("fp32 operands are the masters: source forward does not apply");
  }
  check_rounding(s, problems);
  check_rotation(s, problems);
  return problems;
}

Reasons problems_of_pair(const QuantSpec& a, const QuantSpec& b) {
  Reasons problems;
  if (a.format != b.format) {
    const std::string names = std::string(name_of(a.format)) + " with " + name_of(b.format);
    if (a.format == Format::kFp32 || b.format == Format::kFp32) {
      problems.push_back(names + " in one GEMM: fp32 is legal only when every cell has it");
    } else if (a.quantised() && b.quantised()) {
      problems.push_back(names + " in one GEMM: no block-scaled tensor core takes the pair");
    }
  }
  // A rotation cancels only when both sides have the same one.
  if (a.hadamard != b.hadamard || (a.hadamard != 0 && a.signs != b.signs)) {
    problems.push_back("hadamard must be the same on both operands of a GEMM");
  }
  if ((a.rounding == Rounding::kMsEden) != (b.rounding == Rounding::kMsEden)) {
    problems.push_back("ms_eden must be on both operands of a GEMM");
  }
  return problems;
}

namespace {

void check_source(const QuantSpec& fprop, const QuantSpec& backward, Reasons& problems) {
  if (backward.source != Source::kForward) return;
  if (fprop.hadamard != 0) {
    problems.push_back(
        "source forward needs a forward operand without hadamard: its codes are rotated along "
        "the other axis");
  }
  if (fprop.format == Format::kNvfp4 && fprop.scale_scope == ScaleScope::kRow &&
      fprop.scale_round != ScaleRound::kPow2) {
    problems.push_back(
        "source forward of an operand with scale_scope row needs scale_round pow2 there: only "
        "then is code x scale exact in BF16");
  }
}

}  // namespace

Reasons problems_of_weights(const QuantSpec& fprop, const QuantSpec& dgrad) {
  Reasons problems;
  check_source(fprop, dgrad, problems);
  const bool nearest_rows = fprop.format == Format::kNvfp4 && fprop.block == BlockShape::k1x16 &&
                            fprop.rounding == Rounding::kNearest;
  const bool quantised_anew = dgrad.format == Format::kNvfp4 && dgrad.source == Source::kTensor &&
                              dgrad.rounding == Rounding::kNearest;
  if (nearest_rows && quantised_anew) {
    problems.push_back(
        "fprop has nearest 1x16 weights and dgrad quantises their transpose anew with nearest rounding: "
        "forward and backward would see different weights; use 16x16 in both, or in dgrad source: forward, "
        "ms_eden, mxfp8 or bf16");
  }
  return problems;
}

Reasons problems_of_activations(const QuantSpec& fprop, const QuantSpec& wgrad) {
  Reasons problems;
  check_source(fprop, wgrad, problems);
  return problems;
}

}  // namespace fp4t

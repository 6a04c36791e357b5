#include "kernels/formats/legal.h"

namespace fp4t {

namespace {

std::string conflict_of_rounding(const QuantSpec& s) {
  if (s.headroom != Headroom::kNone &&
      (s.rounding != Rounding::kStochastic || s.scale_rule != ScaleRule::kAmax)) {
    return "headroom 17/16 needs rounding stochastic and scale_rule amax";
  }
  if (s.rounding == Rounding::kStochastic && s.scale_rule == ScaleRule::kFourOverSix) {
    return "rounding stochastic excludes scale_rule four_over_six";
  }
  if (s.rounding != Rounding::kMsEden) return "";
  if (s.block == BlockShape::k16x16) return "rounding ms_eden excludes block 16x16";
  if (s.scale_scope == ScaleScope::kRow) return "rounding ms_eden excludes scale_scope row";
  if (s.scale_round == ScaleRound::kPow2) return "rounding ms_eden excludes scale_round pow2";
  if (s.scale_rule == ScaleRule::kFourOverSix) return "rounding ms_eden excludes scale_rule four_over_six";
  if (s.hadamard == 0 || s.signs != Signs::kFresh) {
    return "rounding ms_eden needs a hadamard rotation with signs fresh";
  }
  return "";
}

}  // namespace

std::string conflict_in(const QuantSpec& s) {
  if (s.format != Format::kNvfp4) {
    QuantSpec plain;
    plain.format = s.format;
    plain.source = s.source;
    return s == plain ? "" : std::string("format ") + name_of(s.format) + " has none of the NVFP4 keys";
  }
  if (s.hadamard != 0 && s.hadamard != 16 && s.hadamard != 32 && s.hadamard != 64 && s.hadamard != 128) {
    return "hadamard must be none, 16, 32, 64 or 128";
  }
  if (s.hadamard != 0 && s.block == BlockShape::k16x16) return "hadamard excludes block 16x16";
  if (s.hadamard == 0 && s.signs != Signs::kFixed) return "signs fresh needs hadamard";
  if (s.hadamard == 0 && s.hadamard_out != HadamardOut::kFp32) return "hadamard_out bf16 needs hadamard";
  if (s.scale_scope == ScaleScope::kRow && s.block == BlockShape::k16x16) {
    return "scale_scope row needs block 1x16";
  }
  return conflict_of_rounding(s);
}

}  // namespace fp4t

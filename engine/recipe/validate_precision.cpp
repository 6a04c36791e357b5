// Checks of precision rules one by one: NUMERICS.md section 0.0's illegal combinations inside a rule, and
// matchers that can match nothing. What needs both operands of a GEMM, or the model, is the plan's.
#include <algorithm>

#include "engine/recipe/tables.h"
#include "engine/recipe/validate.h"
#include "kernels/base/check.h"

namespace fp4t {

namespace {

using detail::concat;

bool is_gemm_glob(const std::string& pattern) {
  return std::ranges::any_of(gemm_module_names(),
                             [&](const std::string& name) { return glob_matches(pattern, name); });
}

void module_globs_match(Check& c, const RuleSpec& rule) {
  if (c.gave(rule.path + ".module") && rule.modules.empty()) {
    c.fail(rule.path + ".module", "found an empty list; leave the key out to match every module with GEMMs");
  }
  for (const std::string& pattern : rule.modules) {
    if (is_plain_module(pattern) || is_gemm_glob(pattern)) continue;
    c.fail(rule.path + ".module", unknown_module(pattern));
  }
}

void layers_and_steps_are_spans(Check& c, const RuleSpec& rule) {
  std::string refusal;
  if (c.gave(rule.path + ".layers") && !read_layers(rule.layers, &refusal)) {
    c.fail(rule.path + ".layers", refusal);
  }
  if (c.gave(rule.path + ".steps") && !read_steps(rule.steps, &refusal)) {
    c.fail(rule.path + ".steps", refusal);
  }
}

void operand_belongs_to_gemm(Check& c, const RuleSpec& rule) {
  const bool wrong =
      (rule.gemm == "dgrad" && rule.operand == "act") || (rule.gemm == "wgrad" && rule.operand == "weight");
  if (wrong) {
    c.fail(rule.path + ".operand",
           concat("found ", rule.operand, "; allowed: ",
                  rule.gemm == "dgrad" ? "grad or weight" : "grad or act", ", the operands of ", rule.gemm));
  }
}

// embed, kv_cache and dispatch have no GEMM: format is all they take, and only in forward tables.
void plain_module_takes_format_alone(Check& c, const RuleSpec& rule, size_t table) {
  for (const std::string& name : rule.modules) {
    if (!is_plain_module(name)) continue;
    const Format format = rule.spec.format;
    QuantSpec only_format;
    only_format.format = format;
    if (!is_forward_table(table)) {
      c.fail_rule(rule, name + " stands in forward tables alone; here it matches nothing");
    } else if (name == "kv_cache" && table != kSamplerTable) {
      c.fail_rule(rule,
                  "kv_cache stands in rl.sampler alone; the trainer's forward rounds as the sampler's cache");
    } else if (!(rule.spec == only_format) || rule.scale_scope_given || !rule.gemm.empty() ||
               !rule.operand.empty()) {
      c.fail_rule(rule, name + " has no GEMM; its rule takes format alone");
    } else if (name == "kv_cache" ? format == Format::kNvfp4 : name == "embed" && only_format.quantised()) {
      c.fail(rule.path + ".format", concat("found ", name_of(format), " for ", name, "; allowed: ",
                                           name == "kv_cache" ? "bf16, mxfp8 or fp32" : "bf16 or fp32"));
    }
    if (name != "embed" && name != "head" && !rule.layers.empty()) {
      c.fail(rule.path + ".layers", name + " has one format for all layers");
    } else if (name == "embed" && !rule.layers.empty()) {
      c.fail(rule.path + ".layers", "embed lies in no layer");
    }
  }
}

void kv_cache_blocks_fill_a_head(Check& c, const RuleSpec& rule) {
  const int64_t head_dim = c.recipe().model.head_dim;
  if (rule.spec.format == Format::kMxfp8 && head_dim % 32 != 0 &&
      std::ranges::find(rule.modules, "kv_cache") != rule.modules.end()) {
    c.fail(
        rule.path + ".format",
        concat(
            "found mxfp8 for kv_cache, whose blocks of 32 lie along the head dimension; model.head_dim is ",
            head_dim, ", allowed: a multiple of 32"),
        {"model.head_dim"});
  }
}

void row_scope_is_for_forward_activations(Check& c, const RuleSpec& rule, size_t table) {
  const QuantSpec& s = rule.spec;
  if (s.scale_scope != ScaleScope::kRow) return;
  const std::string path = rule.path + ".scale_scope";
  if (!is_forward_table(table)) {
    c.fail(path,
           "found row in a backward table; allowed: tensor, row scope is for the activation of fprop alone");
  } else if (rule.operand != "act") {
    c.fail(path,
           "found row in a rule that covers weights; add operand: act, row scope is for the activation of "
           "fprop alone");
  }
  if (s.block == BlockShape::k16x16) {
    c.fail(path, "found row beside block: 16x16, whose scales span 16 rows; allowed: block: 1x16");
  }
}

void rotation_excludes_square_blocks(Check& c, const RuleSpec& rule) {
  const QuantSpec& s = rule.spec;
  if (s.hadamard != 0 && s.block == BlockShape::k16x16) {
    c.fail(rule.path + ".hadamard",
           concat("found ", s.hadamard,
                  " beside block: 16x16; a 16x16 tile serves both orientations, a rotation "
                  "along one contraction only. Allowed: none, or block: 1x16"));
  }
}

void ms_eden_stands_alone(Check& c, const RuleSpec& rule) {
  const QuantSpec& s = rule.spec;
  if (s.rounding != Rounding::kMsEden) return;
  std::vector<std::string> wants;
  if (s.block != BlockShape::k1x16) wants.emplace_back("block: 1x16");
  if (s.hadamard == 0) wants.emplace_back("hadamard: 16, 32, 64 or 128");
  if (s.hadamard != 0 && s.signs != Signs::kFresh) wants.emplace_back("signs: fresh");
  if (s.scale_scope != ScaleScope::kTensor) wants.emplace_back("scale_scope: tensor");
  if (s.scale_round != ScaleRound::kFp32) wants.emplace_back("scale_round: fp32");
  if (s.scale_rule != ScaleRule::kAmax) wants.emplace_back("scale_rule: amax");
  if (wants.empty()) return;
  std::string text;
  for (const std::string& want : wants) text += (text.empty() ? "" : ", ") + want;
  c.fail(rule.path + ".rounding",
         "found ms_eden, which rounds the block scales so that a rotated group is "
         "unbiased and sets every scale itself; it needs " +
             text);
}

void stochastic_excludes_four_over_six(Check& c, const RuleSpec& rule) {
  if (rule.spec.rounding == Rounding::kStochastic && rule.spec.scale_rule == ScaleRule::kFourOverSix) {
    c.fail(rule.path + ".scale_rule",
           "found four_over_six beside rounding: stochastic; choosing the smaller of "
           "two rounding errors would bias the draw. Allowed: amax");
  }
}

void headroom_serves_stochastic_amax(Check& c, const RuleSpec& rule) {
  const QuantSpec& s = rule.spec;
  if (s.headroom == Headroom::kNone) return;
  if (s.rounding != Rounding::kStochastic || s.scale_rule != ScaleRule::kAmax) {
    c.fail(rule.path + ".headroom",
           concat("found 17/16 with rounding: ", name_of(s.rounding), ", scale_rule: ", name_of(s.scale_rule),
                  "; it takes away the clipping bias of stochastic rounding with amax "
                  "scales, and goes with these alone"));
  }
}

// fp32 is the reference: operands are the masters and everything between ops is FP32, so it is all or
// nothing.
void fp32_is_everywhere(Check& c) {
  const Recipe& r = c.recipe();
  if (!uses_fp32(r.precision)) return;
  for (size_t t = 0; t < kNumRecipeTables; ++t) {
    if (r.precision.tables[t].empty()) {
      c.fail("precision", concat("fp32 is legal only when every cell has it; ", kTableNames[t],
                                 " is left out, so it is bf16"));
    }
    for (const RuleSpec& rule : r.precision.tables[t]) {
      if (rule.spec.format == Format::kFp32) continue;
      const std::string message = concat("fp32 is legal only when every cell has it; ", rule.path, " has ",
                                         name_of(rule.spec.format));
      if (rule.place.file.empty()) {
        c.fail("precision", message);
      } else {
        c.fail_rule(rule, message);
      }
    }
  }
  if (r.dtypes.gradients != DType::kF32) {
    c.fail("dtypes.gradients", "found bf16; under the fp32 format gradients are fp32");
  }
  if (r.dtypes.masters != DType::kF32) {
    c.fail("dtypes.masters", "found bf16; under the fp32 format the operands are the masters, in fp32");
  }
}

}  // namespace

void validate_precision(Check& c) {
  const PrecisionSpec& precision = c.recipe().precision;
  for (size_t t = 0; t < kNumRecipeTables; ++t) {
    for (const RuleSpec& rule : precision.tables[t]) {
      module_globs_match(c, rule);
      layers_and_steps_are_spans(c, rule);
      operand_belongs_to_gemm(c, rule);
      plain_module_takes_format_alone(c, rule, t);
      kv_cache_blocks_fill_a_head(c, rule);
      row_scope_is_for_forward_activations(c, rule, t);
      rotation_excludes_square_blocks(c, rule);
      ms_eden_stands_alone(c, rule);
      stochastic_excludes_four_over_six(c, rule);
      headroom_serves_stochastic_amax(c, rule);
    }
  }
  fp32_is_everywhere(c);
}

}  // namespace fp4t

#include "engine/plan/resolve.h"

namespace fp4t {

std::string cell_name(Table table, int64_t layer, Module module, GemmRole gemm, OperandRole operand) {
  std::string name = name_of(table);
  if (in_layers(module)) name += " layers." + std::to_string(layer);
  name += std::string(" ") + name_of(module);
  if (is_gemm_module(module)) name += std::string(" ") + name_of(gemm) + " " + name_of(operand);
  return name;
}

TableRules::TableRules(const PrecisionSpec& spec, Table table, const ModelSpec& model,
                       const StageShape& stage, ProblemList& problems)
    : table_(table) {
  for (const RuleSpec& rule : spec.tables[static_cast<size_t>(table)]) {
    std::vector<RuleProblem> found;
    MatchedRule matched = match_rule(rule, model, stage, found);
    for (const RuleProblem& problem : found) problems.rule_key(rule, problem.key, problem.message);
    if (found.empty()) rules_.push_back(matched);
  }
}

TableRules::Cell TableRules::cell(int64_t step, int64_t layer, Module m, GemmRole g, OperandRole o,
                                  std::set<const RuleSpec*>& won) const {
  for (const MatchedRule& r : rules_) {
    if (!r.steps.contains(step) || !r.matches(m, layer, g, o)) continue;
    won.insert(r.rule);
    Cell cell{r.rule->spec, r.rule};
    // DESIGN.md section 4: the forward tables of RL keep rows independent of their batch unless told.
    const bool rl_forward = table_ == Table::kSampler || table_ == Table::kTrainerForward;
    if (rl_forward && o == OperandRole::kAct && cell.spec.format == Format::kNvfp4 &&
        !r.rule->scale_scope_given) {
      cell.spec.scale_scope = ScaleScope::kRow;
    }
    if (o == OperandRole::kGrad) cell.spec.source = Source::kTensor;  // ignored there (NUMERICS.md 0.0)
    return cell;
  }
  return {};
}

TableRules::Cell TableRules::plain_cell(int64_t step, Module m, std::set<const RuleSpec*>& won) const {
  for (const MatchedRule& r : rules_) {
    const bool matches =
        r.steps.contains(step) && r.modules[static_cast<size_t>(m)] && !r.layers && !r.gemm && !r.operand;
    if (!matches) continue;
    won.insert(r.rule);
    return {r.rule->spec, r.rule};
  }
  return {};
}

void TableRules::add_boundaries(std::set<int64_t>& boundaries) const {
  for (const MatchedRule& r : rules_) {
    boundaries.insert(r.steps.begin);
    boundaries.insert(r.steps.end);
  }
}

}  // namespace fp4t

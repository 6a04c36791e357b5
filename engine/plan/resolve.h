// One precision table of one stage: which rule wins which cell.
#pragma once

#include <set>
#include <string>
#include <vector>

#include "engine/plan/match.h"
#include "engine/plan/precision.h"
#include "engine/plan/problems.h"

namespace fp4t {

// "pretrain.forward layers.3 experts.down fprop weight".
std::string cell_name(Table table, int64_t layer, Module module, GemmRole gemm, OperandRole operand);

class TableRules {
 public:
  // A cell's content and the rule that supplied it; no rule: the default, bf16.
  struct Cell {
    QuantSpec spec;
    const RuleSpec* rule = nullptr;
  };

  TableRules(const PrecisionSpec& spec, Table table, const ModelSpec& model, const StageShape& stage,
             ProblemList& problems);

  // The first rule that matches; `won` collects the rules that supplied a cell.
  Cell cell(int64_t step, int64_t layer, Module m, GemmRole g, OperandRole o,
            std::set<const RuleSpec*>& won) const;
  // Of embed, kv_cache and dispatch.
  Cell plain_cell(int64_t step, Module m, std::set<const RuleSpec*>& won) const;

  // Steps inside the stage where a rule begins or ends.
  void add_boundaries(std::set<int64_t>& boundaries) const;

  Table table() const { return table_; }

 private:
  Table table_;
  std::vector<MatchedRule> rules_;
};

// resolve_precision() of precision.h that collects instead of throwing; what it returns is of use only when
// it found no problem.
std::vector<StagePrecision> resolve_precision(const PrecisionSpec& spec, const ModelSpec& model,
                                              const std::vector<StageShape>& stages, ProblemList& problems);

}  // namespace fp4t

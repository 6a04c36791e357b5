#include "engine/plan/precision.h"

#include <algorithm>
#include <functional>
#include <optional>

#include "engine/plan/legal.h"
#include "engine/plan/resolve.h"

namespace fp4t {

namespace {

using Won = std::set<const RuleSpec*>;

// Whether the cells of the run are fp32, for "legal only when every cell has it".
struct Fp32Census {
  std::string first_fp32, first_other;
  const RuleSpec* rule = nullptr;  // of the first fp32 cell
  void count(Format format, const RuleSpec* supplied, const std::string& cell) {
    std::string& first = format == Format::kFp32 ? first_fp32 : first_other;
    if (!first.empty()) return;
    first = cell;
    if (format == Format::kFp32) rule = supplied;
  }
};

// Resolves the tables of one stage, step span by step span.
class StageResolver {
 public:
  // `census` is null for tables that no stage uses.
  StageResolver(const PrecisionSpec& spec, const ModelSpec& model, const StageShape& stage, Won& won,
                ProblemList& problems, Fp32Census* census)
      : model_(model),
        stage_(stage),
        won_(won),
        problems_(problems),
        census_(census),
        forward_(spec, stage.is_rl ? Table::kTrainerForward : Table::kPretrainForward, model, stage,
                 problems),
        backward_(spec, stage.is_rl ? Table::kTrainerBackward : Table::kPretrainBackward, model, stage,
                  problems),
        sampler_(spec, Table::kSampler, model, stage, problems) {}

  StagePrecision resolve(bool with_sampler) {
    std::set<int64_t> boundaries = {0, stage_.steps};
    forward_.add_boundaries(boundaries);
    backward_.add_boundaries(boundaries);
    if (with_sampler) sampler_.add_boundaries(boundaries);
    StagePrecision out;
    for (auto at = boundaries.begin(); std::next(at) != boundaries.end(); ++at) {
      const int64_t begin = *at, end = *std::next(at);
      ForwardTable sampler;
      if (with_sampler) sampler = forward_table(sampler_, begin);
      ForwardTable forward = forward_table(forward_, begin);
      // The trainer rounds keys and values as the sampler's cache does (DESIGN.md section 4).
      if (stage_.is_rl) forward.kv_cache = sampler.kv_cache;
      const BackwardTable backward = backward_table(begin, forward);
      append(out.sampler, begin, end, sampler);
      append(out.forward, begin, end, forward);
      append(out.backward, begin, end, backward);
    }
    return out;
  }

 private:
  template <class T>
  static void append(Spans<T>& spans, int64_t begin, int64_t end, const T& table) {
    if (!spans.spans.empty() && spans.spans.back().table == table) {
      spans.spans.back().end = end;
    } else {
      spans.spans.push_back({begin, end, table});
    }
  }

  // Calls visit(layer, module) for every cell position that the model has; the head last.
  void for_each_position(const std::function<void(int64_t, Module)>& visit) const {
    for (int64_t layer = 0; layer < model_.layers; ++layer) {
      for (int i = 0; i < kNumGemmModules; ++i) {
        const Module m = static_cast<Module>(i);
        if (in_layers(m) && layer_has(model_, layer, m)) visit(layer, m);
      }
    }
    visit(model_.layers, Module::kHead);
  }

  QuantSpec operand(const TableRules& rules, int64_t step, int64_t layer, Module m, GemmRole g, OperandRole o,
                    const RuleSpec*& rule) {
    const TableRules::Cell cell = rules.cell(step, layer, m, g, o, won_);
    const std::string name = cell_name(rules.table(), layer, m, g, o);
    for (const std::string& problem : problems_of_operand(cell.spec, g, o)) {
      problems_.cell(cell.rule, name, problem);
    }
    if (census_) census_->count(cell.spec.format, cell.rule, name);
    if (!rule) rule = cell.rule;
    return cell.spec;
  }

  void report(const RuleSpec* rule, Table table, int64_t layer, Module m, const std::string& what,
              const std::vector<std::string>& found) {
    const std::string where = in_layers(m) ? " layers." + std::to_string(layer) : "";
    for (const std::string& problem : found) {
      problems_.cell(rule, detail::concat(name_of(table), where, " ", name_of(m), what), problem);
    }
  }

  ForwardTable forward_table(const TableRules& rules, int64_t step) {
    ForwardTable table;
    table.layers.resize(static_cast<size_t>(model_.layers));
    bool all_fp32 = true;
    for_each_position([&](int64_t layer, Module m) {
      const RuleSpec* rule = nullptr;
      ForwardCell cell;
      cell.act = operand(rules, step, layer, m, GemmRole::kFprop, OperandRole::kAct, rule);
      cell.weight = operand(rules, step, layer, m, GemmRole::kFprop, OperandRole::kWeight, rule);
      report(rule, rules.table(), layer, m, " fprop", problems_of_pair(cell.act, cell.weight));
      all_fp32 &= cell.act.format == Format::kFp32 && cell.weight.format == Format::kFp32;
      forward_position(table, layer, m) = cell;
    });
    table.embed = plain(rules, step, Module::kEmbed, all_fp32);
    table.dispatch = plain(rules, step, Module::kDispatch, all_fp32);
    table.kv_cache = rules.table() == Table::kSampler ? plain(rules, step, Module::kKvCache, all_fp32)
                     : all_fp32                       ? Format::kFp32
                                                      : Format::kBf16;
    return table;
  }

  ForwardCell& forward_position(ForwardTable& table, int64_t layer, Module m) const {
    return m == Module::kHead ? table.head : table.layers[static_cast<size_t>(layer)][static_cast<size_t>(m)];
  }

  // embed, kv_cache, dispatch: a format alone. Under the fp32 reference they follow it.
  Format plain(const TableRules& rules, int64_t step, Module m, bool all_fp32) {
    const TableRules::Cell cell = rules.plain_cell(step, m, won_);
    const Format format = cell.rule ? cell.spec.format : all_fp32 ? Format::kFp32 : Format::kBf16;
    const std::string name = cell_name(rules.table(), 0, m, GemmRole::kFprop, OperandRole::kAct);
    QuantSpec format_only;
    format_only.format = cell.spec.format;
    if (cell.spec != format_only) problems_.cell(cell.rule, name, "takes format only");
    const bool known = format == Format::kBf16 || format == Format::kFp32 || m == Module::kDispatch ||
                       (m == Module::kKvCache && format == Format::kMxfp8);
    if (!known) {
      problems_.cell(cell.rule, name,
                     std::string("cannot be ") + name_of(format) +
                         (m == Module::kKvCache ? "; allowed: bf16, mxfp8" : "; allowed: bf16") +
                         ", and fp32 when every cell is");
    }
    if (known && m == Module::kKvCache && format == Format::kMxfp8 && model_.head_dim % 32 != 0) {
      problems_.cell(
          cell.rule, name,
          "mxfp8 has blocks of 32 along the head dimension, which is " + std::to_string(model_.head_dim));
    }
    if (census_) census_->count(format, cell.rule, name);
    return format;
  }

  BackwardTable backward_table(int64_t step, const ForwardTable& forward) {
    BackwardTable table;
    table.layers.resize(static_cast<size_t>(model_.layers));
    const Table t = backward_.table();
    for_each_position([&](int64_t layer, Module m) {
      const RuleSpec *dgrad = nullptr, *dgrad_weight = nullptr, *wgrad = nullptr, *wgrad_act = nullptr;
      BackwardCell c;
      c.dgrad_weight =
          operand(backward_, step, layer, m, GemmRole::kDgrad, OperandRole::kWeight, dgrad_weight);
      c.dgrad_grad = operand(backward_, step, layer, m, GemmRole::kDgrad, OperandRole::kGrad, dgrad);
      c.wgrad_act = operand(backward_, step, layer, m, GemmRole::kWgrad, OperandRole::kAct, wgrad_act);
      c.wgrad_grad = operand(backward_, step, layer, m, GemmRole::kWgrad, OperandRole::kGrad, wgrad);
      const ForwardCell& f = forward.cell(layer, m);
      report(dgrad ? dgrad : dgrad_weight, t, layer, m, " dgrad",
             problems_of_pair(c.dgrad_grad, c.dgrad_weight));
      report(wgrad ? wgrad : wgrad_act, t, layer, m, " wgrad", problems_of_pair(c.wgrad_grad, c.wgrad_act));
      report(dgrad_weight, t, layer, m, " dgrad weight", problems_of_weights(f.weight, c.dgrad_weight));
      report(wgrad_act, t, layer, m, " wgrad act", problems_of_activations(f.act, c.wgrad_act));
      (m == Module::kHead ? table.head : table.layers[static_cast<size_t>(layer)][static_cast<size_t>(m)]) =
          c;
    });
    return table;
  }

  const ModelSpec& model_;
  StageShape stage_;
  Won& won_;
  ProblemList& problems_;
  Fp32Census* census_;
  TableRules forward_, backward_, sampler_;
};

// Enough steps for every percentage of two decimals and every step named in absolute numbers.
int64_t nominal_steps(const PrecisionSpec& spec) {
  int64_t steps = 10000;
  for (const auto& table : spec.tables) {
    for (const RuleSpec& rule : table) steps = std::max(steps, 2 * largest_named_step(rule));
  }
  return steps;
}

// Why a rule that never wins does not, where that can be said.
std::string why_never(const RuleSpec& rule, Table table, const ModelSpec& model) {
  std::string problem;
  const auto modules = match_modules(rule.modules, &problem);
  const std::optional<Range> layers =
      rule.layers.empty() ? std::nullopt : match_layers(rule.layers, model.layers, &problem);
  bool present = false, inside = false, plain = false;
  for (int i = 0; modules && i < kNumModules; ++i) {
    const Module m = static_cast<Module>(i);
    if (!(*modules)[static_cast<size_t>(i)] || !model_has(model, m)) continue;
    present = true;
    plain |= !is_gemm_module(m);
    for (int64_t l = layers ? layers->begin : 0; layers && l < layers->end; ++l) {
      inside |= in_layers(m) && layer_has(model, l, m);
    }
  }
  if (!present) return "the model has none of its modules";
  if (layers && !inside) {
    return "none of its modules is in its layers (head, embed, kv_cache and dispatch are outside the layers)";
  }
  if (plain && (!rule.gemm.empty() || !rule.operand.empty())) return "its module has no GEMM";
  if (plain) {
    return "embed and dispatch belong to the forward tables, kv_cache to rl.sampler, and the first rule that "
           "matches supplies the cell";
  }
  const bool forward = is_forward(table);
  if (forward && (rule.gemm == "dgrad" || rule.gemm == "wgrad" || rule.operand == "grad")) {
    return "a forward table has fprop alone, with operands act and weight";
  }
  if (!forward && rule.gemm == "fprop") return "a backward table has dgrad and wgrad alone";
  if (!forward && rule.gemm == "dgrad" && rule.operand == "act") return "dgrad has operands grad and weight";
  if (!forward && rule.gemm == "wgrad" && rule.operand == "weight") return "wgrad has operands grad and act";
  return "rules before it take every cell that it matches, or its steps lie outside the stage";
}

void report_losers(const PrecisionSpec& spec, const ModelSpec& model, const Won& won, ProblemList& problems) {
  for (int t = 0; t < kNumTables; ++t) {
    for (const RuleSpec& rule : spec.tables[t]) {
      if (rule.from_preset || won.count(&rule) || problems.names(rule)) continue;
      const Table table = static_cast<Table>(t);
      problems.rule(rule, std::string("this rule never wins a cell of ") + name_of(table) + ": " +
                              why_never(rule, table, model));
    }
  }
}

}  // namespace

std::vector<StagePrecision> resolve_precision(const PrecisionSpec& spec, const ModelSpec& model,
                                              const std::vector<StageShape>& stages, ProblemList& problems) {
  Fp32Census census;
  Won won;
  std::vector<StagePrecision> out;
  bool has_kind[2] = {false, false};
  for (StageShape stage : stages) {
    has_kind[stage.is_rl] = true;
    stage.steps = std::max<int64_t>(stage.steps, 1);  // a stage of no steps still evaluates
    out.push_back(StageResolver(spec, model, stage, won, problems, &census).resolve(true));
  }
  for (const bool is_rl : {false, true}) {
    if (has_kind[is_rl]) continue;
    // The sampler's table has its stage: RL, or pretraining when that generates text alone.
    StageResolver(spec, model, {is_rl, nominal_steps(spec)}, won, problems, nullptr).resolve(is_rl);
  }
  if (!census.first_fp32.empty() && !census.first_other.empty()) {
    problems.cell(census.rule, census.first_fp32,
                  "fp32 is legal only when every cell has it, and " + census.first_other + " has not");
  }
  report_losers(spec, model, won, problems);
  return out;
}

std::vector<StagePrecision> resolve_precision(const PrecisionSpec& spec, const ModelSpec& model,
                                              const std::vector<StageShape>& stages) {
  ProblemList problems;
  std::vector<StagePrecision> out = resolve_precision(spec, model, stages, problems);
  problems.throw_if_any();
  return out;
}

StagePrecision resolve_precision(const PrecisionSpec& spec, const ModelSpec& model, bool is_rl,
                                 int64_t steps) {
  return resolve_precision(spec, model, std::vector<StageShape>{{is_rl, steps, 0}}).front();
}

}  // namespace fp4t

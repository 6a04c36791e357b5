#include "engine/plan/notes.h"

#include "engine/plan/dims.h"
#include "engine/plan/operands.h"

namespace fp4t {

namespace {

// Of rows coded along their columns: the rule for forward acts holds for gradients, too.
std::string variance_along_columns(const QuantSpec& spec, const char* operand) {
  if (spec.format == Format::kNvfp4 && spec.scale_scope != ScaleScope::kRow) {
    return std::string(operand) + " has one scale for all rows of an expert";
  }
  const std::string why = row_variance({.act = spec, .weight = {}});
  return why.empty() ? why : operand + why.substr(why.find(' '));
}

// Blocks along the tokens hold rows of one round.
std::string variance_along_rows(const QuantSpec& spec, const char* operand) {
  return spec.quantised() ? std::string(operand) + " has blocks along an expert's rows" : "";
}

std::string variance_of(const ForwardCell& forward, const BackwardCell* backward) {
  std::string why = variance_along_columns(forward.act, "act");
  if (backward == nullptr || !why.empty()) return why;
  why = variance_along_columns(backward->dgrad_grad, "grad");
  if (why.empty()) why = variance_along_rows(backward->wgrad_grad, "wgrad's grad");
  if (why.empty()) why = variance_along_rows(backward->wgrad_act, "wgrad's act");
  return why;
}

void note_experts(const Plan& plan, std::vector<std::string>& list) {
  const ParallelSpec& p = plan.parallel;
  if (plan.axes.expert == 1) {
    if (p.expert_chunks > 1) {
      list.push_back(detail::concat("parallel.expert_chunks: ", p.expert_chunks,
                                    " has no effect: no tokens travel where parallel.expert is 1"));
    }
    if (p.receive_factor != ParallelSpec{}.receive_factor) {
      list.push_back(detail::concat("parallel.receive_factor: ", p.receive_factor,
                                    " has no effect: no tokens travel where parallel.expert is 1"));
    }
    return;
  }
  const ModelDims d = dims_of(plan);
  if (p.expert_chunks > d.expert_chunks) {
    list.push_back(detail::concat("parallel.expert_chunks: ", p.expert_chunks, " becomes ", d.expert_chunks,
                                  ", as many as a rank has experts"));
  }
  const int64_t rounds = worst_rounds(plan);
  const std::string why = rounds > 1 ? round_variance(plan) : "";
  if (!why.empty()) {
    list.push_back(
        detail::concat("parallel.receive_factor: the worst routing takes ", rounds,
                       " rounds, and an expert's rows of several rounds are rounded otherwise than "
                       "together (",
                       why, "); 0: always one"));
  }
}

void note_ranks(const Plan& plan, std::vector<std::string>& list) {
  const ParallelSpec& p = plan.parallel;
  const int64_t ranks = plan.axes.ranks();
  const std::string here = ranks == 1 ? "on one rank" : detail::concat("on ", ranks, " ranks");
  if (p.domain > ranks) {
    list.push_back(detail::concat("parallel.domain: ", p.domain, " has no effect ", here,
                                  ": one domain holds them all, as with 0"));
  }
  if (p.zero > 1 && ranks == 1) {
    list.push_back(detail::concat("parallel.zero: ", p.zero, " has no effect on one rank"));
  }
}

}  // namespace

std::string round_variance(const Plan& plan) {
  for (const TablePair& tables : table_pairs(plan)) {
    for (const GemmSite& site : gemm_sites(plan)) {
      if (site.groups == 0) continue;
      const BackwardCell* backward =
          tables.backward ? &tables.backward->cell(site.layer, site.module) : nullptr;
      const std::string why = variance_of(tables.forward->cell(site.layer, site.module), backward);
      if (!why.empty()) return detail::concat("layers.", site.layer, " ", name_of(site.module), ": ", why);
    }
  }
  return "";
}

std::vector<std::string> notes(const Plan& plan) {
  std::vector<std::string> list;
  note_experts(plan, list);
  note_ranks(plan, list);
  return list;
}

}  // namespace fp4t

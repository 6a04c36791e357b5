// The resolved table as a list of cells, as text and as a hash.
#include <xxhash.h>

#include <algorithm>
#include <array>
#include <cstdio>

#include "engine/plan/modules.h"
#include "engine/plan/precision.h"
#include "kernels/base/check.h"

namespace fp4t {

namespace {

struct Slot {
  GemmRole gemm;
  OperandRole operand;
  QuantSpec ForwardCell::*forward;
  QuantSpec BackwardCell::*backward;
};
constexpr Slot kForwardSlots[] = {{GemmRole::kFprop, OperandRole::kAct, &ForwardCell::act, nullptr},
                                  {GemmRole::kFprop, OperandRole::kWeight, &ForwardCell::weight, nullptr}};
constexpr Slot kBackwardSlots[] = {
    {GemmRole::kDgrad, OperandRole::kGrad, nullptr, &BackwardCell::dgrad_grad},
    {GemmRole::kDgrad, OperandRole::kWeight, nullptr, &BackwardCell::dgrad_weight},
    {GemmRole::kWgrad, OperandRole::kGrad, nullptr, &BackwardCell::wgrad_grad},
    {GemmRole::kWgrad, OperandRole::kAct, nullptr, &BackwardCell::wgrad_act}};

const QuantSpec& content(const ForwardCell& cell, const Slot& slot) { return cell.*slot.forward; }
const QuantSpec& content(const BackwardCell& cell, const Slot& slot) { return cell.*slot.backward; }

template <class T, size_t kSlots>
void add_gemm_cells(std::vector<CellRow>& rows, Table table, const Spans<T>& spans, const ModelSpec& model,
                    const Slot (&slots)[kSlots], size_t span) {
  const auto& s = spans.spans[span];
  for (int i = 0; i < kNumGemmModules; ++i) {
    const Module m = static_cast<Module>(i);
    for (const Slot& slot : slots) {
      for (int64_t layer = 0; layer < model.layers; ++layer) {
        if (!in_layers(m) || !layer_has(model, layer, m)) continue;
        rows.push_back({table, s.begin, s.end, layer, m, slot.gemm, slot.operand,
                        content(s.table.cell(layer, m), slot)});
      }
      if (m != Module::kHead) continue;
      rows.push_back({table, s.begin, s.end, -1, m, slot.gemm, slot.operand, content(s.table.head, slot)});
    }
  }
}

void add_forward(std::vector<CellRow>& rows, Table table, const Spans<ForwardTable>& spans,
                 const ModelSpec& model) {
  for (size_t i = 0; i < spans.spans.size(); ++i) {
    add_gemm_cells(rows, table, spans, model, kForwardSlots, i);
    const auto& s = spans.spans[i];
    const auto plain = [&](Module m, Format format) {
      QuantSpec spec;
      spec.format = format;
      rows.push_back({table, s.begin, s.end, -1, m, GemmRole::kFprop, OperandRole::kAct, spec});
    };
    plain(Module::kEmbed, s.table.embed);
    plain(Module::kKvCache, s.table.kv_cache);
    if (model_has(model, Module::kDispatch)) plain(Module::kDispatch, s.table.dispatch);
  }
}

// Cells of one (table, span, module, GEMM, operand): runs of layers with equal content.
struct LayerRun {
  std::string layers, cell;
  bool operator==(const LayerRun&) const = default;
};

std::vector<LayerRun> layer_runs(const std::vector<CellRow>& rows, size_t begin, size_t end) {
  std::vector<LayerRun> runs;
  for (size_t i = begin; i < end;) {
    size_t j = i;
    while (j + 1 < end && rows[j + 1].spec == rows[i].spec && rows[j + 1].layer == rows[j].layer + 1) ++j;
    const int64_t a = rows[i].layer, b = rows[j].layer;
    const std::string layers = i == begin && j + 1 == end ? "all"
                               : a == b                   ? std::to_string(a)
                                                          : detail::concat(a, "-", b);
    runs.push_back({layers, describe(rows[i].spec)});
    i = j + 1;
  }
  return runs;
}

// A line group: operands of modules that share all their runs.
struct Group {
  std::string modules, operands;
  std::vector<LayerRun> runs;
};

std::string operand_label(const CellRow& row) {
  return is_gemm_module(row.module) ? detail::concat(name_of(row.gemm), " ", name_of(row.operand)) : "";
}

// What to append to "dgrad grad" for another operand: "+weight" of the same GEMM, ", wgrad grad" of another.
std::string join_operand(const std::string& before, const CellRow& row) {
  const size_t last_gemm = before.rfind(name_of(row.gemm));
  return last_gemm != std::string::npos ? std::string("+") + name_of(row.operand) : ", " + operand_label(row);
}

// All rows of one table span to groups: first operands of a module, then modules with equal groups.
std::vector<std::vector<Group>> fold(const std::vector<CellRow>& rows, size_t begin, size_t end) {
  std::vector<std::vector<Group>> modules;
  for (size_t i = begin; i < end;) {
    const Module m = rows[i].module;
    std::vector<Group> groups;
    while (i < end && rows[i].module == m) {
      size_t j = i;
      while (j < end && rows[j].module == m && rows[j].gemm == rows[i].gemm &&
             rows[j].operand == rows[i].operand) {
        ++j;
      }
      const std::vector<LayerRun> runs = layer_runs(rows, i, j);
      const std::string label = operand_label(rows[i]);
      const auto same =
          std::find_if(groups.begin(), groups.end(), [&](const Group& g) { return g.runs == runs; });
      if (same == groups.end()) {
        groups.push_back({name_of(m), label, runs});
      } else {
        same->operands += join_operand(same->operands, rows[i]);
      }
      i = j;
    }
    const auto equal = [&](const std::vector<Group>& other) {
      return std::equal(
          other.begin(), other.end(), groups.begin(), groups.end(),
          [](const Group& a, const Group& b) { return a.operands == b.operands && a.runs == b.runs; });
    };
    const auto twin = std::find_if(modules.begin(), modules.end(), equal);
    if (twin == modules.end()) {
      modules.push_back(groups);
    } else {
      for (Group& g : *twin) g.modules += std::string(", ") + name_of(m);
    }
  }
  return modules;
}

std::string hex16(uint64_t v) {
  char text[17];
  std::snprintf(text, sizeof(text), "%016llx", static_cast<unsigned long long>(v));
  return text;
}

// Lines of columns, each as wide as its widest entry.
std::string align(const std::vector<std::array<std::string, 4>>& lines) {
  std::array<size_t, 4> width{};
  for (const auto& line : lines) {
    for (size_t c = 0; c < line.size(); ++c) width[c] = std::max(width[c], line[c].size());
  }
  std::string text;
  for (const auto& line : lines) {
    for (size_t c = 0; c < line.size(); ++c) {
      if (width[c] == 0) continue;
      text += "  " + line[c];
      if (c + 1 < line.size()) text.append(width[c] - line[c].size(), ' ');
    }
    text += "\n";
  }
  return text;
}

}  // namespace

std::vector<CellRow> list_cells(const StagePrecision& p, const ModelSpec& model, bool is_rl) {
  std::vector<CellRow> rows;
  add_forward(rows, is_rl ? Table::kTrainerForward : Table::kPretrainForward, p.forward, model);
  for (size_t i = 0; i < p.backward.spans.size(); ++i) {
    add_gemm_cells(rows, is_rl ? Table::kTrainerBackward : Table::kPretrainBackward, p.backward, model,
                   kBackwardSlots, i);
  }
  add_forward(rows, Table::kSampler, p.sampler, model);
  return rows;
}

std::string describe(const StagePrecision& p, const ModelSpec& model, bool is_rl) {
  const std::vector<CellRow> rows = list_cells(p, model, is_rl);
  std::string text;
  for (size_t i = 0; i < rows.size();) {
    size_t j = i;
    while (j < rows.size() && rows[j].table == rows[i].table && rows[j].begin == rows[i].begin) ++j;
    text += detail::concat(name_of(rows[i].table), ", steps ", rows[i].begin, " to ", rows[i].end, "\n");
    std::vector<std::array<std::string, 4>> lines;
    for (const std::vector<Group>& module : fold(rows, i, j)) {
      for (const Group& g : module) {
        for (const LayerRun& run : g.runs) {
          const std::string layers = run.layers == "all" ? "" : "layers " + run.layers;
          lines.push_back({g.modules, g.operands, layers, run.cell});
        }
      }
    }
    text += align(lines);
    i = j;
  }
  return text;
}

uint64_t hash_of(const StagePrecision& p) {
  // Every position counts, also those that a model leaves at their default; the order is frozen.
  std::vector<uint8_t> bytes;
  const auto number = [&](int64_t v) {
    for (int i = 0; i < 8; ++i) bytes.push_back(static_cast<uint8_t>(v >> (8 * i)));
  };
  const auto spec = [&](const QuantSpec& s) {
    for (const int v :
         {static_cast<int>(s.format), static_cast<int>(s.block), static_cast<int>(s.scale_rule),
          static_cast<int>(s.scale_scope), static_cast<int>(s.scale_round), static_cast<int>(s.rounding),
          static_cast<int>(s.headroom), static_cast<int>(s.hadamard), static_cast<int>(s.signs),
          static_cast<int>(s.hadamard_out), static_cast<int>(s.source)}) {
      bytes.push_back(static_cast<uint8_t>(v));
    }
  };
  const auto forward_cell = [&](const ForwardCell& c) {
    for (const Slot& slot : kForwardSlots) spec(content(c, slot));
  };
  const auto backward_cell = [&](const BackwardCell& c) {
    for (const Slot& slot : kBackwardSlots) spec(content(c, slot));
  };
  const auto spans = [&](const auto& list, const auto& cell) {
    number(static_cast<int64_t>(list.spans.size()));
    for (const auto& s : list.spans) {
      number(s.begin);
      number(s.end);
      for (const auto& layer : s.table.layers) {
        for (const auto& c : layer) cell(c);
      }
      cell(s.table.head);
    }
  };
  const auto forward_spans = [&](const Spans<ForwardTable>& list) {
    spans(list, forward_cell);
    for (const auto& s : list.spans) {
      for (const Format f : {s.table.embed, s.table.kv_cache, s.table.dispatch}) {
        bytes.push_back(static_cast<uint8_t>(f));
      }
    }
  };
  forward_spans(p.forward);
  spans(p.backward, backward_cell);
  forward_spans(p.sampler);
  return XXH3_64bits(bytes.data(), bytes.size());
}

std::string hash_of(const std::vector<const StagePrecision*>& stages) {
  std::string list;
  for (const StagePrecision* p : stages) list += hex16(hash_of(*p)) + "\n";
  return hex16(XXH3_64bits(list.data(), list.size()));
}

}  // namespace fp4t

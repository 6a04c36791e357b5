// The resolved precision table: every (table, step, layer, module, GEMM, operand) of a stage as a
// QuantSpec. Rules are matched once, here; only engine/model/linear.cpp reads the result (DESIGN.md
// section 4).
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "engine/recipe/recipe.h"
#include "kernels/formats/quant.h"

namespace fp4t {

enum class Table : uint8_t {
  kPretrainForward,
  kPretrainBackward,
  kSampler,
  kTrainerForward,
  kTrainerBackward
};
inline constexpr int kNumTables = 5;
const char* name_of(Table t);  // "pretrain.forward", "pretrain.backward", "rl.sampler", ...

// Frozen: part of the site ids that key random bits. The first nine have GEMMs.
enum class Module : uint8_t {
  kAttnQkv = 0,
  kAttnOut = 1,
  kMlpGateUp = 2,
  kMlpDown = 3,
  kExpertsGateUp = 4,
  kExpertsDown = 5,
  kSharedGateUp = 6,
  kSharedDown = 7,
  kHead = 8,
  kEmbed = 9,
  kKvCache = 10,
  kDispatch = 11,
};
inline constexpr int kNumGemmModules = 9;
const char* name_of(Module m);  // "attn.qkv", ...

enum class GemmRole : uint8_t { kFprop = 0, kDgrad = 1, kWgrad = 2 };
enum class OperandRole : uint8_t { kAct = 0, kWeight = 1, kGrad = 2 };
const char* name_of(GemmRole g);
const char* name_of(OperandRole o);

// ((layer * 64 + module) * 4 + GEMM) * 4 + operand; the head counts as layer `num_layers`. Hadamard signs
// are keyed by the same with operand 0.
uint32_t site_id(int64_t layer, Module module, GemmRole gemm, OperandRole operand);

struct ForwardCell {
  QuantSpec act, weight;
  bool operator==(const ForwardCell&) const = default;
};
struct BackwardCell {
  QuantSpec dgrad_grad, dgrad_weight;  // along the out features
  QuantSpec wgrad_grad, wgrad_act;     // along the tokens
  bool operator==(const BackwardCell&) const = default;
};

struct ForwardTable {
  std::vector<std::array<ForwardCell, kNumGemmModules>> layers;  // head not used here
  ForwardCell head;
  Format embed = Format::kBf16;     // bf16, or fp32 when every cell is
  Format kv_cache = Format::kBf16;  // bf16, mxfp8, fp32; the trainer's forward has the sampler's
  Format dispatch = Format::kBf16;  // of the rows that experts get, wherever these are
  const ForwardCell& cell(int64_t layer, Module m) const {
    return m == Module::kHead ? head : layers[static_cast<size_t>(layer)][static_cast<size_t>(m)];
  }
  bool operator==(const ForwardTable&) const = default;
};
struct BackwardTable {
  std::vector<std::array<BackwardCell, kNumGemmModules>> layers;
  BackwardCell head;
  const BackwardCell& cell(int64_t layer, Module m) const {
    return m == Module::kHead ? head : layers[static_cast<size_t>(layer)][static_cast<size_t>(m)];
  }
  bool operator==(const BackwardTable&) const = default;
};

// A table over the steps of one stage: spans [begin, end) in order, covering [0, steps).
template <class T>
struct Spans {
  struct Span {
    int64_t begin, end;
    T table;
  };
  std::vector<Span> spans;
  const T& at(int64_t step) const {
    for (const Span& s : spans) {
      if (step < s.end) return s.table;
    }
    return spans.back().table;  // after the last step (final evaluation)
  }
};

// Tables of one stage. Pretraining: forward and backward are pretrain.*; RL: rl.trainer.*. The sampler
// generates text in both.
struct StagePrecision {
  Spans<ForwardTable> forward;
  Spans<BackwardTable> backward;
  Spans<ForwardTable> sampler;
};

// Whether a forward cell gives a row the same bits in any batch (NUMERICS.md 0.0, "Row-invariant").
bool row_invariant(const ForwardCell& cell);
// Why it does not; "" when it does.
std::string row_variance(const ForwardCell& cell);

// Whether sampler and trainer agree bit for bit over a stage: "" when yes, else the first cell and why.
std::string equality_obstacle(const StagePrecision& p, const ModelSpec& model);

// What a stage asks of the tables.
struct StageShape {
  bool is_rl = false;
  int64_t steps = 0;
  // Steps that percentages in `steps` matchers refer to; 0: `steps`. A run that was made longer keeps the
  // value of its first plan, so that no switch moves (DESIGN.md section 4).
  int64_t percent_steps = 0;
};

// Matches the rules of all stages of a run. Throws RecipeError (all errors at once) for matchers that
// cannot be read, illegal cells, fp32 in some cells but not all, and recipe rules that never win a cell in
// any stage. Tables that no stage uses are checked too, over 10000 steps or twice the largest they name.
std::vector<StagePrecision> resolve_precision(const PrecisionSpec& spec, const ModelSpec& model,
                                              const std::vector<StageShape>& stages);

// The same for a run of one stage.
StagePrecision resolve_precision(const PrecisionSpec& spec, const ModelSpec& model, bool is_rl,
                                 int64_t steps);

// One cell with its place, over the steps [begin, end).
struct CellRow {
  Table table;
  int64_t begin, end;
  int64_t layer;  // -1: outside the layers
  Module module;
  GemmRole gemm;  // of modules with GEMMs, like `operand`
  OperandRole operand;
  QuantSpec spec;
};
// Every cell that the model has, in a fixed order: tables, spans, modules, GEMMs, operands, layers.
std::vector<CellRow> list_cells(const StagePrecision& p, const ModelSpec& model, bool is_rl);

// The table as text: runs of equal cells in one line each.
std::string describe(const StagePrecision& p, const ModelSpec& model, bool is_rl);

// XXH3 of the resolved cells and spans.
uint64_t hash_of(const StagePrecision& p);
// Of all stages together, 16 hex digits.
std::string hash_of(const std::vector<const StagePrecision*>& stages);

}  // namespace fp4t

// What one rank computes, op by op: FLOPs and bytes, from the plan alone. Rules of counting:
//  - routing is even: every expert gets the same number of rows, every rank of an expert group the same
//  tokens;
//  - sequences are full, so causal attention takes half the square of the batch's length;
//  - a product reads both operands and writes its result once; values that a kernel keeps on chip cost
//  nothing;
//  - bytes of ops that only move data are those that the op must read and write once.
// Products whose format the machine has no tensor cores for are BF16 products after decoding (KERNELS.md,
// section 1: operands are exact); that costs reading the codes and writing BF16.
#pragma once

#include <cstdint>
#include <vector>

#include "engine/plan/dims.h"
#include "engine/plan/machine_spec.h"
#include "engine/plan/operands.h"
#include "engine/plan/plan.h"

namespace fp4t {

inline double real(int64_t n) { return static_cast<double>(n); }

struct OpWork {
  Rate rate = Rate::kElementwise;
  Format format = Format::kBf16;  // whose peak `flops` are held against
  double flops = 0, bytes = 0;
  double ops = 1;         // launches
  bool of_codes = false;  // a product of decoded values: few bits change, so the device keeps its clock
};
using WorkList = std::vector<OpWork>;

// Columns of the printed table.
enum class WorkKind : uint8_t { kProducts, kAttention, kCodes, kRest };
inline constexpr int kNumWorkKinds = 4;
const char* name_of(WorkKind kind);
WorkKind kind_of(Rate rate);

// One call of the model: `tokens` of this rank in sequences of `length`, under one pair of tables.
struct WorkCall {
  const Plan& plan;
  const MachineSpec& machine;
  TablePair tables;
  int64_t tokens, length;
};

// The blocks, embedding included.
void add_forward(const WorkCall& call, WorkList& list);
// `begun`: an earlier micro-batch has left its gradients, so these are added to them.
void add_backward(const WorkCall& call, bool begun, WorkList& list);
// Of this, in layers with experts: gate_up's weight gradients, with the codes that they alone need.
void add_gate_up_gradients(const WorkCall& call, bool begun, WorkList& list);
// The last norm, logits and losses; with their gradients where there is a backward table.
void add_head(const WorkCall& call, bool begun, WorkList& list);
// Weights that are coded once an update.
void add_weight_codes(const WorkCall& call, WorkList& list);
// Sums over ranks as far as a rank adds, the norm, the update of what the rank owns.
void add_update(const Plan& plan, const OptimizerSpec& spec, WorkList& list);
// One call that gives `tokens` sequences with `length` positions in their caches one more, head and draw
// included. Products here cost the reading of their weights.
void add_decode(const WorkCall& call, WorkList& list);

// Share of tokens that have any of their experts among so many given ones, under even routing.
double share_of_guests(const ModelDims& dims, int64_t experts);

// Seconds of an op on the machine: the longer of computing and moving. What launching costs comes on top
// where nothing hides it.
double seconds_of(const OpWork& op, const MachineSpec& machine);

}  // namespace fp4t

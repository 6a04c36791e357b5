// Bytes that ranks send each other in a step, by exchange: what this program hands to its communicator
// (engine/comm/README.md), every part from its sender to its receiver. Figures are of the mean rank. Not
// counted: sizes that calls announce to each other, sums of named figures, signals, checkpoints: kilobytes a
// step.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "engine/plan/machine_spec.h"
#include "engine/plan/plan.h"
#include "engine/plan/work.h"

namespace fp4t {

enum class Collective : uint8_t {
  kExchange,   // parts of parameters and rows of tokens, from device to device
  kAllGather,  // from host to host: everybody's values to everybody
};

// What runs beside an exchange on a GPU: nothing; the last backward of a step; every backward; forward and
// backward.
enum class Beside : uint8_t { kNothing, kLastBackward, kBackward, kBlocks };

struct WireLine {
  std::string name;
  Collective collective = Collective::kExchange;
  Beside beside = Beside::kNothing;
  double inside_bytes = 0, outside_bytes = 0;  // sent by a rank, inside and beyond its fast domain
  double calls = 0;
  double share_beside = 0;  // of its time: what is begun while there still is something to compute
  // Gradients from experts, of a call with so many chunks: of its time what begins when nothing of the last
  // chunk is left but the product for gate_up's weight gradients.
  double share_last = 0, chunks = 1;
  double bytes() const { return inside_bytes + outside_bytes; }
};

// Ranks of a fast domain; 0: all are in one.
struct Domains {
  int64_t size = 0;
};

// Where parameters stand in a row: those of a block, or those before and those after the blocks (layer -1).
std::vector<Span> ranges_of(const Plan& plan, const ShardRow& row, int64_t layer);

// Once an update: gradients to their owners, norm, weights to all who hold them. `micro_batches` of the rank
// with the most: from ZeRO 2 on, blocks exchange in each of them.
std::vector<WireLine> update_wire(const Plan& plan, const Domains& domains, int64_t micro_batches);

// A call of the model with so many tokens on every rank: to the experts and back; nothing where experts are
// not spread. The backward also takes another forward where that came in several rounds.
std::vector<WireLine> expert_forward_wire(const Plan& plan, const ForwardTable& table, double tokens);
std::vector<WireLine> expert_backward_wire(const Plan& plan, const ForwardTable& table, double tokens);

// Seconds of a line: both links carry at once, and a call has the latency of the farthest. What hosts tell
// each other goes over the slow link.
double seconds_of(const WireLine& line, const MachineSpec& machine);

}  // namespace fp4t

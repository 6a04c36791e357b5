// How long a step takes on a machine that is described by its rates: a roofline model. Pure functions.
//
// An op takes the longer of its FLOPs over the peak of their format times the share of it that such ops
// reach, and its bytes over the memory rate times that share (engine/plan/work.h counts,
// engine/plan/machine_spec.h has the shares); ops run one after another. Launches cost nothing while a GPU's
// queue is ahead of the host, the machine's op_us each where a call waits for the one before: in decoding,
// and everywhere on a CPU. Communication (engine/plan/wire.h) is added but for what runs beside the
// computation on a GPU: gradients of blocks beside the backward of those before them (under ZeRO 1 in the
// last backward of a pretraining step, from ZeRO 2 on in each), weights of ZeRO 3 beside the block before;
// and what experts exchange, but for the tokens of a call's first chunk and the sums of its last; of these,
// gradients are hidden as long as the last chunk's product for gate_up's weight gradients takes; each as far
// as there is time. The norm, the weights after an update and the counts of experts' rows are exposed, and on
// a CPU everything is. All ranks are alike: routing is even and no rank waits for another.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "engine/plan/elsewhere.h"
#include "engine/plan/wire.h"
#include "engine/plan/work.h"

namespace fp4t {

enum class Phase : uint8_t {
  kForward,
  kRecompute,
  kBackward,
  kHead,  // last norm, logits, losses, their gradients
  kUpdate,
  kPrefill,
  kDecode,
  kScore,  // RL: log-probabilities of the rollout before its first update
};
inline constexpr size_t kNumPhases = static_cast<size_t>(Phase::kScore) + 1;
const char* name_of(Phase phase);

struct PhaseTime {
  std::array<double, kNumWorkKinds> seconds{};
  double total() const;
};

// A step of a stage, under the tables of its longest span.
struct StagePrediction {
  std::string name;
  bool is_rl = false;
  int64_t tokens = 0;  // trained a step by all ranks; RL: at most, completions of full length
  std::array<PhaseTime, kNumPhases> phases{};
  std::vector<WireLine> wire;
  double compute_seconds = 0;           // all phases
  double communication_seconds = 0;     // all of it
  double hidden_seconds = 0;            // beside the computation
  double forward_backward_seconds = 0;  // without update and communication
  double decode_ms = 0;                 // RL: a decode call in the middle of a completion
  double exposed_seconds() const { return communication_seconds - hidden_seconds; }
  double step_seconds() const { return compute_seconds + exposed_seconds(); }
};

struct Prediction {
  const MachineSpec* machine = nullptr;
  int64_t ranks = 1;
  std::string memory_obstacle;
  std::vector<StagePrediction> stages;
};

// `machine` and the plan must outlive it.
Prediction predict(const PlanElsewhere& made, const MachineSpec& machine);

// Milliseconds of one decode call of so many sequences with `context` positions each, under a sampler's
// table.
double decode_call_ms(const Plan& plan, const MachineSpec& machine, const ForwardTable& table,
                      int64_t sequences, int64_t context);

// Model FLOPs a second of one rank, as a share of the machine's BF16 peak (BENCH.md, "Rules").
double model_flops_utilisation(const Plan& plan, const MachineSpec& machine, double tokens_per_s);

// What `fp4train plan --machine` prints below the plan, and the key `prediction` of `--json`.
std::string describe(const Prediction& prediction, const Plan& plan);
std::string plan_json(const Plan& plan, const Prediction& prediction);

}  // namespace fp4t

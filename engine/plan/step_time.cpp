#include "engine/plan/step_time.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "engine/plan/sizes.h"
#include "kernels/base/numeric.h"

namespace fp4t {

namespace {

enum class Launches : uint8_t { kHidden, kWaited };

// Sums a list into a phase.
void add(const WorkList& list, double times, const MachineSpec& machine, Launches launches,
         PhaseTime& phase) {
  const double op_s = launches == Launches::kWaited || !machine.is_gpu() ? machine.op_us.value * 1e-6 : 0;
  for (const OpWork& op : list) {
    phase.seconds[static_cast<size_t>(kind_of(op.rate))] += times * (seconds_of(op, machine) + op.ops * op_s);
  }
}

// The step in the middle of the longest run of equal tables.
template <class Spans>
void longest(const Spans& spans, int64_t& begin, int64_t& end) {
  int64_t best = -1, b = begin, e = end;
  for (const auto& s : spans) {
    const int64_t from = std::max(s.begin, begin), to = std::min(s.end, end);
    if (to - from > best) best = to - from, b = from, e = to;
  }
  begin = b, end = e;
}
int64_t typical_step(const StagePlan& stage) {
  int64_t begin = 0, end = std::max<int64_t>(stage.steps, 1);
  longest(stage.precision.forward.spans, begin, end);
  longest(stage.precision.backward.spans, begin, end);
  return (begin + end) / 2;
}

class StageModel {
 public:
  StageModel(const Plan& plan, const MachineSpec& machine, const StagePlan& stage)
      : plan_(plan), machine_(machine), stage_(stage), step_(typical_step(stage)) {
    out_.name = stage.name;
    out_.is_rl = stage.is_rl;
  }

  StagePrediction predict() {
    if (const auto* pretrain = std::get_if<PretrainSpec>(&stage_.spec)) {
      train(*pretrain);
    } else {
      reinforce(std::get<RlSpec>(stage_.spec));
    }
    for (const PhaseTime& phase : out_.phases) out_.compute_seconds += phase.total();
    hide();
    return std::move(out_);
  }

 private:
  PhaseTime& phase(Phase p) { return out_.phases[static_cast<size_t>(p)]; }
  const ForwardTable& forward() const { return stage_.precision.forward.at(step_); }
  const BackwardTable& backward() const { return stage_.precision.backward.at(step_); }
  bool recomputes() const { return keep_for_backward(plan_.parallel) == Keep::kInputs; }

  void note(std::vector<WireLine> lines, double times) {
    for (WireLine& line : lines) {
      line.inside_bytes *= times, line.outside_bytes *= times, line.calls *= times;
      const auto same = std::find_if(out_.wire.begin(), out_.wire.end(),
                                     [&](const WireLine& l) { return l.name == line.name; });
      if (same == out_.wire.end()) {
        out_.wire.push_back(line);
      } else {
        const double all = same->bytes() + line.bytes();
        if (all > 0) {
          same->share_beside = (same->share_beside * same->bytes() + line.share_beside * line.bytes()) / all;
        }
        same->inside_bytes += line.inside_bytes, same->outside_bytes += line.outside_bytes;
        same->calls += line.calls;
      }
    }
  }

  // `times` micro-batches of `tokens`, each a forward and a backward.
  void micro_batches(int64_t tokens, int64_t length, double times, bool begun) {
    if (tokens == 0 || times == 0) return;
    const WorkCall call{plan_, machine_, {&forward(), &backward()}, tokens, length};
    WorkList ahead, back, head;
    add_forward(call, ahead);
    add_backward(call, begun, back);
    add_head(call, begun, head);
    const double passes = recomputes() ? 2 : 1;
    add(ahead, times, machine_, Launches::kHidden, phase(Phase::kForward));
    if (recomputes()) add(ahead, times, machine_, Launches::kHidden, phase(Phase::kRecompute));
    add(back, times, machine_, Launches::kHidden, phase(Phase::kBackward));
    add(head, times, machine_, Launches::kHidden, phase(Phase::kHead));
    note(expert_forward_wire(plan_, forward(), real(tokens)), passes * times);
    std::vector<WireLine> lines = expert_backward_wire(plan_, forward(), real(tokens));
    put_beside_weight_gradients(call, begun, lines);
    note(std::move(lines), times);
  }

  // What leaves with a layer's last chunk is hidden as long as its product for gate_up's weight gradients
  // takes. Layers with experts are alike, and so are chunks.
  void put_beside_weight_gradients(const WorkCall& call, bool begun, std::vector<WireLine>& lines) const {
    WorkList products;
    add_gate_up_gradients(call, begun, products);
    PhaseTime time;
    add(products, 1, machine_, Launches::kHidden, time);
    for (WireLine& line : lines) {
      if (line.share_last == 0) continue;
      const double of_last = time.total() / line.chunks / seconds_of(line, machine_);
      line.share_beside += std::min(line.share_last, of_last);
    }
  }

  // Several micro-batches, the first of which begins the gradients, the last what is left.
  void accumulate(int64_t tokens, int64_t micro, int64_t length) {
    const int64_t whole = tokens / micro, rest = tokens % micro;
    if (whole > 0) micro_batches(micro, length, 1, false);
    if (whole > 1) micro_batches(micro, length, real(whole - 1), true);
    micro_batches(rest, length, 1, whole > 0);
  }

  void updates(const OptimizerSpec& optimizer, double times, int64_t micro_batches_each) {
    const WorkCall call{plan_, machine_, {&forward(), &backward()}, 0, 0};
    WorkList codes, update;
    add_weight_codes(call, codes);
    add_update(plan_, optimizer, update);
    add(codes, times, machine_, Launches::kHidden, phase(Phase::kForward));
    add(update, times, machine_, Launches::kHidden, phase(Phase::kUpdate));
    note(update_wire(plan_, {machine_.fast_domain}, micro_batches_each), times);
  }

  void train(const PretrainSpec& spec) {
    out_.tokens = spec.batch.tokens;
    const int64_t sequences = largest_part(spec.batch.tokens / spec.batch.length, plan_.axes.ranks());
    accumulate(sequences * spec.batch.length, spec.batch.micro_sequences * spec.batch.length,
               spec.batch.length);
    updates(spec.optimizer, 1, stage_.accumulation);
    sum_forward_backward();
  }

  void sum_forward_backward() {
    for (const Phase p : {Phase::kForward, Phase::kRecompute, Phase::kBackward, Phase::kHead}) {
      out_.forward_backward_seconds += phase(p).total();
    }
  }

  // Each prompt once for its group, in calls as large as the plan allows, then one position after another,
  // all completions of full length; the caches grow from the prompt to the end.
  void sample(const RlSpec& spec, int64_t sequences, int64_t prompt, int64_t length) {
    const ForwardTable& table = stage_.precision.sampler.at(step_);
    const int64_t batch = std::min(sequences, spec.sampling.max_batch);
    const double batches = real(sequences) / real(batch);
    const int64_t prompts = ceil_div(batch, spec.sampling.samples) * prompt;
    const int64_t rows = std::min(plan_.max_decode_tokens, prompts);
    WorkList prefill, decode;
    add_forward({plan_, machine_, {&table, nullptr}, rows, prompt}, prefill);
    const double calls = batches * real(prompts) / real(rows);
    add(prefill, calls, machine_, Launches::kHidden, phase(Phase::kPrefill));
    note(expert_forward_wire(plan_, table, real(rows)), calls);
    const int64_t context = (prompt + length) / 2;
    add_decode({plan_, machine_, {&table, nullptr}, batch, context}, decode);
    const double steps = batches * real(length - prompt);
    add(decode, steps, machine_, Launches::kWaited, phase(Phase::kDecode));
    note(expert_forward_wire(plan_, table, real(batch)), steps);
    out_.decode_ms = decode_call_ms(plan_, machine_, table, batch, context);
  }

  void reinforce(const RlSpec& spec) {
    const int64_t ranks = plan_.axes.ranks();
    const int64_t sequences = largest_part(spec.sampling.prompts, ranks) * spec.sampling.samples;
    const int64_t prompt = longest_prompt(spec.task);
    const int64_t length = std::min(prompt + spec.sampling.max_tokens, plan_.model.max_positions);
    out_.tokens = spec.sampling.prompts * spec.sampling.samples * length;
    sample(spec, sequences, prompt, length);
    const int64_t tokens = sequences * length, micro = std::min(tokens, spec.objective.micro_tokens);
    score(tokens, micro, length);
    const auto updates_a_step = real(stage_.updates_per_step);
    const auto each = static_cast<int64_t>(std::ceil(real(tokens * spec.objective.epochs) / updates_a_step));
    for (int64_t i = 0; i < stage_.updates_per_step; ++i) accumulate(each, std::min(each, micro), length);
    updates(spec.optimizer, updates_a_step, ceil_div(each, micro));
    sum_forward_backward();
  }

  void score(int64_t tokens, int64_t micro, int64_t length) {
    const WorkCall call{plan_, machine_, {&forward(), nullptr}, micro, length};
    WorkList list;
    add_forward(call, list);
    add_head(call, false, list);
    const double calls = real(tokens) / real(micro);
    add(list, calls, machine_, Launches::kHidden, phase(Phase::kScore));
    note(expert_forward_wire(plan_, forward(), real(micro)), calls);
  }

  // Gradients go first, weights get what is left beside the backward.
  void hide() {
    const double backward = phase(Phase::kBackward).total() + phase(Phase::kRecompute).total();
    double left = backward + phase(Phase::kForward).total();
    for (const WireLine& line : out_.wire) {
      const double seconds = seconds_of(line, machine_);
      out_.communication_seconds += seconds;
      // A step of RL does not know which backward is its last.
      const bool unknown = line.beside == Beside::kLastBackward && out_.is_rl;
      if (!machine_.is_gpu() || line.beside == Beside::kNothing || unknown) continue;
      const double room = line.beside == Beside::kLastBackward ? backward / real(stage_.accumulation)
                          : line.beside == Beside::kBackward   ? backward
                                                               : left;
      const double hidden = std::min({seconds * line.share_beside, room, left});
      out_.hidden_seconds += hidden;
      left -= hidden;
    }
  }

  const Plan& plan_;
  const MachineSpec& machine_;
  const StagePlan& stage_;
  int64_t step_;
  StagePrediction out_;
};

}  // namespace

const char* name_of(Phase phase) {
  constexpr const char* kNames[kNumPhases] = {"forward", "recompute", "backward", "head and loss",
                                              "update",  "prefill",   "decode",   "score"};
  return kNames[static_cast<size_t>(phase)];
}

double PhaseTime::total() const { return std::accumulate(seconds.begin(), seconds.end(), 0.0); }

Prediction predict(const PlanElsewhere& made, const MachineSpec& machine) {
  Prediction p;
  p.machine = &machine;
  p.ranks = made.plan.axes.ranks();
  p.memory_obstacle = made.memory_obstacle;
  for (const StagePlan& stage : made.plan.stages) {
    p.stages.push_back(StageModel(made.plan, machine, stage).predict());
  }
  return p;
}

double decode_call_ms(const Plan& plan, const MachineSpec& machine, const ForwardTable& table,
                      int64_t sequences, int64_t context) {
  WorkList list;
  add_decode({plan, machine, {&table, nullptr}, sequences, context}, list);
  PhaseTime time;
  add(list, 1, machine, Launches::kWaited, time);
  double seconds = time.total();
  for (const WireLine& line : expert_forward_wire(plan, table, real(sequences)))
    seconds += seconds_of(line, machine);
  return seconds * 1e3;
}

double model_flops_utilisation(const Plan& plan, const MachineSpec& machine, double tokens_per_s) {
  return plan.flops_per_token * tokens_per_s / (machine.bf16_tflops.value * 1e12);
}

}  // namespace fp4t

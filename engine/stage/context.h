// What the loops of a run share: model, optimizer, state, and the outlets. One object a process; with several
// ranks the state is the same on all of them, and rank 0's outlets speak for all (engine/comm/README.md).
#pragma once

#include <chrono>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "engine/metrics/metrics.h"
#include "engine/metrics/prometheus.h"
#include "engine/model/transformer.h"
#include "engine/optim/optimizer.h"
#include "engine/stage/resume.h"
#include "engine/stage/stage.h"
#include "engine/stage/step_clock.h"
#include "engine/store/checkpoint.h"
#include "engine/tokens/tokenizer.h"

namespace fp4t {

class Run {
 public:
  Run(Queue& queue, Communicator& comm, const Plan& plan, const RunOptions& options,
      const ResumePoint& resume);
  ~Run();

  Queue& queue;
  Communicator& comm;
  const Plan& plan;
  RunOptions options;
  Console console;
  std::unique_ptr<Tokenizer> tokenizer;
  Transformer model;
  Optimizer optimizer;
  CheckpointStore store;
  RunState state;
  std::unique_ptr<MetricsWriter> metrics;      // rank 0's
  std::unique_ptr<PrometheusFile> prometheus;  // likewise, where the recipe asks for it
  StepClock clock;
  std::vector<NamedTensor> reference;  // weights of the reference policy, empty when no stage needs them

  const StagePlan& stage() const { return plan.stages[static_cast<size_t>(state.stage)]; }

  bool leads() const { return comm.rank() == 0; }
  // This rank's part of n samples, prompts, problems.
  Span part(int64_t n) const { return part_of(n, comm.rank(), comm.size()); }
  // Over all ranks, in rank order.
  double sum_over_ranks(double mine) {
    comm.all_reduce(&mine, 1, ReduceOp::kSum);
    return mine;
  }

  // Where blocks exchange something, all ranks make as many calls (engine/plan/run_layout.h): the largest
  // number of any, and a call of one that has nothing to do.
  size_t calls_of_all(size_t mine, bool backward);
  void serve(const Pass& pass);

  // Passes with the tables in force at the current step. Scoring is the trainer's forward alone.
  Pass pass_for_training() const;
  Pass pass_for_scoring() const;
  Pass pass_for_evaluation() const;  // pretrain.forward
  Pass pass_for_sampling() const;    // rl.sampler

  // Masters and buffers by their own names: what makes up the policy; of masters that ranks share this rank's
  // part.
  std::vector<NamedTensor> policy_tensors();

  // Saves now; a failing save of `required` throws SaveError, another warns and the run goes on.
  void save(bool required);
  // Saves and throws PreemptedError when a signal asked any rank to stop.
  void stop_if_requested();
  [[noreturn]] void stop(int signal_number);
  // Remembers the fingerprint of a stage's data under `key`; it may change later only by an accepted change.
  void check_data(const std::string& key, const std::string& stage_name, const std::string& fingerprint);
  void write_metrics(const std::string& kind, const MetricsRecord& record);
  // Lists the kernel of every product in <run dir>/kernels.txt, whenever it is not what it was before.
  void note_kernels();
  // Seconds that this rank's work has stood still for other ranks since the process began: in calls on the
  // host and, on a GPU, in its queue.
  double exposed_seconds() const { return comm.waited_seconds() + queue.counts().held_seconds; }
  // Seconds of this run, earlier processes included.
  double seconds() const;
  const std::string& last_checkpoint() const { return last_checkpoint_; }

  // Monitors that are summed over one step and must survive a checkpoint inside it: what every rank knows
  // alike, and what this rank adds to; the latter counts from the next reduce_sums() on, which all ranks
  // call.
  void add_common(const std::string& name, double value) { state.counters["step." + name] += value; }
  void add(const std::string& name, double value) {
    if (comm.size() == 1) {
      add_common(name, value);
    } else {
      own_sums_[name] += value;
    }
  }
  void reduce_sums();
  // Throws InternalError naming rank and tensor where ranks hold other weights, buffers or state than rank 0.
  void check_replicas();
  double sum(const std::string& name) const;
  void clear_sums();

  // Router sums since the last call, on their way to the host; and those that are, into the step's monitors.
  void begin_router_sums();
  void add_router_sums();
  // Moves the selection biases by the step's load; call after the last update.
  void balance_experts();
  // Expert load and balance figures of the step, into a record.
  void report_router(MetricsRecord& record, double trained_tokens) const;
  // Whether this step's first micro-batch also sums error energies: every tenth step, as the sums cost about
  // as much as quantising does.
  bool measures_errors() const { return state.step % 10 == 0; }
  // Drops what the model's monitors hold and makes its codes anew. Called where counting begins: so figures
  // depend neither on evaluations and sampling before nor on whether a process started in between.
  void begin_counting();
  // Quantiser monitors of the model, into the step's monitors and a record.
  void add_operand_stats();
  void report_operand_stats(MetricsRecord& record) const;

  // Consecutive updates that were skipped; throws NonFiniteError by the stage's policy.
  void judge(const StepReport& report, const std::string& policy, int64_t max_skips);

 private:
  Pass pass_base() const;
  std::vector<NamedTensor> tensors();
  TensorParts parts();
  void restore(const ResumePoint& resume);
  void warn_of_changes_too_late();
  bool reference_is_in_use() const;

  std::map<std::string, double> own_sums_;
  std::string last_checkpoint_;
  std::vector<std::string> kernels_;
  std::vector<RouterDownload> router_sums_;
  bool prometheus_failed_ = false;
  double earlier_seconds_ = 0;
  int64_t restarts_ = 0;
  bool changes_accepted_ = false;
  std::chrono::steady_clock::time_point start_;
};

// "1h02m", "3m05s", "12s".
std::string duration_text(double seconds);

// Packs sequences into one batch.
struct Sequence;
void append_sequence(TokenBatch& batch, const Sequence& sequence);

void run_pretrain(Run& run);
void run_rl(Run& run);

}  // namespace fp4t

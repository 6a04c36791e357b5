// What the user asked for: plain typed structs, one for each map of the YAML recipe, with the defaults
// that apply where the recipe is silent. Text, positions and errors are engine/recipe/load.h's; the
// field lists that parse, print, document and compare them are engine/recipe/fields.h's.
// Nothing downstream of the plan reads these.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "kernels/base/dtype.h"
#include "kernels/formats/quant.h"

namespace fp4t {

struct RunSpec {
  std::string name = "run";
  std::string dir;  // run folder; default runs/<name>
  uint64_t seed = 1;
  std::string device = "auto";  // auto, cpu, cuda
  int64_t threads = 0;          // CPU threads; 0: all cores
  double watchdog_seconds = 1800;
  bool deterministic = true;
  std::string resume = "auto";  // auto, never, or a checkpoint folder
  std::string branch_from;      // checkpoint folder to start a new run from
  bool allow_fault_injection = false;
  std::string prometheus;  // text file for node_exporter; "": none
  bool operator==(const RunSpec&) const = default;
};

struct RopeSpec {
  double theta = 10000.0;
  std::string scaling = "none";    // none, linear, llama3, yarn
  double factor = 1.0;             // context extension of linear, llama3, yarn
  double low_freq_factor = 1.0;    // llama3
  double high_freq_factor = 4.0;   // llama3
  double beta_fast = 32.0;         // yarn
  double beta_slow = 1.0;          // yarn
  int64_t original_positions = 0;  // llama3, yarn: positions the base model was trained for
  bool operator==(const RopeSpec&) const = default;
};

struct BalanceSpec {
  double bias_rate = 0.0;  // step of the selection bias, 0: off
  double aux_loss = 0.0;   // coefficient of the load-balance loss
  double z_loss = 0.0;     // coefficient of the router z-loss
  bool operator==(const BalanceSpec&) const = default;
};

struct MoeSpec {
  int64_t experts = 0;  // 0: every layer is dense
  int64_t top_k = 1;
  int64_t hidden = 0;              // FFN width of one expert
  int64_t shared_experts = 0;      // one dense FFN of shared_experts * shared_hidden beside the routed ones
  int64_t shared_hidden = 0;       // default: hidden
  int64_t dense_layers = 0;        // the first layers that are dense, of width model.mlp_hidden
  std::string router = "softmax";  // softmax, sigmoid
  bool normalise = true;           // gates divided by their sum
  double gate_scale = 1.0;
  BalanceSpec balance;
  bool operator==(const MoeSpec&) const = default;
};

struct InitSpec {
  std::string kind = "normal";
  double std = 0.02;           // of every matrix
  bool scale_residual = true;  // attn.out and *.down by 1/sqrt(2 layers) (GPT-2)
  bool operator==(const InitSpec&) const = default;
};

struct ModelSpec {
  std::string from;  // folder with config.json and *.safetensors whose weights the run starts from; "": none
  int64_t layers = 0, hidden = 0, heads = 0, kv_heads = 0, head_dim = 0;
  int64_t mlp_hidden = 0;  // FFN width of dense layers
  int64_t vocabulary = 0;  // 0: the tokenizer's
  int64_t max_positions = 2048;
  bool qk_norm = false;
  bool tied_head = false;
  double norm_eps = 1e-6;
  double swiglu_clamp = 0.0;  // 0: none
  RopeSpec rope;
  MoeSpec moe;
  InitSpec init;
  bool operator==(const ModelSpec&) const = default;
};

struct TokenizerSpec {
  // bytes: 256 byte values and <eod> = 256; ids: text is token numbers; json: byte-level BPE of a
  // tokenizer.json; sentencepiece: a .model
  std::string kind = "bytes";
  std::string path;        // json, sentencepiece
  int64_t vocabulary = 0;  // ids: number of tokens; the last is <eod>. json, sentencepiece: 0, the file's
  std::string end_of_document;    // text of a token; "": one with a usual name
  std::string begin_of_document;  // text of a token, or none; "": as the file says
  std::string hash;               // of what decides ids in the file; "": any
  std::string chat;               // form of conversations; "": none
  bool operator==(const TokenizerSpec&) const = default;
};

struct ParallelSpec {
  int64_t data = 0;  // 0: what is left of the ranks
  int64_t expert = 1;
  double receive_factor = 2;  // 0: room for all that could come
  int64_t expert_chunks = 1;  // 0: by the bytes that travel
  int64_t domain = 0;         // ranks; 0: all are one domain
  int64_t zero = 1;
  std::string transport = "auto";  // auto, nccl, host
  std::string recompute = "none";  // none, block
  bool operator==(const ParallelSpec&) const = default;
};

struct DtypesSpec {
  DType masters = DType::kF32;     // fp32, bf16
  DType moments = DType::kF32;     // fp32, bf16
  DType gradients = DType::kBf16;  // bf16, fp32; head, embedding and router always fp32
  bool operator==(const DtypesSpec&) const = default;
};

// Where a value stands in the recipe, for messages.
struct SourcePlace {
  std::string file;
  int line = 0, column = 0;  // 1-based; 0: from a preset or a default
};

// One rule of a precision table. Matchers that are absent match everything.
struct RuleSpec {
  std::vector<std::string> modules;  // globs; empty: not named
  std::string layers;                // "", "0-3", "5", "first 2", "last 15%"
  std::string steps;                 // "", "0-90%", "100-500"
  std::string gemm;                  // "", fprop, dgrad, wgrad
  std::string operand;               // "", act, weight, grad
  QuantSpec spec;                    // format and its keys; what was left out has the defaults
  bool scale_scope_given = false;    // else row for nvfp4 fprop act in the RL forward tables
  std::string path;                  // dotted path, "precision.pretrain.forward[2]"
  SourcePlace place;
  bool from_preset = false;
  // What the rule says, wherever it stands.
  bool operator==(const RuleSpec& o) const {
    return modules == o.modules && layers == o.layers && steps == o.steps && gemm == o.gemm &&
           operand == o.operand && spec == o.spec && scale_scope_given == o.scale_scope_given &&
           from_preset == o.from_preset;
  }
};

struct PrecisionSpec {
  std::string preset;               // "" or a name of NUMERICS.md 0.0
  std::vector<RuleSpec> tables[5];  // indexed by Table (engine/plan/precision.h), overrides first
  bool operator==(const PrecisionSpec&) const = default;
};

struct OptimizerSpec {
  std::string kind = "adamw";  // adamw, muon (matrices by Muon, the rest by AdamW)
  double learning_rate = 1e-3;
  double beta1 = 0.9, beta2 = 0.95, eps = 1e-8;
  double weight_decay = 0.0;  // matrices only
  double clip_norm = 1.0;     // 0: no clipping
  double muon_learning_rate = 0.02;
  double muon_momentum = 0.95;
  int64_t muon_iterations = 5;
  std::string state = "fresh";  // at the start of a stage: fresh, keep
  bool operator==(const OptimizerSpec&) const = default;
};

struct ScheduleSpec {
  std::string kind = "cosine";  // constant, cosine, linear, wsd
  int64_t warmup = 0;           // updates
  double final_fraction = 0.1;  // of the learning rate, reached at the last update
  double decay_fraction = 0.2;  // wsd: the last part of the updates that decays
  bool operator==(const ScheduleSpec&) const = default;
};

// A split that both the data and the tasks respect.
struct HeldOutSpec {
  double fraction = 0.0;  // of documents (text) or problems (sums, countdown)
  uint64_t seed = 0;
  std::string hash;  // generated tasks: XXH3 of the held-out list, checked at start
  bool operator==(const HeldOutSpec&) const = default;
};

struct DataSourceSpec {
  std::string name;
  // text, jsonl; megatron, llmc, nanogpt: files of tokens; sums, countdown, random: generated
  std::string kind = "text";
  std::vector<std::string> paths;     // files or folders, globs allowed
  std::string separator;              // text: a line that separates documents ("%"); "": one document a file
  std::string field = "text";         // jsonl
  std::string loss_on = "assistant";  // jsonl, of rows that are conversations: assistant, all
  double weight = 1.0;                // share of the tokens
  bool end_of_document = true;        // text, jsonl: append <eod> to each document
  bool special_tokens = false;        // text, jsonl: texts of special tokens are those tokens
  std::string dtype = "uint16";       // nanogpt: uint16, uint32
  int64_t low = 10, high = 99;        // sums: range of both operands; countdown: of its numbers
  double wrong_fraction = 0.0;        // sums, countdown: share of documents whose answer is wrong on purpose
  int64_t numbers = 3;                // countdown: numbers a problem
  HeldOutSpec held_out;
  bool operator==(const DataSourceSpec&) const = default;
};

struct BatchSpec {
  int64_t tokens = 0;           // a step, over all ranks: micro_sequences * length * a whole number
  int64_t micro_sequences = 1;  // sequences a micro-batch
  int64_t length = 0;           // tokens a sequence
  bool operator==(const BatchSpec&) const = default;
};

// Where answers stand and how they are compared (task.kind jsonl).
struct AnswerSpec {
  std::string form = "exact";      // in a completion: exact, hash, boxed, regex
  std::string gold = "exact";      // in the file: exact, hash, boxed
  std::string pattern;             // form regex
  std::string compare = "number";  // number, text
  bool operator==(const AnswerSpec&) const = default;
};

struct TaskSpec {
  std::string kind = "sums";    // sums, countdown, jsonl
  int64_t low = 10, high = 99;  // sums operands; countdown numbers
  int64_t numbers = 3;          // countdown
  // jsonl:
  std::vector<std::string> paths;  // files or folders, globs allowed
  std::string prompt_field = "prompt", answer_field = "answer";
  std::string limit_field;                   // a row's own sampling.max_tokens; "": none has one
  std::string prompt_template = "{prompt}";  // what the model reads
  int64_t max_prompt_tokens = 512;           // of the longest prompt, template included
  AnswerSpec answer;
  HeldOutSpec held_out;
  bool permute_rewards = false;  // control experiment: rewards shuffled over all completions of a step
  bool operator==(const TaskSpec&) const = default;
};

struct EvalSpec {
  int64_t every = 0;             // steps; 0: only at the start and the end of the stage
  int64_t tokens = 65536;        // held-out tokens a source, at most
  std::optional<TaskSpec> task;  // accuracy on the held-out problems
  int64_t task_samples = 4;      // at temperature 1, besides one greedy
  int64_t task_problems = 0;     // 0: all of the held-out problems
  int64_t max_tokens = 16;
  std::vector<std::string> end_tokens;  // empty: in RL stages the sampler's, else the tokenizer's line ends
  std::vector<std::string> prompts;     // samples to show
  bool operator==(const EvalSpec&) const = default;
};

struct CheckpointSpec {
  int64_t every = 0;          // steps; 0: only at the end of the stage
  int64_t every_updates = 0;  // RL: also every so many updates inside a rollout's updates; 0: off
  int64_t keep = 2;
  bool operator==(const CheckpointSpec&) const = default;
};

struct PretrainSpec {
  std::string name = "pretrain";
  int64_t steps = 0;
  BatchSpec batch;
  std::vector<DataSourceSpec> data;
  OptimizerSpec optimizer;
  ScheduleSpec schedule;
  EvalSpec eval;
  CheckpointSpec checkpoint;
  double z_loss = 0.0;                // on the logits' log-sum-exp
  std::string on_nonfinite = "skip";  // skip, stop
  int64_t max_skips = 10;             // consecutive skips before the run stops
  bool operator==(const PretrainSpec&) const = default;
};

struct SamplingSpec {
  int64_t prompts = 32;  // a step
  int64_t samples = 16;  // completions a prompt
  double temperature = 1.0;
  double top_p = 1.0;
  int64_t max_tokens = 16;
  int64_t max_batch = 512;                       // sequences decoded together
  std::vector<std::string> end_tokens = {"\n"};  // strings of one token, or "<eod>"
  bool operator==(const SamplingSpec&) const = default;
};

// What the ratio rho = p_old / mu of trainer to sampler does to the policy's term of a token: f(rho), a
// constant to the gradient. Masks set f to 0; bounds of 0 above are off.
struct MismatchSpec {
  std::string importance = "truncated";  // off (f = 1), raw (f = rho), truncated (f = min(rho, cap))
  double cap = 2.0;
  double token_low = 0.0, token_high = 0.0;        // tokens with rho outside are masked
  double sequence_low = 0.0, sequence_high = 0.0;  // completions whose geometric mean of rho is outside
  double veto = 0.0;                               // completions that hold a rho below
  bool operator==(const MismatchSpec&) const = default;
};

// The defaults are those of kind grpo; objective_defaults() gives another kind's.
struct ObjectiveSpec {
  std::string kind = "grpo";
  std::string baseline = "group_mean";  // group_mean, leave_one_out
  bool normalise_std = true;            // advantages divided by the group's standard deviation
  std::string ratio = "token";          // token, sequence (geometric mean over the completion)
  std::string clip_form = "ppo";        // ppo, cispo (a clipped weight on the log-probability), none
  double clip_low = 0.2, clip_high = 0.2;
  double clip_dual = 0.0;            // 0: off
  std::string average = "sequence";  // token (mean over all tokens), sequence (mean of means), constant
  int64_t average_tokens = 0;        // the constant's tokens a completion; 0: sampling.max_tokens
  bool drop_zero_advantage = true;
  bool mask_truncated = false;      // completions that were cut are not trained on
  int64_t resample = 0;             // most times that groups of equal rewards are replaced by new problems
  int64_t overlong_tokens = 0;      // the last tokens before the limit, over which a penalty rises; 0: none
  double overlong_penalty = 1.0;    // taken off the reward at the limit
  double kl = 0.0;                  // coefficient of the penalty to the policy at the start of the stage
  std::string kl_estimator = "k3";  // k1, k2, k3
  std::string kl_in = "loss";       // loss, reward
  double entropy = 0.0;             // coefficient of the entropy bonus
  int64_t epochs = 1;
  int64_t mini_batches = 1;      // optimizer updates an epoch
  int64_t micro_tokens = 16384;  // at most so many tokens a forward-backward
  MismatchSpec mismatch;
  std::string router_replay = "off";  // off, measure (disagreement is logged), sampler (and replayed)
  bool operator==(const ObjectiveSpec&) const = default;
};

// What a kind means, in the keys that it sets.
ObjectiveSpec objective_defaults(const std::string& kind, int64_t max_tokens);

// One part of a completion's reward, which is the sum of weight * part.
struct RewardSpec {
  std::string kind = "verifier";  // verifier, length, format, process
  std::string name;               // in metrics and rollouts; default: kind
  double weight = 1.0;
  int64_t free_tokens = 0;           // length: tokens that cost nothing; below sampling.max_tokens
  std::string pattern;               // format: regular expression
  std::vector<std::string> command;  // process: program and arguments
  double timeout_seconds = 30;       // process: for one batch of completions
  int64_t restarts = 3;              // process: in a row, before the run stops
  int64_t cpu_seconds = 0;           // process: limits, 0: none
  int64_t memory_mib = 0;
  int64_t file_mib = 0;
  bool operator==(const RewardSpec&) const = default;
};

// Completions of a step written as JSON lines.
struct RolloutsSpec {
  int64_t every = 0;  // steps; 0: off
  int64_t keep = 0;   // files that stay; 0: all
  bool operator==(const RolloutsSpec&) const = default;
};

struct RlSpec {
  std::string name = "rl";
  int64_t steps = 0;
  TaskSpec task;
  std::vector<RewardSpec> rewards;  // empty: the verifier's verdict alone
  RolloutsSpec rollouts;
  SamplingSpec sampling;
  ObjectiveSpec objective;
  OptimizerSpec optimizer;
  ScheduleSpec schedule;
  EvalSpec eval;
  CheckpointSpec checkpoint;
  std::string on_nonfinite = "skip";
  int64_t max_skips = 10;
  int64_t stop_without_signal = 0;  // steps in a row without a learning signal before the run stops; 0: never
  bool operator==(const RlSpec&) const = default;
};

using StageSpec = std::variant<PretrainSpec, RlSpec>;

struct Recipe {
  RunSpec run;
  ModelSpec model;
  TokenizerSpec tokenizer;
  ParallelSpec parallel;
  DtypesSpec dtypes;
  PrecisionSpec precision;
  std::vector<StageSpec> stages;
  bool operator==(const Recipe&) const = default;
};

}  // namespace fp4t

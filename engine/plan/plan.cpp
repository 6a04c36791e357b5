#include "engine/plan/plan.h"

#include <algorithm>
#include <limits>

#include "engine/comm/device.h"
#include "engine/plan/elsewhere.h"
#include "engine/plan/memory.h"
#include "engine/plan/resolve.h"
#include "engine/plan/sizes.h"
#include "engine/recipe/load.h"
#include "kernels/ops/capability.h"

namespace fp4t {

namespace {

Axes resolve_axes(const Recipe& recipe, int64_t ranks, ProblemList& problems) {
  const ParallelSpec& p = recipe.parallel;
  const std::string here = ranks > 1 ? detail::concat("this run has ", ranks)
                                     : "this program runs on one (mpirun -np N; fp4train plan: --ranks N)";
  if (ranks % p.expert != 0) {
    problems.at("parallel.expert",
                detail::concat(p.expert, " needs ", p.expert, " ranks, or a multiple, and ", here,
                               "; allowed: a divisor of the number of ranks"));
    return {};
  }
  const Axes axes = {ranks / p.expert, p.expert};
  if (p.data != 0 && p.data != axes.data) {
    problems.at("parallel.data",
                detail::concat(p.data, " x parallel.expert ", p.expert, " needs ", p.data * p.expert,
                               " ranks, and ", here, "; allowed: ", axes.data, ", or 0 for what is left"));
  }
  if (p.domain > 0 && p.domain < ranks) {
    if (ranks % p.domain != 0) {
      problems.at("parallel.domain", detail::concat(p.domain, " ranks, and ", here,
                                                    "; allowed: a divisor of the number of ranks, or 0"));
    } else if (p.domain % p.expert != 0) {
      problems.at("parallel.domain",
                  detail::concat(p.domain, " ranks, and ", p.expert,
                                 " share experts (parallel.expert): some "
                                 "groups would lie in two domains; allowed: a multiple of it, or 0"));
    }
  }
  return axes;
}

// "nccl" or "host"; "" where ranks exchange nothing.
std::string resolve_transport(const Recipe& recipe, const Machine& machine, int64_t ranks,
                              ProblemList& problems) {
  const std::string& wish = recipe.parallel.transport;
  const bool gpu = machine.backend == Backend::kCuda;
  if (wish == "nccl" && !gpu) {
    problems.at("parallel.transport", "nccl, and this run computes on the CPU; allowed: auto, host");
  }
  if (ranks == 1 || !gpu || wish == "host") return ranks == 1 ? "" : "host";
  if (!built_with_nccl()) {
    problems.at("parallel.transport",
                wish +
                    ", which is NCCL between GPUs, and this program was built without it; allowed: host, "
                    "which is slow, or run.device: cpu");
  }
  return "nccl";
}

// The same where another machine carries them.
std::string transport_elsewhere(const Recipe& recipe, const MachineSpec& spec, int64_t ranks,
                                ProblemList& problems) {
  const std::string& wish = recipe.parallel.transport;
  if (spec.is_gpu() ? wish == "host" : wish == "nccl") {
    problems.at("parallel.transport",
                detail::concat(wish,
                               ", and predictions know NCCL between GPUs and host memory between CPUs alone; "
                               "allowed: auto"));
  }
  return ranks == 1 ? "" : spec.is_gpu() ? "nccl" : "host";
}

// What this process shall run.
void check_machine(const Recipe& recipe, const Machine& machine, ProblemList& problems) {
  if (recipe.run.device == "cuda" && machine.backend != Backend::kCuda) {
    const std::string why = !machine.gpu_obstacle.empty() ? machine.gpu_obstacle
                            : machine.built_with_cuda     ? "this machine shows no usable GPU"
                                                          : "this program was built without CUDA";
    problems.at("run.device", "cuda, and " + why + "; allowed: auto, cpu");
  }
}

// What another machine shall run. The axes are one rank's where parallel.expert does not divide the ranks.
void check_spec(const Recipe& recipe, const MachineSpec& spec, const Axes& axes, ProblemList& problems) {
  const std::string& device = recipe.run.device;
  const int64_t ranks = axes.ranks(), domain = spec.fast_domain;
  if (device != "auto" && (device == "cuda") != spec.is_gpu()) {
    problems.at("run.device", detail::concat(device, ", and --machine ", spec.name, " computes on ",
                                             spec.backend, "; allowed: auto, ", spec.backend));
  }
  if (ranks > domain && ranks % domain != 0) {
    problems.at("--ranks", detail::concat(ranks, " leave a fast domain of ", spec.name,
                                          " half empty; allowed: up to ", domain, ", or a multiple"));
  }
  if (recipe.parallel.domain > domain && ranks > domain) {
    problems.at("parallel.domain", detail::concat(recipe.parallel.domain, " ranks, and a fast domain of ",
                                                  spec.name, " has ", domain, "; allowed: at most that"));
  }
  const int64_t expert = axes.expert;
  if (expert > domain || (ranks > domain && domain % expert != 0)) {
    problems.at(
        "parallel.expert",
        detail::concat(expert, " ranks share experts, and a fast domain of ", spec.name, " has ", domain,
                       expert > domain ? "; allowed: at most that"
                                       : ": some groups would lie in two; allowed: a divisor of it"));
  }
}

void check_kernels(const Plan& plan, ProblemList& problems) {
  const std::string why = head_dim_obstacle(plan.machine, plan.model.head_dim);
  if (!why.empty()) problems.at("model.head_dim", detail::concat(plan.model.head_dim, ", and ", why));
}

void resolve_vocabulary(Plan& plan, ProblemList& problems) {
  const int64_t needed = tokenizer_vocabulary(plan.tokenizer);
  if (plan.model.vocabulary == 0) plan.model.vocabulary = needed;
  if (plan.model.vocabulary < needed) {
    problems.at("model.vocabulary",
                detail::concat(plan.model.vocabulary, " is less than the ", needed, " tokens of tokenizer ",
                               plan.tokenizer.kind, "; leave it out or give at least that"));
  }
}

void make_stages(Plan& plan, const Recipe& recipe) {
  for (const StageSpec& spec : recipe.stages) {
    StagePlan stage;
    stage.spec = spec;
    stage.name = std::visit([](const auto& s) { return s.name; }, spec);
    stage.steps = std::visit([](const auto& s) { return s.steps; }, spec);
    stage.is_rl = std::holds_alternative<RlSpec>(spec);
    plan.stages.push_back(std::move(stage));
  }
}

void resolve_stages(Plan& plan, const PrecisionSpec& spec, const std::vector<int64_t>& span_steps,
                    ProblemList& problems) {
  std::vector<StageShape> shapes;
  for (const StagePlan& stage : plan.stages) {
    const size_t i = shapes.size();
    shapes.push_back({stage.is_rl, stage.steps, i < span_steps.size() ? span_steps[i] : 0});
  }
  std::vector<StagePrecision> precision = resolve_precision(spec, plan.model, shapes, problems);
  std::vector<const StagePrecision*> hashed;
  for (size_t i = 0; i < plan.stages.size(); ++i) {
    StagePlan& stage = plan.stages[i];
    stage.precision = std::move(precision[i]);
    if (stage.is_rl) stage.equality_obstacle = equality_obstacle(stage.precision, plan.model);
    hashed.push_back(&stage.precision);
  }
  plan.precision_hash = hash_of(hashed);
}

// The reference format is one for all cells (precision.cpp sees to it), so one cell tells.
bool is_fp32_reference(const Plan& plan) {
  return !plan.stages.empty() && plan.stages.front().precision.forward.at(0).head.act.format == Format::kFp32;
}

void check_reference(const Plan& plan, ProblemList& problems) {
  if (plan.act == DType::kF32 && plan.dtypes.masters != DType::kF32) {
    problems.at("dtypes.masters", "bf16, and the fp32 format computes with the masters; allowed: fp32");
  }
}

// A key of the recipe with its value, and how much of the need it decides.
struct DecidingKey {
  std::string path;
  int64_t value, share;
};

std::string named(const DecidingKey& key) { return detail::concat(key.path, " (", key.value, ")"); }

void sort_by_share(std::vector<DecidingKey>& keys) {
  std::stable_sort(keys.begin(), keys.end(),
                   [](const DecidingKey& a, const DecidingKey& b) { return a.share > b.share; });
}

// The keys that decide how many tokens a step works on at once, the one that decides most first.
std::vector<DecidingKey> batch_keys(const Plan& plan) {
  std::vector<DecidingKey> keys;
  for (size_t i = 0; i < plan.stages.size(); ++i) {
    const StagePlan& stage = plan.stages[i];
    if (const auto* pretrain = std::get_if<PretrainSpec>(&stage.spec)) {
      const BatchSpec& batch = pretrain->batch;
      keys.push_back({detail::concat("stages[", i, "].pretrain.batch.micro_sequences"), batch.micro_sequences,
                      batch.micro_sequences * batch.length});
    } else {
      const RlSpec& rl = std::get<RlSpec>(stage.spec);
      keys.push_back({detail::concat("stages[", i, "].rl.objective.micro_tokens"), rl.objective.micro_tokens,
                      std::min(rl.objective.micro_tokens, plan.max_tokens)});
      // The arena of a step is as large as the larger of training and sampling; the other is a line without
      // bytes.
      const bool sampling_decides =
          std::any_of(plan.memory.step.begin(), plan.memory.step.end(),
                      [](const MemoryLine& l) { return l.name == "training (overlaid)"; });
      keys.push_back({detail::concat("stages[", i, "].rl.sampling.max_batch"), rl.sampling.max_batch,
                      sampling_decides ? std::numeric_limits<int64_t>::max() : 0});
    }
  }
  sort_by_share(keys);
  return keys;
}

// Of the model, by the elements of its parameters that grow with each.
std::vector<DecidingKey> model_keys(const Plan& plan) {
  const ModelSpec& m = plan.model;
  int64_t all = 0, experts = 0, outside = 0;
  for (const ParamInfo& p : plan.parameters) {
    const int64_t n = p.shape.elements();
    all += n;
    if (p.role == ParamRole::kExpertWeight) experts += n;
    if (p.role == ParamRole::kEmbedding || p.name == "head") outside += n;
  }
  std::vector<DecidingKey> keys = {{"model.layers", m.layers, all - outside},
                                   {"model.hidden", m.hidden, all}};
  if (m.moe.experts > 0) keys.push_back({"model.moe.experts", m.moe.experts, 2 * experts});
  sort_by_share(keys);
  return keys;
}

// What needs less than this plan.
std::string smaller_needs(const Plan& plan, const std::vector<DecidingKey>& keys) {
  std::string text = "smaller ";
  for (size_t i = 0; i < keys.size(); ++i) {
    text += (i == 0 ? "" : i + 1 == keys.size() ? " or " : ", ") + named(keys[i]);
  }
  text += " need less";
  std::string values;
  if (plan.parallel.recompute == "none") values += ", parallel.recompute: block";
  if (plan.dtypes.masters == DType::kF32) values += ", dtypes.masters: bf16";
  if (plan.dtypes.moments == DType::kF32) values += ", dtypes.moments: bf16";
  return values.empty() ? text : text + "; so do " + values.substr(2);
}

// "" when the machine has room for the plan.
std::string memory_obstacle(const Plan& plan) {
  const MemoryPlan& m = plan.memory;
  const int64_t total = m.total_bytes();
  const Machine& machine = plan.machine;
  const int64_t room = machine.free_bytes > 0 ? machine.free_bytes : machine.memory_bytes;
  if (room <= 0 || total <= room) return "";
  return detail::concat(
      "the plan needs ", total >> 20, " MiB (run ", m.run_bytes >> 20, ", step ", m.step_bytes >> 20,
      ", scratch ", (m.scratch_bytes + m.workspace_bytes) >> 20,
      m.communicator_bytes > 0 ? detail::concat(", NCCL ", m.communicator_bytes >> 20) : std::string(),
      ") and ", machine.device_name, " has ", room >> 20, " MiB", machine.free_bytes > 0 ? " free" : "");
}

// All keys that decide how much memory the plan needs, the one to blame first.
std::vector<DecidingKey> deciding_keys(const Plan& plan) {
  std::vector<DecidingKey> keys = batch_keys(plan);
  const std::vector<DecidingKey> of_model = model_keys(plan);
  // What the run holds all the time is the model's.
  const bool model_decides = plan.memory.run_bytes > plan.memory.total_bytes() / 2;
  keys.insert(model_decides ? keys.begin() : keys.end(), of_model.begin(), of_model.end());
  return keys;
}

// The key to blame, and what to do; the text is empty when the plan fits.
std::pair<std::string, std::string> memory_problem(const Plan& plan) {
  const std::string obstacle = memory_obstacle(plan);
  if (obstacle.empty()) return {};
  const std::vector<DecidingKey> keys = deciding_keys(plan);
  return {keys.front().path, obstacle + ": " + smaller_needs(plan, keys)};
}

void check_memory(const Plan& plan, ProblemList& problems) {
  const auto [key, problem] = memory_problem(plan);
  if (!problem.empty()) problems.at(key, problem);
}

// Muon makes whole matrices orthogonal, so no parameter may be cut where it is used.
bool uses_muon(const Plan& plan) {
  return std::any_of(plan.stages.begin(), plan.stages.end(), [](const StagePlan& s) {
    return std::visit([](const auto& spec) { return spec.optimizer.kind == "muon"; }, s.spec);
  });
}

void finish_parameters(Plan& plan) {
  plan.parameters = parameter_list(plan.model, plan.dtypes);
  plan.buffers = buffer_list(plan.model);
  if (plan.act == DType::kF32 || accumulates(plan)) {
    for (ParamInfo& p : plan.parameters) p.gradient = DType::kF32;
  }
  if (plan.axes.ranks() > 1) {
    const auto cut = uses_muon(plan) ? ShardTable::Cut::kParameters : ShardTable::Cut::kChunks;
    plan.shards = ShardTable(plan.parameters, plan.axes, cut);
  }
}

// Everything but the memory's fit; `check` sees the axes and says what carries tensors between ranks.
template <class Check>
Plan resolve(const Recipe& recipe, const Machine& machine, const std::vector<int64_t>& span_steps,
             int64_t ranks, ProblemList& problems, const Check& check) {
  Plan plan;
  plan.run = recipe.run;
  plan.model = recipe.model;
  plan.parallel = recipe.parallel;
  plan.dtypes = recipe.dtypes;
  plan.tokenizer = recipe.tokenizer;
  plan.machine = machine;
  plan.axes = resolve_axes(recipe, ranks, problems);
  plan.transport = check(plan.axes);
  check_kernels(plan, problems);
  resolve_vocabulary(plan, problems);
  make_stages(plan, recipe);
  size_plan(plan, problems);
  resolve_stages(plan, recipe.precision, span_steps, problems);
  plan.act = is_fp32_reference(plan) ? DType::kF32 : DType::kBf16;
  check_reference(plan, problems);
  problems.throw_if_any();
  plan.head_chunk = head_chunk(plan.model.vocabulary);
  finish_parameters(plan);
  plan.flops_per_token = model_flops_per_token(plan);
  plan.recipe_yaml = print_recipe(recipe);
  plan.memory = plan_memory(plan);
  return plan;
}

}  // namespace

int64_t tokenizer_vocabulary(const TokenizerSpec& tokenizer) {
  if (tokenizer.kind == "bytes") return 257;  // 256 byte values and <eod>
  FP4T_CHECK(tokenizer.vocabulary > 0, "tokenizer ", tokenizer.kind, ", whose file was not read");
  return tokenizer.vocabulary;
}

Plan make_plan(const Recipe& recipe, const Machine& machine, const std::vector<int64_t>& span_steps,
               const FieldPlaces& places, int64_t ranks) {
  ProblemList problems(places);
  Plan plan = resolve(recipe, machine, span_steps, ranks, problems, [&](const Axes&) {
    check_machine(recipe, machine, problems);
    return resolve_transport(recipe, machine, ranks, problems);
  });
  check_memory(plan, problems);
  problems.throw_if_any();
  return plan;
}

PlanElsewhere plan_elsewhere(const Recipe& recipe, const MachineSpec& spec, const FieldPlaces& places,
                             int64_t ranks) {
  ProblemList problems(places);
  PlanElsewhere made;
  made.plan = resolve(recipe, machine_of(spec), {}, ranks, problems, [&](const Axes& axes) {
    check_spec(recipe, spec, axes, problems);
    return transport_elsewhere(recipe, spec, ranks, problems);
  });
  made.memory_obstacle = memory_problem(made.plan).second;
  return made;
}

std::string memory_refusal(const Plan& plan, const FieldPlaces& places, const std::string& what) {
  const std::vector<DecidingKey> keys = deciding_keys(plan);
  return detail::concat(place_text(nearest_place(places, keys.front().path)), ": ", keys.front().path, ": ",
                        what, ": ", smaller_needs(plan, keys));
}

void size_for_generation(Plan& plan, int64_t prompt_tokens, int64_t length, int64_t samples) {
  plan.max_tokens = prompt_tokens;
  plan.max_cache_slots = samples;
  plan.max_cache_length = length;
  plan.max_cache_pages = 0;
  plan.max_decode_tokens = std::max(prompt_tokens, samples);
  plan.memory = plan_memory(plan);
  const std::string obstacle = memory_obstacle(plan);
  if (!obstacle.empty()) {
    throw RecipeError(
        obstacle +
        ": fewer or shorter sequences at once need less (--samples, --max-tokens, --batch-tokens)");
  }
}

}  // namespace fp4t

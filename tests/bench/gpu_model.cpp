// A recipe's model on a GPU: forward and backward of a micro-batch, the optimizer's step, decoding. Prints
// one JSON object a line, with the keys of scripts/bench/torch_moe.py.
//   bench_gpu_model configs/bench/q6.yaml [--set A.B=VALUE]... [--iters 10] [--losses N] [--dump PREFIX]
//                   [--decode 1,16,64,256] [--context 1024] [--only train|decode] [--balance router|forced]
//                   [--any-order]
// --losses N first trains N steps and prints their losses; --dump writes PREFIX.weights.safetensors and
// PREFIX.tokens.safetensors before them, for torch_moe.py to start from. --balance forced trains weights and
// tokens under which every expert gets the same number of tokens. --any-order decodes with cuBLASLt's dense
// products in place of ours, as a sampler might whose bits need not be the trainer's.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <functional>
#include <nlohmann/json.hpp>
#include <optional>
#include <random>

#include "engine/comm/comm.h"
#include "engine/model/transformer.h"
#include "engine/optim/optimizer.h"
#include "engine/plan/plan.h"
#include "engine/recipe/load.h"
#include "engine/store/safetensors.h"
#include "tests/bench/cublaslt.h"

namespace fp4t {
namespace {

struct Options {
  std::string recipe, dump, only, balance = "router";
  std::vector<std::string> overrides;
  std::vector<int64_t> decode = {1, 16, 64, 256};
  bool any_order = false;
  int64_t iters = 10, losses = 0, context = 1024, new_tokens = 32;
  double peak = 989e12;  // FLOP/s, dense BF16 by the datasheet of H100 and H200
};

double median(std::vector<double> v) {
  std::sort(v.begin(), v.end());
  return v[v.size() / 2];
}

// Milliseconds of `body`, the queue empty before and after.
template <class Body>
double milliseconds(Queue& queue, const Body& body) {
  queue.synchronize();
  const auto begin = std::chrono::steady_clock::now();
  body();
  queue.synchronize();
  return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - begin).count();
}

void print(const nlohmann::ordered_json& line) {
  std::printf("%s\n", line.dump().c_str());
  std::fflush(stdout);
}

// Rows of length + 1 random tokens, as one packed batch in which every position is trained.
struct RandomTokens {
  RandomTokens(int64_t sequences, int64_t length_in, int64_t vocabulary, uint64_t seed) : length(length_in) {
    std::mt19937_64 engine(seed);
    std::uniform_int_distribution<int32_t> token(0, static_cast<int32_t>(vocabulary) - 1);
    ids.resize(static_cast<size_t>(sequences * (length + 1)));
    for (int32_t& id : ids) id = token(engine);
  }
  TokenBatch batch() const {
    TokenBatch b;
    for (size_t row = 0; row < ids.size(); row += static_cast<size_t>(length + 1)) {
      const auto begin = static_cast<int32_t>(b.tokens.size());
      for (int32_t i = 0; i < length; ++i) {
        b.tokens.push_back(ids[row + static_cast<size_t>(i)]);
        b.targets.push_back(ids[row + static_cast<size_t>(i) + 1]);
        b.positions.push_back(i);
        b.doc_begin.push_back(begin);
      }
    }
    return b;
  }
  int64_t length;
  std::vector<int32_t> ids;
};

void dump(Transformer& model, const RandomTokens& tokens, const std::string& prefix) {
  std::vector<std::vector<uint8_t>> bytes;
  std::vector<TensorToStore> tensors;
  for (const Param& p : model.params().params()) {
    bytes.emplace_back(static_cast<size_t>(p.master.bytes()));
    model.queue().copy_to_host(bytes.back().data(), p.master.data, p.master.bytes());
    tensors.push_back({p.info.name, p.master.dtype, dims_of(p.info.shape), bytes.back().data()});
  }
  write_safetensors(prefix + ".weights.safetensors", tensors, {});
  const int64_t columns = tokens.length + 1, rows = static_cast<int64_t>(tokens.ids.size()) / columns;
  write_safetensors(prefix + ".tokens.safetensors",
                    {{"tokens", DType::kI32, {rows, columns}, tokens.ids.data()}}, {});
}

void change(Transformer& model, const std::string& name,
            const std::function<void(std::vector<float>&)>& edit) {
  const TensorView master = model.params().find(name).master;
  FP4T_CHECK(master.dtype == DType::kF32, name, " is not F32");
  std::vector<float> values(static_cast<size_t>(master.elements()));
  model.queue().copy_to_host(values.data(), master.data, master.bytes());
  edit(values);
  model.queue().copy_from_host(master.data, values.data(), master.bytes());
}

// Every token of a class (id modulo experts / choices, the position's) is embedded with one large value in
// the hidden dimension of its number, which leads the residual stream in every layer; the routers read these
// dimensions alone. So the classes share the experts evenly, as --balance forced of torch_moe.py does.
void force_balance(Transformer& model, RandomTokens& tokens) {
  const ModelSpec& spec = model.plan().model;
  const int64_t classes = spec.moe.experts / spec.moe.top_k, columns = tokens.length + 1;
  FP4T_CHECK(
      spec.moe.experts % spec.moe.top_k == 0 && classes <= spec.hidden && spec.vocabulary >= 2 * classes,
      "no even classes of experts");
  for (size_t i = 0; i < tokens.ids.size(); ++i) {
    const int64_t whole = std::min<int64_t>(tokens.ids[i], spec.vocabulary - classes) / classes * classes;
    tokens.ids[i] = static_cast<int32_t>(whole + static_cast<int64_t>(i) % columns % classes);
  }
  change(model, "embed.weight", [&](std::vector<float>& w) {
    for (int64_t id = 0; id < spec.vocabulary; ++id) {
      for (int64_t c = 0; c < classes; ++c) {
        w[static_cast<size_t>(id * spec.hidden + c)] = id % classes == c ? 100.0f : 0.0f;
      }
    }
  });
  for (int64_t layer = spec.moe.dense_layers; layer < spec.layers; ++layer) {
    change(model, "layers." + std::to_string(layer) + ".router.weight", [&](std::vector<float>& w) {
      std::fill(w.begin(), w.end(), 0.0f);
      for (int64_t e = 0; e < spec.moe.experts; ++e) {
        w[static_cast<size_t>(e * spec.hidden + e / spec.moe.top_k)] = 1.0f;
      }
    });
  }
  model.params().refresh_copies(model.queue());
  model.weights_changed();
}

// The busiest expert's tokens over the mean, worst layer.
double largest_load(const RouterSums& sums) {
  double worst = 0;
  for (const std::vector<int64_t>& load : sums.load) {
    double total = 0;
    for (const int64_t n : load) total += static_cast<double>(n);
    const double most = static_cast<double>(*std::max_element(load.begin(), load.end()));
    if (total > 0) worst = std::max(worst, most * static_cast<double>(load.size()) / total);
  }
  return worst;
}

void train(const Options& options, const Plan& plan) {
  Queue queue = Queue::on(plan.machine);
  const auto comm = make_single();
  Transformer model(queue, *comm, plan);
  Optimizer optimizer(model, *comm, model.run_arena());
  const PretrainSpec& spec = std::get<PretrainSpec>(plan.stages.at(0).spec);
  RandomTokens tokens(spec.batch.micro_sequences, spec.batch.length, plan.model.vocabulary, 7);
  if (options.balance == "forced") force_balance(model, tokens);
  const TokenBatch batch = tokens.batch();
  if (!options.dump.empty()) dump(model, tokens, options.dump);

  const StagePrecision& tables = plan.stages.at(0).precision;
  Pass pass;
  pass.forward = &tables.forward.at(0);
  pass.backward = &tables.backward.at(0);
  pass.seed = plan.run.seed;
  pass.count_load = true;
  pass.token_weight = 1.0 / static_cast<double>(batch.size());
  const std::vector<float> slope(static_cast<size_t>(batch.size()), static_cast<float>(-pass.token_weight));
  const auto micro_batch = [&] {
    model.zero_gradients();
    model.forward(pass, batch);
    const auto buffers = model.token_buffers(batch.size());
    queue.upload(buffers.d_log_prob.data, slope.data(), buffers.d_log_prob.bytes());
    model.backward(pass, Scoring{}, 0.0f);
  };
  const auto loss = [&] {
    std::vector<float> log_prob(static_cast<size_t>(batch.size()));
    queue.copy_to_host(log_prob.data(), model.token_buffers(batch.size()).log_prob.data, batch.size() * 4);
    double sum = 0;
    for (const float p : log_prob) sum -= static_cast<double>(p);
    return sum / static_cast<double>(batch.size());
  };
  const auto step = [&] {
    optimizer.step(spec.optimizer, 1.0, pass.step, 0);
    pass.step += 1;
  };
  for (int64_t i = 0; i < options.losses; ++i) {
    micro_batch();
    print({{"what", "loss"}, {"step", i}, {"loss", loss()}});
    step();
  }
  for (int i = 0; i < 3; ++i) micro_batch();
  step();
  std::vector<double> forward_backward, update;
  for (int64_t i = 0; i < options.iters; ++i) {
    forward_backward.push_back(milliseconds(queue, micro_batch));
    update.push_back(milliseconds(queue, step));
  }
  model.reset_monitors();
  micro_batch();
  const double load = largest_load(model.take_router_sums());
  const double fb = median(forward_backward), op = median(update);
  const auto n = static_cast<double>(batch.size());
  double parameters = 0;
  for (const ParamInfo& p : plan.parameters) parameters += static_cast<double>(p.shape.elements());
  const MemoryPlan& m = plan.memory;
  print({{"what", "train"},
         {"fwd_bwd_ms", fb},
         {"optimizer_ms", op},
         {"tokens", batch.size()},
         {"tokens_per_s", n / (fb + op) * 1e3},
         {"tokens_per_s_fwd_bwd", n / fb * 1e3},
         {"mfu_fwd_bwd", plan.flops_per_token * n / fb * 1e3 / options.peak},
         {"mfu", plan.flops_per_token * n / (fb + op) * 1e3 / options.peak},
         {"params_B", parameters / 1e9},
         {"arenas_GiB", static_cast<double>(m.run_bytes + m.step_bytes + m.scratch_bytes) / 0x1p30},
         {"workspace_GiB", static_cast<double>(queue.counts().workspace_bytes) / 0x1p30},
         {"balance", options.balance},
         {"largest_load", load},
         {"loss", loss()}});
}

void decode(const Options& options, Plan plan, int64_t rows) {
  const int64_t length = options.context + options.new_tokens;
  size_for_generation(plan, std::min<int64_t>(rows * options.context, 16384), length, rows);
  Queue queue = Queue::on(plan.machine);
  std::optional<AnyOrder> any_order;
  if (options.any_order) any_order.emplace(queue);
  const auto comm = make_single();
  Transformer model(queue, *comm, plan);
  Pass pass;
  pass.forward = &plan.stages.at(0).precision.sampler.at(0);
  pass.seed = plan.run.seed;
  const RandomTokens tokens(rows, options.context, plan.model.vocabulary, 11);
  Transformer::DecodeRows call;
  const auto flush = [&] {
    call.logit_rows = {static_cast<int32_t>(call.tokens.size()) - 1};
    model.decode(pass, call);
    call = {};
  };
  for (int32_t slot = 0; slot < rows; ++slot) {
    for (int32_t i = 0; i < options.context; ++i) {
      call.tokens.push_back(tokens.ids[static_cast<size_t>(slot * (options.context + 1) + i)]);
      call.slots.push_back(slot);
      call.positions.push_back(i);
      if (static_cast<int64_t>(call.tokens.size()) == plan.max_decode_tokens) flush();
    }
  }
  if (!call.tokens.empty()) flush();
  Transformer::Draws draws{.temperature = 0.0f, .top_p = 1.0f, .key = {}, .sample_ids = {}, .positions = {}};
  std::vector<int32_t> next(static_cast<size_t>(rows), 1);
  for (int32_t slot = 0; slot < rows; ++slot) {
    draws.sample_ids.push_back(slot);
    call.slots.push_back(slot);
    call.logit_rows.push_back(slot);
  }
  std::vector<double> times;
  for (int64_t i = 0; i < options.new_tokens; ++i) {
    times.push_back(milliseconds(queue, [&] {
      call.tokens = next;
      call.positions.assign(static_cast<size_t>(rows), static_cast<int32_t>(options.context + i));
      draws.positions = call.positions;
      next = model.decode_and_draw(pass, call, draws).tokens;
    }));
  }
  const double ms = median(times);
  print({{"what", "decode"},
         {"batch", rows},
         {"context", options.context},
         {"ms_per_token", ms},
         {"tokens_per_s", static_cast<double>(rows) / ms * 1e3}});
}

}  // namespace
}  // namespace fp4t

int main(int argc, char** argv) {
  using namespace fp4t;
  Options o;
  CLI::App app{"a recipe's model on a GPU"};
  app.add_option("recipe", o.recipe)->required();
  app.add_option("--set", o.overrides)->allow_extra_args(false);
  app.add_option("--iters", o.iters);
  app.add_option("--losses", o.losses);
  app.add_option("--dump", o.dump);
  app.add_option("--only", o.only)->check(CLI::IsMember({"train", "decode"}));
  app.add_option("--balance", o.balance)->check(CLI::IsMember({"router", "forced"}));
  app.add_option("--decode", o.decode)->delimiter(',');
  app.add_option("--context", o.context);
  app.add_flag("--any-order", o.any_order);
  CLI11_PARSE(app, argc, argv);
  try {
    const Plan plan = make_plan(load_recipe(o.recipe, o.overrides).recipe, probe_machine("cuda", 0), {});
    if (o.only != "decode") train(o, plan);
    if (o.only == "train") return 0;
    for (const int64_t rows : o.decode) decode(o, plan, rows);
  } catch (const Error& e) {
    std::fprintf(stderr, "%s\n", e.what());
    return static_cast<int>(e.code());
  }
  return 0;
}

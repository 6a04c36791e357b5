#include "engine/stage/calibrate.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <sstream>

#include "engine/comm/comm.h"
#include "engine/model/transformer.h"
#include "engine/stage/checkpoint_model.h"
#include "engine/tokens/corpus.h"
#include "kernels/base/check.h"
#include "kernels/base/text.h"
#include "kernels/base/text_file.h"
#include "kernels/formats/bf16.h"

namespace fp4t {

namespace {

using detail::concat;

constexpr int64_t kMostTokens = 2048;    // of all sequences
constexpr int64_t kMostSequence = 2048;  // of one

class LargestActs : public ActWatcher {
 public:
  explicit LargestActs(int64_t layers) : amax_(static_cast<size_t>(layers + 1)) {}
  void saw(Queue& queue, int64_t layer, Module module, const TensorView& x) override {
    std::vector<Bf16> values(static_cast<size_t>(x.elements()));
    FP4T_CHECK(x.dtype == DType::kBf16, dtype_name(x.dtype));
    queue.copy_to_host(values.data(), x.data, x.bytes());
    float& most = amax_[static_cast<size_t>(layer)][static_cast<size_t>(module)];
    for (const Bf16 v : values) {
      const float magnitude = std::fabs(bf16_to_f32(v));
      most = std::isnan(magnitude) ? magnitude : std::max(most, magnitude);
    }
  }
  float of(int64_t layer, Module module) const {
    return amax_[static_cast<size_t>(layer)][static_cast<size_t>(module)];
  }

 private:
  std::vector<std::array<float, kNumGemmModules>> amax_;
};

TokenBatch document(std::vector<int32_t> tokens) {
  TokenBatch batch;
  const size_t n = tokens.size();
  batch.tokens = std::move(tokens);
  batch.targets.assign(n, -1);
  batch.doc_begin.assign(n, 0);
  for (size_t i = 0; i < n; ++i) batch.positions.push_back(static_cast<int32_t>(i));
  return batch;
}

std::vector<TokenBatch> from_text(const std::string& path, const Plan& plan) {
  std::istringstream in(read_text_file(path));
  const auto tokenizer = make_tokenizer(plan.tokenizer);
  const auto most = static_cast<size_t>(std::min(plan.model.max_positions, kMostSequence));
  std::vector<TokenBatch> list;
  int64_t total = 0;
  int64_t number = 0;
  for (std::string line; total < kMostTokens && std::getline(in, line);) {
    ++number;
    std::vector<int32_t> tokens;
    try {
      tokens = tokenizer->encode(line);
    } catch (const NoTokenError& e) {
      throw BadDataError(concat(printable(path), ":", number, ": ", e.what()));
    }
    tokens.resize(std::min(tokens.size(), most));
    if (tokens.empty()) continue;
    list.push_back(document(std::move(tokens)));
    total += list.back().size();
  }
  if (list.empty()) throw BadDataError("--calibrate: '" + printable(path) + "' has no token");
  return list;
}

// The pretraining whose data the weights saw last; null where there was none.
const PretrainSpec* last_pretraining(const CheckpointInfo& info, const Plan& plan) {
  const PretrainSpec* spec = nullptr;
  for (size_t i = 0; i <= static_cast<size_t>(info.state.stage); ++i) {
    if (const auto* pretrain = std::get_if<PretrainSpec>(&plan.stages[i].spec)) spec = pretrain;
  }
  return spec;
}

// What the scales are from, in words. An imported model's recipe names no text: its activations on tokens
// drawn evenly are not those of a text, and a reader of the scales must know.
std::string name_of_data(const CheckpointInfo& info, const Plan& plan) {
  const PretrainSpec* spec = last_pretraining(info, plan);
  const bool is_random = spec && std::all_of(spec->data.begin(), spec->data.end(),
                                             [](const DataSourceSpec& d) { return d.kind == "random"; });
  return is_random ? "random numbers, as the recipe names no text (--calibrate FILE does)"
                   : "the recipe's data";
}

std::vector<TokenBatch> from_data(const CheckpointInfo& info, const Plan& plan) {
  const PretrainSpec* spec = last_pretraining(info, plan);
  if (!spec)
    throw RecipeError("the recipe has no pretraining whose data could calibrate; --calibrate names a text");
  const auto tokenizer = make_tokenizer(plan.tokenizer);
  const auto corpus = make_corpus(spec->data, spec->batch.length, plan.run.seed, *tokenizer);
  std::vector<TokenBatch> list;
  for (int64_t i = 0; i * spec->batch.length < kMostTokens; ++i) {
    Sequence s = corpus->sample(i);
    list.push_back(
        {std::move(s.tokens), std::move(s.targets), std::move(s.positions), std::move(s.doc_begin)});
  }
  return list;
}

}  // namespace

std::string calibrate(const CheckpointInfo& info, std::vector<std::string> overrides, const std::string& text,
                      ExportModel& exported) {
  for (const char* o : {"precision={preset: bf16}", "parallel.recompute=none", "run.device=cpu"}) {
    overrides.emplace_back(o);
  }
  const Recipe recipe = recipe_of_checkpoint(info, overrides);
  const Machine machine = probe_machine("cpu", static_cast<int>(recipe.run.threads));
  Plan plan = make_plan(recipe, machine, {});
  const std::vector<TokenBatch> sequences = text.empty() ? from_data(info, plan) : from_text(text, plan);
  int64_t longest = 0, total = 0;
  for (const TokenBatch& s : sequences) {
    longest = std::max(longest, s.size());
    total += s.size();
  }
  size_for_generation(plan, longest, longest, 1);
  Queue queue = Queue::on(machine);
  const auto comm = make_single();
  Transformer model(queue, *comm, plan);
  load_weights(queue, info.path, model);
  LargestActs largest(plan.model.layers);
  Pass pass;
  pass.forward = &plan.stages[0].precision.forward.at(0);
  pass.watcher = &largest;
  for (const TokenBatch& s : sequences) {
    model.forward(pass, s);
    model.logits(pass);
  }
  for (int64_t layer = 0; layer <= plan.model.layers; ++layer) {
    for (int m = 0; m < kNumGemmModules; ++m) {
      const auto module = static_cast<Module>(m);
      exported.set_act_amax(layer, module, largest.of(layer, module));
    }
  }
  return concat("scales of activations: from ", sequences.size(), " sequences, ", total, " tokens of ",
                text.empty() ? name_of_data(info, plan) : printable(text), "\n");
}

}  // namespace fp4t

// Import, forward and backward against weights, logits, loss and gradients that Hugging Face transformers
// computed (tests/golden/hf), under the fp32 preset.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <set>
#include <string>

#include "engine/comm/comm.h"
#include "engine/model/transformer.h"
#include "engine/recipe/load.h"
#include "engine/store/huggingface.h"
#include "engine/store/safetensors.h"
#include "gtest/gtest.h"
#include "kernels/ops/loss.h"

namespace fp4t::test {
inline constexpr double kLogitTolerance = 1e-4;
inline constexpr double kLossTolerance = 1e-5;
inline constexpr double kGradientTolerance = 1e-4;  // of the tensor's largest magnitude

// A recipe of the folder's model under the fp32 preset, for one call of `rows` documents.
inline Recipe oracle_recipe(const std::string& folder, const char* recompute, int64_t rows, int64_t length) {
  using detail::concat;
  const ModelSpec model = model_from_config(folder);
  std::vector<std::string> keys;
  for (const ImpliedKey& key : implied_keys(model)) keys.push_back(key.path + "=" + key.value);
  const std::string text =
      concat("run: {name: oracle}\n", "model: {from: \"", folder, "\"}\n",
             "tokenizer: {kind: ids, vocabulary: ", model.vocabulary, "}\n", "dtypes: {gradients: fp32}\n",
             "parallel: {recompute: ", recompute, "}\n", "precision: {preset: fp32}\n",
             "stages:\n  - pretrain:\n      steps: 1\n", "      batch: {tokens: ", rows * length,
             ", micro_sequences: ", rows, ", length: ", length, "}\n      data: [{kind: random}]\n");
  return parse_recipe(text, "oracle.yaml", keys).recipe;
}

inline std::vector<float> floats(const SafetensorsFile& file, const std::string& name) {
  const StoredTensor& t = file.find(name);
  EXPECT_TRUE(t.dtype == FileType::kF32) << name;
  std::vector<float> out(static_cast<size_t>(t.bytes()) / sizeof(float));
  file.read_into(t, out.data());
  return out;
}

// Rows of the oracle packed as documents one after another.
inline TokenBatch packed(const SafetensorsFile& oracle) {
  const StoredTensor& t = oracle.find("input_ids");
  std::vector<int64_t> ids(static_cast<size_t>(t.bytes()) / sizeof(int64_t));
  oracle.read_into(t, ids.data());
  const int64_t rows = t.dims[0], length = t.dims[1] - 1;
  TokenBatch batch;
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t p = 0; p < length; ++p) {
      const auto at = static_cast<size_t>(r * (length + 1) + p);
      batch.tokens.push_back(static_cast<int32_t>(ids[at]));
      batch.targets.push_back(static_cast<int32_t>(ids[at + 1]));
      batch.positions.push_back(static_cast<int32_t>(p));
      batch.doc_begin.push_back(static_cast<int32_t>(r * length));
    }
  }
  return batch;
}

inline double largest_difference(const std::vector<float>& a, const std::vector<float>& b) {
  double most = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    const double d = std::fabs(static_cast<double>(a[i]) - static_cast<double>(b[i]));
    if (std::isnan(d)) return d;  // fails every bound
    most = std::max(most, d);
  }
  return most;
}

inline double largest_magnitude(const std::vector<float>& a) {
  return largest_difference(a, std::vector<float>(a.size(), 0.0f));
}

inline void compare_gradients(const SafetensorsFile& oracle, const std::vector<NamedHostTensor>& ours) {
  std::set<std::string> seen;
  double worst = 0;
  for (const NamedHostTensor& g : ours) {
    const std::string name = "grad." + g.name;
    ASSERT_TRUE(oracle.contains(name)) << name;
    ASSERT_EQ(oracle.find(name).dims, g.dims) << name;
    const std::vector<float> expected = floats(oracle, name);
    const double relative = largest_difference(g.values, expected) / largest_magnitude(expected);
    EXPECT_LE(relative, kGradientTolerance) << name;
    worst = std::max(worst, relative);
    seen.insert(name);
  }
  for (const StoredTensor& t : oracle.tensors()) {
    EXPECT_TRUE(t.name.rfind("grad.", 0) != 0 || seen.count(t.name) != 0) << t.name << " has no partner";
  }
  std::printf("gradients: worst difference %.3g of the tensor's largest magnitude\n", worst);
}

inline void matches_oracle(const std::string& family, const char* recompute, const Machine& machine) {
  const std::string folder = std::string(std::getenv("FP4T_TEST_SOURCE")) + "/tests/golden/hf/" + family;
  const SafetensorsFile oracle(folder + "/oracle.safetensors");
  const TokenBatch batch = packed(oracle);
  const int64_t rows = oracle.find("input_ids").dims[0], tokens = batch.size();
  const Recipe recipe = oracle_recipe(folder, recompute, rows, tokens / rows);
  const Plan plan = make_plan(recipe, machine, {});

  Queue queue = Queue::on(machine);
  const auto comm = make_single();
  Transformer model(queue, *comm, plan);
  import_weights(queue, folder, plan, model.params());
  model.weights_changed();
  model.zero_gradients();

  Pass pass;
  pass.forward = &plan.stages[0].precision.forward.at(0);
  pass.backward = &plan.stages[0].precision.backward.at(0);
  pass.token_weight = 1.0 / static_cast<double>(tokens);
  model.forward(pass, batch);
  const TensorView logits = model.logits(pass);
  std::vector<float> got(static_cast<size_t>(logits.elements()));
  queue.copy_to_host(got.data(), logits.data, logits.bytes());
  const std::vector<float> expected = floats(oracle, "logits");
  ASSERT_EQ(got.size(), expected.size());
  const double logit_difference = largest_difference(got, expected);
  EXPECT_LE(logit_difference, kLogitTolerance);

  const Transformer::TokenBuffers b = model.token_buffers(tokens);
  model.score(pass, {});
  std::vector<float> log_probs(static_cast<size_t>(tokens));
  queue.copy_to_host(log_probs.data(), b.log_prob.data, b.log_prob.bytes());
  double loss = 0;
  for (const float p : log_probs) loss -= static_cast<double>(p) / static_cast<double>(tokens);
  const double loss_difference = std::fabs(loss - static_cast<double>(floats(oracle, "loss")[0]));
  EXPECT_LE(loss_difference, kLossTolerance);
  std::printf("%s: logits differ by %.3g, loss by %.3g\n", family.c_str(), logit_difference, loss_difference);

  const std::vector<float> weights(static_cast<size_t>(tokens), -1.0f / static_cast<float>(tokens));
  queue.copy_from_host(b.d_log_prob.data, weights.data(), b.d_log_prob.bytes());
  model.backward(pass, {});
  compare_gradients(oracle, export_named(queue, plan, model.params(), Exported::kGradients));
}

}  // namespace fp4t::test

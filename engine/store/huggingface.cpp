#include "engine/store/huggingface.h"

#include <algorithm>
#include <map>

#include "engine/plan/run_layout.h"
#include "engine/store/huggingface_folder.h"
#include "engine/store/huggingface_names.h"
#include "kernels/base/check.h"
#include "kernels/base/text.h"
#include "kernels/formats/bf16.h"

namespace fp4t {

namespace {

// The keys in which a plan's model and a folder's differ, as lines of a message.
std::string differences(const ModelSpec& plan, const ModelSpec& folder) {
  std::map<std::string, std::string> ours;
  for (const ImpliedKey& key : implied_keys(plan)) ours[key.path] = key.value;
  std::string out;
  for (const ImpliedKey& key : implied_keys(folder)) {
    const auto it = ours.find(key.path);
    if (!key.must_agree || (it != ours.end() && it->second == key.value)) continue;
    out += "\n  " + key.path + " is " + (it == ours.end() ? "without effect" : it->second) +
           ", the folder's is " + key.value;
  }
  return out;
}

void store_floats(Queue& queue, const std::vector<float>& values, const TensorView& out) {
  if (out.dtype == DType::kF32) {
    queue.copy_from_host(out.data, values.data(), out.bytes());
    return;
  }
  FP4T_CHECK(out.dtype == DType::kBf16, "master in ", dtype_name(out.dtype));
  std::vector<Bf16> rounded(values.size());
  std::transform(values.begin(), values.end(), rounded.begin(), [](float v) { return f32_to_bf16(v); });
  queue.copy_from_host(out.data, rounded.data(), out.bytes());
}

std::vector<float> load_floats(Queue& queue, const TensorView& t) {
  std::vector<float> values(static_cast<size_t>(t.elements()));
  if (t.dtype == DType::kF32) {
    queue.copy_to_host(values.data(), t.data, t.bytes());
    return values;
  }
  FP4T_CHECK(t.dtype == DType::kBf16, "tensor in ", dtype_name(t.dtype));
  std::vector<Bf16> raw(values.size());
  queue.copy_to_host(raw.data(), t.data, t.bytes());
  std::transform(raw.begin(), raw.end(), values.begin(), [](Bf16 v) { return bf16_to_f32(v); });
  return values;
}

HuggingFaceFolder weights_of(const std::string& folder, const Plan& plan) {
  const std::string differing = differences(plan.model, model_from_config(folder));
  if (!differing.empty()) {
    throw RecipeError("the recipe's model is not that of '" + printable(folder) +
                      "/config.json':" + differing);
  }
  return {folder, plan.model, plan.parameters};
}

}  // namespace

void check_weights(const std::string& folder, const Plan& plan) { weights_of(folder, plan); }

void import_weights(Queue& queue, const std::string& folder, const Plan& plan, ParamSet& params) {
  const HuggingFaceFolder weights = weights_of(folder, plan);
  for (size_t i = 0; i < params.params().size(); ++i) {
    const Param& p = params.params()[i];
    std::vector<float> values = weights.read(i);
    if (p.master.shape != p.info.shape) {  // what this rank keeps of it
      const Span kept = master_is_part(p.info, plan) ? params.owned(p) : p.held;
      values = {values.begin() + kept.begin, values.begin() + kept.end};
    }
    store_floats(queue, values, p.master);
  }
  for (const Buffer& b : params.buffers()) queue.fill_bytes(b.data.data, 0, b.data.bytes());
  params.refresh_copies(queue);
}

std::vector<NamedHostTensor> export_named(Queue& queue, const Plan& plan, ParamSet& params, Exported what) {
  std::vector<NamedHostTensor> out;
  for (const Param& p : params.params()) {
    const std::vector<float> values = load_floats(queue, what == Exported::kWeights ? p.master : p.gradient);
    for (const LibraryPiece& piece : library_pieces(p.info, plan.model, ExpertLayout::kStacked)) {
      const auto begin = values.begin() + piece.offset;
      out.push_back({piece.name, piece.dims, {begin, begin + piece.elements()}});
    }
  }
  return out;
}

}  // namespace fp4t

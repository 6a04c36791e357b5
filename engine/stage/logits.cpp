#include <algorithm>
#include <filesystem>
#include <sstream>

#include "engine/comm/comm.h"
#include "engine/stage/checkpoint_model.h"
#include "engine/stage/convert.h"
#include "engine/stage/resume.h"
#include "engine/store/files.h"
#include "engine/store/safetensors.h"
#include "kernels/base/check.h"
#include "kernels/base/text.h"
#include "kernels/base/text_file.h"

namespace fp4t {

namespace {

using detail::concat;

std::vector<TokenBatch> read_sequences(const std::string& path, const ModelSpec& model) {
  std::istringstream in(read_text_file(path));
  std::vector<TokenBatch> list;
  for (std::string line; std::getline(in, line);) {
    const auto refuse = [&](const std::string& why) {
      throw BadDataError(concat("'", printable(path), "' line ", list.size() + 1, " ", why));
    };
    TokenBatch batch;
    std::istringstream words(line);
    for (std::string word; words >> word;) {
      const bool number = word.size() < 10 && word.find_first_not_of("0123456789") == std::string::npos;
      if (!number || std::stoll(word) >= model.vocabulary) {
        refuse(concat("has '", printable(word), "', which is no token of ", model.vocabulary));
      }
      batch.positions.push_back(static_cast<int32_t>(batch.size()));
      batch.tokens.push_back(static_cast<int32_t>(std::stol(word)));
      batch.targets.push_back(-1);
      batch.doc_begin.push_back(0);
    }
    if (batch.size() == 0) refuse("has no token");
    if (batch.size() > model.max_positions) {
      refuse(concat("has ", batch.size(), " tokens, model.max_positions is ", model.max_positions));
    }
    list.push_back(std::move(batch));
  }
  if (list.empty()) throw BadDataError("'" + printable(path) + "' has no line");
  return list;
}

}  // namespace

void write_logits(const std::string& checkpoint, const std::string& tokens, const std::string& to) {
  const std::string path = find_checkpoint(checkpoint);
  const CheckpointInfo info = read_checkpoint_info(path, false);  // hashes are checked where tensors are read
  check_state(info);
  const Recipe recipe = recipe_of_checkpoint(info, {"precision={preset: fp32}", "dtypes.gradients=fp32",
                                                    "parallel.recompute=none", "run.device=cpu"});
  const Machine machine = probe_machine("cpu", static_cast<int>(recipe.run.threads));
  Plan plan = make_plan(recipe, machine, {});
  const std::vector<TokenBatch> sequences = read_sequences(tokens, plan.model);
  int64_t longest = 0;
  for (const TokenBatch& s : sequences) longest = std::max(longest, s.size());
  if (longest > plan.head_chunk) {
    throw RecipeError(concat("'", printable(tokens), "' has a line of ", longest,
                             " tokens; this model's logits fit for ", plan.head_chunk));
  }
  size_for_generation(plan, longest, longest, 1);
  Queue queue = Queue::on(machine);
  const auto comm = make_single();
  Transformer model(queue, *comm, plan);
  load_weights(queue, path, model);
  Pass pass;
  pass.forward = &plan.stages[static_cast<size_t>(info.state.stage)].precision.forward.at(info.state.step);
  std::vector<std::vector<float>> logits;
  std::vector<TensorToStore> out;
  for (const TokenBatch& s : sequences) {
    model.forward(pass, s);
    const TensorView view = model.logits(pass);
    logits.emplace_back(static_cast<size_t>(view.elements()));
    queue.copy_to_host(logits.back().data(), view.data, view.bytes());
    out.push_back(
        {"logits." + std::to_string(out.size()), FileType::kF32, {s.size(), plan.model.vocabulary}, nullptr});
  }
  for (size_t i = 0; i < out.size(); ++i) out[i].data = logits[i].data();
  const std::string temporary = to + ".tmp";
  try {
    write_safetensors(temporary, out, {});
    rename_path(temporary, to, {});
  } catch (...) {
    std::error_code ignored;  // the first error is the one to report
    std::filesystem::remove(temporary, ignored);
    throw;
  }
}

}  // namespace fp4t

// The plan as a user reads it.
#include <algorithm>
#include <cstdio>

#include "engine/plan/cache_layout.h"
#include "engine/plan/dims.h"
#include "engine/plan/notes.h"
#include "engine/plan/plan.h"
#include "engine/plan/run_layout.h"

namespace fp4t {

namespace {

std::string fixed(double value, int decimals) {
  char text[64];
  std::snprintf(text, sizeof(text), "%.*f", decimals, value);
  return text;
}

std::string bytes_text(int64_t bytes) {
  const auto b = static_cast<double>(bytes);
  if (bytes >= int64_t{1} << 30) return fixed(b / (1 << 30), 2) + " GiB";
  if (bytes >= int64_t{1} << 20) return fixed(b / (1 << 20), 1) + " MiB";
  return fixed(b / 1024, 1) + " KiB";
}

// 1234567 as "1,234,567".
std::string grouped(int64_t n) {
  const std::string digits = std::to_string(n);
  std::string text;
  for (size_t i = 0; i < digits.size(); ++i) {
    if (i > 0 && (digits.size() - i) % 3 == 0) text += ',';
    text += digits[i];
  }
  return text;
}

std::string model_text(const Plan& plan) {
  const ModelSpec& m = plan.model;
  std::string text = detail::concat("model\n  ", m.layers, " layers, hidden ", m.hidden, ", ", m.heads,
                                    " heads and ", m.kv_heads, " key-value heads of ", m.head_dim,
                                    ", vocabulary ", m.vocabulary, ", positions ", m.max_positions,
                                    m.qk_norm ? ", QK-norm" : "", m.tied_head ? ", tied head" : "", "\n");
  if (m.moe.experts > 0) {
    text += detail::concat("  ", m.moe.experts, " experts of ", m.moe.hidden, ", top ", m.moe.top_k, ", ",
                           m.moe.router, " router");
    if (m.moe.shared_experts > 0)
      text += detail::concat(", shared experts of ", shared_width(m), " together");
    if (m.moe.dense_layers > 0) {
      text += detail::concat(", the first ", m.moe.dense_layers, " layers dense of ", m.mlp_hidden);
    }
    text += "\n";
  } else {
    text += detail::concat("  dense, FFN of ", m.mlp_hidden, "\n");
  }
  text += detail::concat("  parameters ", grouped(total_parameters(plan.parameters)), ", active a token ",
                         grouped(active_parameters(plan.parameters, m)), "\n  masters ",
                         dtype_name(plan.dtypes.masters), ", moments ", dtype_name(plan.dtypes.moments),
                         ", gradients ", dtype_name(plan.dtypes.gradients),
                         " (fp32 where micro-batches add up, and for head, embedding, router and norms)\n");
  return text;
}

std::string experts_text(const Plan& plan) {
  if (plan.axes.expert == 1) return "";
  const ModelDims d = dims_of(plan);
  return detail::concat("  ", d.local_experts, " experts a rank, which take ", grouped(d.round_rows),
                        " rows in a round; the worst routing takes ", worst_rounds(plan), " rounds\n",
                        d.expert_chunks > 1
                            ? detail::concat("  their tokens travel in ", d.expert_chunks,
                                             " parts, beside the products of the part before\n")
                            : "");
}

std::string ranks_text(const Plan& plan) {
  if (plan.axes.ranks() == 1) return "";
  const RowDomains domains = row_domains(plan, plan.shards.everywhere());
  return detail::concat("ranks\n  ", plan.axes.ranks(), ": data ", plan.axes.data, " x expert ",
                        plan.axes.expert, "; masters and moments of at most ",
                        grouped(plan.shards.largest_owned()), " parameters a rank",
                        gathers_weights(plan)      ? ", their gradients and weights too, block by block\n"
                        : scatters_gradients(plan) ? ", their gradients too, block by block\n"
                                                   : "\n",
                        "  tensors travel ",
                        plan.transport == "nccl" ? "from GPU to GPU by NCCL" : "through host memory by MPI",
                        domains.nested() ? detail::concat("; gradients are summed in domains of ",
                                                          domains.size, " ranks, then between these\n")
                                         : "\n") +
         experts_text(plan);
}

std::string stage_text(const Plan& plan, const StagePlan& stage) {
  const CheckpointSpec& checkpoint = *std::visit([](const auto& s) { return &s.checkpoint; }, stage.spec);
  std::string text = detail::concat("  ", stage.name, ": ", grouped(stage.steps), " steps, ",
                                    grouped(stage.steps * stage.updates_per_step), " updates");
  if (const auto* pretrain = std::get_if<PretrainSpec>(&stage.spec)) {
    text += detail::concat(", ", grouped(pretrain->batch.tokens), " tokens a step in ", stage.accumulation,
                           stage.accumulation == 1 ? " micro-batch" : " micro-batches",
                           plan.axes.ranks() > 1 ? " a rank of at most " : " of ",
                           pretrain->batch.micro_sequences, " x ", pretrain->batch.length, ", ",
                           grouped(stage.steps * pretrain->batch.tokens), " tokens in all");
  } else {
    const RlSpec& rl = std::get<RlSpec>(stage.spec);
    text += detail::concat(" at most, ", rl.sampling.prompts, " prompts x ", rl.sampling.samples,
                           " completions of up to ", rl.sampling.max_tokens, " tokens a step");
  }
  if (checkpoint.every > 0) text += detail::concat(", checkpoint every ", checkpoint.every, " steps");
  return text + "\n";
}

std::string equality_text(const Plan& plan) {
  std::string text;
  for (const StagePlan& stage : plan.stages) {
    if (!stage.is_rl) continue;
    text += "  " + stage.name + ": ";
    text += stage.equality_obstacle.empty()
                ? "sampler and trainer agree bit for bit: equal cells, all row-invariant\n"
                : "sampler and trainer will not agree bit for bit: " + stage.equality_obstacle + "\n";
  }
  return text.empty() ? text : "equality\n" + text;
}

void add_arena(std::string& text, const char* name, std::vector<MemoryLine> lines, int64_t total) {
  constexpr size_t kShown = 8;
  text += detail::concat("  ", name, " arena ", bytes_text(total), "\n");
  std::stable_sort(lines.begin(), lines.end(),
                   [](const MemoryLine& a, const MemoryLine& b) { return a.bytes > b.bytes; });
  int64_t rest = 0;
  for (size_t i = 0; i < lines.size(); ++i) {
    if (i >= kShown) {
      rest += lines[i].bytes;
      continue;
    }
    std::string line = "    " + lines[i].name;
    line.resize(std::max<size_t>(line.size() + 1, 34), ' ');
    text += line + bytes_text(lines[i].bytes) + "\n";
  }
  if (lines.size() > kShown) {
    text +=
        detail::concat("    ", lines.size() - kShown, " more", std::string(24, ' '), bytes_text(rest), "\n");
  }
}

std::string memory_text(const Plan& plan) {
  const MemoryPlan& m = plan.memory;
  std::string text =
      detail::concat("memory on ", plan.machine.device_name, ": ", bytes_text(m.total_bytes()));
  if (plan.machine.memory_bytes > 0) text += " of " + bytes_text(plan.machine.memory_bytes);
  if (plan.machine.free_bytes > 0) text += ", " + bytes_text(plan.machine.free_bytes) + " free";
  text += "\n";
  add_arena(text, "run", m.run, m.run_bytes);
  add_arena(text, "step", m.step, m.step_bytes);
  add_arena(text, "scratch", m.scratch, m.scratch_bytes);
  if (m.workspace_bytes > 0) text += "  workspace of the kernels " + bytes_text(m.workspace_bytes) + "\n";
  if (m.communicator_bytes > 0) text += "  NCCL's buffers " + bytes_text(m.communicator_bytes) + "\n";
  int64_t keep = 0;
  for (const StagePlan& stage : plan.stages) {
    keep = std::max(keep, std::visit([](const auto& s) { return s.checkpoint.keep; }, stage.spec));
  }
  text += detail::concat("  checkpoint ", bytes_text(m.checkpoint_bytes), ", ", keep,
                         " kept: ", bytes_text(m.checkpoint_bytes * keep), " on disk\n");
  return text;
}

std::string notes_text(const Plan& plan) {
  std::string text;
  for (const std::string& note : notes(plan)) text += "  " + note + "\n";
  return text.empty() ? text : "notes\n" + text;
}

}  // namespace

std::string describe(const Plan& plan) {
  std::string text = model_text(plan);
  text += detail::concat("  ", fixed(plan.flops_per_token / 1e6, 3), " MFLOP a trained token\n");
  text += ranks_text(plan) + "stages\n";
  for (const StagePlan& stage : plan.stages) text += stage_text(plan, stage);
  text += detail::concat("  largest forward-backward ", grouped(plan.max_tokens), " tokens");
  if (plan.max_cache_slots > 0) {
    text += detail::concat("; generation ", plan.max_cache_slots, " sequences of up to ",
                           plan.max_cache_length, " positions in ", cache_pages(plan), " pages of ", kKvPage,
                           ", ", plan.max_decode_tokens, " rows a call");
  }
  text += "\n";
  for (const StagePlan& stage : plan.stages) {
    text += "precision of " + stage.name + "\n" + describe(stage.precision, plan.model, stage.is_rl);
  }
  text += "precision hash " + plan.precision_hash + "\n";
  return text + equality_text(plan) + memory_text(plan) + notes_text(plan);
}

}  // namespace fp4t

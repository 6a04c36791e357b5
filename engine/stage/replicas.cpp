// Whether ranks still hold the same model and state: what is computed twice may part by a fault of memory or
// of ours, and training goes on without a sign of it.
#include <cstring>

#include "engine/comm/agree.h"
#include "engine/model/call.h"
#include "engine/stage/context.h"
#include "engine/tokens/hash.h"

namespace fp4t {

namespace {

std::string hash_of(Queue& queue, const TensorView& t) {
  std::string bytes(static_cast<size_t>(t.bytes()), '\0');
  if (!bytes.empty()) queue.copy_to_host(bytes.data(), t.data, t.bytes());
  return xxh3_hex(bytes);
}

std::string hash_of(const RunState& state) {
  std::string text =
      detail::concat(state.stage, ' ', state.step, ' ', state.update, ' ', state.attempted_updates, ' ',
                     state.applied_updates, ' ', state.next_sample, '\n');
  for (const auto& [name, value] : state.counters) {
    char bytes[sizeof(double)];
    std::memcpy(bytes, &value, sizeof(value));
    text += name;
    text.append(bytes, sizeof(bytes));
  }
  for (const auto& [name, value] : state.texts) text += name + '=' + value + '\n';
  return xxh3_hex(text);
}

}  // namespace

void Run::check_replicas() {
  if (comm.size() == 1) return;
  std::map<std::string, std::string> facts, experts;
  for (const Param& p : model.params().params()) {
    if (p.shares_copy) continue;  // nobody else keeps what this rank owns
    const bool everywhere = p.held.count() == p.info.shape.elements();
    (everywhere ? facts : experts)[p.info.name] = hash_of(queue, operand_of(p));
  }
  for (const Buffer& b : model.params().buffers()) facts[b.info.name] = hash_of(queue, b.data);
  facts["state"] = hash_of(state);
  const auto refuse = [&](const std::string& difference) {
    throw InternalError(detail::concat("ranks have parted at stage ", state.stage, ", step ", state.step,
                                       "; the first to differ ", difference));
  };
  const std::string difference = first_difference(comm, facts);
  if (!difference.empty()) refuse("from rank 0: " + difference);
  if (plan.axes.expert == 1) return;
  const std::string of_experts = first_difference(model.shard_exchange().replicas(), experts);
  for (const std::string& text : gather_texts(comm, of_experts)) {
    if (!text.empty()) refuse("among the ranks with the same experts: " + text);
  }
}

}  // namespace fp4t

#include "engine/plan/wire.h"

#include <algorithm>
#include <cmath>

#include "engine/plan/dims.h"
#include "engine/plan/run_layout.h"
#include "kernels/base/numeric.h"

namespace fp4t {

namespace {

// Ranks that hold a row alike, as the links see them.
struct Members {
  int64_t count;   // of the row
  int64_t inside;  // of these, in one fast domain
  // Of what a member sends to every other.
  void add(WireLine& line, double to_each) const {
    line.inside_bytes += to_each * real(inside - 1);
    line.outside_bytes += to_each * real(count - inside);
  }
};

// Where parameters that ranks hold alike go through: one row of all ranks, one of a rank's experts.
struct SharedRow {
  const ShardRow& row;
  Members members;
};
std::vector<SharedRow> shared_rows(const Plan& plan, const Domains& domains) {
  const int64_t ranks = plan.axes.ranks();
  const int64_t domain = domains.size == 0 ? ranks : std::min(domains.size, ranks);
  std::vector<SharedRow> rows = {{plan.shards.everywhere(), {ranks, domain}}};
  if (plan.shards.spreads_experts()) {
    const int64_t replicas = std::max<int64_t>(domain / plan.axes.expert, 1);
    rows.push_back({plan.shards.experts(0), {plan.axes.data, replicas}});  // all expert indices have as much
  }
  return rows;
}

// Ranges of a row: of a block, or of what lies before and after the blocks (layer -1).
std::vector<Span> ranges_of(const Plan& plan, const ShardRow& row, int64_t layer) {
  const auto& list = plan.parameters;
  const auto first = std::find_if(list.begin(), list.end(), [&](const ParamInfo& p) {
    return layer < 0 ? p.layer >= 0 : p.layer == layer;
  });
  const auto end = std::find_if(
      first, list.end(), [&](const ParamInfo& p) { return layer < 0 ? p.layer < 0 : p.layer != layer; });
  const auto begin_index = static_cast<size_t>(first - list.begin()),
             end_index = static_cast<size_t>(end - list.begin());
  if (layer >= 0) return {row.range(begin_index, end_index)};
  return {row.range(0, begin_index), row.range(end_index, list.size())};
}

// Of every segment in the range, those of its largest piece.
int64_t rounds_of(const Plan& plan, const ShardRow& row, const Span& range) {
  int64_t rounds = 0;
  row.for_segments(range, [&](size_t segment, const Span& inside) {
    int64_t most = 0;
    for (int64_t m = 0; m < row.members(); ++m) {
      const Span piece = row.piece(segment, m);
      const int64_t begin = std::clamp(piece.begin, inside.begin, inside.end);
      most = std::max(most, std::clamp(piece.end, begin, inside.end) - begin);
    }
    rounds += ceil_div(most, round_elements(plan, row));
  });
  return rounds;
}

// Every rank sends every owner its F32 share, so many times.
void add_sum(const Plan& plan, const SharedRow& shared, const Span& range, int64_t times, WireLine& line) {
  const double elements = real(range.count()) / real(shared.members.count);
  shared.members.add(line, elements * 4 * real(times));
  line.calls += real(rounds_of(plan, shared.row, range) * times);
}

double weight_bytes(const Plan& plan, const ShardRow& row, const Span& range, bool shared) {
  double bytes = 0;
  row.for_parts(range, [&](size_t i, const Span& elements) {
    const ParamInfo& p = plan.parameters[i];
    if (has_shared_copy(p, plan) != shared) return;
    const DType dtype = shared || has_copy(p, plan) ? plan.act : master_dtype(p, plan.dtypes);
    bytes += real(elements.count() * dtype_bytes(dtype));
  });
  return bytes;
}

// Every owner sends every other rank what it owns, in one call; so many times.
void add_gather(const Plan& plan, const SharedRow& shared, const Span& range, bool blocks, int64_t times,
                WireLine& line) {
  const double bytes = weight_bytes(plan, shared.row, range, blocks);
  if (bytes == 0) return;
  shared.members.add(line, bytes / real(shared.members.count) * real(times));
  line.calls += real(times);
}

WireLine expert_line(const char* name) { return {name, Collective::kAllToAll}; }

// Bytes a row and layer, over all layers with experts; every rank sends those of its tokens that have an
// expert on another rank of its group, once a rank.
void add_rows(const Plan& plan, double tokens, double row_bytes, double calls, WireLine& line) {
  const ModelDims d = dims_of(plan);
  const double layers = real(num_moe_layers(plan.model));
  line.inside_bytes += layers * tokens * share_of_guests(d) * real(d.expert_ranks - 1) * row_bytes;
  line.calls += layers * calls;
}

double dispatch_bytes(const ModelDims& d, Format format) {
  const double hidden = real(d.hidden);
  if (format == Format::kMxfp8) return hidden * (1 + 1.0 / 32);
  if (format == Format::kNvfp4) return hidden * (0.5 + 1.0 / 16) + 4;
  return hidden * real(dtype_bytes(d.act));
}

// A bounded buffer takes more than one even share a round, or less.
bool takes_rounds(const ModelDims& d, double tokens) { return tokens * real(d.top_k) > real(d.round_rows); }

}  // namespace

std::vector<WireLine> update_wire(const Plan& plan, const Domains& domains, int64_t micro_batches) {
  if (!plan.shards.is_sharded()) return {};
  const bool scatters = scatters_gradients(plan);
  WireLine gradients{"gradients to their owners", Collective::kExchange,
                     scatters ? Beside::kBackward : Beside::kLastBackward},
      norm{"norm, two sums a chunk", Collective::kAllReduce}, weights{"weights after the update"},
      blocks{"weights block by block", Collective::kExchange, Beside::kBlocks};
  const int64_t layers = plan.model.layers;
  double of_blocks = 0, all = 0;
  for (const SharedRow& shared : shared_rows(plan, domains)) {
    add_gather(plan, shared, {0, shared.row.length()}, false, 1, weights);
    for (const Span& range : ranges_of(plan, shared.row, -1)) {
      add_sum(plan, shared, range, 1, gradients);
      all += real(range.count());
    }
    const int64_t times = scatters ? micro_batches : 1;
    for (int64_t l = 0; l < layers; ++l) {
      const Span range = ranges_of(plan, shared.row, l).front();
      add_sum(plan, shared, range, times, gradients);
      all += real(range.count() * times);
      if (l > 0) of_blocks += real(range.count() * times);  // the first block's backward is the last
      if (!gathers_weights(plan)) continue;
      // Forward and backward; the two blocks that came last are there at the turn, and at the next forward.
      const bool last = l >= layers - kCopyPlaces, first = l < kCopyPlaces;
      const int64_t gathers =
          2 * micro_batches - (last ? micro_batches : 0) - (first ? micro_batches - 1 : 0);
      add_gather(plan, shared, range, true, gathers, blocks);
    }
  }
  gradients.share_beside = of_blocks / all;
  blocks.share_beside = 1 - 1 / real(layers);
  const int64_t ranks = plan.axes.ranks();
  const int64_t domain = domains.size == 0 ? ranks : std::min(domains.size, ranks);
  Members{ranks, domain}.add(norm, real(2 * norm_chunks(plan) * 8));
  norm.calls = real(ceil_div(2 * norm_chunks(plan), int64_t{16384}));
  std::vector<WireLine> lines = {gradients, norm, weights};
  if (gathers_weights(plan)) lines.push_back(blocks);
  return lines;
}

std::vector<WireLine> expert_forward_wire(const Plan& plan, const ForwardTable& table, double tokens) {
  const ModelDims d = dims_of(plan);
  if (!d.spreads_experts()) return {};
  WireLine there = expert_line("rows to experts"), back = expert_line("sums from experts");
  const bool coded = dispatch_spec(table.dispatch).quantised();
  const double choices = real(d.top_k) * 8;  // experts and gates
  add_rows(plan, tokens, dispatch_bytes(d, table.dispatch) + choices, coded ? 5 : 3, there);
  add_rows(plan, tokens, real(d.hidden) * 4, 1, back);
  WireLine counts{"counts of rows", Collective::kAllGather};
  // For every rank of the group how many tokens and rows, and a sample id: 24 bytes.
  counts.inside_bytes =
      real(num_moe_layers(plan.model)) * 24 * real(d.expert_ranks) * real(d.expert_ranks - 1);
  counts.calls = real(num_moe_layers(plan.model));
  return {counts, there, back};
}

std::vector<WireLine> expert_backward_wire(const Plan& plan, const ForwardTable& table, double tokens) {
  const ModelDims d = dims_of(plan);
  if (!d.spreads_experts()) return {};
  WireLine there = expert_line("gradients to experts"), back = expert_line("gradients from experts");
  add_rows(plan, tokens, real(d.hidden * dtype_bytes(d.act)), 1, there);
  add_rows(plan, tokens, real(d.hidden) * 4 + real(d.top_k) * 4, 2, back);
  if (takes_rounds(d, tokens)) {
    const double again = dispatch_bytes(d, table.dispatch) + real(d.top_k) * 8;
    add_rows(plan, tokens, again, 3, there);
  }
  return {there, back};
}

double seconds_of(const WireLine& line, const MachineSpec& machine) {
  const double slow = machine.slow.gb_s.value * 1e9, fast = machine.fast.gb_s.value * 1e9;
  const bool hosts = line.collective == Collective::kAllReduce || line.collective == Collective::kAllGather;
  const double carried =
      hosts ? line.bytes() / slow : std::max(line.inside_bytes / fast, line.outside_bytes / slow);
  const LinkSpec& farthest = hosts || line.outside_bytes > 0 ? machine.slow : machine.fast;
  return carried + line.calls * farthest.latency_us.value * 1e-6;
}

}  // namespace fp4t

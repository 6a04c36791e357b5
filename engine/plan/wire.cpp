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
  void add(WireLine& line, double to_each) const { add_to_next(line, to_each, count); }
  // To the others of so many consecutive ones.
  void add_to_next(WireLine& line, double to_each, int64_t neighbours) const {
    const int64_t near = std::min(neighbours, inside);
    line.inside_bytes += to_each * real(near - 1);
    line.outside_bytes += to_each * real(neighbours - near);
  }
  // To all that have the same place in domains of so many.
  void add_across(WireLine& line, double to_each, int64_t size) const {
    const int64_t near = std::max<int64_t>(inside / size, 1);
    line.inside_bytes += to_each * real(near - 1);
    line.outside_bytes += to_each * real(count / size - near);
  }
  // Everybody has a piece for everybody, of so many bytes: by domains, the pieces of all domains go to the
  // next in the own one and each then to its domain, or the other way round.
  void add_pieces(WireLine& line, double piece, const RowDomains& domains) const {
    add_to_next(line, piece * real(domains.count), domains.size);
    add_across(line, piece, domains.size);
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
  const RowDomains domains = row_domains(plan, shared.row);
  shared.members.add_pieces(line, elements * 4 * real(times), domains);
  line.calls += real(rounds_of(plan, shared.row, range) * times * (domains.nested() ? 2 : 1));
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
  const RowDomains domains = row_domains(plan, shared.row);
  shared.members.add_pieces(line, bytes / real(shared.members.count) * real(times), domains);
  line.calls += real(times * (domains.nested() ? 2 : 1));
}

// What a call's exchanges with experts have in common.
struct Trips {
  Trips(const Plan& plan, double tokens) : d(dims_of(plan)), layers(real(num_moe_layers(plan.model))) {
    sent = tokens * share_of_guests(d, d.local_experts) * real(d.expert_ranks - 1);
    chunks = call_chunks(plan, d, sent);
    // A token comes with the first chunk that has an expert of its own; while those of the first come, and
    // while sums of the last leave, nothing computes but, in the backward, what `share_last` says.
    const double first = share_of_guests(d, d.local_experts / chunks) / share_of_guests(d, d.local_experts);
    share_beside = chunks > 1 ? 1 - first : 0;
  }
  WireLine line(const char* name) const {
    WireLine l{name, Collective::kExchange, Beside::kBlocks};
    l.share_beside = share_beside;
    return l;
  }
  // Bytes a row and layer, over all layers with experts; every rank sends those of its tokens that have an
  // expert on another rank of its group, once a rank.
  void add(double row_bytes, WireLine& line) const {
    line.inside_bytes += layers * sent * row_bytes;
    line.calls += layers * real(line.collective == Collective::kExchange ? chunks : 1);
  }

  ModelDims d;
  double layers, sent = 0, share_beside = 0;
  int64_t chunks = 1;
};

double dispatch_bytes(const ModelDims& d, Format format) {
  const double hidden = real(d.hidden);
  if (format == Format::kMxfp8) return hidden * (1 + 1.0 / 32);
  if (format == Format::kNvfp4) return hidden * (0.5 + 1.0 / 16) + 4;
  return hidden * real(dtype_bytes(d.act));
}

// A bounded buffer takes more than one even share a round, or less.
bool takes_rounds(const ModelDims& d, double tokens) { return tokens * real(d.top_k) > real(d.round_rows); }

}  // namespace

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

std::vector<WireLine> update_wire(const Plan& plan, const Domains& domains, int64_t micro_batches) {
  if (!plan.shards.is_sharded()) return {};
  const bool scatters = scatters_gradients(plan);
  WireLine gradients{"gradients to their owners", Collective::kExchange,
                     scatters ? Beside::kBackward : Beside::kLastBackward},
      norm{"norm, two sums a chunk", Collective::kAllGather}, weights{"weights after the update"},
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
  Members{ranks, domain}.add(norm, real(2 * most_owned_chunks(plan) * 8));
  norm.calls = 1;
  std::vector<WireLine> lines = {gradients, norm, weights};
  if (gathers_weights(plan)) lines.push_back(blocks);
  return lines;
}

std::vector<WireLine> expert_forward_wire(const Plan& plan, const ForwardTable& table, double tokens) {
  const Trips trips(plan, tokens);
  const ModelDims& d = trips.d;
  if (!d.spreads_experts()) return {};
  WireLine there = trips.line("rows to experts"), back = trips.line("sums from experts");
  trips.add(dispatch_bytes(d, table.dispatch) + 2 * real(d.top_k) * 4, there);  // choices and gates
  trips.add(real(d.hidden) * 4, back);
  WireLine counts{"counts of rows", Collective::kAllGather};
  const double of_rank = real(4 * (split_of(d).num_counts() + 1));  // and a sample id
  counts.inside_bytes = trips.layers * of_rank * real(d.expert_ranks - 1);
  counts.calls = trips.layers;
  return {counts, there, back};
}

std::vector<WireLine> expert_backward_wire(const Plan& plan, const ForwardTable& table, double tokens) {
  const Trips trips(plan, tokens);
  const ModelDims& d = trips.d;
  if (!d.spreads_experts()) return {};
  WireLine there = trips.line("gradients to experts"), back = trips.line("gradients from experts");
  trips.add(real(d.hidden * dtype_bytes(d.act)), there);
  trips.add(real(d.hidden) * 4 + real(d.top_k) * 4, back);
  back.share_last = 1 - back.share_beside, back.chunks = real(trips.chunks);
  if (!takes_rounds(d, tokens)) return {there, back};
  trips.add(dispatch_bytes(d, table.dispatch) + 2 * real(d.top_k) * 4, there);
  return {there, back};
}

double seconds_of(const WireLine& line, const MachineSpec& machine) {
  const double slow = machine.slow.gb_s.value * 1e9, fast = machine.fast.gb_s.value * 1e9;
  const bool hosts = line.collective != Collective::kExchange;
  const double carried =
      hosts ? line.bytes() / slow : std::max(line.inside_bytes / fast, line.outside_bytes / slow);
  const LinkSpec& farthest = hosts || line.outside_bytes > 0 ? machine.slow : machine.fast;
  return carried + line.calls * farthest.latency_us.value * 1e-6;
}

}  // namespace fp4t

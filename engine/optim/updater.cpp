#include "engine/optim/updater.h"

#include <algorithm>
#include <cmath>

#include "engine/plan/run_layout.h"
#include "kernels/ops/run.h"

namespace fp4t {

namespace {

bool uses_muon(const Plan& plan) {
  return std::any_of(plan.stages.begin(), plan.stages.end(), [](const StagePlan& s) {
    return std::visit([](const auto& spec) { return spec.optimizer.kind == "muon"; }, s.spec);
  });
}

TensorView flat(const TensorView& v) { return v.empty() ? v : v.reshape({v.elements()}); }

// Moments of parameters that are always FP32 are so too.
DType moments_dtype(const ParamInfo& info, const Plan& plan) {
  const bool always_fp32 = info.role == ParamRole::kNorm || info.role == ParamRole::kRouter;
  return always_fp32 ? DType::kF32 : plan.dtypes.moments;
}

// Pieces end between chunks: a chunk is owned by whoever owns its first element.
std::vector<int64_t> places_of_chunks(const Plan& plan, int64_t most) {
  std::vector<int64_t> places;
  std::vector<int64_t> next(static_cast<size_t>(plan.axes.ranks()));
  for (size_t r = 0; r < next.size(); ++r) next[r] = static_cast<int64_t>(r) * most;
  struct Owned {
    Span span;
    size_t rank;
  };
  for (const ParamInfo& info : plan.parameters) {
    std::vector<Owned> owners;
    for (size_t r = 0; r < next.size(); ++r) {
      const Span owned = plan.shards.owned(info, static_cast<int64_t>(r));
      if (owned.count() > 0) owners.push_back({owned, r});
    }
    std::sort(owners.begin(), owners.end(),
              [](const Owned& a, const Owned& b) { return a.span.begin < b.span.begin; });
    auto owner = owners.begin();
    for_norm_chunks(info, [&](const Span& chunk) {
      while (owner != owners.end() && owner->span.end <= chunk.begin) ++owner;
      FP4T_CHECK(owner != owners.end() && owner->span.begin <= chunk.begin && chunk.end <= owner->span.end,
                 info.name, ": elements [", chunk.begin, ", ", chunk.end, ") have no one owner");
      places.push_back(next[owner->rank]++);
    });
  }
  return places;
}

}  // namespace

Updater::Updater(Queue& queue, const Plan& plan, std::vector<Param>& params, Arena& arena,
                 ShardExchange* exchange)
    : queue_(queue),
      plan_(plan),
      params_(params),
      exchange_(exchange),
      rank_(exchange ? exchange->comm().rank() : 0) {
  FP4T_CHECK(exchange || !plan.shards.is_sharded(), "several ranks without an exchange");
  for (const Param& p : params) {
    const DType dtype = moments_dtype(p.info, plan);
    const Shape shape = owned_shape(p.info, plan, rank_);
    Moments moments;
    moments.m = arena.take("optimizer moments", dtype, shape);
    moments.v = arena.take("optimizer moments", dtype, shape);
    moments_.push_back(moments);
  }
  if (plan.shards.is_sharded()) {
    const int64_t most = most_owned_chunks(plan);
    chunk_sums_ = arena.take("norm chunks", DType::kF64, {most, 2});
    chunk_places_ = places_of_chunks(plan, most);
  }
  sums_ = arena.take("optimizer scalars", DType::kF64, {2});
  clip_ = arena.take("optimizer scalars", DType::kF32, {1});
  apply_ = arena.take("optimizer scalars", DType::kI32, {1});
  if (uses_muon(plan)) {
    int64_t largest = 0;
    std::vector<ParamInfo> infos;
    for (const Param& p : params) {
      infos.push_back(p.info);
      if (is_muon_parameter(p.info)) largest = std::max(largest, p.held.count());
    }
    muon_update_ = arena.take("optimizer scratch", DType::kF32, {largest});
    newton_schulz_ = std::make_unique<NewtonSchulz>(queue, arena, infos);
  }
  reset();
}

void Updater::reset() {
  for (const Moments& moments : moments_) {
    queue_.fill_bytes(moments.m.data, 0, moments.m.bytes());
    queue_.fill_bytes(moments.v.data, 0, moments.v.bytes());
  }
  applied_ = 0;
}

void Updater::sum_squares() {
  queue_.fill_bytes(sums_.data, 0, sums_.bytes());
  for (const Param& p : params_) {
    run(queue_, SumSquares{.x = flat(p.gradient), .sum = sums_.rows(0, 1), .nonfinite = sums_.rows(1, 1)});
  }
}

void Updater::sum_squares_over_ranks() {
  queue_.fill_bytes(chunk_sums_.data, 0, chunk_sums_.bytes());
  int64_t mine = 0;
  for (const Param& p : params_) {
    const Span owned = plan_.shards.owned(p.info, rank_);
    if (owned.count() == 0) continue;
    SumSquaresChunks op{owned_gradient(p, owned, owned), owned.begin, matrix_elements(p.info), {}};
    op.sums = chunk_sums_.rows(mine, op.chunks());
    run(queue_, op);
    mine += op.chunks();
  }
  const std::vector<double> own = queue_.download(chunk_sums_.data, chunk_sums_.bytes()).values<double>();
  std::vector<double> all(own.size() * static_cast<size_t>(plan_.axes.ranks()));
  exchange_->comm().all_gather(own.data(), all.data(), static_cast<int64_t>(own.size() * sizeof(double)));
  double sums[2] = {0, 0};
  auto place = chunk_places_.begin();
  for (const Param& p : params_) {
    double sum = 0, nonfinite = 0;
    for_norm_chunks(p.info, [&](const Span&) {
      const double* const of_chunk = all.data() + 2 * *place++;
      sum += of_chunk[0];
      nonfinite += of_chunk[1];
    });
    sums[0] += sum;
    sums[1] += nonfinite;
  }
  queue_.upload(sums_.data, sums, sums_.bytes());
}

Download Updater::decide(const OptimizerSpec& spec, double extra_nonfinite) {
  if (plan_.shards.is_sharded()) {
    exchange_->sum_gradients();
    sum_squares_over_ranks();
  } else {
    sum_squares();
  }
  const TensorView sum = sums_.rows(0, 1), nonfinite = sums_.rows(1, 1);
  run(queue_, ClipFactor{.sum = sum,
                         .nonfinite = nonfinite,
                         .extra_nonfinite = extra_nonfinite,
                         .max_norm = spec.clip_norm,
                         .factor = clip_,
                         .apply = apply_});
  return queue_.download(sums_.data, sums_.bytes());
}

StepReport Updater::report_of(const std::vector<double>& sums, const OptimizerSpec& spec,
                              double extra_nonfinite) {
  StepReport report;
  report.gradient_norm = std::sqrt(sums[0]);
  report.nonfinite = sums[1] + extra_nonfinite;
  const ClipDecision same = decide_clip(sums[0], report.nonfinite, spec.clip_norm);
  report.clip_factor = same.factor;
  report.applied = same.apply;
  return report;
}

StepReport Updater::step(const OptimizerSpec& spec, double learning_rate_factor, uint32_t attempted,
                         double extra_nonfinite) {
  const bool muon = spec.kind == "muon";
  FP4T_CHECK(muon || spec.kind == "adamw", "optimizer ", spec.kind);
  FP4T_CHECK(!muon || newton_schulz_, "the plan has no room for Muon");
  // Apply or skip is decided before any byte of the weights or the state changes: where the sums are, so that
  // the updates can follow without waiting for the host. Muon waits for its matrices anyway.
  Download sums = decide(spec, extra_nonfinite);
  if (muon) {
    const StepReport report = report_of(sums.values<double>(), spec, extra_nonfinite);
    if (!report.applied) return report;
  }
  for (size_t i = 0; i < params_.size(); ++i) {
    if (plan_.shards.owned(params_[i].info, rank_).count() == 0) continue;
    const PhiloxKey key =
        site_key(plan_.run.seed, Purpose::kStore, 0, params_[i].info.tensor_id, attempted, 0);
    if (muon && is_muon_parameter(params_[i].info)) {
      update_muon(spec, learning_rate_factor, params_[i], moments_[i], key);
    } else {
      update_adamw(spec, learning_rate_factor, applied_ + 1, params_[i], moments_[i], key);
    }
  }
  const StepReport report = report_of(sums.values<double>(), spec, extra_nonfinite);
  if (!report.applied) return report;
  ++applied_;
  if (exchange_) exchange_->gather_weights();
  return report;
}

void Updater::update_adamw(const OptimizerSpec& spec, double factor, int64_t update, Param& param,
                           const Moments& moments, PhiloxKey key) {
  const auto t = static_cast<double>(update);
  const Span owned = plan_.shards.owned(param.info, rank_);
  run(queue_,
      AdamWStep{.grad = owned_gradient(param, owned, owned),
                .grad_scale = clip_,
                .master = master_of(param, owned),
                .m = flat(moments.m),
                .v = flat(moments.v),
                .copy = owned_copy(param, owned),
                .lr = static_cast<float>(spec.learning_rate * factor),
                .beta1 = static_cast<float>(spec.beta1),
                .beta2 = static_cast<float>(spec.beta2),
                .eps = static_cast<float>(spec.eps),
                .weight_decay = param.info.weight_decay ? static_cast<float>(spec.weight_decay) : 0.0f,
                .bias1 = static_cast<float>(1.0 / (1.0 - std::pow(spec.beta1, t))),
                .bias2 = static_cast<float>(1.0 / (1.0 - std::pow(spec.beta2, t))),
                .store_key = key,
                .first_element = owned.begin,
                .apply = apply_});
}

void Updater::update_muon(const OptimizerSpec& spec, double factor, Param& param, const Moments& moments,
                          PhiloxKey key) {
  const int64_t elements = param.held.count();
  const Span owned = plan_.shards.owned(param.info, rank_);
  FP4T_CHECK_EQ(owned.count(), elements, "of a parameter that Muon updates");
  ParamInfo held = param.info;
  held.shape = held_shape(param.info, plan_, rank_);
  const int64_t columns = param.info.shape[param.info.shape.rank() - 1];
  const TensorView update = {muon_update_.data, DType::kF32, {elements}};
  run(queue_, MuonMomentum{.grad = owned_gradient(param, owned, owned),
                           .grad_scale = clip_,
                           .momentum = flat(moments.m),
                           .beta = static_cast<float>(spec.muon_momentum),
                           .update = update,
                           .store_key = key,
                           .first_element = param.held.begin});
  const TensorView matrices = update.reshape({elements / columns, columns});
  for (const RowSlice& slice : muon_matrices(held, plan_.model)) {
    newton_schulz_->orthogonalise(matrices.rows(slice.begin, slice.count), spec.muon_iterations);
  }
  run(queue_, ApplyUpdate{.update = update,
                          .master = flat(param.master),
                          .copy = owned_copy(param, owned),
                          .lr = static_cast<float>(spec.muon_learning_rate * factor),
                          .scale = 1.0f,
                          .weight_decay = static_cast<float>(spec.weight_decay),
                          .store_key = key,
                          .first_element = param.held.begin});
}

std::vector<NamedTensor> Updater::state() const {
  std::vector<NamedTensor> list;
  for (size_t i = 0; i < params_.size(); ++i) {
    list.push_back({"optimizer.m." + params_[i].info.name, moments_[i].m});
    list.push_back({"optimizer.v." + params_[i].info.name, moments_[i].v});
  }
  return list;
}

}  // namespace fp4t

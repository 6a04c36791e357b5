#include "engine/optim/updater.h"

#include <algorithm>
#include <cmath>

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

}  // namespace

Updater::Updater(Queue& queue, const Plan& plan, std::vector<Param>& params, Arena& arena)
    : queue_(queue), plan_(plan), params_(params) {
  for (const Param& p : params) {
    const DType dtype = moments_dtype(p.info, plan);
    Moments moments;
    moments.m = arena.take("optimizer moments", dtype, p.info.shape);
    moments.v = arena.take("optimizer moments", dtype, p.info.shape);
    moments_.push_back(moments);
  }
  sum_ = arena.take("optimizer scalars", DType::kF64, {1});
  nonfinite_ = arena.take("optimizer scalars", DType::kF64, {1});
  clip_ = arena.take("optimizer scalars", DType::kF32, {1});
  if (uses_muon(plan)) {
    int64_t largest = 0;
    std::vector<ParamInfo> infos;
    for (const Param& p : params) {
      infos.push_back(p.info);
      if (is_muon_parameter(p.info)) largest = std::max(largest, p.info.shape.elements());
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

void Updater::measure(StepReport& report) {
  queue_.fill_bytes(sum_.data, 0, sum_.bytes());
  queue_.fill_bytes(nonfinite_.data, 0, nonfinite_.bytes());
  for (const Param& p : params_) {
    run(queue_, SumSquares{.x = flat(p.gradient), .sum = sum_, .nonfinite = nonfinite_});
  }
  Download sum = queue_.download(sum_.data, sum_.bytes());
  Download nonfinite = queue_.download(nonfinite_.data, nonfinite_.bytes());
  report.gradient_norm = std::sqrt(sum.values<double>()[0]);
  report.nonfinite += nonfinite.values<double>()[0];
}

StepReport Updater::step(const OptimizerSpec& spec, double learning_rate_factor, uint32_t attempted,
                         double extra_nonfinite) {
  const bool muon = spec.kind == "muon";
  FP4T_CHECK(muon || spec.kind == "adamw", "optimizer ", spec.kind);
  FP4T_CHECK(!muon || newton_schulz_, "the plan has no room for Muon");
  StepReport report;
  report.nonfinite = extra_nonfinite;
  measure(report);
  // Apply or skip is decided before any byte of the weights or the state changes.
  if (report.nonfinite != 0 || !std::isfinite(report.gradient_norm)) return report;
  if (spec.clip_norm > 0 && report.gradient_norm > spec.clip_norm) {
    report.clip_factor = spec.clip_norm / report.gradient_norm;
  }
  const auto clip = static_cast<float>(report.clip_factor);
  queue_.upload(clip_.data, &clip, sizeof(clip));
  ++applied_;
  for (size_t i = 0; i < params_.size(); ++i) {
    const PhiloxKey key =
        site_key(plan_.run.seed, Purpose::kStore, 0, params_[i].info.tensor_id, attempted, 0);
    if (muon && is_muon_parameter(params_[i].info)) {
      update_muon(spec, learning_rate_factor, params_[i], moments_[i], key);
    } else {
      update_adamw(spec, learning_rate_factor, params_[i], moments_[i], key);
    }
  }
  report.applied = true;
  return report;
}

void Updater::update_adamw(const OptimizerSpec& spec, double factor, Param& param, const Moments& moments,
                           PhiloxKey key) {
  const auto t = static_cast<double>(applied_);
  run(queue_,
      AdamWStep{.grad = flat(param.gradient),
                .grad_scale = clip_,
                .master = flat(param.master),
                .m = flat(moments.m),
                .v = flat(moments.v),
                .copy = flat(param.copy),
                .lr = static_cast<float>(spec.learning_rate * factor),
                .beta1 = static_cast<float>(spec.beta1),
                .beta2 = static_cast<float>(spec.beta2),
                .eps = static_cast<float>(spec.eps),
                .weight_decay = param.info.weight_decay ? static_cast<float>(spec.weight_decay) : 0.0f,
                .bias1 = static_cast<float>(1.0 / (1.0 - std::pow(spec.beta1, t))),
                .bias2 = static_cast<float>(1.0 / (1.0 - std::pow(spec.beta2, t))),
                .store_key = key});
}

void Updater::update_muon(const OptimizerSpec& spec, double factor, Param& param, const Moments& moments,
                          PhiloxKey key) {
  const int64_t elements = param.info.shape.elements();
  const int64_t columns = param.info.shape[param.info.shape.rank() - 1];
  const TensorView update = {muon_update_.data, DType::kF32, {elements}};
  run(queue_, MuonMomentum{.grad = flat(param.gradient),
                           .grad_scale = clip_,
                           .momentum = flat(moments.m),
                           .beta = static_cast<float>(spec.muon_momentum),
                           .update = update,
                           .store_key = key});
  const TensorView matrices = update.reshape({elements / columns, columns});
  for (const RowSlice& slice : muon_matrices(param.info, plan_.model)) {
    newton_schulz_->orthogonalise(matrices.rows(slice.begin, slice.count), spec.muon_iterations);
  }
  run(queue_, ApplyUpdate{.update = update,
                          .master = flat(param.master),
                          .copy = flat(param.copy),
                          .lr = static_cast<float>(spec.muon_learning_rate * factor),
                          .scale = 1.0f,
                          .weight_decay = static_cast<float>(spec.weight_decay),
                          .store_key = key});
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

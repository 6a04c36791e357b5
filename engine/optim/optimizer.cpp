#include "engine/optim/optimizer.h"

#include "engine/optim/updater.h"

namespace fp4t {

struct Optimizer::Impl {
  Transformer& model;
  Updater updater;
};

Optimizer::Optimizer(Transformer& model, Communicator& comm, Arena& arena)
    : impl_(new Impl{model, Updater(model.queue(), model.plan(), model.params().params(), arena,
                                    &model.shard_exchange())}) {
  FP4T_CHECK_EQ(comm.size(), model.shard_exchange().comm().size(), "ranks");
}

Optimizer::~Optimizer() = default;

void Optimizer::reset() { impl_->updater.reset(); }

StepReport Optimizer::step(const OptimizerSpec& spec, double learning_rate_factor, uint32_t attempted,
                           double extra_nonfinite) {
  impl_->model.settle_gradients();
  const StepReport report = impl_->updater.step(spec, learning_rate_factor, attempted, extra_nonfinite);
  if (report.applied) impl_->model.weights_changed();
  return report;
}

int64_t Optimizer::applied_updates() const { return impl_->updater.applied(); }
void Optimizer::set_applied_updates(int64_t n) { impl_->updater.set_applied(n); }
std::vector<NamedTensor> Optimizer::state() { return impl_->updater.state(); }

}  // namespace fp4t

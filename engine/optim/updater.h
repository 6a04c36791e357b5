// The update of a list of parameters; what Optimizer does short of telling the model.
#pragma once

#include <memory>
#include <vector>

#include "engine/model/params.h"
#include "engine/optim/muon.h"
#include "engine/optim/optimizer.h"
#include "kernels/base/philox.h"

namespace fp4t {

class Updater {
 public:
  // State comes from `arena`; Muon's scratch only when a stage of the plan uses Muon.
  Updater(Queue& queue, const Plan& plan, std::vector<Param>& params, Arena& arena);

  void reset();
  StepReport step(const OptimizerSpec& spec, double learning_rate_factor, uint32_t attempted,
                  double extra_nonfinite);

  int64_t applied() const { return applied_; }
  void set_applied(int64_t n) { applied_ = n; }
  std::vector<NamedTensor> state() const;

 private:
  struct Moments {
    TensorView m, v;  // of AdamW; Muon keeps its momentum in m
  };
  // Sets gradient_norm and nonfinite of the report.
  void measure(StepReport& report);
  void update_adamw(const OptimizerSpec& spec, double factor, Param& param, const Moments& moments,
                    PhiloxKey key);
  void update_muon(const OptimizerSpec& spec, double factor, Param& param, const Moments& moments,
                   PhiloxKey key);

  Queue& queue_;
  const Plan& plan_;
  std::vector<Param>& params_;
  std::vector<Moments> moments_;
  TensorView sum_, nonfinite_;  // F64 [1]
  TensorView clip_;             // F32 [1]
  TensorView muon_update_;      // F32, elements of the largest Muon parameter
  std::unique_ptr<NewtonSchulz> newton_schulz_;
  int64_t applied_ = 0;
};

}  // namespace fp4t

// Work beside a queue's: exchanges between ranks that run while the queue computes. On a GPU a queue of its
// own, on the CPU the same one.
#pragma once

#include <optional>

#include "engine/comm/device.h"
#include "engine/plan/plan.h"
#include "kernels/base/queue.h"

namespace fp4t {

inline Transport transport_of(const Plan& plan) {
  return plan.transport == "nccl" ? Transport::kNccl : Transport::kHost;
}

class Aside {
 public:
  // `own`: false where nothing is exchanged, so that no second queue is made.
  Aside(Queue& main, bool own) : main_(main) {
    if (own && main.backend() == Backend::kCuda) beside_.emplace(main.beside());
  }
  Queue& queue() { return beside_ ? *beside_ : main_; }
  // What comes now may read and overwrite what has been enqueued on the main queue.
  void begin() {
    if (beside_) beside_->wait_for(main_.mark());
  }
  // A mark behind it.
  Mark mark() { return beside_ ? beside_->mark() : Mark(); }
  // The main queue goes on behind it.
  void end() {
    if (beside_) main_.wait_for(beside_->mark());
  }

 private:
  Queue& main_;
  std::optional<Queue> beside_;
};

}  // namespace fp4t

// The stages of a run: walk, pretrain loop, RL loop, evaluation, resume. DESIGN.md section 1.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "engine/comm/comm.h"
#include "engine/plan/plan.h"
#include "engine/stage/resume.h"
#include "kernels/base/queue.h"

namespace fp4t {

struct RunOptions {
  bool accept_changes = false;  // course keys may differ from the checkpoint's
  std::string command_line;     // for the header
};

// Runs or resumes the plan's stages to the end; writes checkpoints, metrics, summary and report. Throws
// PreemptedError after a signal (state saved). Called by every rank.
void run_stages(Queue& queue, Communicator& comm, const Plan& plan, const RunOptions& options,
                const ResumePoint& resume);

}  // namespace fp4t

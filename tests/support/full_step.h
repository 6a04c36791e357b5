// An RL recipe with everything on that a step can have: several epochs and mini-batches, groups asked anew,
// the sampler's routing, a reference policy, a reward by a program, limits of the rows' own. Saves after
// every update.
#pragma once

#include <string>

#include "tests/support/runs.h"

namespace fp4t::test {

// Half the groups or so have equal rewards. What a program answers depends on its requests alone.
inline const char* const kFullStepJudge = R"(import json, sys
for line in sys.stdin:
  r = json.loads(line)
  print(json.dumps({'id': r['id'], 'reward': (len(r['completion']) + (r['id'] % 16 == 0)) % 2}), flush=True)
)";

inline const std::string kFullStepRecipe = std::string(kTinyModel) + kTinyTables + R"(  rl.sampler:
    - {module: [embed, head], format: bf16}
    - {module: "experts.*", operand: act, format: nvfp4, scale_scope: row}
    - {module: "*", format: nvfp4}
  rl.trainer.forward:
    - {module: "*", format: bf16}
stages:
  - rl:
      steps: 6
      task: {kind: jsonl, paths: rows.jsonl, template: "{prompt}=", limit_field: most, max_prompt_tokens: 8}
      rewards:
        - {kind: verifier}
        - {kind: process, name: judge, command: [python3, judge.py], timeout_seconds: 60}
      rollouts: {every: 1}
      sampling: {prompts: 6, samples: 3, max_tokens: 6, max_batch: 7}
      objective: {kind: dapo, resample: 2, overlong_tokens: 2, kl: 0.05, entropy: 0.01, epochs: 2,
                  mini_batches: 3, micro_tokens: 48, drop_zero_advantage: false, router_replay: sampler,
                  mismatch: {cap: 1.5, token_low: 0.25, token_high: 4}}
      optimizer: {learning_rate: 5e-3}
      eval: {tokens: 32}
      checkpoint: {every: 2, every_updates: 1, keep: 3}
)";

inline void write_full_step(const std::string& folder) {
  write_inputs(folder, kFullStepRecipe);
  write_text(folder + "/judge.py", kFullStepJudge);
  std::string rows;
  for (int i = 0; i < 30; ++i) {
    rows += "{\"prompt\": \"" + std::to_string(i) + "\", \"answer\": " + std::to_string(i % 10) +
            ", \"most\": " + std::to_string(2 + i % 5) + "}\n";
  }
  write_text(folder + "/rows.jsonl", rows);
}

// Whether the newest checkpoint lies between two updates of step `step` or a later one.
inline bool is_inside_a_step(const std::string& run_dir, int64_t step) {
  const std::string latest = latest_checkpoint_of(run_dir);
  long stage = 0, done = 0, update = 0;
  return std::sscanf(latest.substr(latest.rfind('/') + 1).c_str(), "step_%ld_%ld_%ld", &stage, &done,
                     &update) == 3 &&
         done >= step && update > 0;
}

}  // namespace fp4t::test

// Recipes that set every key away from its default, as text; recipe_keys.cpp has what each must become.
#pragma once

namespace fp4t::test {

// A mixture-of-experts run: text, lines of JSON, generated tasks, AdamW.
inline constexpr const char* kFirst = R"(
run: {name: n, dir: some/dir, seed: 18446744073709551615, device: cpu, threads: 3, watchdog_seconds: 2.5, resume: never, branch_from: c, prometheus: figures.prom}
model:
  layers: 5
  hidden: 96
  heads: 6
  kv_heads: 3
  head_dim: 64
  mlp_hidden: 80
  vocabulary: 300
  max_positions: 512
  qk_norm: true
  tied_head: true
  norm_eps: 1e-5
  swiglu_clamp: 7.5
  rope: {theta: 5e5, scaling: llama3, factor: 8, low_freq_factor: 1.5, high_freq_factor: 5, original_positions: 64}
  moe: {experts: 4, top_k: 3, hidden: 48, shared_experts: 2, shared_hidden: 40, dense_layers: 1, router: sigmoid, normalise: false, gate_scale: 2.5, balance: {bias_rate: 0.25, aux_loss: 0.5, z_loss: 0.75}}
  init: {std: 0.5, scale_residual: false}
parallel: {data: 6, receive_factor: 3.5, expert_chunks: 3, domain: 3, transport: host, recompute: block}
dtypes: {masters: bf16, moments: bf16, gradients: fp32}
stages:
  - pretrain:
      name: p
      steps: 11
      batch: {tokens: 64, micro_sequences: 2, length: 32}
      data:
        - {name: t, kind: text, paths: [a, b], separator: "%", weight: 2, end_of_document: false, held_out: {fraction: 0.125, seed: 5}}
        - {name: j, kind: jsonl, paths: [l], field: body, loss_on: all}
        - {name: s, kind: sums, low: 1, high: 9, wrong_fraction: 0.5, held_out: {fraction: 0.25, seed: 6, hash: 00112233aabbccdd}}
        - {name: c, kind: countdown, numbers: 4}
      optimizer: {learning_rate: 0.5, beta1: 0.6, beta2: 0.7, eps: 1e-6, weight_decay: 0.1, clip_norm: 2, state: keep}
      schedule: {kind: linear, warmup: 4, final_fraction: 0.5}
      eval: {every: 3, tokens: 100, task: {kind: countdown, low: 2, high: 8, numbers: 5, held_out: {fraction: 0.5, seed: 7, hash: 0123456789abcdef}}, task_samples: 2, task_problems: 6, max_tokens: 12, prompts: [x, "y: z"]}
      checkpoint: {every: 9, keep: 5}
      z_loss: 0.001
      on_nonfinite: stop
  - rl:
      name: r
      steps: 12
      task: {kind: countdown, low: 2, high: 8, numbers: 5, held_out: {fraction: 0.5, seed: 7, hash: 0123456789abcdef}, permute_rewards: true}
      sampling: {prompts: 8, samples: 4, temperature: 0.5, top_p: 0.75, max_tokens: 10, max_batch: 64, end_tokens: [";", "<eod>"]}
      objective: {kind: gspo, clip_low: 0.1, clip_high: 0.3, clip_dual: 3, normalise_std: false, drop_zero_advantage: false, mask_truncated: true, resample: 2, overlong_tokens: 4, overlong_penalty: 0.5, kl: 0.01, kl_estimator: k1, kl_in: reward, entropy: 0.125, epochs: 2, mini_batches: 4, micro_tokens: 1000, average: constant, average_tokens: 7, mismatch: {cap: 3, token_low: 0.5, token_high: 5, sequence_low: 0.75, sequence_high: 1.5, veto: 1e-4}, router_replay: sampler}
      optimizer: {learning_rate: 0.25, beta1: 0.6, beta2: 0.7, eps: 1e-6, weight_decay: 0.1, clip_norm: 2, state: keep}
      schedule: {kind: constant, warmup: 4}
      eval: {every: 3, tokens: 100, task: {kind: countdown, low: 2, high: 8, numbers: 5, held_out: {fraction: 0.5, seed: 7, hash: 0123456789abcdef}}, task_samples: 2, task_problems: 6, max_tokens: 12, prompts: [x]}
      checkpoint: {every: 9, every_updates: 3, keep: 5}
      on_nonfinite: stop
      stop_without_signal: 21
)";

// A dense run from imported weights: Muon, WSD, YaRN; what the first cannot say.
inline constexpr const char* kSecond = R"(
model:
  layers: 5
  hidden: 96
  heads: 6
  kv_heads: 3
  head_dim: 64
  mlp_hidden: 80
  rope: {scaling: yarn, factor: 4, beta_fast: 16, beta_slow: 2, original_positions: 64}
  from: weights
stages:
  - pretrain:
      steps: 11
      batch: {tokens: 64, length: 32}
      data: [{kind: text, paths: a}]
      optimizer: {kind: muon, muon_learning_rate: 0.5, muon_momentum: 0.75, muon_iterations: 3}
      schedule: {kind: wsd, decay_fraction: 0.5}
      max_skips: 2
  - rl:
      steps: 12
      task: {kind: countdown}
      objective: {kind: rloo, mismatch: {importance: raw}}
      optimizer: {kind: muon, muon_learning_rate: 0.5, muon_momentum: 0.75, muon_iterations: 3}
      schedule: {kind: wsd, final_fraction: 0.25, decay_fraction: 0.5}
      max_skips: 2
)";

// Tokens made elsewhere.
inline constexpr const char* kThird = R"(
model: {layers: 5, hidden: 96, heads: 6, kv_heads: 3, head_dim: 64, mlp_hidden: 80}
tokenizer: {kind: ids, vocabulary: 5000}
stages:
  - pretrain:
      steps: 11
      batch: {tokens: 64, length: 32}
      data: [{kind: random}]
)";

// Problems from files.
inline constexpr const char* kFourth = R"(
model: {layers: 5, hidden: 96, heads: 6, kv_heads: 3, head_dim: 64, mlp_hidden: 80}
stages:
  - pretrain:
      steps: 11
      batch: {tokens: 64, length: 32}
      data: [{kind: countdown, wrong_fraction: 0.25}]
      eval: &eval
        task:
          kind: jsonl
          paths: test
          prompt_field: q
          answer_field: a
          limit_field: n
          template: "{prompt}?"
          max_prompt_tokens: 100
          answer: {form: regex, gold: hash, pattern: x, compare: text}
          held_out: {fraction: 1}
        end_tokens: ["<eod>"]
  - rl:
      steps: 12
      task:
        kind: jsonl
        paths: [rows]
        prompt_field: q
        answer_field: a
        limit_field: n
        template: "{prompt}?"
        max_prompt_tokens: 100
        answer: {form: regex, gold: hash, pattern: x, compare: text}
      rewards:
        - {kind: verifier, name: right, weight: 2}
        - {kind: length, weight: 0.5, free_tokens: 8}
        - {kind: format, pattern: x, weight: -1}
        - {kind: process, command: [python3, judge.py], timeout_seconds: 1.5, restarts: 1, cpu_seconds: 60, memory_mib: 512, file_mib: 1}
      rollouts: {every: 2, keep: 10}
      eval: *eval
)";

// A vocabulary in a file.
inline constexpr const char* kFifth = R"(
model: {layers: 5, hidden: 96, heads: 6, kv_heads: 3, head_dim: 64, mlp_hidden: 80}
tokenizer:
  kind: json
  path: t.json
  vocabulary: 500
  begin_of_document: <s>
  end_of_document: </s>
  hash: 0123456789abcdef
  chat: chatml
stages:
  - pretrain:
      steps: 11
      batch: {tokens: 64, length: 32}
      data: [{kind: nanogpt, paths: a, dtype: uint32}, {kind: jsonl, paths: b, special_tokens: true}]
)";

}  // namespace fp4t::test

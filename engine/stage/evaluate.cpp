#include "engine/stage/evaluate.h"

#include <cstdio>

#include "engine/rl/sampler.h"

namespace fp4t {

namespace {

// Sum of -log p and number of the trained tokens of a batch.
std::pair<double, int64_t> batch_loss(Run& run, const TokenBatch& batch) {
  const Pass pass = run.pass_for_evaluation();
  run.model.forward(pass, batch);
  run.model.score(pass, Scoring{});
  const auto buffers = run.model.token_buffers(batch.size());
  const auto log_prob = run.queue.download(buffers.log_prob.data, buffers.log_prob.bytes()).values<float>();
  double loss = 0;
  int64_t tokens = 0;
  for (size_t t = 0; t < log_prob.size(); ++t) {
    if (batch.targets[t] < 0) continue;
    loss -= static_cast<double>(log_prob[t]);
    ++tokens;
  }
  return {loss, tokens};
}

GenerateOptions evaluation_options(Run& run, const EvalSpec& spec, double temperature) {
  GenerateOptions options;
  options.temperature = temperature;
  options.max_tokens = spec.max_tokens;
  options.max_batch = run.plan.max_cache_slots;
  options.end_tokens = default_end_tokens(*run.tokenizer);
  options.key = site_key(run.plan.run.seed, Purpose::kEvalSampling, 0, static_cast<uint32_t>(run.state.stage),
                         static_cast<uint32_t>(run.state.attempted_updates), 0);
  options.progress = [&run](int64_t done, int64_t total) {
    run.console.status(detail::concat("evaluating ", done, "/", total));
    run.stop_if_requested();
  };
  return options;
}

}  // namespace

std::vector<int32_t> default_end_tokens(const Tokenizer& tokenizer) { return tokenizer.line_ends(); }

HeldOutLoss held_out_loss(Run& run, const Corpus& corpus, const std::vector<DataSourceSpec>& sources,
                          int64_t max_tokens) {
  HeldOutLoss result;
  double text_loss = 0;
  int64_t text_tokens = 0;
  const std::vector<std::string> names = corpus.source_names();
  for (size_t s = 0; s < names.size(); ++s) {
    double loss = 0;
    int64_t tokens = 0;
    TokenBatch batch;
    auto flush = [&] {
      if (batch.size() == 0) return;
      run.stop_if_requested();
      const auto [l, n] = batch_loss(run, batch);
      loss += l;
      tokens += n;
      batch = {};
    };
    for (const Sequence& sequence : corpus.held_out(static_cast<int>(s), max_tokens)) {
      if (batch.size() + static_cast<int64_t>(sequence.tokens.size()) > run.plan.max_tokens) flush();
      append_sequence(batch, sequence);
    }
    flush();
    if (tokens == 0) continue;
    result.by_source[names[s]] = loss / static_cast<double>(tokens);
    if (sources[s].kind == "text" || sources[s].kind == "jsonl") {
      text_loss += loss;
      text_tokens += tokens;
    }
  }
  if (text_tokens > 0) {
    result.text = text_loss / static_cast<double>(text_tokens);
    result.has_text = true;
  }
  return result;
}

TaskAccuracy task_accuracy(Run& run, const EvalSpec& spec) {
  const std::unique_ptr<Task> task = make_task(*spec.task);
  std::vector<Problem> problems = task->held_out();
  if (spec.task_problems > 0 && spec.task_problems < static_cast<int64_t>(problems.size())) {
    problems.resize(static_cast<size_t>(spec.task_problems));
  }
  TaskAccuracy result;
  result.problems = static_cast<int64_t>(problems.size());
  const Pass pass = run.pass_for_sampling();
  auto fraction_right = [&](int64_t samples, double temperature) {
    std::vector<GenerateRequest> requests;
    for (const Problem& problem : problems) {
      for (int64_t k = 0; k < samples; ++k) {
        requests.push_back({run.tokenizer->encode(problem.prompt), static_cast<int64_t>(requests.size())});
      }
    }
    const auto completions = generate(run.model, pass, requests, evaluation_options(run, spec, temperature));
    int64_t right = 0;
    for (size_t i = 0; i < completions.size(); ++i) {
      std::vector<int32_t> tokens = completions[i].tokens;
      if (completions[i].finished) tokens.pop_back();
      const Verdict verdict = task->verify(problems[i / static_cast<size_t>(samples)],
                                           run.tokenizer->decode(tokens), completions[i].finished);
      right += verdict == Verdict::kRight;
    }
    return completions.empty() ? 0.0 : static_cast<double>(right) / static_cast<double>(completions.size());
  };
  result.samples = result.problems * spec.task_samples;
  result.sampled = fraction_right(spec.task_samples, 1.0);
  result.greedy = fraction_right(1, 0.0);
  return result;
}

std::vector<std::string> text_samples(Run& run, const EvalSpec& spec) {
  std::vector<GenerateRequest> requests;
  for (const std::string& prompt : spec.prompts) {
    requests.push_back({run.tokenizer->encode(prompt), static_cast<int64_t>(requests.size())});
  }
  std::vector<std::string> lines;
  const auto completions =
      generate(run.model, run.pass_for_sampling(), requests, evaluation_options(run, spec, 1.0));
  for (const Completion& c : completions) {
    std::string text = run.tokenizer->decode(c.tokens);
    while (!text.empty() && text.back() == '\n') text.pop_back();
    lines.push_back(text);
  }
  return lines;
}

void evaluate(Run& run, const Corpus* corpus, const std::vector<DataSourceSpec>& sources,
              const EvalSpec& spec, const std::string& moment) {
  MetricsRecord record;
  std::string line = run.stage().name + " eval";
  char text[96];
  auto note = [&](const std::string& name, double value) {
    record.numbers.emplace_back(name, value);
    if (!moment.empty()) run.state.counters["eval." + run.stage().name + "." + moment + "." + name] = value;
    std::snprintf(text, sizeof(text), " %s=%.4f", name.c_str(), value);
    line += text;
  };
  if (corpus) {
    const HeldOutLoss loss = held_out_loss(run, *corpus, sources, spec.tokens);
    for (const auto& [name, value] : loss.by_source) note("loss." + name, value);
    if (loss.has_text) note("text_loss", loss.text);
  }
  if (spec.task) {
    const TaskAccuracy accuracy = task_accuracy(run, spec);
    note("accuracy", accuracy.sampled);
    note("accuracy_greedy", accuracy.greedy);
    note("problems", static_cast<double>(accuracy.problems));
  }
  run.console.line(line);
  if (!spec.prompts.empty()) {
    const auto samples = text_samples(run, spec);
    for (size_t i = 0; i < samples.size(); ++i) {
      run.console.line("  sample: " + spec.prompts[i] + " -> " + samples[i]);
      record.texts.emplace_back("sample." + std::to_string(i), spec.prompts[i] + samples[i]);
    }
  }
  run.write_metrics("eval", record);
  run.state.texts[evaluated_key(static_cast<size_t>(run.state.stage))] = std::to_string(run.state.step);
}

void evaluate_if_due(Run& run, const Corpus* corpus, const std::vector<DataSourceSpec>& sources,
                     const EvalSpec& spec) {
  const RunState& state = run.state;
  if (spec.every == 0 || state.step == 0 || state.step % spec.every != 0) return;
  if (state.step == run.stage().steps) return;  // the one at the end of the stage
  const auto made = state.texts.find(evaluated_key(static_cast<size_t>(state.stage)));
  if (made != state.texts.end() && made->second == std::to_string(state.step)) return;
  evaluate(run, corpus, sources, spec, "");
}

}  // namespace fp4t

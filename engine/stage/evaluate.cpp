#include "engine/stage/evaluate.h"

#include <algorithm>
#include <cstdio>
#include <tuple>

#include "engine/stage/spread.h"
#include "engine/tokens/chat.h"
#include "engine/tokens/token_store.h"

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

std::vector<int32_t> single_tokens(const Tokenizer& tokenizer, const std::vector<std::string>& texts) {
  std::vector<int32_t> tokens;
  for (const std::string& text : texts) tokens.push_back(tokenizer.single_token(text));
  return tokens;
}

// Of answers: what ends a completion in training ends it here.
std::vector<int32_t> answer_end_tokens(const Run& run, const EvalSpec& spec) {
  if (!spec.end_tokens.empty()) return single_tokens(*run.tokenizer, spec.end_tokens);
  const StagePlan& stage = run.stage();
  if (!stage.is_rl) {
    const std::string& form = run.tokenizer->chat();
    return form.empty() ? run.tokenizer->line_ends() : Chat(form, *run.tokenizer).end_tokens();
  }
  return single_tokens(*run.tokenizer, std::get<RlSpec>(stage.spec).sampling.end_tokens);
}

GenerateOptions evaluation_options(Run& run, const EvalSpec& spec, double temperature,
                                   std::vector<int32_t> end_tokens) {
  GenerateOptions options;
  options.temperature = temperature;
  options.max_tokens = spec.max_tokens;
  options.max_batch = run.plan.max_cache_slots;
  options.end_tokens = std::move(end_tokens);
  options.key = site_key(run.plan.run.seed, Purpose::kEvalSampling, 0, static_cast<uint32_t>(run.state.stage),
                         static_cast<uint32_t>(run.state.attempted_updates), 0);
  return options;
}

// Held-out sequences of a source, packed.
std::vector<TokenBatch> held_out_batches(const Run& run, const Corpus& corpus, int source,
                                         int64_t max_tokens) {
  std::vector<TokenBatch> batches;
  for (const Sequence& sequence : corpus.held_out(source, max_tokens)) {
    const auto n = static_cast<int64_t>(sequence.tokens.size());
    if (batches.empty() || batches.back().size() + n > run.plan.max_tokens) batches.emplace_back();
    append_sequence(batches.back(), sequence);
  }
  return batches;
}

// Losses of the batches, which ranks take in turn; added in the order of batches, so the sum depends on no
// layout beyond the batches that it cuts (plan.max_tokens).
std::pair<double, double> batches_loss(Run& run, const std::vector<TokenBatch>& batches) {
  const auto ranks = static_cast<size_t>(run.comm.size()), rank = static_cast<size_t>(run.comm.rank());
  std::vector<double> losses(2 * batches.size());
  for (size_t turn = 0; turn < batches.size(); turn += ranks) {
    run.stop_if_requested();
    const size_t i = turn + rank;
    if (i >= batches.size()) {
      run.serve(run.pass_for_evaluation());
      continue;
    }
    const auto [loss, tokens] = batch_loss(run, batches[i]);
    losses[2 * i] = loss;
    losses[2 * i + 1] = static_cast<double>(tokens);
  }
  run.comm.all_reduce(losses.data(), static_cast<int64_t>(losses.size()), ReduceOp::kSum);
  double loss = 0, tokens = 0;
  for (size_t i = 0; i < batches.size(); ++i) {
    loss += losses[2 * i];
    tokens += losses[2 * i + 1];
  }
  return {loss, tokens};
}

std::string one_line(std::string text) {
  for (size_t at = 0; (at = text.find('\n', at)) != std::string::npos; at += 2) text.replace(at, 1, "\\n");
  return text;
}

}  // namespace

HeldOutLoss held_out_loss(Run& run, const Corpus& corpus, const std::vector<DataSourceSpec>& sources,
                          int64_t max_tokens) {
  HeldOutLoss result;
  double text_loss = 0, text_tokens = 0;
  const std::vector<std::string> names = corpus.source_names();
  for (size_t s = 0; s < names.size(); ++s) {
    const auto [loss, tokens] =
        batches_loss(run, held_out_batches(run, corpus, static_cast<int>(s), max_tokens));
    if (tokens == 0) continue;
    result.by_source[names[s]] = loss / tokens;
    if (has_documents(sources[s].kind)) {
      text_loss += loss;
      text_tokens += tokens;
    }
  }
  if (text_tokens > 0) {
    result.text = text_loss / text_tokens;
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
  const Span mine = run.part(result.problems);
  // Shares of right and unverifiable completions.
  auto verdicts = [&](int64_t samples, double temperature) {
    std::vector<GenerateRequest> requests;
    for (int64_t i = mine.begin * samples; i < mine.end * samples; ++i) {
      const Problem& p = problems[static_cast<size_t>(i / samples)];
      requests.push_back({prompt_tokens(*spec.task, *run.tokenizer, p), i, p.max_tokens});
    }
    const auto completions = generate_together(
        run, pass, requests, evaluation_options(run, spec, temperature, answer_end_tokens(run, spec)),
        "evaluating");
    std::pair<double, double> counts;
    for (size_t i = 0; i < completions.size(); ++i) {
      const auto problem = static_cast<size_t>(mine.begin) + i / static_cast<size_t>(samples);
      const Verdict verdict = task->verify(problems[problem], answer_text(*run.tokenizer, completions[i]),
                                           completions[i].finished);
      counts.first += verdict == Verdict::kRight;
      counts.second += verdict == Verdict::kUnverifiable;
    }
    const double total = std::max(1.0, static_cast<double>(result.problems * samples));
    counts.first = run.sum_over_ranks(counts.first) / total;
    counts.second = run.sum_over_ranks(counts.second) / total;
    return counts;
  };
  result.samples = result.problems * spec.task_samples;
  std::tie(result.sampled, result.unverifiable) = verdicts(spec.task_samples, 1.0);
  result.greedy = verdicts(1, 0.0).first;
  return result;
}

std::vector<std::string> text_samples(Run& run, const EvalSpec& spec) {
  std::vector<GenerateRequest> requests;
  for (const std::string& prompt : spec.prompts) {
    requests.push_back({run.tokenizer->prompt(prompt), static_cast<int64_t>(requests.size())});
  }
  std::vector<std::string> lines;
  std::vector<int32_t> ends =
      spec.end_tokens.empty() ? run.tokenizer->line_ends() : single_tokens(*run.tokenizer, spec.end_tokens);
  // A few, so every rank makes all of them.
  const auto completions =
      generate_together(run, run.pass_for_sampling(), requests,
                        evaluation_options(run, spec, 1.0, std::move(ends)), "evaluating");
  for (const Completion& c : completions) {
    std::string text = run.tokenizer->continuation(c.tokens);
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
    note("unverifiable", accuracy.unverifiable);
    note("problems", static_cast<double>(accuracy.problems));
  }
  if (!record.numbers.empty()) run.console.line(line);
  if (!spec.prompts.empty()) {
    const auto samples = text_samples(run, spec);
    for (size_t i = 0; i < samples.size(); ++i) {
      run.console.line("  sample: " + one_line(spec.prompts[i]) + " -> " + one_line(samples[i]));
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

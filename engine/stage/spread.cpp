#include "engine/stage/spread.h"

#include <cstring>

#include "engine/comm/agree.h"
#include "engine/plan/run_layout.h"
#include "engine/stage/signals.h"

namespace fp4t {

namespace {

// Ranks decode in their own time, so they meet by number of calls; where they share experts or weights,
// before every call.
class Meetings {
 public:
  explicit Meetings(Run& run) : run_(run) {}

  bool at_every_call() const { return calls_together(run_.plan, false); }
  void after_call() {
    constexpr int64_t kCallsBetween = 8;
    if (run_.comm.size() == 1) {
      run_.stop_if_requested();
    } else if (!at_every_call() && ++calls_ % kCallsBetween == 0) {
      meet(true);
    }
  }
  void when_done() {
    while (run_.comm.size() > 1 && !at_every_call() && meet(false)) {
    }
  }
  // Whether any rank is still at work.
  bool meet(bool at_work) {
    double most[2] = {static_cast<double>(stop_requested()), at_work ? 1.0 : 0.0};
    run_.comm.all_reduce(most, 2, ReduceOp::kMax);
    if (most[0] > 0) run_.stop(static_cast<int>(most[0]));
    return most[1] > 0;
  }

 private:
  Run& run_;
  int64_t calls_ = 0;
};

template <class T>
std::string packed(const std::vector<std::vector<T>>& lists) {
  std::string text;
  for (const std::vector<T>& list : lists) {
    const auto n = static_cast<int64_t>(list.size());
    text.append(reinterpret_cast<const char*>(&n), sizeof(n));
    text.append(reinterpret_cast<const char*>(list.data()), list.size() * sizeof(T));
  }
  return text;
}

template <class T>
void append_unpacked(const std::string& text, std::vector<std::vector<T>>& lists) {
  for (size_t at = 0; at < text.size();) {
    int64_t n = 0;
    FP4T_CHECK(text.size() - at >= sizeof(n), "lists cut off at ", at);
    std::memcpy(&n, text.data() + at, sizeof(n));
    at += sizeof(n);
    const size_t bytes = static_cast<size_t>(n) * sizeof(T);
    FP4T_CHECK(n >= 0 && text.size() - at >= bytes, "a list of ", n, " cut off at ", at);
    std::vector<T> list(static_cast<size_t>(n));
    if (n > 0) std::memcpy(list.data(), text.data() + at, bytes);
    at += bytes;
    lists.push_back(std::move(list));
  }
}

template <class T>
std::vector<std::vector<T>> gather(Communicator& comm, std::vector<std::vector<T>> mine) {
  if (comm.size() == 1) return mine;
  std::vector<std::vector<T>> all;
  for (const std::string& text : gather_texts(comm, packed(mine))) append_unpacked(text, all);
  return all;
}

}  // namespace

std::vector<Completion> generate_together(Run& run, const Pass& pass,
                                          const std::vector<GenerateRequest>& requests,
                                          GenerateOptions options, const std::string& doing) {
  Meetings meetings(run);
  options.progress = [&](int64_t done, int64_t total) {
    run.console.status(detail::concat(doing, " ", done, "/", total));
    meetings.after_call();
  };
  if (meetings.at_every_call()) {
    options.meet = [&](bool at_work) { return meetings.meet(at_work); };
  }
  std::vector<Completion> completions = generate(run.model, pass, requests, options);
  meetings.when_done();
  return completions;
}

std::string answer_text(const Tokenizer& tokenizer, const Completion& completion) {
  std::vector<int32_t> tokens = completion.tokens;
  if (completion.finished) tokens.pop_back();
  return tokenizer.decode(tokens);
}

std::vector<std::vector<int32_t>> gather_lists(Communicator& comm, std::vector<std::vector<int32_t>> mine) {
  return gather(comm, std::move(mine));
}
std::vector<std::vector<float>> gather_lists(Communicator& comm, std::vector<std::vector<float>> mine) {
  return gather(comm, std::move(mine));
}
std::vector<std::vector<uint8_t>> gather_lists(Communicator& comm, std::vector<std::vector<uint8_t>> mine) {
  return gather(comm, std::move(mine));
}
std::vector<uint8_t> gather_list(Communicator& comm, const std::vector<uint8_t>& mine) {
  std::vector<uint8_t> all;
  for (const std::string& text : gather_texts(comm, {mine.begin(), mine.end()})) {
    all.insert(all.end(), text.begin(), text.end());
  }
  return all;
}

}  // namespace fp4t

// Sums "37+58=95". The universe is the unordered pairs of [low, high]; the held-out ones are those with the
// smallest keyed draws, so that both orders of a pair are on one side.
#include <algorithm>

#include "engine/tokens/generated_tasks.h"
#include "engine/tokens/hash.h"
#include "kernels/base/check.h"

namespace fp4t {

namespace {

struct Pair {
  int64_t a, b;  // a <= b
};

Problem sum_problem(int64_t a, int64_t b) {
  return {std::to_string(a) + "+" + std::to_string(b) + "=", std::to_string(a + b)};
}

class Sums : public Task {
 public:
  explicit Sums(const TaskSpec& spec) : spec_(spec) {
    std::vector<Pair> all;
    for (int64_t a = spec.low; a <= spec.high; ++a) {
      for (int64_t b = a; b <= spec.high; ++b) all.push_back({a, b});
    }
    key_ = site_key(spec.held_out.seed, Purpose::kTask, 1, 0, 0, 0);
    std::vector<std::pair<uint64_t, size_t>> drawn(all.size());
    for (size_t i = 0; i < all.size(); ++i) {
      const PhiloxBits bits = site_draw(key_, i);
      drawn[i] = {uint64_t{bits.word[0]} << 32 | bits.word[1], i};
    }
    std::sort(drawn.begin(), drawn.end());
    const auto count = static_cast<size_t>(spec.held_out.fraction * static_cast<double>(all.size()));
    std::vector<bool> out(all.size(), false);
    for (size_t i = 0; i < count; ++i) out[drawn[i].second] = true;
    for (size_t i = 0; i < all.size(); ++i) (out[i] ? held_out_ : training_).push_back(all[i]);
    if (training_.empty() && spec.held_out.fraction < 1)
      throw BadDataError("sums: no pair is left for training");
    if (held_out_.empty() && spec.held_out.fraction > 0) {
      throw BadDataError(detail::concat("sums: held_out.fraction ", spec.held_out.fraction,
                                        " holds out none of the ", all.size(), " pairs; give more"));
    }
  }

  std::string name() const override { return "sums"; }

  Problem training(PhiloxKey key, int64_t i) const override {
    const PhiloxBits bits = site_draw(key, static_cast<uint64_t>(i));
    const uint64_t word = uint64_t{bits.word[0]} << 32 | bits.word[1];
    if (training_.empty()) throw BadDataError("sums: no pair is left for training");
    const Pair& p = training_[word % training_.size()];
    return bits.word[2] & 1 ? sum_problem(p.b, p.a) : sum_problem(p.a, p.b);
  }

  std::vector<Problem> held_out() const override {
    std::vector<Problem> list;
    for (size_t i = 0; i < held_out_.size(); ++i) {
      const Pair& p = held_out_[i];
      const bool swap = site_draw(key_, (uint64_t{1} << 32) + i).word[0] & 1;
      list.push_back(swap ? sum_problem(p.b, p.a) : sum_problem(p.a, p.b));
    }
    return list;
  }

  std::string held_out_hash() const override {
    std::string text;
    for (const Pair& p : held_out_) text += std::to_string(p.a) + "+" + std::to_string(p.b) + "\n";
    return xxh3_hex(text);
  }

  Verdict verify(const Problem& problem, const std::string& completion, bool finished) const override {
    const bool digits =
        !completion.empty() && completion.size() <= 18 &&
        std::all_of(completion.begin(), completion.end(), [](char c) { return c >= '0' && c <= '9'; });
    if (!finished || !digits) return Verdict::kUnverifiable;
    return completion == problem.answer ? Verdict::kRight : Verdict::kWrong;
  }

  std::string document(const Problem& problem, bool wrong, uint32_t bits) const override {
    if (!wrong) return problem.prompt + problem.answer + "\n";
    const int64_t answer = std::stoll(problem.answer);
    return problem.prompt + std::to_string(bits & 1 ? answer + 1 : answer - 1) + "\n";
  }

 private:
  TaskSpec spec_;
  PhiloxKey key_;
  std::vector<Pair> training_, held_out_;
};

}  // namespace

std::unique_ptr<Task> make_sums(const TaskSpec& spec) { return std::make_unique<Sums>(spec); }

}  // namespace fp4t

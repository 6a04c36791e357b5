// Countdown "3,7,25:46=" -> "25+3*7": reach the target from the numbers, each used at most as often as
// given. Problems come from a keyed stream; one is held out when a keyed hash of (sorted numbers, target)
// falls below the fraction.
#include <algorithm>
#include <set>
#include <string_view>
#include <unordered_set>

#include "engine/tokens/expression.h"
#include "engine/tokens/generated_tasks.h"
#include "engine/tokens/hash.h"
#include "kernels/base/check.h"

namespace fp4t {

namespace {

constexpr int64_t kHeldOutProblems = 400;
constexpr int64_t kMaxTarget = 999;
constexpr uint64_t kHeldOutDraws = 1000000;
constexpr std::string_view kOperators = "+-*";

// Numbers and the operators between them, in the order of one draw.
struct Choice {
  std::vector<int64_t> numbers;
  std::string operators;

  // Equal for equal choices.
  std::string bytes() const {
    return std::string(reinterpret_cast<const char*>(numbers.data()), numbers.size() * sizeof(int64_t)) +
           operators;
  }
};

struct Drawn {
  Problem problem;
  std::string identity;  // sorted numbers and target
  bool valid = false;
};

class Countdown : public Task {
 public:
  explicit Countdown(const TaskSpec& spec) : spec_(spec) {
    const PhiloxKey key = site_key(spec.held_out.seed, Purpose::kTask, 2, 0, 0, 0);
    std::set<std::string> seen;
    const bool splits = spec.held_out.fraction > 0;
    // A small universe repeats itself: what was drawn before is passed over without being worked out again.
    std::unordered_set<std::string> drawn;
    for (uint64_t i = 0; splits && i < kHeldOutDraws; ++i) {
      const Choice choice = choose(key, i);
      if (!drawn.insert(choice.bytes()).second) continue;
      const Drawn d = work_out(choice);
      if (!d.valid || !is_held_out(d.identity) || !seen.insert(d.identity).second) continue;
      held_out_.push_back(d.problem);
      if (static_cast<int64_t>(held_out_.size()) == kHeldOutProblems) break;
    }
    if (splits && held_out_.empty()) {
      throw BadDataError(detail::concat("countdown: held_out.fraction ", spec.held_out.fraction,
                                        " holds out no problem; give more"));
    }
    if (spec.held_out.fraction < 1) training(key, 0);  // throws when the numbers make no problem
  }

  std::string name() const override { return "countdown"; }

  Problem training(PhiloxKey key, int64_t i) const override {
    for (uint64_t attempt = 0; attempt < 4096; ++attempt) {
      const Drawn d = work_out(choose(key, static_cast<uint64_t>(i) * 4096 + attempt));
      if (d.valid && !is_held_out(d.identity)) return d.problem;
    }
    throw BadDataError("countdown: no training problem can be drawn from these numbers");
  }

  std::vector<Problem> held_out() const override { return held_out_; }

  std::string held_out_hash() const override {
    std::string text;
    for (const Problem& p : held_out_) text += p.prompt + "\n";
    return xxh3_hex(text);
  }

  Verdict verify(const Problem& problem, const std::string& completion, bool finished) const override {
    const auto parsed = finished ? parse_expression(completion) : std::nullopt;
    if (!parsed) return Verdict::kUnverifiable;
    const Question question = question_of(problem);
    std::multiset<int64_t> left(question.numbers.begin(), question.numbers.end());
    for (int64_t n : parsed->numbers) {
      const auto it = left.find(n);
      if (it == left.end()) return Verdict::kWrong;
      left.erase(it);
    }
    return parsed->value == Rational{question.target, 1} ? Verdict::kRight : Verdict::kWrong;
  }

  // A wrong answer is an expression of all the problem's numbers with another value than the target: the
  // first such one of a walk through their orders and operators that begins at `bits`.
  std::string document(const Problem& problem, bool wrong, uint32_t bits) const override {
    return problem.prompt + (wrong ? wrong_answer(problem, bits) : problem.answer) + "\n";
  }

 private:
  bool is_held_out(const std::string& identity) const {
    const std::string hash = xxh3_hex(std::to_string(spec_.held_out.seed) + "|" + identity);
    return static_cast<double>(std::stoull(hash.substr(0, 12), nullptr, 16)) * 0x1p-48 <
           spec_.held_out.fraction;
  }

  Choice choose(PhiloxKey key, uint64_t index) const {
    Choice choice;
    const auto range = static_cast<uint64_t>(spec_.high - spec_.low + 1);
    for (int64_t k = 0; k < spec_.numbers; ++k) {
      const PhiloxBits bits = site_draw(key, index * 16 + static_cast<uint64_t>(k));
      choice.numbers.push_back(spec_.low + static_cast<int64_t>(bits.word[0] % range));
      if (k > 0) choice.operators += kOperators[bits.word[1] % kOperators.size()];
    }
    return choice;
  }

  struct Question {
    std::vector<int64_t> numbers;  // as the prompt has them: sorted
    int64_t target = 0;
  };

  static Question question_of(const Problem& problem) {
    Question question;
    const size_t colon = problem.prompt.find(':');
    for (size_t at = 0; at < colon;) {
      question.numbers.push_back(std::stoll(problem.prompt.substr(at)));
      at = std::min(problem.prompt.find(',', at), colon) + 1;
    }
    question.target = std::stoll(problem.prompt.substr(colon + 1));
    return question;
  }

  static std::string wrong_answer(const Problem& problem, uint32_t bits) {
    const Question question = question_of(problem);
    Choice choice{question.numbers, {}};
    const auto n = choice.numbers.size();
    uint64_t orders = 1, operators = 1;
    for (uint64_t k = 2; k <= n; ++k) orders *= k;
    for (uint64_t k = 1; k < n; ++k) operators *= kOperators.size();
    for (uint64_t i = 0; i < orders * operators; ++i) {
      uint64_t at = (bits + i) % (orders * operators);
      choice = {question.numbers, {}};
      for (size_t k = n; k > 1; --k, at /= k + 1) std::swap(choice.numbers[k - 1], choice.numbers[at % k]);
      for (size_t k = 1; k < n; ++k, at /= kOperators.size()) {
        choice.operators += kOperators[at % kOperators.size()];
      }
      std::string expression = expression_of(choice);
      const auto parsed = parse_expression(expression);
      if (parsed && parsed->value != Rational{question.target, 1}) return expression;
    }
    // Every expression hits the target, as with zeros alone: then a number that it does not reach.
    return std::to_string(question.target + 1);
  }

  // ((n1 op n2) op n3) ...
  static std::string expression_of(const Choice& choice) {
    std::string expression = std::to_string(choice.numbers[0]);
    for (size_t k = 1; k < choice.numbers.size(); ++k) {
      const char op = choice.operators[k - 1];
      const bool wrap = op == '*' && expression.find_first_of("+-") != std::string::npos;
      expression = (wrap ? "(" + expression + ")" : expression) + op + std::to_string(choice.numbers[k]);
    }
    return expression;
  }

  static Drawn work_out(const Choice& choice) {
    Drawn out;
    std::vector<int64_t> numbers = choice.numbers;
    const std::string expression = expression_of(choice);
    const auto parsed = parse_expression(expression);
    if (!parsed || parsed->value.denominator != 1) return out;
    const int64_t target = parsed->value.numerator;
    out.valid = target >= 1 && target <= kMaxTarget;
    std::sort(numbers.begin(), numbers.end());
    std::string list;
    for (int64_t n : numbers) list += (list.empty() ? "" : ",") + std::to_string(n);
    out.identity = list + ":" + std::to_string(target);
    out.problem = {out.identity + "=", expression};
    return out;
  }

  TaskSpec spec_;
  std::vector<Problem> held_out_;
};

}  // namespace

std::unique_ptr<Task> make_countdown(const TaskSpec& spec) { return std::make_unique<Countdown>(spec); }

}  // namespace fp4t

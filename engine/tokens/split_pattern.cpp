#include "engine/tokens/split_pattern.h"

#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>

#include <cctype>
#include <new>
#include <set>

#include "engine/tokens/utf8.h"
#include "kernels/base/check.h"
#include "kernels/base/text.h"

namespace fp4t {

namespace {

// Unicode's White_Space, as the inside of a class.
constexpr const char* kWhiteSpace =
    R"(\x{9}-\x{d}\x{20}\x{85}\x{a0}\x{1680}\x{2000}-\x{200a}\x{2028}\x{2029}\x{202f}\x{205f}\x{3000})";

class Translator {
 public:
  explicit Translator(std::string_view pattern) : in_(pattern) {}

  std::string run() {
    if (!is_well_formed(in_)) throw BadDataError("a pattern that is no UTF-8");
    while (at_ < in_.size()) outside();
    return out_;
  }

 private:
  [[noreturn]] void refuse(const std::string& what) const {
    throw BadDataError(detail::concat("the pattern holds ", what, " at character ", at_,
                                      ", which is not supported: ", in_.substr(0, 200)));
  }
  char peek(size_t ahead = 0) const { return at_ + ahead < in_.size() ? in_[at_ + ahead] : '\0'; }
  bool starts(std::string_view text) const { return in_.substr(at_).starts_with(text); }
  void copy(size_t n) {
    out_ += in_.substr(at_, n);
    at_ += n;
  }

  void outside() {
    switch (peek()) {
      case '\\':
        return escape(false);
      case '[':
        return char_class();
      case '(':
        return group();
      case '{':
        return counted();
      case '.':
      case '^':
      case '$':
        refuse(std::string("'") + peek() + "'");
      default:
        copy(1);
    }
  }

  void group() {
    if (peek(1) != '?') return copy(1);
    for (const std::string_view form : {"(?:", "(?i:", "(?!", "(?="}) {
      if (starts(form)) return copy(form.size());
    }
    refuse("a group that begins with " + std::string(in_.substr(at_, 4)));
  }

  // {n}, {n,} or {n,m}; a '+' behind it is possessive to one engine and a second repeat to the other.
  void counted() {
    size_t n = 1, digits = 0;
    for (; peek(n) >= '0' && peek(n) <= '9'; ++n) ++digits;
    if (peek(n) == ',') ++n;
    for (; peek(n) >= '0' && peek(n) <= '9'; ++n) {
    }
    if (digits == 0 || peek(n) != '}' || peek(n + 1) == '+') refuse("a repeat that begins with '{'");
    copy(n + 1);
  }

  void escape(bool in_class) {
    const char c = peek(1);
    if (c == 's' || c == 'S') {
      if (in_class && c == 'S') refuse("\\S in a class");
      out_ += in_class ? kWhiteSpace : std::string(c == 's' ? "[" : "[^") + kWhiteSpace + "]";
      at_ += 2;
      return;
    }
    if (c == 'p' || c == 'P') return property();
    const bool is_punctuation = c > ' ' && c < 0x7F && !std::isalnum(static_cast<unsigned char>(c));
    if (!is_punctuation && std::string_view(" rntd").find(c) == std::string_view::npos) {
      refuse(std::string("\\") + c);
    }
    copy(2);
  }

  void property() {
    static const std::set<std::string_view> kCategories = {
        "L",  "Lu", "Ll", "Lt", "Lm", "Lo", "M", "Mn", "Mc", "Me", "N",  "Nd", "Nl", "No", "P",  "Pc",
        "Pd", "Ps", "Pe", "Pi", "Pf", "Po", "S", "Sm", "Sc", "Sk", "So", "Z",  "Zs", "Zl", "Zp", "C"};
    const size_t end = in_.find('}', at_);
    const bool braced = peek(2) == '{' && end != std::string_view::npos;
    const std::string_view name = braced ? in_.substr(at_ + 3, end - at_ - 3) : in_.substr(at_ + 2, 1);
    if (name == "Han") {  // the script itself; PCRE2 would add its extensions
      out_ += std::string("\\") + peek(1) + "{sc:Han}";
      at_ = end + 1;
      return;
    }
    if (!braced || kCategories.count(name) == 0) refuse("the property '" + std::string(name) + "'");
    copy(end + 1 - at_);
  }

  void char_class() {
    copy(1);
    if (peek() == '^') copy(1);
    if (peek() == ']') refuse("an empty class");
    while (peek() != ']') {
      if (at_ >= in_.size()) refuse("a class without end");
      if (peek() == '[') refuse("a class inside a class");
      if (starts("&&")) refuse("an intersection of classes");
      if (peek() == '\\') {
        escape(true);
      } else {
        copy(1);
      }
    }
    copy(1);
  }

  std::string_view in_;
  size_t at_ = 0;
  std::string out_;
};

std::string pcre2_message(int code) {
  PCRE2_UCHAR text[256];
  pcre2_get_error_message(code, text, sizeof(text));
  return reinterpret_cast<const char*>(text);
}

}  // namespace

std::string translate_pattern(std::string_view pattern) { return Translator(pattern).run(); }

std::string literal_pattern(std::string_view text) {
  std::string pattern;
  for (const char c : text) {
    if (c > ' ' && c < 0x7F && !std::isalnum(static_cast<unsigned char>(c))) pattern += '\\';
    pattern += c;
  }
  return pattern;
}

struct SplitPattern::Code {
  pcre2_code* code = nullptr;
  ~Code() { pcre2_code_free(code); }
};

SplitPattern::SplitPattern(const std::string& pattern) : code_(std::make_unique<Code>()) {
  int error = 0;
  PCRE2_SIZE at = 0;
  code_->code = pcre2_compile(reinterpret_cast<PCRE2_SPTR>(pattern.data()), pattern.size(),
                              PCRE2_UTF | PCRE2_UCP, &error, &at, nullptr);
  if (code_->code == nullptr) {
    throw BadDataError(detail::concat("the pattern is none, at character ", at, ": ", pcre2_message(error),
                                      ": ", printable(pattern, 200)));
  }
  uint32_t matches_empty = 0;
  pcre2_pattern_info(code_->code, PCRE2_INFO_MATCHEMPTY, &matches_empty);
  if (matches_empty != 0)
    throw BadDataError("the pattern matches the empty text: " + printable(pattern, 200));
  pcre2_jit_compile(code_->code, PCRE2_JIT_COMPLETE);  // where there is none, matching is slower and the same
}

SplitPattern::~SplitPattern() = default;
SplitPattern::SplitPattern(SplitPattern&&) noexcept = default;

struct SplitPattern::Matcher::State {
  const pcre2_code* code;
  pcre2_match_context* context = pcre2_match_context_create(nullptr);
  pcre2_jit_stack* stack = pcre2_jit_stack_create(64 << 10, 64 << 20, nullptr);
  pcre2_match_data* data;

  explicit State(const pcre2_code* c) : code(c), data(pcre2_match_data_create_from_pattern(c, nullptr)) {
    if (context == nullptr || stack == nullptr || data == nullptr) throw std::bad_alloc();
    pcre2_set_match_limit(context, UINT32_MAX);  // a run of a million spaces is text as well
    pcre2_jit_stack_assign(context, nullptr, stack);
  }
  ~State() {
    pcre2_match_data_free(data);
    pcre2_jit_stack_free(stack);
    pcre2_match_context_free(context);
  }
};

SplitPattern::Matcher::Matcher(const SplitPattern& pattern)
    : state_(std::make_unique<State>(pattern.code_->code)) {}
SplitPattern::Matcher::~Matcher() = default;
SplitPattern::Matcher::Matcher(Matcher&&) noexcept = default;

bool SplitPattern::Matcher::find(std::string_view text, size_t at, size_t& begin, size_t& end) {
  const int found = pcre2_match(state_->code, reinterpret_cast<PCRE2_SPTR>(text.data()), text.size(), at,
                                PCRE2_NO_UTF_CHECK, state_->data, state_->context);
  if (found == PCRE2_ERROR_NOMATCH) return false;
  if (found < 0) throw BadDataError("text that cannot be cut into words: " + pcre2_message(found));
  const PCRE2_SIZE* range = pcre2_get_ovector_pointer(state_->data);
  begin = range[0];
  end = range[1];
  return true;
}

}  // namespace fp4t

// The regular expressions by which tokenizers cut text into words, run by PCRE2 with Unicode properties.
// Files write them for another engine (Oniguruma), so a pattern is checked first: only constructs that mean
// the same in both are taken, and white space, where the two differ (PCRE2 counts U+180E), is spelt out. That
// covers the patterns of GPT-2, cl100k, o200k, Qwen2 and Qwen3, Llama 3 and DeepSeek.
#pragma once

#include <memory>
#include <string>
#include <string_view>

namespace fp4t {

// The pattern in PCRE2's syntax. Throws BadDataError naming the construct that is not taken.
std::string translate_pattern(std::string_view pattern);
// One that matches this text and nothing else.
std::string literal_pattern(std::string_view text);

class SplitPattern {
 public:
  // `pattern` as translate_pattern gives it. Throws BadDataError.
  explicit SplitPattern(const std::string& pattern);
  ~SplitPattern();
  SplitPattern(SplitPattern&&) noexcept;

  // State of one thread's matching.
  class Matcher {
   public:
    explicit Matcher(const SplitPattern& pattern);
    ~Matcher();
    Matcher(Matcher&&) noexcept;
    // The next match in well-formed `text` at or after `at`, which is the beginning of a character; matches
    // are never empty.
    bool find(std::string_view text, size_t at, size_t& begin, size_t& end);

   private:
    struct State;
    std::unique_ptr<State> state_;
  };

 private:
  struct Code;
  std::unique_ptr<Code> code_;
};

}  // namespace fp4t

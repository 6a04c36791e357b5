// Regular expressions (PCRE2) over any bytes in bounded time: a search that takes more steps than its budget
// gives up and says so. Characters are those of UTF-8; what is no UTF-8 matches nothing.
#pragma once

#include <memory>
#include <string>
#include <string_view>

namespace fp4t {

class Pattern {
 public:
  enum class Outcome : uint8_t { kFound, kAbsent, kGaveUp };
  struct Found {
    Outcome outcome = Outcome::kAbsent;
    std::string text;  // of group 1, or of the whole match where the pattern has no group
  };

  // Throws RecipeError with the place in the pattern.
  explicit Pattern(const std::string& pattern);
  ~Pattern();
  Pattern(Pattern&&) noexcept;

  // The last of the matches that follow each other from the left.
  Found last(std::string_view text) const;
  // Whether it occurs anywhere.
  Outcome occurs(std::string_view text) const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace fp4t

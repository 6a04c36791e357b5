#define PCRE2_CODE_UNIT_WIDTH 8
#include "engine/tokens/pattern.h"

#include <pcre2.h>

#include "engine/tokens/utf8.h"
#include "kernels/base/check.h"
#include "kernels/base/text.h"

namespace fp4t {

namespace {

// What one search may spend, over all of its matches: some milliseconds. An item of the pattern that is tried
// costs 1, and so do so many bytes that it runs over or that are looked at before a match begins: an item may
// swallow a whole text at one step. PCRE2's own limits are per match and see neither that nor a search that
// begins anew at every character.
constexpr int64_t kSteps = 2'000'000, kBytesAStep = 64;
constexpr uint32_t kMatchLimit = 1'000'000, kDepthLimit = 10'000, kHeapKib = 20'000;
constexpr size_t kLongestText = size_t{1} << 20;

struct Budget {
  int64_t steps = kSteps;
  size_t position = 0;  // at the item before
};

int count_step(pcre2_callout_block* block, void* data) {
  auto* budget = static_cast<Budget*>(data);
  if (block->current_position > budget->position) {
    budget->steps -= static_cast<int64_t>(block->current_position - budget->position) / kBytesAStep;
  }
  budget->position = block->current_position;
  return --budget->steps < 0 ? PCRE2_ERROR_CALLOUT : 0;
}

pcre2_code* compile(const std::string& pattern, uint32_t options) {
  // \C would tear characters apart, which UTF-8 that may be ill-formed does not allow.
  options |= PCRE2_UTF | PCRE2_NEVER_BACKSLASH_C | PCRE2_AUTO_CALLOUT;
  int error = 0;
  PCRE2_SIZE at = 0;
  pcre2_code* code = pcre2_compile(reinterpret_cast<PCRE2_SPTR>(pattern.data()), pattern.size(), options,
                                   &error, &at, nullptr);
  if (code) return code;
  unsigned char message[256] = {};
  pcre2_get_error_message(error, message, sizeof(message));
  throw RecipeError(detail::concat("no regular expression: ", reinterpret_cast<const char*>(message),
                                   ", at character ", at + 1, " of '", printable(pattern), "'"));
}

}  // namespace

struct Pattern::Impl {
  // For text that is UTF-8, and for what may not be: that one looks through the rest of the text for
  // ill-formed bytes before every match.
  pcre2_code *well_formed = nullptr, *any = nullptr;
  uint32_t groups = 0;
  ~Impl() {
    pcre2_code_free(well_formed);
    pcre2_code_free(any);
  }
};

namespace {

// One search through a text: its budget is used up across calls.
class Search {
 public:
  Search(const pcre2_code* well_formed, const pcre2_code* any, std::string_view text)
      : text_(text),
        well_formed_(is_well_formed(text)),
        code_(well_formed_ ? well_formed : any),
        context_(pcre2_match_context_create(nullptr)),
        data_(pcre2_match_data_create_from_pattern(code_, nullptr)) {
    if (!context_ || !data_) {
      pcre2_match_data_free(data_);
      pcre2_match_context_free(context_);
      throw std::bad_alloc();
    }
    pcre2_set_match_limit(context_, kMatchLimit);
    pcre2_set_depth_limit(context_, kDepthLimit);
    pcre2_set_heap_limit(context_, kHeapKib);
    pcre2_set_callout(context_, count_step, &budget_);
  }
  Search(const Search&) = delete;
  ~Search() {
    pcre2_match_data_free(data_);
    pcre2_match_context_free(context_);
  }

  Pattern::Outcome find(size_t from, uint32_t options) {
    if (well_formed_) {
      options |= PCRE2_NO_UTF_CHECK;
    } else {
      budget_.steps -= static_cast<int64_t>(text_.size() - from) / kBytesAStep;
    }
    budget_.position = from;
    if (budget_.steps < 0) return Pattern::Outcome::kGaveUp;
    const int result = pcre2_match(code_, reinterpret_cast<PCRE2_SPTR>(text_.data()), text_.size(), from,
                                   options, data_, context_);
    if (result >= 0) return Pattern::Outcome::kFound;
    return result == PCRE2_ERROR_NOMATCH ? Pattern::Outcome::kAbsent : Pattern::Outcome::kGaveUp;
  }
  const PCRE2_SIZE* places() const { return pcre2_get_ovector_pointer(data_); }

 private:
  std::string_view text_;
  bool well_formed_;
  const pcre2_code* code_;
  Budget budget_;
  pcre2_match_context* context_;
  pcre2_match_data* data_;
};

}  // namespace

Pattern::Pattern(const std::string& pattern) : impl_(std::make_unique<Impl>()) {
  impl_->well_formed = compile(pattern, 0);
  impl_->any = compile(pattern, PCRE2_MATCH_INVALID_UTF);
  pcre2_pattern_info(impl_->any, PCRE2_INFO_CAPTURECOUNT, &impl_->groups);
}

Pattern::~Pattern() = default;
Pattern::Pattern(Pattern&&) noexcept = default;

Pattern::Found Pattern::last(std::string_view text) const {
  Found found;
  if (text.size() > kLongestText) return {Outcome::kGaveUp, ""};
  Search search(impl_->well_formed, impl_->any, text);
  for (size_t from = 0; from <= text.size();) {
    // Empty matches are none here: they would be found between any two characters.
    const Outcome outcome = search.find(from, PCRE2_NOTEMPTY);
    if (outcome == Outcome::kGaveUp) return {Outcome::kGaveUp, ""};
    if (outcome == Outcome::kAbsent) break;
    const PCRE2_SIZE* places = search.places();
    const size_t group = impl_->groups > 0 ? 2 : 0;
    found.outcome = Outcome::kFound;
    const bool set = places[group] != PCRE2_UNSET;
    found.text = set ? std::string(text.substr(places[group], places[group + 1] - places[group])) : "";
    from = places[1];
  }
  return found;
}

Pattern::Outcome Pattern::occurs(std::string_view text) const {
  if (text.size() > kLongestText) return Outcome::kGaveUp;
  return Search(impl_->well_formed, impl_->any, text).find(0, 0);
}

}  // namespace fp4t

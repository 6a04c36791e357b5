#define PCRE2_CODE_UNIT_WIDTH 8
#include "engine/tokens/pattern.h"

#include <pcre2.h>

#include "kernels/base/check.h"
#include "kernels/base/text.h"

namespace fp4t {

namespace {

// Items of the pattern that one search may try, over all of its matches: some milliseconds. PCRE2's own
// limits are per match and do not see a search that begins anew at every character.
constexpr int64_t kSteps = 2'000'000;
constexpr uint32_t kMatchLimit = 1'000'000, kDepthLimit = 10'000, kHeapKib = 20'000;
constexpr size_t kLongestText = size_t{1} << 20;

int count_step(pcre2_callout_block*, void* steps) {
  return --*static_cast<int64_t*>(steps) < 0 ? PCRE2_ERROR_CALLOUT : 0;
}

}  // namespace

struct Pattern::Impl {
  pcre2_code* code = nullptr;
  uint32_t groups = 0;
  ~Impl() { pcre2_code_free(code); }

  // Of one search: its budget is used up across calls.
  struct Search {
    explicit Search(const pcre2_code* c)
        : context(pcre2_match_context_create(nullptr)),
          data(pcre2_match_data_create_from_pattern(c, nullptr)) {
      if (!context || !data) throw std::bad_alloc();
      pcre2_set_match_limit(context, kMatchLimit);
      pcre2_set_depth_limit(context, kDepthLimit);
      pcre2_set_heap_limit(context, kHeapKib);
      pcre2_set_callout(context, count_step, &steps);
    }
    Search(const Search&) = delete;
    ~Search() {
      pcre2_match_data_free(data);
      pcre2_match_context_free(context);
    }
    int64_t steps = kSteps;
    pcre2_match_context* context;
    pcre2_match_data* data;
  };

  Outcome find(Search& search, std::string_view text, size_t from, uint32_t options) const {
    const int result = pcre2_match(code, reinterpret_cast<PCRE2_SPTR>(text.data()), text.size(), from,
                                   options, search.data, search.context);
    if (result >= 0) return Outcome::kFound;
    return result == PCRE2_ERROR_NOMATCH ? Outcome::kAbsent : Outcome::kGaveUp;
  }
};

Pattern::Pattern(const std::string& pattern) : impl_(std::make_unique<Impl>()) {
  int error = 0;
  PCRE2_SIZE at = 0;
  // \C would tear characters apart, which UTF-8 that may be ill-formed does not allow.
  constexpr uint32_t kOptions =
      PCRE2_UTF | PCRE2_MATCH_INVALID_UTF | PCRE2_NEVER_BACKSLASH_C | PCRE2_AUTO_CALLOUT;
  impl_->code = pcre2_compile(reinterpret_cast<PCRE2_SPTR>(pattern.data()), pattern.size(), kOptions, &error,
                              &at, nullptr);
  if (!impl_->code) {
    unsigned char message[256] = {};
    pcre2_get_error_message(error, message, sizeof(message));
    throw RecipeError(detail::concat("no regular expression: ", reinterpret_cast<const char*>(message),
                                     ", at character ", at + 1, " of '", printable(pattern), "'"));
  }
  pcre2_pattern_info(impl_->code, PCRE2_INFO_CAPTURECOUNT, &impl_->groups);
}

Pattern::~Pattern() = default;
Pattern::Pattern(Pattern&&) noexcept = default;

Pattern::Found Pattern::last(std::string_view text) const {
  Found found;
  if (text.size() > kLongestText) return {Outcome::kGaveUp, ""};
  Impl::Search search(impl_->code);
  for (size_t from = 0; from <= text.size();) {
    // Empty matches are none here: they would be found between any two characters.
    const Outcome outcome = impl_->find(search, text, from, PCRE2_NOTEMPTY);
    if (outcome == Outcome::kGaveUp) return {Outcome::kGaveUp, ""};
    if (outcome == Outcome::kAbsent) break;
    const PCRE2_SIZE* places = pcre2_get_ovector_pointer(search.data);
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
  Impl::Search search(impl_->code);
  return impl_->find(search, text, 0, 0);
}

}  // namespace fp4t

// Error types and checks. Every failure is an exception thrown where it is noticed, carrying both
// values; `main` catches once and maps the type to an exit code (DESIGN.md section 9).
#pragma once

#include <sstream>
#include <stdexcept>
#include <string>
#include <string_view>

namespace fp4t {

// Process exit codes; frozen, scripts and batch systems depend on them.
enum class ExitCode : int {
  kDone = 0,
  kInternal = 1,       // a broken invariant: a bug of ours
  kRecipe = 2,         // recipe or command line
  kBadData = 65,       // input data that is there but damaged or contradictory
  kMissingInput = 66,  // input file that is not there
  kNonFinite = 71,     // stopped by the non-finite or spike policy
  kWatchdog = 72,      // no progress within the time-out
  kCannotSave = 73,    // a checkpoint could not be written
  kPreempted = 75,     // stopped by a signal, checkpoint saved: start me again
  kNoCheckpoint = 76,  // a checkpoint was asked for and none can be read
};

// Base of every exception of ours; `what()` is one or more full lines for the user.
class Error : public std::runtime_error {
 public:
  Error(ExitCode code, const std::string& message) : std::runtime_error(message), code_(code) {}
  ExitCode code() const { return code_; }

 private:
  ExitCode code_;
};

struct InternalError : Error {
  explicit InternalError(const std::string& m) : Error(ExitCode::kInternal, m) {}
};
struct RecipeError : Error {
  explicit RecipeError(const std::string& m) : Error(ExitCode::kRecipe, m) {}
};
// The recipe asks for more memory than there is.
struct MemoryError : Error {
  explicit MemoryError(const std::string& m) : Error(ExitCode::kRecipe, m) {}
};
struct BadDataError : Error {
  explicit BadDataError(const std::string& m) : Error(ExitCode::kBadData, m) {}
};
struct MissingInputError : Error {
  explicit MissingInputError(const std::string& m) : Error(ExitCode::kMissingInput, m) {}
};
struct NonFiniteError : Error {
  explicit NonFiniteError(const std::string& m) : Error(ExitCode::kNonFinite, m) {}
};
struct SaveError : Error {
  explicit SaveError(const std::string& m) : Error(ExitCode::kCannotSave, m) {}
};
struct PreemptedError : Error {
  explicit PreemptedError(const std::string& m) : Error(ExitCode::kPreempted, m) {}
};
struct NoCheckpointError : Error {
  explicit NoCheckpointError(const std::string& m) : Error(ExitCode::kNoCheckpoint, m) {}
};

namespace detail {
[[noreturn]] void throw_check(const char* file, int line, const char* expression, const std::string& message);

template <class... Parts>
std::string concat(const Parts&... parts) {
  std::ostringstream out;
  (out << ... << parts);
  return out.str();
}
}  // namespace detail

// FP4T_CHECK(condition, parts...): throws InternalError with the expression, the place and the parts.
#define FP4T_CHECK(condition, ...)                                                        \
  do {                                                                                    \
    if (!(condition)) {                                                                   \
      ::fp4t::detail::throw_check(__FILE__, __LINE__, #condition,                         \
                                  ::fp4t::detail::concat("" __VA_OPT__(, ) __VA_ARGS__)); \
    }                                                                                     \
  } while (false)

// FP4T_CHECK_EQ(a, b, parts...): as above, and prints both values.
#define FP4T_CHECK_EQ(a, b, ...)                                                                 \
  do {                                                                                           \
    const auto& fp4t_a = (a);                                                                    \
    const auto& fp4t_b = (b);                                                                    \
    if (!(fp4t_a == fp4t_b)) {                                                                   \
      ::fp4t::detail::throw_check(                                                               \
          __FILE__, __LINE__, #a " == " #b,                                                      \
          ::fp4t::detail::concat(fp4t_a, " against ", fp4t_b, ". " __VA_OPT__(, ) __VA_ARGS__)); \
    }                                                                                            \
  } while (false)

}  // namespace fp4t

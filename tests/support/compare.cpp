#include "tests/support/compare.h"

#include <cmath>
#include <cstring>
#include <iomanip>
#include <limits>
#include <sstream>

#include "kernels/base/dtype.h"

namespace fp4t::test {

namespace {

constexpr int kShownMismatches = 5;

uint64_t bits_of(const TensorView& t, int64_t i) {
  const int64_t size = dtype_bytes(t.dtype);
  uint64_t bits = 0;
  std::memcpy(&bits, static_cast<const char*>(t.data) + i * size, static_cast<size_t>(size));
  return bits;
}

bool is_float(DType t) { return t == DType::kF32 || t == DType::kBf16 || t == DType::kF64; }

// Monotone integer of a floating-point pattern: neighbours differ by 1, +0 and -0 coincide.
int64_t ordered(const TensorView& t, int64_t i) {
  const int width = static_cast<int>(dtype_bytes(t.dtype)) * 8;
  const uint64_t sign = uint64_t{1} << (width - 1);
  const uint64_t bits = bits_of(t, i);
  const int64_t magnitude = static_cast<int64_t>(bits & (sign - 1));
  return (bits & sign) ? -magnitude : magnitude;
}

std::string index_text(const Shape& shape, int64_t i) {
  std::string out;
  for (int d = shape.rank() - 1; d >= 0; --d) {
    out = std::to_string(i % shape[d]) + (out.empty() ? "" : ", ") + out;
    i /= shape[d];
  }
  return "[" + out + "]";
}

void describe(std::ostream& out, const TensorView& t, int64_t i) {
  out << std::setprecision(17) << element(t, i) << " (0x" << std::hex << std::setfill('0')
      << std::setw(static_cast<int>(dtype_bytes(t.dtype)) * 2) << bits_of(t, i) << std::dec << ")";
}

// Collects mismatches; prints the first few and the number of all.
class Mismatches {
 public:
  Mismatches(const TensorView& expected, const TensorView& got) : expected_(expected), got_(got) {}

  void add(int64_t i, const std::string& distance) {
    if (count_++ >= kShownMismatches) return;
    text_ << "\n  " << index_text(expected_.shape, i) << ": expected ";
    describe(text_, expected_, i);
    text_ << ", got ";
    describe(text_, got_, i);
    text_ << distance;
  }

  testing::AssertionResult result() const {
    if (count_ == 0) return testing::AssertionSuccess();
    return testing::AssertionFailure()
           << count_ << " of " << expected_.elements() << " elements of " << dtype_name(expected_.dtype)
           << " " << expected_.shape.text() << " differ" << text_.str();
  }

 private:
  const TensorView& expected_;
  const TensorView& got_;
  int64_t count_ = 0;
  std::ostringstream text_;
};

testing::AssertionResult same_kind(const TensorView& expected, const TensorView& got) {
  if (expected.dtype == got.dtype && expected.shape == got.shape) return testing::AssertionSuccess();
  return testing::AssertionFailure() << "expected " << dtype_name(expected.dtype) << " "
                                     << expected.shape.text() << ", got " << dtype_name(got.dtype) << " "
                                     << got.shape.text();
}

// True when both are finite; else `equal` says whether they are the same NaN or infinity.
bool both_finite(double a, double b, bool& equal) {
  equal = (std::isnan(a) && std::isnan(b)) || a == b;
  return std::isfinite(a) && std::isfinite(b);
}

}  // namespace

double element(const TensorView& t, int64_t i) {
  switch (t.dtype) {
    case DType::kF32:
      return t.as<float>()[i];
    case DType::kBf16: {
      const uint32_t bits = static_cast<uint32_t>(t.as<Bf16>()[i].bits) << 16;
      float value;
      std::memcpy(&value, &bits, sizeof value);
      return value;
    }
    case DType::kF64:
      return t.as<double>()[i];
    case DType::kI32:
      return t.as<int32_t>()[i];
    case DType::kI64:
      return static_cast<double>(t.as<int64_t>()[i]);
    case DType::kU8:
      return t.as<uint8_t>()[i];
  }
  return std::numeric_limits<double>::quiet_NaN();
}

double nmse(const TensorView& expected, const TensorView& got) {
  double error = 0, signal = 0;
  for (int64_t i = 0; i < expected.elements(); ++i) {
    const double e = element(expected, i), g = element(got, i);
    bool equal;
    if (!both_finite(e, g, equal)) {
      if (!equal) return std::numeric_limits<double>::infinity();
      continue;
    }
    error += (g - e) * (g - e);
    signal += e * e;
  }
  return error == 0 ? 0 : error / signal;
}

testing::AssertionResult matches_bitwise(const TensorView& expected, const TensorView& got) {
  if (auto kind = same_kind(expected, got); !kind) return kind;
  Mismatches mismatches(expected, got);
  for (int64_t i = 0; i < expected.elements(); ++i) {
    if (bits_of(expected, i) != bits_of(got, i)) mismatches.add(i, "");
  }
  return mismatches.result();
}

testing::AssertionResult matches_ulp(const TensorView& expected, const TensorView& got, double max_ulps) {
  if (auto kind = same_kind(expected, got); !kind) return kind;
  if (!is_float(expected.dtype)) return matches_bitwise(expected, got);
  Mismatches mismatches(expected, got);
  for (int64_t i = 0; i < expected.elements(); ++i) {
    bool equal;
    if (!both_finite(element(expected, i), element(got, i), equal)) {
      if (!equal) mismatches.add(i, "");
      continue;
    }
    const double ulps =
        std::abs(static_cast<double>(ordered(expected, i)) - static_cast<double>(ordered(got, i)));
    if (ulps > max_ulps) mismatches.add(i, ", " + std::to_string(ulps) + " ulps");
  }
  return mismatches.result();
}

testing::AssertionResult matches_nmse(const TensorView& expected, const TensorView& got, double bound) {
  if (auto kind = same_kind(expected, got); !kind) return kind;
  Mismatches mismatches(expected, got);
  int64_t worst = -1;
  double worst_error = 0;
  for (int64_t i = 0; i < expected.elements(); ++i) {
    const double e = element(expected, i), g = element(got, i);
    bool equal;
    if (!both_finite(e, g, equal)) {
      if (!equal) mismatches.add(i, "");
    } else if (std::abs(g - e) > worst_error) {
      worst = i;
      worst_error = std::abs(g - e);
    }
  }
  if (auto finite = mismatches.result(); !finite) return finite;
  const double quotient = nmse(expected, got);
  if (quotient <= bound) return testing::AssertionSuccess();
  std::ostringstream text;
  text << "nmse " << quotient << " exceeds " << bound << " over " << expected.elements() << " elements of "
       << dtype_name(expected.dtype) << " " << expected.shape.text() << "; worst "
       << index_text(expected.shape, worst) << ": expected ";
  describe(text, expected, worst);
  text << ", got ";
  describe(text, got, worst);
  return testing::AssertionFailure() << text.str();
}

testing::AssertionResult matches(const TensorView& expected, const TensorView& got, Exactness exactness) {
  switch (exactness.kind) {
    case Exactness::Kind::kBitwise:
      return matches_bitwise(expected, got);
    case Exactness::Kind::kUlp:
      return matches_ulp(expected, got, exactness.bound);
    case Exactness::Kind::kNmse:
      return matches_nmse(expected, got, exactness.bound);
  }
  return testing::AssertionFailure() << "unknown exactness";
}

}  // namespace fp4t::test

// AttentionBackward against central differences of the definition in FP64.
#include "tests/support/dense_cases.h"

namespace fp4t::test {
namespace {

struct Sizes {
  reference::Heads heads;
  int64_t tokens, max_document;
  size_t stride;  // of the checked elements
};

TEST(AttentionBackward, matches_differences) {
  const Sizes sizes[] = {{{1, 1, 8}, 1, 1, 1},     {{4, 2, 32}, 33, 20, 7}, {{3, 3, 10}, 31, 31, 1},
                         {{8, 2, 32}, 40, 40, 17}, {{5, 1, 64}, 21, 21, 5}, {{2, 1, 128}, 9, 5, 3}};
  for (const Sizes& s : sizes) {
    AttentionCase c(DType::kF32, random_documents(s.tokens, s.max_document, 61), s.heads, 61);
    SCOPED_TRACE(c.text());
    Queue queue = Queue::cpu(2);
    c.forward(queue);
    c.backward(queue);
    Values x = values_of(c.qkv);
    const Values dout = values_of(c.dout);
    const auto loss = [&] { return inner(c.expected(x), dout); };
    EXPECT_TRUE(gradient_matches(x, loss, c.dqkv.view(), 1e-4, s.stride));
  }
}

// Longer than a block of queries and a piece of rows: d loss / d scale-free direction, one number that
// every gradient enters.
TEST(AttentionBackward, a_long_document_matches_a_directional_difference) {
  AttentionCase c(DType::kF32, std::vector<int32_t>(300, 0), {4, 2, 32}, 62);
  Queue queue = Queue::cpu(2);
  c.forward(queue);
  c.backward(queue);
  const Values x = values_of(c.qkv), dout = values_of(c.dout), gradient = values_of(c.dqkv);
  HostTensor direction = normal_tensor(DType::kF32, c.qkv.view().shape, 63);
  const Values d = values_of(direction);
  const auto along = [&](double step) {
    Values moved = x;
    for (size_t i = 0; i < x.size(); ++i) moved[i] += step * d[i];
    return inner(c.expected(moved), dout);
  };
  const double numeric = (along(1e-5) - along(-1e-5)) / 2e-5;
  double size = 0;
  for (size_t i = 0; i < d.size(); ++i) size += std::pow(gradient[i] * d[i], 2);
  EXPECT_NEAR(numeric, inner(gradient, d), 1e-4 * std::sqrt(size));
}

}  // namespace
}  // namespace fp4t::test

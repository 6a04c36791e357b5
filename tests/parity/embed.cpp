// EmbedForward and EmbedBackward.
#include "kernels/ops/embed.h"

#include "kernels/ops/run.h"
#include "tests/support/ops.h"

namespace fp4t::test {
namespace {

constexpr int64_t kVocabulary = 50;

HostTensor random_tokens(int64_t count, uint64_t seed) {
  std::mt19937_64 engine(seed);
  std::vector<int32_t> ids(static_cast<size_t>(count));
  for (int32_t& id : ids) id = static_cast<int32_t>(engine() % (kVocabulary - 10));
  return i32_tensor(ids);
}

const Shape kShapes[] = {{0, 16}, {1, 1}, {31, 90}, {33, 64}, {700, 200}};

TEST(Embed, forward_copies_rows) {
  for (const Shape& shape : kShapes) {
    for (DType dtype : {DType::kF32, DType::kBf16}) {
      SCOPED_TRACE(shape.text());
      Queue queue = Queue::cpu(2);
      HostTensor table = normal_tensor(dtype, {kVocabulary, shape[1]}, 71),
                 tokens = random_tokens(shape[0], 72);
      HostTensor out(dtype, shape);
      run(queue, EmbedForward{.table = table.view(), .tokens = tokens.view(), .out = out.view()});
      for (int64_t t = 0; t < shape[0]; ++t) {
        EXPECT_TRUE(matches_bitwise(table.view().rows(tokens.as<int32_t>()[t], 1), out.view().rows(t, 1)));
      }
    }
  }
}

// The gradient is the transpose of the copy: rows added to what is there, in index order.
TEST(Embed, backward_adds_rows_in_index_order) {
  for (const Shape& shape : kShapes) {
    for (DType dtype : {DType::kF32, DType::kBf16}) {
      SCOPED_TRACE(shape.text());
      Queue queue = Queue::cpu(2);
      HostTensor dout = normal_tensor(dtype, shape, 73), tokens = random_tokens(shape[0], 74);
      HostTensor dtable = normal_tensor(DType::kF32, {kVocabulary, shape[1]}, 75), expected = dtable;
      for (int64_t t = 0; t < shape[0]; ++t) {
        for (int64_t i = 0; i < shape[1]; ++i) {
          expected.as<float>()[tokens.as<int32_t>()[t] * shape[1] + i] +=
              static_cast<float>(element(dout.view(), t * shape[1] + i));
        }
      }
      run(queue, EmbedBackward{.dout = dout.view(), .tokens = tokens.view(), .dtable = dtable.view()});
      EXPECT_TRUE(matches_bitwise(expected.view(), dtable.view()));
    }
  }
}

TEST(Embed, threads_change_no_bit) {
  expect_same_with_any_threads([](Queue& queue) {
    HostTensor dout = normal_tensor(DType::kBf16, {700, 200}, 76), tokens = random_tokens(700, 77);
    HostTensor dtable = zeros(DType::kF32, {kVocabulary, 200});
    run(queue, EmbedBackward{.dout = dout.view(), .tokens = tokens.view(), .dtable = dtable.view()});
    return std::vector<HostTensor>{dtable};
  });
}

TEST(Embed, tokens_outside_the_vocabulary_are_refused) {
  for (int32_t token : {-1, static_cast<int32_t>(kVocabulary)}) {
    Queue queue = Queue::cpu(2);
    HostTensor tokens = i32_tensor({3, token}), table = zeros(DType::kF32, {kVocabulary, 4});
    HostTensor rows = zeros(DType::kF32, {2, 4});
    EXPECT_THROW(run(queue, EmbedForward{.table = table.view(), .tokens = tokens.view(), .out = rows.view()}),
                 InternalError);
    EXPECT_THROW(
        run(queue, EmbedBackward{.dout = rows.view(), .tokens = tokens.view(), .dtable = table.view()}),
        InternalError);
  }
}

}  // namespace
}  // namespace fp4t::test

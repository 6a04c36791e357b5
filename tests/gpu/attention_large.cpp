// Attention where elements are more than 2^31: the last document, and the last slot, give what they give
// alone.
#include "kernels/ops/attention.h"
#include "tests/support/mirror.h"

namespace fp4t::test {
namespace {

constexpr int64_t kHeads = 28, kKvHeads = 2, kDim = 64, kWidth = (kHeads + 2 * kKvHeads) * kDim;
constexpr int64_t kCount = 300;       // rows of the document that is looked at
constexpr int64_t kOthers = 1100000;  // rows before it
static_assert((kOthers + kCount) * kWidth > int64_t{1} << 31);
constexpr float kScale = 0.125f;

class Device {
 public:
  ~Device() {
    for (void* p : blocks_) queue.release(p);
  }
  // Zeros, the last of them from `tail`.
  TensorView tensor(DType dtype, const Shape& shape, const TensorView& tail) {
    TensorView v{nullptr, dtype, shape};
    v.data = queue.allocate(v.shape.elements() * dtype_bytes(dtype));
    blocks_.push_back(v.data);
    queue.fill_bytes(v.data, 0, v.bytes());
    if (!tail.empty()) {
      queue.copy_from_host(static_cast<char*>(v.data) + v.bytes() - tail.bytes(), tail.data, tail.bytes());
    }
    return v;
  }
  HostTensor tail(const TensorView& v, const Shape& shape) {
    HostTensor out(v.dtype, shape);
    const int64_t bytes = out.view().bytes();
    queue.copy_to_host(out.view().data, static_cast<const char*>(v.data) + v.bytes() - bytes, bytes);
    return out;
  }
  Queue queue = Queue::cuda(0);

 private:
  std::vector<void*> blocks_;
};

HostTensor normal(const Shape& shape, uint64_t seed) {
  HostTensor t(DType::kBf16, shape);
  fill_normal(t, seed);
  return t;
}

// Out, lse and dqkv of the last kCount rows, behind `others` rows of documents of 500.
std::vector<HostTensor> packed(int64_t others) {
  Device gpu;
  const int64_t tokens = others + kCount;
  HostTensor qkv = normal({kCount, kWidth}, 1), dout = normal({kCount, kHeads * kDim}, 2);
  HostTensor documents(DType::kI32, {tokens});
  for (int64_t t = 0; t < tokens; ++t) {
    documents.as<int32_t>()[t] = static_cast<int32_t>(t < others ? t / 500 * 500 : others);
  }
  const AttentionForward forward{.qkv = gpu.tensor(DType::kBf16, {tokens, kWidth}, qkv.view()),
                                 .heads = kHeads,
                                 .kv_heads = kKvHeads,
                                 .head_dim = kDim,
                                 .doc_begin = gpu.tensor(DType::kI32, {tokens}, documents.view()),
                                 .scale = kScale,
                                 .out = gpu.tensor(DType::kBf16, {tokens, kHeads * kDim}, {}),
                                 .lse = gpu.tensor(DType::kF32, {tokens, kHeads}, {})};
  const AttentionBackward backward{.qkv = forward.qkv,
                                   .heads = kHeads,
                                   .kv_heads = kKvHeads,
                                   .head_dim = kDim,
                                   .doc_begin = forward.doc_begin,
                                   .scale = kScale,
                                   .out = forward.out,
                                   .lse = forward.lse,
                                   .dout = gpu.tensor(DType::kBf16, forward.out.shape, dout.view()),
                                   .dqkv = gpu.tensor(DType::kBf16, forward.qkv.shape, {})};
  run(gpu.queue, forward);
  run(gpu.queue, backward);
  std::vector<HostTensor> out;
  out.push_back(gpu.tail(forward.out, {kCount, kHeads * kDim}));
  out.push_back(gpu.tail(forward.lse, {kCount, kHeads}));
  out.push_back(gpu.tail(backward.dqkv, {kCount, kWidth}));
  return out;
}

// Rows of the last of `slots` slots, appended and attended.
HostTensor cached(int64_t slots, int64_t max_length) {
  Device gpu;
  HostTensor qkv = normal({kCount, kWidth}, 3), slot(DType::kI32, {kCount}), position(DType::kI32, {kCount});
  for (int64_t t = 0; t < kCount; ++t) {
    slot.as<int32_t>()[t] = static_cast<int32_t>(slots - 1);
    position.as<int32_t>()[t] = static_cast<int32_t>(t);
  }
  KvCacheView cache{Format::kBf16, {}, {}, {}, {}};
  cache.k = gpu.tensor(DType::kBf16, {slots, max_length, kKvHeads * kDim}, {});
  cache.v = gpu.tensor(DType::kBf16, {slots, max_length, kKvHeads * kDim}, {});
  const KvAppend append{.qkv = gpu.tensor(DType::kBf16, {kCount, kWidth}, qkv.view()),
                        .heads = kHeads,
                        .kv_heads = kKvHeads,
                        .head_dim = kDim,
                        .slots = gpu.tensor(DType::kI32, {kCount}, slot.view()),
                        .positions = gpu.tensor(DType::kI32, {kCount}, position.view()),
                        .cache = cache};
  const TensorView out = gpu.tensor(DType::kBf16, {kCount, kHeads * kDim}, {});
  run(gpu.queue, append);
  run(gpu.queue, AttentionCached{.qkv = append.qkv,
                                 .heads = kHeads,
                                 .kv_heads = kKvHeads,
                                 .head_dim = kDim,
                                 .slots = append.slots,
                                 .positions = append.positions,
                                 .cache = cache,
                                 .scale = kScale,
                                 .out = out});
  return gpu.tail(out, out.shape);
}

TEST(GpuAttentionLarge, the_last_document_of_many_is_as_alone) {
  std::vector<HostTensor> alone = packed(0), behind = packed(kOthers);
  for (size_t i = 0; i < alone.size(); ++i) EXPECT_TRUE(matches_bitwise(alone[i].view(), behind[i].view()));
}

TEST(GpuAttentionLarge, the_last_slot_of_many_is_as_alone) {
  constexpr int64_t kSlots = 20000, kLength = 1000;
  static_assert(kSlots * kLength * kKvHeads * kDim > int64_t{1} << 31);
  HostTensor alone = cached(1, kLength), behind = cached(kSlots, kLength);
  EXPECT_TRUE(matches_bitwise(alone.view(), behind.view()));
}

}  // namespace
}  // namespace fp4t::test

FP4T_GPU_TEST_MAIN

// One op on both backends. A test makes its tensors through a Mirror and hands the op over once; the
// mirror runs it on the CPU and twice on the GPU from the same bytes, and compares every tensor.
//   Mirror m;
//   TensorView x = m.normal(DType::kBf16, {T, D}), out = m.fresh(DType::kBf16, {T, D});
//   m.check(Cast{.x = x, .out = out});
#pragma once

#include <cstdlib>
#include <cstring>
#include <functional>
#include <list>
#include <map>
#include <optional>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/base/queue.h"
#include "kernels/formats/quant.h"
#include "kernels/ops/run.h"
#include "tests/support/compare.h"
#include "tests/support/gpu_main.h"
#include "tests/support/tensors.h"

namespace fp4t::test {

template <class Op>
constexpr Exactness exactness_of();
#define FP4T_OP(op, exactness)             \
  template <>                              \
  constexpr Exactness exactness_of<op>() { \
    return exactness;                      \
  }
#include "kernels/ops/op_list.inc"
#undef FP4T_OP

// Under some sanitizers a launch costs a hundred times what it does alone. scripts/run_gpu_tests.py names the
// tests that are too slow there and sets FP4T_GPU_SHARE=n for them: the GPU then takes one of n checks, the
// first and others drawn by their number, so that no loop's period decides which.
inline uint64_t gpu_share() {
  static const char* const given = std::getenv("FP4T_GPU_SHARE");
  return given ? std::strtoull(given, nullptr, 10) : 1;
}
inline bool next_is_in_gpu_share() {
  static uint64_t number = 0;
  uint64_t x = number++ * 0x9E3779B97F4A7C15u;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
  return gpu_share() <= 1 || (x >> 32) % gpu_share() == 0;
}

class Mirror {
 public:
  explicit Mirror(uint64_t seed = 1) : seed_(seed), cpu_(Queue::cpu(4)), gpu_(Queue::cuda(0)) {}
  ~Mirror() {
    for (Pair& p : pairs_) gpu_.release(p.device);
  }
  Mirror(const Mirror&) = delete;
  Mirror& operator=(const Mirror&) = delete;

  // A tensor whose bytes are all 0xFF (NaN): an output, or something the test fills itself.
  TensorView fresh(DType dtype, const Shape& shape) {
    pairs_.push_back(Pair(dtype, shape));
    Pair& p = pairs_.back();
    p.device = static_cast<char*>(gpu_.allocate(p.bytes() + 2 * kGuard));
    return p.cpu.view();
  }
  TensorView zeros(DType dtype, const Shape& shape) {
    const TensorView v = fresh(dtype, shape);
    if (v.bytes() > 0) std::memset(v.data, 0, static_cast<size_t>(v.bytes()));
    return v;
  }
  TensorView normal(DType dtype, const Shape& shape, float scale = 1.0f) {
    const TensorView v = fresh(dtype, shape);
    fill_normal(pairs_.back().cpu, ++seed_, scale);
    return v;
  }
  TensorView i32(const std::vector<int32_t>& values) {
    const TensorView v = fresh(DType::kI32, {static_cast<int64_t>(values.size())});
    std::copy(values.begin(), values.end(), v.as<int32_t>());
    return v;
  }
  TensorView f32(const std::vector<float>& values) {
    const TensorView v = fresh(DType::kF32, {static_cast<int64_t>(values.size())});
    std::copy(values.begin(), values.end(), v.as<float>());
    return v;
  }
  // Codes and scales for a layout made by quant_layout().
  QuantView quant(QuantView layout) {
    for (TensorView* part : {&layout.codes, &layout.block_scales, &layout.tensor_scale}) {
      if (part->shape.rank() > 0) *part = fresh(part->dtype, part->shape);
    }
    return layout;
  }

  // This tensor is compared by `exactness` instead of the op's class; integers are always bitwise.
  void compare_by(const TensorView& tensor, Exactness exactness) { own_[tensor.data] = exactness; }
  // This tensor's contents after the op are nobody's business (scratch).
  void ignore(const TensorView& tensor) { ignored_[tensor.data] = true; }

  // Runs `op` on both sides and compares. The CPU's results stay in the tensors, and go to the GPU with the
  // next op, so that a chain of ops is checked link by link.
  template <class Op>
  void check(const Op& op) {
    SCOPED_TRACE(Op::kName);
    for (Pair& p : pairs_) p.before = p.cpu;
    run(cpu_, op);
    if (!next_is_in_gpu_share()) return;
    const Op there = on_device(op);
    std::vector<HostTensor> first;
    for (int round = 0; round < (gpu_share() > 1 ? 1 : 2); ++round) {
      upload();
      run(gpu_, there);
      gpu_.synchronize();
      size_t i = 0;
      for (Pair& p : pairs_) {
        HostTensor got = download(p);
        if (round == 0) {
          first.push_back(got);
        } else if (!ignored_.count(p.cpu.view().data)) {
          EXPECT_TRUE(first[i].same_bytes(got)) << "tensor " << i << " differs between two runs on the GPU";
        }
        ++i;
      }
    }
    size_t i = 0;
    for (Pair& p : pairs_) compare(p, first[i++], exactness_of<Op>());
  }

  // Runs `op` on the GPU only and brings every tensor back into the host's copy.
  template <class Op>
  void run_on_gpu(const Op& op) {
    for (Pair& p : pairs_) p.before = p.cpu;
    upload();
    run(gpu_, on_device(op));
    gpu_.synchronize();
    for (Pair& p : pairs_) {
      HostTensor got = download(p);
      std::memcpy(p.cpu.view().data, got.view().data, static_cast<size_t>(p.bytes()));
    }
  }

  Queue& cpu() { return cpu_; }
  Queue& gpu() { return gpu_; }
  // From now on the GPU's queue has another beside it.
  void share_device() { beside_.emplace(gpu_.beside()); }

  // The same op over the device's copies: every view of one of the mirror's tensors is exchanged. Views are
  // recognised as a whole, since the bytes after a view's type are padding and may hold an old pointer.
  template <class Op>
  Op on_device(const Op& op) {
    static_assert(std::is_trivially_copyable_v<Op>);
    alignas(Op) unsigned char bytes[sizeof(Op)];
    std::memcpy(bytes, &op, sizeof(Op));
    for (size_t at = 0; at + sizeof(TensorView) <= sizeof(Op); at += alignof(TensorView)) {
      TensorView view;
      std::memcpy(static_cast<void*>(&view), bytes + at, sizeof view);
      const bool is_view = view.data && view.dtype <= DType::kU8 && view.shape.rank() > 0 &&
                           view.shape.rank() <= Shape::kMaxRank;
      if (!is_view) continue;
      for (Pair& p : pairs_) {
        char *base = static_cast<char*>(p.cpu.view().data), *pointer = static_cast<char*>(view.data);
        if (pointer < base || pointer + view.bytes() > base + p.bytes()) continue;
        view.data = p.device + kGuard + (pointer - base);
        std::memcpy(bytes + at, static_cast<void*>(&view), sizeof view);
        at += sizeof view - alignof(TensorView);
        break;
      }
    }
    Op out;
    std::memcpy(static_cast<void*>(&out), bytes, sizeof(Op));
    return out;
  }

 private:
  static constexpr int64_t kGuard = 256;  // bytes of 0xA5 on both sides of every device tensor

  struct Pair {
    Pair(DType dtype, const Shape& shape) : cpu(dtype, shape), before(dtype, shape) {}
    HostTensor cpu, before;
    char* device = nullptr;
    int64_t bytes() { return cpu.view().bytes(); }
  };

  void upload() {
    for (Pair& p : pairs_) {
      gpu_.fill_bytes(p.device, 0xA5, p.bytes() + 2 * kGuard);
      gpu_.copy_from_host(p.device + kGuard, p.before.view().data, p.bytes());
    }
  }

  HostTensor download(Pair& p) {
    HostTensor got(p.cpu.view().dtype, p.cpu.view().shape);
    gpu_.copy_to_host(got.view().data, p.device + kGuard, p.bytes());
    unsigned char guards[2 * kGuard];
    gpu_.copy_to_host(guards, p.device, kGuard);
    gpu_.copy_to_host(guards + kGuard, p.device + kGuard + p.bytes(), kGuard);
    for (unsigned char g : guards) {
      if (g != 0xA5) {
        ADD_FAILURE() << "written outside of a tensor " << p.cpu.view().shape.text();
        break;
      }
    }
    return got;
  }

  void compare(Pair& p, HostTensor& got, Exactness exactness) {
    const TensorView expected = p.cpu.view();
    if (ignored_.count(expected.data)) return;
    const auto own = own_.find(expected.data);
    if (own != own_.end()) exactness = own->second;
    const bool is_float =
        expected.dtype == DType::kF32 || expected.dtype == DType::kBf16 || expected.dtype == DType::kF64;
    EXPECT_TRUE(is_float ? matches(expected, got.view(), exactness) : matches_bitwise(expected, got.view()));
  }

  uint64_t seed_;
  Queue cpu_, gpu_;
  std::optional<Queue> beside_;
  std::list<Pair> pairs_;
  std::map<const void*, Exactness> own_;
  std::map<const void*, bool> ignored_;
};

}  // namespace fp4t::test

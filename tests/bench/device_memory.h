// Device memory of a benchmark on a GPU, filled before anything is timed and given back at the end of the
// scope.
#pragma once

#include <algorithm>
#include <cmath>
#include <random>
#include <vector>

#include "kernels/base/queue.h"
#include "kernels/base/tensor.h"
#include "kernels/cuda/context.h"
#include "kernels/formats/bf16.h"

namespace fp4t {

class Memory {
 public:
  explicit Memory(Queue& queue) : queue_(queue) {}
  ~Memory() {
    for (void* p : blocks_) queue_.release(p);
  }
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;

  // Zeros.
  TensorView fresh(DType dtype, const Shape& shape) {
    const TensorView v{queue_.allocate(shape.elements() * dtype_bytes(dtype)), dtype, shape};
    blocks_.push_back(v.data);
    queue_.fill_bytes(v.data, 0, v.bytes());
    return v;
  }

  // Normal values of BF16 or F32, a million of them over and over: the period divides no row's length.
  TensorView normal(DType dtype, const Shape& shape, float scale = 1.0f, bool positive = false) {
    const TensorView v = fresh(dtype, shape);
    std::vector<float> values(static_cast<size_t>(std::min<int64_t>(v.elements(), kPeriod)));
    for (size_t i = 0; i < values.size(); ++i)
      values[i] = scale * (positive ? std::fabs(draws()[i]) : draws()[i]);
    if (dtype == DType::kF32) return repeat(v, values.data(), static_cast<int64_t>(values.size()));
    std::vector<Bf16> narrow_values;
    for (const float x : values) narrow_values.push_back(f32_to_bf16(x));
    return repeat(v, narrow_values.data(), static_cast<int64_t>(values.size()));
  }

  TensorView i32(const std::vector<int32_t>& values) { return of(DType::kI32, values.data(), values.size()); }
  TensorView f32(const std::vector<float>& values) { return of(DType::kF32, values.data(), values.size()); }

  // Integers below `limit` in no order.
  TensorView indices(int64_t count, int64_t limit) {
    std::mt19937_64 engine(2);
    std::vector<int32_t> values;
    for (int64_t i = 0; i < count; ++i) {
      values.push_back(static_cast<int32_t>(static_cast<int64_t>(engine() >> 1) % limit));
    }
    return i32(values);
  }

 private:
  static constexpr int64_t kPeriod = 1000003;

  static const std::vector<float>& draws() {
    static const std::vector<float> values = [] {
      std::vector<float> v(static_cast<size_t>(kPeriod));
      std::mt19937_64 engine(1);
      std::normal_distribution<float> draw;
      for (float& x : v) x = draw(engine);
      return v;
    }();
    return values;
  }

  TensorView of(DType dtype, const void* from, size_t count) {
    const TensorView v = fresh(dtype, {static_cast<int64_t>(count)});
    queue_.copy_from_host(v.data, from, v.bytes());
    return v;
  }

  // The first `count` elements from the host, then what is there behind itself.
  TensorView repeat(const TensorView& v, const void* from, int64_t count) {
    int64_t done = count * dtype_bytes(v.dtype);
    queue_.copy_from_host(v.data, from, done);
    for (const int64_t period = done; done < v.bytes();) {
      const int64_t whole = std::min(done / period * period, v.bytes() - done);
      FP4T_CUDA(cudaMemcpy(static_cast<char*>(v.data) + done, v.data, static_cast<size_t>(whole),
                           cudaMemcpyDeviceToDevice));
      done += whole;
    }
    return v;
  }

  Queue& queue_;
  std::vector<void*> blocks_;
};

}  // namespace fp4t

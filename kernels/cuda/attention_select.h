// Which kernels serve an attention op. The choice depends on what training and cached attention of a model
// have in common, never on their rows, since the bits differ between the two.
#pragma once

#include "kernels/base/tensor.h"
#include "kernels/cuda/context.h"

namespace fp4t::cuda {

// BF16 tensor cores; else the general kernels.
inline bool attention_on_tensor_cores(DType dtype, int64_t head_dim, float scale) {
  return dtype == DType::kBf16 && head_dim % 8 == 0 && head_dim <= 128 && scale > 0.0f;
}

// Scores times this are exponents of 2.
inline float score_factor(float scale) { return static_cast<float>(scale * 1.44269504088896340736); }

// Tensors as those kernels take them, at multiples of 16 bytes: themselves, or copies in the workspace.
class AlignedInput {
 public:
  AlignedInput(Queue& queue, Workspace& workspace, const TensorView& tensor) : view_(tensor) {
    if (reinterpret_cast<uintptr_t>(tensor.data) % 16 == 0) return;
    view_.data = workspace.bytes(tensor.bytes());
    copy(queue, view_, tensor);
  }
  template <class T>
  T* as() const {
    return view_.as<T>();
  }
  static void copy(const Queue& queue, const TensorView& to, const TensorView& from) {
    FP4T_CUDA(cudaMemcpyAsync(to.data, from.data, static_cast<size_t>(from.bytes()), cudaMemcpyDeviceToDevice,
                              stream_of(queue)));
  }

 private:
  TensorView view_;
};

class AlignedOutput {
 public:
  AlignedOutput(Queue& queue, Workspace& workspace, const TensorView& tensor)
      : queue_(queue), tensor_(tensor), view_(tensor) {
    if (reinterpret_cast<uintptr_t>(tensor.data) % 16 != 0) view_.data = workspace.bytes(tensor.bytes());
  }
  template <class T>
  T* as() const {
    return view_.as<T>();
  }
  // After the last kernel that writes it.
  void finish() const {
    if (view_.data != tensor_.data) AlignedInput::copy(queue_, tensor_, view_);
  }

 private:
  Queue& queue_;
  TensorView tensor_, view_;
};

}  // namespace fp4t::cuda

// cuBLASLt beside our cores: dense products of BF16 with FP32 accumulation, in whatever order it likes.
#pragma once

#include <cublasLt.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <map>
#include <tuple>
#include <vector>

#include "kernels/cuda/context.h"
#include "kernels/cuda/gemm_problem.h"

namespace fp4t {

inline void check_lt(cublasStatus_t status) {
  FP4T_CHECK(status == CUBLAS_STATUS_SUCCESS, "cuBLASLt: ", static_cast<int>(status));
}

// Device memory, freed at the end of the scope.
class Bytes {
 public:
  explicit Bytes(int64_t bytes) : bytes_(bytes) {
    FP4T_CUDA(cudaMalloc(&data_, static_cast<size_t>(std::max<int64_t>(bytes, 16))));
  }
  ~Bytes() { cudaFree(data_); }
  Bytes(const Bytes&) = delete;
  Bytes& operator=(const Bytes&) = delete;
  template <class T>
  T* as() const {
    return static_cast<T*>(data_);
  }
  int64_t size() const { return bytes_; }
  void fill(int byte) const { FP4T_CUDA(cudaMemset(data_, byte, static_cast<size_t>(bytes_))); }

 private:
  void* data_ = nullptr;
  int64_t bytes_;
};

// out = A B^T of a dense problem by cuBLASLt; row-major matrices are its transposed ones.
class Lt {
 public:
  Lt() : workspace_(int64_t{64} << 20) { check_lt(cublasLtCreate(&handle_)); }
  ~Lt() { cublasLtDestroy(handle_); }

  struct Plan {
    cublasLtMatmulDesc_t op;
    cublasLtMatrixLayout_t a, b, out;
    std::vector<cublasLtMatmulAlgo_t> algorithms;
    size_t chosen = 0;
  };

  Plan plan(const cuda::GemmProblem& p, int candidates) {
    Plan plan{};
    check_lt(cublasLtMatmulDescCreate(&plan.op, CUBLAS_COMPUTE_32F, CUDA_R_32F));
    const cublasOperation_t op_a = p.b.mn_major ? CUBLAS_OP_N : CUBLAS_OP_T;
    const cublasOperation_t op_b = p.a.mn_major ? CUBLAS_OP_T : CUBLAS_OP_N;
    check_lt(cublasLtMatmulDescSetAttribute(plan.op, CUBLASLT_MATMUL_DESC_TRANSA, &op_a, sizeof op_a));
    check_lt(cublasLtMatmulDescSetAttribute(plan.op, CUBLASLT_MATMUL_DESC_TRANSB, &op_b, sizeof op_b));
    plan.a = layout(CUDA_R_16BF, p.n, p.k, p.b);
    plan.b = layout(CUDA_R_16BF, p.m, p.k, p.a);
    check_lt(cublasLtMatrixLayoutCreate(&plan.out, p.out_dtype == DType::kBf16 ? CUDA_R_16BF : CUDA_R_32F,
                                        static_cast<uint64_t>(p.n), static_cast<uint64_t>(p.m), p.ld_out));
    cublasLtMatmulPreference_t preference;
    check_lt(cublasLtMatmulPreferenceCreate(&preference));
    const uint64_t bytes = static_cast<uint64_t>(workspace_.size());
    check_lt(cublasLtMatmulPreferenceSetAttribute(preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES,
                                                  &bytes, sizeof bytes));
    std::vector<cublasLtMatmulHeuristicResult_t> found(static_cast<size_t>(candidates));
    int count = 0;
    check_lt(cublasLtMatmulAlgoGetHeuristic(handle_, plan.op, plan.a, plan.b, plan.out, plan.out, preference,
                                            candidates, found.data(), &count));
    FP4T_CHECK(count > 0, "cuBLASLt knows no algorithm");
    for (int i = 0; i < count; ++i) plan.algorithms.push_back(found[static_cast<size_t>(i)].algo);
    cublasLtMatmulPreferenceDestroy(preference);
    return plan;
  }

  void run(const Plan& plan, const cuda::GemmProblem& p, cudaStream_t stream) {
    const float alpha = 1, beta = p.accumulate ? 1.0f : 0.0f;
    check_lt(cublasLtMatmul(handle_, plan.op, &alpha, p.b.data, plan.a, p.a.data, plan.b, &beta, p.out,
                            plan.out, p.out, plan.out, &plan.algorithms[plan.chosen], workspace_.as<void>(),
                            static_cast<size_t>(workspace_.size()), stream));
  }

  static void destroy(Plan& plan) {
    for (cublasLtMatrixLayout_t layout : {plan.a, plan.b, plan.out}) cublasLtMatrixLayoutDestroy(layout);
    cublasLtMatmulDescDestroy(plan.op);
  }

 private:
  static cublasLtMatrixLayout_t layout(cudaDataType_t type, int64_t outer, int64_t depth,
                                       const cuda::GemmSide& s) {
    cublasLtMatrixLayout_t out;
    check_lt(cublasLtMatrixLayoutCreate(&out, type, static_cast<uint64_t>(s.mn_major ? outer : depth),
                                        static_cast<uint64_t>(s.mn_major ? depth : outer), s.ld));
    return out;
  }

  cublasLtHandle_t handle_ = nullptr;
  Bytes workspace_;
};

// Gives a queue's dense products of BF16 to cuBLASLt, each shape to the fastest of its first candidates: what
// a sampler could do that need not agree with its trainer.
class AnyOrder {
 public:
  explicit AnyOrder(Queue& queue) : queue_(queue), cold_(int64_t{128} << 20) {
    cuda::context_of(queue).dense_product = [this](const cuda::GemmProblem& p) { return take(p); };
  }
  ~AnyOrder() {
    cuda::context_of(queue_).dense_product = nullptr;
    for (auto& [shape, plan] : plans_) Lt::destroy(plan);
  }
  AnyOrder(const AnyOrder&) = delete;
  AnyOrder& operator=(const AnyOrder&) = delete;

 private:
  using Shape = std::tuple<int64_t, int64_t, int64_t, bool, bool, DType>;

  bool take(const cuda::GemmProblem& p) {
    const bool scaled = p.a.scale_of != cuda::ScaleOf::kNone || p.b.scale_of != cuda::ScaleOf::kNone;
    if (scaled || p.accumulate || p.m == 0 || p.n == 0 || p.k == 0) return false;
    const Shape shape{p.m, p.n, p.k, p.a.mn_major, p.b.mn_major, p.out_dtype};
    const auto found = plans_.find(shape);
    const cudaStream_t stream = cuda::stream_of(queue_);
    if (found != plans_.end()) {
      lt_.run(found->second, p, stream);
      return true;
    }
    // The first call of a shape is not recorded yet: there is time to choose.
    Lt::Plan plan = lt_.plan(p, 6);
    choose(plan, p, stream);
    lt_.run(plan, p, stream);
    plans_.emplace(shape, std::move(plan));
    return true;
  }

  void choose(Lt::Plan& plan, const cuda::GemmProblem& p, cudaStream_t stream) {
    cudaEvent_t begin, end;
    FP4T_CUDA(cudaEventCreate(&begin));
    FP4T_CUDA(cudaEventCreate(&end));
    std::vector<float> least(plan.algorithms.size(), 1e30f);
    for (int round = 0; round < 5; ++round) {
      for (plan.chosen = 0; plan.chosen < plan.algorithms.size(); ++plan.chosen) {
        FP4T_CUDA(cudaMemsetAsync(cold_.as<void>(), round, static_cast<size_t>(cold_.size()), stream));
        FP4T_CUDA(cudaEventRecord(begin, stream));
        lt_.run(plan, p, stream);
        FP4T_CUDA(cudaEventRecord(end, stream));
        FP4T_CUDA(cudaEventSynchronize(end));
        float ms = 0;
        FP4T_CUDA(cudaEventElapsedTime(&ms, begin, end));
        least[plan.chosen] = std::min(least[plan.chosen], ms);
      }
    }
    plan.chosen = static_cast<size_t>(std::min_element(least.begin(), least.end()) - least.begin());
    cudaEventDestroy(begin);
    cudaEventDestroy(end);
  }

  Queue& queue_;
  Bytes cold_;
  Lt lt_;
  std::map<Shape, Lt::Plan> plans_;
};

}  // namespace fp4t

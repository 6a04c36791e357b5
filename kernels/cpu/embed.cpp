#include "kernels/ops/embed.h"

#include <cstring>

#include "kernels/base/numeric.h"
#include "kernels/cpu/rows.h"
#include "kernels/ops/run.h"

namespace fp4t::cpu {

namespace {

int64_t checked_token(int32_t token, int64_t vocabulary, const char* op) {
  FP4T_CHECK(token >= 0 && token < vocabulary, op, ": token ", token, " outside a vocabulary of ",
             vocabulary);
  return token;
}

// Chunks of columns: each row's tokens arrive in index order whatever the threads.
template <class T>
void embed_backward(Queue& queue, const EmbedBackward& op) {
  constexpr int64_t kColumnsPerChunk = 64;
  const int64_t tokens = op.dout.dim(0), width = op.dout.dim(1), vocabulary = op.dtable.dim(0);
  const T* dout = op.dout.as<T>();
  const int32_t* ids = op.tokens.as<int32_t>();
  float* dtable = op.dtable.as<float>();
  parallel_for(queue, width, kColumnsPerChunk, [&](int64_t begin, int64_t end) {
    float grad[kColumnsPerChunk];
    const int64_t columns = end - begin;
    for (int64_t t = 0; t < tokens; ++t) {
      float* row = dtable + checked_token(ids[t], vocabulary, op.kName) * width + begin;
      load_row(dout + t * width + begin, grad, columns);
      for (int64_t i = 0; i < columns; ++i) row[i] = row[i] + grad[i];
    }
  });
}

}  // namespace

void run(Queue& queue, const EmbedForward& op) {
  const int64_t vocabulary = op.table.dim(0), width = op.table.dim(1);
  const int64_t row_bytes = width * dtype_bytes(op.table.dtype);
  const char* table = static_cast<const char*>(op.table.data);
  char* out = static_cast<char*>(op.out.data);
  const int32_t* ids = op.tokens.as<int32_t>();
  parallel_for(queue, op.tokens.dim(0), rows_per_chunk(width), [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      std::memcpy(out + t * row_bytes, table + checked_token(ids[t], vocabulary, op.kName) * row_bytes,
                  static_cast<size_t>(row_bytes));
    }
  });
}

void run(Queue& queue, const EmbedBackward& op) {
  for_float_type(op.dout.dtype, [&](auto type) { embed_backward<decltype(type)>(queue, op); });
}

}  // namespace fp4t::cpu

#include "kernels/ops/embed.h"

#include "kernels/ops/expect.h"

namespace fp4t {

void EmbedForward::check() const {
  expect_rank(kName, "table", table, 2);
  expect_rank(kName, "tokens", tokens, 1);
  expect_float(kName, "table", table, {table.dim(0), table.dim(1)});
  expect_tensor(kName, "tokens", tokens, DType::kI32, {tokens.dim(0)});
  expect_tensor(kName, "out", out, table.dtype, {tokens.dim(0), table.dim(1)});
  expect_disjoint(kName, "out", out, "table", table);
}

void EmbedBackward::check() const {
  expect_rank(kName, "dout", dout, 2);
  expect_rank(kName, "dtable", dtable, 2);
  expect_float(kName, "dout", dout, {dout.dim(0), dout.dim(1)});
  expect_tensor(kName, "tokens", tokens, DType::kI32, {dout.dim(0)});
  expect_tensor(kName, "dtable", dtable, DType::kF32, {dtable.dim(0), dout.dim(1)});
  expect_disjoint(kName, "dtable", dtable, "dout", dout);
}

}  // namespace fp4t

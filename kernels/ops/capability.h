// What a machine's kernels need and can do, asked before anything is allocated: pure functions of the machine
// and of shapes. Views here have shapes and no data. The bodies live beside the kernels
// (kernels/cuda/capability.cpp); the CPU can do everything and needs nothing.
#pragma once

#include <cstdint>
#include <string>

#include "kernels/base/queue.h"
#include "kernels/formats/quant.h"

namespace fp4t {

// Both sides of a product; a side without codes is plain values.
struct ProductCodes {
  QuantView a, b;
};

// Rows of a cached attention call, and what its cache holds at most.
struct CachedRows {
  int64_t rows, heads, head_dim, max_length;
};

// Why this machine has no kernel for heads of this size, in words; "" when it has.
std::string head_dim_obstacle(const Machine& machine, int64_t head_dim);

// Scratch that one op takes besides what it names, in bytes.
int64_t workspace_bytes(const Machine& machine, const ProductCodes& codes);
int64_t workspace_bytes(const Machine& machine, const CachedRows& rows);
// Of every other op of a model with so many rows a call.
int64_t workspace_bytes(const Machine& machine, int64_t rows, int64_t heads, int64_t vocabulary);

namespace cuda {
std::string head_dim_obstacle(int64_t head_dim);
int64_t workspace_bytes(const ProductCodes& codes);
int64_t workspace_bytes(const CachedRows& rows);
int64_t workspace_bytes(int64_t rows, int64_t heads, int64_t vocabulary);
}  // namespace cuda

}  // namespace fp4t

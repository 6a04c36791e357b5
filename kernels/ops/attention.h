// Causal attention with grouped queries inside documents. Packed rows as in kernels/ops/norm.h:
// [q heads | k heads | v heads]. Query head h reads key head h / (heads / kv_heads).
// A row's result depends on its document up to that row alone: training and cached attention give the
// same bits for the same keys, at any place in a batch (DESIGN.md section 4).
#pragma once

#include "kernels/base/tensor.h"
#include "kernels/formats/quant.h"

namespace fp4t {

struct AttentionForward {
  static constexpr const char* kName = "attention_forward";
  TensorView qkv;  // act [T, (heads + 2 kv_heads) * head_dim]
  int64_t heads, kv_heads, head_dim;
  TensorView doc_begin;  // I32 [T]: index of the first token of each token's document; non-decreasing
  float scale;           // usually 1/sqrt(head_dim)
  TensorView out;        // act [T, heads * head_dim]
  TensorView lse;        // F32 [T, heads]: log-sum-exp of the scaled scores
  void check() const;
};

struct AttentionBackward {
  static constexpr const char* kName = "attention_backward";
  TensorView qkv;
  int64_t heads, kv_heads, head_dim;
  TensorView doc_begin;
  float scale;
  TensorView out;   // act [T, heads * head_dim], the forward's
  TensorView lse;   // F32 [T, heads], the forward's
  TensorView dout;  // act [T, heads * head_dim]
  TensorView dqkv;  // act, shape of qkv; written whole
  void check() const;
};

// The shortest page: the keys that a warp reads together lie in one.
inline constexpr int64_t kLeastKvPage = 32;

// Keys and values of many sequences, in pages of one length: position i of slot s lies in page
// table[s][i / length], at place i % length of it. Slots may share pages that nobody writes any more. Without
// a table slot s has page s alone. Where a key lies changes no bit of what is computed from it.
struct KvCacheView {
  Format format = Format::kBf16;  // bf16 (values act), or mxfp8 (codes and E8M0 scales)
  TensorView k, v;                // act [pages, length, kv_heads * head_dim], or U8 of that shape
  TensorView k_scales, v_scales;  // mxfp8: U8 [pages, length, kv_heads * head_dim / 32]
  TensorView table = {};          // I32 [slots, pages of a slot]; then length is a power of two

  bool is_paged() const { return table.data != nullptr; }
  int64_t slots() const { return is_paged() ? table.dim(0) : k.dim(0); }
  int64_t max_length() const { return is_paged() ? table.dim(1) * k.dim(1) : k.dim(1); }
};

// Writes the k and v parts of rows into the cache at (slot, position).
struct KvAppend {
  static constexpr const char* kName = "kv_append";
  TensorView qkv;  // act [T, (heads + 2 kv_heads) * head_dim]
  int64_t heads, kv_heads, head_dim;
  TensorView slots;      // I32 [T]
  TensorView positions;  // I32 [T]
  KvCacheView cache;
  void check() const;
};

// Copies whole pages inside a cache: from[i] to to[i]. No page is written twice, none is read and written.
struct KvCopyPages {
  static constexpr const char* kName = "kv_copy_pages";
  TensorView from, to;  // I32 [N]
  KvCacheView cache;
  void check() const;
};

// Rounds the k and v parts in place through the cache's format, as the sampler's cache does.
struct KvRound {
  static constexpr const char* kName = "kv_round";
  TensorView qkv;
  int64_t heads, kv_heads, head_dim;
  Format format;  // mxfp8
  void check() const;
};

// Attention of row t over positions 0..positions[t] of slot slots[t]; serves prefill and decode.
struct AttentionCached {
  static constexpr const char* kName = "attention_cached";
  TensorView qkv;  // act [T, ...]; only the q part is read
  int64_t heads, kv_heads, head_dim;
  TensorView slots;      // I32 [T]
  TensorView positions;  // I32 [T]
  KvCacheView cache;
  float scale;
  TensorView out;  // act [T, heads * head_dim]
  void check() const;
};

}  // namespace fp4t

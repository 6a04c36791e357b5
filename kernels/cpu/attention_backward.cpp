// Work item: one document and one key head. Queries come in blocks of whole rows, in index order (row,
// then head of the group); a key's gradients sum over them in that order by fma. Probabilities are
// recomputed as exp(score - lse).
//   D = <dout, out>;  dP = <dout, v_j>;  dS = P * (dP - D) * scale
//   dq = sum over keys of dS k_j;  dk_j = sum over queries of dS q;  dv_j = sum over queries of P dout
#include "kernels/cpu/attention_core.h"
#include "kernels/cpu/documents.h"
#include "kernels/ops/attention.h"
#include "kernels/ops/run.h"

namespace fp4t::cpu {

namespace {

constexpr int64_t kBlockQueries = 32;

template <class T>
class DocumentBackward {
 public:
  DocumentBackward(const AttentionBackward& op, const RowSpan& doc, int64_t kv_head)
      : op_(op),
        layout_{op.heads, op.kv_heads, op.head_dim},
        doc_(doc),
        kv_head_(kv_head),
        keys_(doc.end - doc.begin),
        padded_(padded_columns(op.head_dim)),
        block_rows_(std::max<int64_t>(1, kBlockQueries / layout_.group())),
        block_queries_(block_rows_ * layout_.group()),
        score_stride_(padded_columns(keys_)),
        k_tiles_(score_stride_ * padded_),
        v_tiles_(score_stride_ * padded_),
        k_panels_(keys_ * padded_),
        dk_panels_(keys_ * padded_),
        dv_panels_(keys_ * padded_),
        q_(block_queries_ * padded_),
        dout_(block_queries_ * padded_),
        q_panels_(block_queries_ * padded_),
        dout_panels_(block_queries_ * padded_),
        row_(padded_),
        delta_(block_queries_),
        p_(block_queries_ * score_stride_),
        ds_(block_queries_ * score_stride_) {}

  void run() {
    const auto load_k = [&](int64_t j, float* row) { load_row(packed(j) + layout_.k(kv_head_), row, dim()); };
    const auto load_v = [&](int64_t j, float* row) { load_row(packed(j) + layout_.v(kv_head_), row, dim()); };
    fill_tiles(k_tiles_.get(), keys_, dim(), load_k);
    fill_tiles(v_tiles_.get(), keys_, dim(), load_v);
    fill_panels(k_panels_.get(), keys_, dim(), load_k);
    std::fill(dk_panels_.get(), dk_panels_.get() + keys_ * padded_, 0.0f);
    std::fill(dv_panels_.get(), dv_panels_.get() + keys_ * padded_, 0.0f);
    for (first_row_ = 0; first_row_ < keys_; first_row_ += block_rows_) {
      num_queries_ = std::min(block_rows_, keys_ - first_row_) * layout_.group();
      load_queries();
      for (int64_t q = 0; q < num_queries_; q += kQueries) {
        switch (std::min<int64_t>(kQueries, num_queries_ - q)) {
          case 1:
            query_gradients<1>(q);
            break;
          case 2:
            query_gradients<2>(q);
            break;
          case 3:
            query_gradients<3>(q);
            break;
          default:
            query_gradients<kQueries>(q);
        }
      }
      key_gradients(ds_.get(), q_panels_.get(), dk_panels_.get());
      key_gradients(p_.get(), dout_panels_.get(), dv_panels_.get());
    }
    store_keys(dk_panels_.get(), layout_.k(kv_head_));
    store_keys(dv_panels_.get(), layout_.v(kv_head_));
  }

 private:
  int64_t dim() const { return op_.head_dim; }
  const T* packed(int64_t row) const { return op_.qkv.as<T>() + (doc_.begin + row) * layout_.width(); }
  T* gradient(int64_t row) const { return op_.dqkv.as<T>() + (doc_.begin + row) * layout_.width(); }
  int64_t row_of(int64_t query) const { return first_row_ + query / layout_.group(); }
  int64_t head_of(int64_t query) const { return kv_head_ * layout_.group() + query % layout_.group(); }
  // Index of (row, head) in tensors [T, heads].
  int64_t place(int64_t query) const { return (doc_.begin + row_of(query)) * op_.heads + head_of(query); }

  void load_queries() {
    const auto load_q = [&](int64_t i, float* row) {
      load_row(packed(row_of(i)) + layout_.q(head_of(i)), row, dim());
    };
    const auto load_dout = [&](int64_t i, float* row) {
      load_row(op_.dout.as<T>() + place(i) * dim(), row, dim());
    };
    fill_panels(q_panels_.get(), num_queries_, dim(), load_q);
    fill_panels(dout_panels_.get(), num_queries_, dim(), load_dout);
    for (int64_t i = 0; i < num_queries_; ++i) {
      load_q(i, q_.get() + i * padded_);
      load_dout(i, dout_.get() + i * padded_);
      load_row(op_.out.as<T>() + place(i) * dim(), row_.get(), dim());
      delta_.get()[i] = dot(dout_.get() + i * padded_, row_.get(), dim());
    }
  }

  // P, dS and dq of the Q queries from `first` on.
  template <int Q>
  void query_gradients(int64_t first) {
    float *p = p_.get() + first * score_stride_, *ds = ds_.get() + first * score_stride_;
    const float *q = q_.get() + first * padded_, *dout = dout_.get() + first * padded_;
    int64_t counts[Q];
    for (int i = 0; i < Q; ++i) counts[i] = row_of(first + i) + 1;
    for (int64_t key = 0; key < counts[Q - 1]; key += kColumns) {
      F8 score[Q][2] = {}, dp[Q][2] = {};
      accumulate<Q>(q, padded_, 1, 0, dim(), k_tiles_.get() + key * padded_, score);
      accumulate<Q>(dout, padded_, 1, 0, dim(), v_tiles_.get() + key * padded_, dp);
      for (int i = 0; i < Q; ++i) {
        store8(p + i * score_stride_ + key, score[i][0]);
        store8(p + i * score_stride_ + key + 8, score[i][1]);
        store8(ds + i * score_stride_ + key, dp[i][0]);
        store8(ds + i * score_stride_ + key + 8, dp[i][1]);
      }
    }
    for (int i = 0; i < Q; ++i) {
      softmax_gradient(p + i * score_stride_, ds + i * score_stride_, padded_columns(counts[i]),
                       op_.lse.as<float>()[place(first + i)], delta_.get()[first + i]);
    }
    for (int64_t c = 0; c < dim(); c += kColumns) {
      F8 acc[Q][2];
      weighted_rows<Q>(ds, score_stride_, counts, k_panels_.get() + c * keys_, acc);
      for (int i = 0; i < Q; ++i) {
        float columns[kColumns];
        store8(columns, acc[i][0]);
        store8(columns + 8, acc[i][1]);
        store_row(columns, gradient(row_of(first + i)) + layout_.q(head_of(first + i)) + c,
                  std::min(kColumns, dim() - c));
      }
    }
  }

  // p: scores in, probabilities out; ds: dP in, dS out.
  void softmax_gradient(float* __restrict p, float* __restrict ds, int64_t count, float lse,
                        float delta) const {
    const float scale = op_.scale;
    for (int64_t j = 0; j < count; ++j) {
      p[j] = exp_f32(p[j] * scale - lse);
      ds[j] = p[j] * (ds[j] - delta) * scale;
    }
  }

  // gradient[j] += sum over the block's queries that read key j of coef[query][j] * row of the query.
  void key_gradients(const float* coef, const float* query_panels, float* gradient_panels) const {
    const int64_t group = layout_.group(), rows = first_row_ + num_queries_ / group;
    const auto first_query = [&](int64_t key) { return std::max<int64_t>(0, key - first_row_) * group; };
    for (int64_t c = 0; c < padded_; c += kColumns) {
      const float* queries = query_panels + c * num_queries_;
      for (int64_t key = 0; key < rows; key += kQueries) {
        float* gradients = gradient_panels + c * keys_ + key * kColumns;
        if (key + kQueries <= rows) {
          key_columns<kQueries>(coef + key, queries, first_query, key, gradients);
          continue;
        }
        for (int64_t j = key; j < rows; ++j) {
          key_columns<1>(coef + j, queries, first_query, j, gradients + (j - key) * kColumns);
        }
      }
    }
  }

  template <int Q, class FirstQuery>
  void key_columns(const float* coef, const float* queries, const FirstQuery& first_query, int64_t key,
                   float* gradients) const {
    const int64_t common = first_query(key + Q - 1);
    F8 acc[Q][2];
    for (int j = 0; j < Q; ++j) {
      F8 alone[1][2] = {{load8(gradients + j * kColumns), load8(gradients + j * kColumns + 8)}};
      accumulate<1>(coef + j, 0, score_stride_, first_query(key + j), common, queries, alone);
      acc[j][0] = alone[0][0];
      acc[j][1] = alone[0][1];
    }
    accumulate<Q>(coef, 1, score_stride_, common, num_queries_, queries, acc);
    for (int j = 0; j < Q; ++j) {
      store8(gradients + j * kColumns, acc[j][0]);
      store8(gradients + j * kColumns + 8, acc[j][1]);
    }
  }

  void store_keys(const float* panels, int64_t offset) const {
    for (int64_t j = 0; j < keys_; ++j) {
      for (int64_t c = 0; c < dim(); c += kColumns) {
        store_row(panels + c * keys_ + j * kColumns, gradient(j) + offset + c, std::min(kColumns, dim() - c));
      }
    }
  }

  const AttentionBackward& op_;
  const HeadLayout layout_;
  const RowSpan doc_;
  const int64_t kv_head_, keys_, padded_, block_rows_, block_queries_, score_stride_;
  // Keys and values, and their gradients.
  Scratch k_tiles_, v_tiles_, k_panels_, dk_panels_, dv_panels_;
  // The block of queries: rows [query][padded], and panels.
  Scratch q_, dout_, q_panels_, dout_panels_, row_, delta_;
  Scratch p_, ds_;  // [query][score_stride]
  int64_t first_row_ = 0, num_queries_ = 0;
};

template <class T>
void attention_backward(Queue& queue, const AttentionBackward& op) {
  const std::vector<RowSpan> documents = documents_of(op.doc_begin, op.kName);
  parallel_for(
      queue, static_cast<int64_t>(documents.size()) * op.kv_heads, 1, [&](int64_t begin, int64_t end) {
        for (int64_t item = begin; item < end; ++item) {
          DocumentBackward<T>(op, documents[static_cast<size_t>(item / op.kv_heads)], item % op.kv_heads)
              .run();
        }
      });
}

}  // namespace

void run(Queue& queue, const AttentionBackward& op) {
  for_float_type(op.qkv.dtype, [&](auto type) { attention_backward<decltype(type)>(queue, op); });
}

}  // namespace fp4t::cpu

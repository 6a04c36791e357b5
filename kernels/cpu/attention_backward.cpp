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
        ds_(block_queries_ * score_stride_) {
    number_queries();
  }

  void run() {
    const auto load_from = [this](int64_t offset) {
      return [this, offset](int64_t j, int64_t c, int64_t n, float* columns) {
        load_columns(packed(j) + offset + c, n, columns);
      };
    };
    const auto load_k = load_from(layout_.k(kv_head_)), load_v = load_from(layout_.v(kv_head_));
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
  // Of a query of the block: its row in the document, and its index in tensors [T, heads].
  int64_t row_of(int64_t query) const { return first_row_ + row_in_block_[static_cast<size_t>(query)]; }
  int64_t place(int64_t query) const {
    return (doc_.begin + first_row_) * op_.heads + place_in_block_[static_cast<size_t>(query)];
  }
  T* query_gradient(int64_t query) const {
    return gradient(row_of(query)) + layout_.q(head_in_block_[static_cast<size_t>(query)]);
  }

  void number_queries() {
    for (int64_t row = 0; row < block_rows_; ++row) {
      for (int64_t i = 0; i < layout_.group(); ++i) {
        const int64_t head = kv_head_ * layout_.group() + i;
        row_in_block_.push_back(row);
        head_in_block_.push_back(head);
        place_in_block_.push_back(row * op_.heads + head);
      }
    }
  }

  void load_queries() {
    for (int64_t i = 0; i < num_queries_; ++i) {
      float *q = q_.get() + i * padded_, *dout = dout_.get() + i * padded_;
      const T* packed_q = packed(row_of(i)) + layout_.q(head_in_block_[static_cast<size_t>(i)]);
      for (int64_t c = 0; c < dim(); c += kColumns) {
        const int64_t n = std::min(kColumns, dim() - c);
        load_columns(packed_q + c, n, q + c);
        load_columns(op_.dout.as<T>() + place(i) * dim() + c, n, dout + c);
        load_columns(op_.out.as<T>() + place(i) * dim() + c, n, row_.get() + c);
      }
      delta_.get()[i] = dot(dout, row_.get(), dim());
    }
    const auto load_from = [this](const Scratch& rows) {
      return [this, &rows](int64_t i, int64_t c, int64_t n, float* columns) {
        load_columns(rows.get() + i * padded_ + c, n, columns);
      };
    };
    fill_panels(q_panels_.get(), num_queries_, dim(), load_from(q_));
    fill_panels(dout_panels_.get(), num_queries_, dim(), load_from(dout_));
  }

  // P, dS and dq of the Q queries from `first` on.
  template <int Q>
  void query_gradients(int64_t first) {
    float *p = p_.get() + first * score_stride_, *ds = ds_.get() + first * score_stride_;
    const float *q = q_.get() + first * padded_, *dout = dout_.get() + first * padded_;
    int64_t counts[Q];
    for (int i = 0; i < Q; ++i) counts[i] = row_of(first + i) + 1;
    for (int64_t key = 0; key < counts[Q - 1]; key += kColumns) {
      tile_products<Q>(q, padded_, dim(), k_tiles_.get() + key * padded_, op_.scale, p + key, score_stride_);
      tile_products<Q>(dout, padded_, dim(), v_tiles_.get() + key * padded_, 1.0f, ds + key, score_stride_);
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
        store_columns(columns, std::min(kColumns, dim() - c), query_gradient(first + i) + c);
      }
    }
  }

  // p: scores in, probabilities out; ds: dP in, dS out.
  void softmax_gradient(float* __restrict p, float* __restrict ds, int64_t count, float lse,
                        float delta) const {
    const float scale = op_.scale;
    for (int64_t j = 0; j < count; ++j) {
      p[j] = exp_f32(p[j] - lse);
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
        store_columns(panels + c * keys_ + j * kColumns, std::min(kColumns, dim() - c),
                      gradient(j) + offset + c);
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
  std::vector<int64_t> row_in_block_, head_in_block_, place_in_block_;
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

// The row orientation without a rotation, in few registers: every thread reads two blocks, codes them and
// writes them, and nothing goes through shared memory but a table of factors.
#include "kernels/cuda/quantize_encode.cuh"

namespace fp4t::cuda {

namespace {

template <bool kStochastic>
__global__ void __launch_bounds__(kQuantThreads, 3) encode_rows(QuantJob job) {
  __shared__ FactorTable table;
  int row, block;
  place_of_thread(false, row, block);
  BlockPlace place{};
  BlockCounts counts{};
  uint64_t draw_base = 0;
  int32_t group = -1;
  for (TileWalk walk(job); walk.valid(); walk.next(job)) {
    const QuantTile& t = walk.t;
    BlockValues b[kTilePasses];
#pragma unroll
    for (int pass = 0; pass < kTilePasses; ++pass) {
      const int32_t r = t.row0 + row + 32 * pass, k = t.k0 + kQuantBlock * block;
      load_block(job.x + (t.begin + r) * job.cols + k, r < t.rows ? t.cols - k : 0, b[pass].word);
    }
    if (t.group != group) {
      __syncthreads();
      group = t.group;
      enter_group(job, group, place, draw_base, table);
      __syncthreads();
    }
    if (t.first && threadIdx.x == 0) job.tensor_scale[group] = place.scale.decode * place.unit;
    const int32_t k = t.k0 + kQuantBlock * block;
    if (k >= t.length) continue;
#pragma unroll
    for (int pass = 0; pass < kTilePasses; ++pass) {
      const int32_t r = t.row0 + row + 32 * pass;
      if (r >= t.rows) continue;
      const int64_t at = int64_t{r} * t.length + k;
      place.number = draw_base + static_cast<uint64_t>(at / kQuantBlock);
      widen(b[pass].word, b[pass].v);
      CodedBlock coded;
      const auto truth = [&](float(&v)[kQuantBlock]) { copy_values(b[pass], v); };
      if (!encode_plain<true, kStochastic, false, 0>(job, place, table, b[pass], truth, job.counts != nullptr,
                                                     coded, counts) &&
          job.counts) {
        count_rare(job, kCountNonFinite, count_non_finite(b[pass].word));
      }
      *reinterpret_cast<uint2*>(job.codes + (t.elements_before + at) / 2) =
          make_uint2(coded.word[0], coded.word[1]);
      job.block_scales[(t.elements_before + at) / kQuantBlock] = static_cast<uint8_t>(coded.scale);
    }
  }
  if (job.counts) add_counts(job, counts);
}

}  // namespace

bool takes_rows(const QuantJob& job, Coder coder) {
  return coder == Coder::kPlain && !job.column && job.spec.scale_scope == ScaleScope::kTensor &&
         job.spec.hadamard == 0 && job.vectors && job.wide_codes && !job.energies;
}

void launch_rows(Queue& queue, const QuantJob& job) {
  const Context& c = context_of(queue);
  const unsigned grid = static_cast<unsigned>(c.sm_count * 3);
  if (job.spec.rounding == Rounding::kStochastic) {
    encode_rows<true><<<grid, kQuantThreads, 0, c.stream>>>(job);
  } else {
    encode_rows<false><<<grid, kQuantThreads, 0, c.stream>>>(job);
  }
  check_launch(Quantize::kName);
}

}  // namespace fp4t::cuda

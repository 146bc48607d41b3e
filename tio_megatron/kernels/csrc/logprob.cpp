// Log-softmax parts: C interface. logits rows have a stride; rows are independent, so threads take rows.
#include "order.h"
#include "rows.h"

#define TIO_BODY "logprob_body.h"
#include "for_each_isa.h"

namespace tio {
namespace {

// The tree's leaves of one row: `runs` runs of `per_run` blocks, run r from leaf r * stride on (contract/vocab.py).
struct Leaves {
  int64_t block, per_run, stride, runs;
  int64_t count() const { return runs * stride; }
};

// The sums of block_sums over the vocabulary rows [lo, lo + n) into their leaves; lo on a block. Everything else is absent.
template <bool weighted>
void fill(const float* x, int64_t lo, int64_t n, float top, const Leaves& leaves, float* out) {
  std::fill(out, out + leaves.count(), -0.0f);
  for (int64_t row = lo; row < lo + n;) {
    const int64_t b = row / leaves.block, run = b / leaves.per_run, inside = b % leaves.per_run;
    const int64_t end = std::min(lo + n, (run + 1) * leaves.per_run * leaves.block);
    TIO_PICK(block_sums<weighted>)(x + row - lo, end - row, leaves.block, top, out + run * leaves.stride + inside);
    row = end;
  }
}

// Calls work(row, its leaves).
template <class Work>
int over_rows(int64_t T, int64_t columns, const Leaves& leaves, int threads, Work work) {
  int failed = 0;
#pragma omp parallel num_threads(useful_threads(threads, T * columns)) reduction(| : failed)
  {
    FloatMode mode;
    Scratch<float> room(size_t(leaves.count()));
    if (!room.get()) failed = 1;
#pragma omp for schedule(static)
    for (int64_t t = 0; t < T; t++)
      if (!failed) work(t, room.get());
  }
  return failed;
}

}  // namespace
}  // namespace tio

using namespace tio;

TIO_API int tio_vocab_max(const float* logits, int64_t stride, int64_t T, int64_t columns, float* top, int threads) {
#pragma omp parallel for num_threads(useful_threads(threads, T * columns)) schedule(static)
  for (int64_t t = 0; t < T; t++) top[t] = TIO_PICK(row_max)(logits + t * stride, columns);
  return 0;
}

// out[nodes, T]; node n is the leaves [starts[n], starts[n] + sizes[n]), sizes powers of two. Columns are the true rows from lo on.
// `weighted`: the terms are exp(d) * d instead of exp(d), with d = x - top.
TIO_API int tio_vocab_sumexp(const float* logits, int64_t stride, int64_t T, int64_t columns, const float* top, int weighted, int64_t lo, int64_t block, int64_t per_run,
                             int64_t leaf_stride, int64_t runs, const int64_t* starts, const int64_t* sizes, int64_t nodes, float* out, int threads) {
  const Leaves leaves{block, per_run, leaf_stride, runs};
  return over_rows(T, columns, leaves, threads, [&](int64_t t, float* room) {
    (weighted ? fill<true> : fill<false>)(logits + t * stride, lo, columns, top[t], leaves, room);
    for (int64_t n = 0; n < nodes; n++) out[n * T + t] = join(room + starts[n], sizes[n]);
  });
}

// y[T, vocab] from whole rows.
TIO_API int tio_log_softmax(const float* logits, int64_t stride, int64_t T, int64_t vocab, int64_t block, int64_t per_run, int64_t leaf_stride, int64_t runs, float* y,
                            int threads) {
  const Leaves leaves{block, per_run, leaf_stride, runs};
  return over_rows(T, vocab, leaves, threads, [&](int64_t t, float* room) {
    const float* x = logits + t * stride;
    const float top = TIO_PICK(row_max)(x, vocab);
    fill<false>(x, 0, vocab, top, leaves, room);
    TIO_PICK(log_softmax_row)(x, vocab, top, join(room, leaves.count()), y + t * vocab);
  });
}

TIO_API int tio_gather_logprob(const float* x, const float* top, const float* sum, float* y, int64_t n) {
  FloatMode mode;
  TIO_PICK(log_values)(x, top, sum, y, n);
  return 0;
}

TIO_API int tio_entropy(const float* sum, const float* weighted, float* y, int64_t n) {
  FloatMode mode;
  TIO_PICK(entropies)(sum, weighted, y, n);
  return 0;
}

// dlogits[T, V] contiguous; zero past `columns`.
TIO_API int tio_logprob_backward(const float* d, const float* logits, int64_t stride, const float* top, const float* sum, const int64_t* target, int64_t T, int64_t V,
                                 int64_t columns, float* dlogits, int threads) {
#pragma omp parallel num_threads(useful_threads(threads, T * V))
  {
    FloatMode mode;
#pragma omp for schedule(static)
    for (int64_t t = 0; t < T; t++) {
      const float* x = logits + t * stride;
      float* to = dlogits + t * V;
      TIO_PICK(softmax_gradient)(x, columns, d[t], top[t], sum[t], to);
      std::fill(to + columns, to + V, 0.0f);
      if (target[t] >= 0 && target[t] < columns) to[target[t]] = TIO_PICK(target_gradient)(x[target[t]], d[t], top[t], sum[t]);
    }
  }
  return 0;
}

// dlogits[T, V] contiguous; zero past `columns`.
TIO_API int tio_entropy_backward(const float* d, const float* logits, int64_t stride, const float* top, const float* sum, const float* weighted, int64_t T, int64_t V,
                                 int64_t columns, float* dlogits, int threads) {
#pragma omp parallel num_threads(useful_threads(threads, T * V))
  {
    FloatMode mode;
#pragma omp for schedule(static)
    for (int64_t t = 0; t < T; t++) {
      TIO_PICK(entropy_gradient)(logits + t * stride, columns, d[t], top[t], sum[t], weighted[t], dlogits + t * V);
      std::fill(dlogits + t * V + columns, dlogits + (t + 1) * V, 0.0f);
    }
  }
  return 0;
}

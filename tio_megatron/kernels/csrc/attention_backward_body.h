// One tile of the backward: 64 query positions by 64 keys of one head. Tiles are fp32: turned[D][64] and plain[64][D].
#include "elementary.h"
#include "multiply.h"
#include "transpose.h"

// Rows [from, to) of a block in both forms; the other rows are zero.
template <class T>
TIO_FN void both_forms(const T* const* rows, int from, int to, int D, float* turned, float* plain) {
  for (int c = 0; c < kKeys; c += W)
    for (int d = 0; d < D; d += W) {
      F r[W];
#pragma GCC unroll 16
      for (int i = 0; i < W; i++) {
        r[i] = c + i >= from && c + i < to ? load(rows[c + i] + d) : zero();
        if (plain) store(plain + (c + i) * D + d, r[i]);
      }
      transpose(r);
#pragma GCC unroll 16
      for (int i = 0; i < W; i++) store(turned + (d + i) * kKeys + c, r[i]);
    }
}

// delta[i] = fma chain over D of a * b, both turned.
TIO_FN void row_deltas(const float* a, const float* b, int D, float* delta) {
  for (int c = 0; c < kKeys; c += W) {
    F sum = zero();
    for (int d = 0; d < D; d++) sum = fma(load(a + d * kKeys + c), load(b + d * kKeys + c), sum);
    store(delta + c, sum);
  }
}

// out[i][j] = fma chain over D of a[d][i] * b[d][j] for the rows [i0, i1).
TIO_INLINE void scores(const float* a, const float* b, int D, int i0, int i1, float* out) {
  constexpr int N = 2;
  for (int i = i0 / kRows * kRows; i < i1; i += kRows)
    for (int c = 0; c < kKeys; c += N * W) {
      F acc[kRows][N] = {};
      multiply<kRows, N>(a + i, kKeys, b + c, kKeys, 0, D, acc);
#pragma GCC unroll 16
      for (int r = 0; r < kRows; r++)
#pragma GCC unroll 8
        for (int n = 0; n < N; n++) store(out + (i + r) * kKeys + c + n * W, acc[r][n]);
    }
}

// multiply() with terms [from[r], to[r]) for row r.
template <int N>
TIO_INLINE void multiply_ragged(const float* a, const float* b, int64_t b_step, const int* from, const int* to, F (&acc)[kRows][N]) {
  int first = kKeys, last = 0, full_from = 0, full_to = kKeys;
  for (int r = 0; r < kRows; r++) {
    first = from[r] < first ? from[r] : first;
    last = to[r] > last ? to[r] : last;
    full_from = from[r] > full_from ? from[r] : full_from;
    full_to = to[r] < full_to ? to[r] : full_to;
  }
  if (full_from > full_to) full_from = full_to = last;
  for (int k = first; k < last; k++) {
    if (k == full_from && full_from < full_to) {
      multiply<kRows, N>(a, kKeys, b, b_step, full_from, full_to, acc);
      k = full_to - 1;
      continue;
    }
#pragma GCC unroll 16
    for (int r = 0; r < kRows; r++) {
      if (k < from[r] || k >= to[r]) continue;
#pragma GCC unroll 8
      for (int n = 0; n < N; n++) acc[r][n] = fma(set1(a[r + k * kKeys]), load(b + k * b_step + n * W), acc[r][n]);
    }
  }
}

// total[row][d] += the chain from +0 over k in [from[row], to[row]) of a[k][row] * b[k][d], for the rows [row0, row1).
template <int N>
TIO_INLINE void add_products(const float* a, const float* b, int D, int d, int row0, int row1, const int* from, const int* to, float* total) {
  for (int row = row0 / kRows * kRows; row < row1; row += kRows) {
    F acc[kRows][N] = {};
    multiply_ragged<N>(a + row, b + d, D, from + row, to + row, acc);
#pragma GCC unroll 16
    for (int r = 0; r < kRows; r++)
#pragma GCC unroll 8
      for (int n = 0; n < N; n++) {
        float* at = total + (row + r) * D + d + n * W;
        store(at, load(at) + acc[r][n]);
      }
  }
}

TIO_INLINE void add_all_products(const float* a, const float* b, int D, int row0, int row1, const int* from, const int* to, float* total) {
  int d = 0;
  for (; d + 2 * W <= D; d += 2 * W) add_products<2>(a, b, D, d, row0, row1, from, to, total);
  for (; d < D; d += W) add_products<1>(a, b, D, d, row0, row1, from, to, total);
}

// Query rows [i0, i1) of the block against `keys` keys; on the diagonal row i sees the keys 0 .. i.
TIO_FN void backward_tile(const BackwardQueries& q, const BackwardKeys& k, int D, float scale, bool diagonal, float* dq, float* dk, float* dv, float* p, float* ds, float* turned) {
  int from_key[kKeys], to_key[kKeys], from_row[kKeys], to_row[kKeys];
  for (int i = 0; i < kKeys; i++) {
    const bool row = i >= q.first && i < q.last, key = i < k.count;
    from_key[i] = 0;
    to_key[i] = !row ? 0 : diagonal && i + 1 < k.count ? i + 1 : k.count;
    from_row[i] = diagonal && i > q.first ? i : q.first;
    to_row[i] = key ? q.last : from_row[i];
  }
  scores(q.turned, k.keys_turned, D, q.first, q.last, p);
  scores(q.grad_turned, k.values_turned, D, q.first, q.last, ds);
  for (int i = q.first; i < q.last; i++)
    for (int c = 0; c < kKeys; c += W) {
      float *pi = p + i * kKeys + c, *di = ds + i * kKeys + c;
      const F e = exp(load(pi) * set1(scale) - set1(q.lse[i]));
      store(pi, e);
      store(di, e * (load(di) - set1(q.delta[i])));
    }
  for (int i = 0; i < kKeys; i += W)
    for (int c = 0; c < kKeys; c += W) {
      F r[W];
#pragma GCC unroll 16
      for (int n = 0; n < W; n++) r[n] = load(ds + (i + n) * kKeys + c);
      transpose(r);
#pragma GCC unroll 16
      for (int n = 0; n < W; n++) store(turned + (c + n) * kKeys + i, r[n]);
    }
  add_all_products(turned, k.keys, D, q.first, q.last, from_key, to_key, dq);
  add_all_products(ds, q.plain, D, 0, k.count, from_row, to_row, dk);
  add_all_products(p, q.grad, D, 0, k.count, from_row, to_row, dv);
}

// total += one, count numbers (a multiple of 16).
TIO_FN void add_into(const float* one, float* total, int64_t count) {
  for (int64_t i = 0; i < count; i += W) store(total + i, load(total + i) + load(one + i));
}

// to = round(x * factor) for one row.
template <class T>
TIO_FN void round_row(const float* x, float factor, int D, T* to) {
  for (int d = 0; d < D; d += W) store(to + d, load(x + d) * set1(factor));
}

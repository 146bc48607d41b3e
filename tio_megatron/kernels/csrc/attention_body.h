// One step of the walk: a block of 64 keys met by a tile of rows.
#include "elementary.h"
#include "transpose.h"
#include "multiply.h"

// Where a lane counts. AVX-512 has registers for it; elsewhere a vector of all ones or zeros does.
#if TIO_IS_AVX512
typedef __mmask16 Mask;
TIO_INLINE Mask above(I a, int b) { return _mm512_cmpgt_epi32_mask((__m512i)a, _mm512_set1_epi32(b)); }
TIO_INLINE F where(Mask m, F yes, F no) { return (F)_mm512_mask_blend_ps(m, (__m512)no, (__m512)yes); }
TIO_INLINE F fma_where(Mask m, F a, F b, F c) { return (F)_mm512_mask3_fmadd_ps((__m512)a, (__m512)b, (__m512)c, m); }
#else
typedef I Mask;
TIO_INLINE Mask above(I a, int b) { return a > set1(b); }
TIO_INLINE F where(Mask m, F yes, F no) { return select(m, yes, no); }
TIO_INLINE F fma_where(Mask m, F a, F b, F c) { return select(m, fma(a, b, c), c); }
#endif

TIO_INLINE I load_counts(const int* p) {
  I x;
  std::memcpy(&x, p, sizeof x);
  return x;
}

// multiply() where k is below the lane's count.
template <int R, int N>
TIO_INLINE void multiply_where(const float* a, int64_t a_step, const float* b, int64_t b_step, const int* counts, int k0, int k1, F (&acc)[R][N]) {
  for (int k = k0; k < k1; k++)
#pragma GCC unroll 8
    for (int n = 0; n < N; n++) {
      const Mask seen = above(load_counts(counts + n * W), k);
      const F bk = load(b + k * b_step + n * W);
#pragma GCC unroll 16
      for (int r = 0; r < R; r++) acc[r][n] = fma_where(seen, set1(a[r + k * a_step]), bk, acc[r][n]);
    }
}

// How many of the block's keys each lane sees, and the fewest and most of them.
struct Counts {
  int of[kLanes], fewest, most;
  TIO_INLINE Counts(const AttentionTile& tile, int64_t first, int lanes) : fewest(kKeys), most(0) {
    for (int i = 0; i < lanes; i++) {
      const int64_t n = tile.sees[i] - first;
      of[i] = int(n < 0 ? 0 : n > kKeys ? kKeys : n);
      if (of[i] < fewest) fewest = of[i];
      if (of[i] > most) most = of[i];
    }
  }
};

// Scores s[key][lane] to p, in place, for W lanes; moves top and sum on, and gives what the earlier sums are scaled by.
TIO_INLINE F soften(float* s, int64_t stride, const int* counts, int fewest, int most, bool first, float* tops, float* sums) {
  const I count = load_counts(counts);
  const F before = load(tops);
  F top = before, block = zero();
  for (int k = 0; k < fewest; k++) top = larger(load(s + k * stride), top);
  for (int k = fewest; k < most; k++) top = where(above(count, k), larger(load(s + k * stride), top), top);
  for (int k = 0; k < fewest; k++) {
    const F p = exp(load(s + k * stride) - top);
    store(s + k * stride, p);
    block = block + p;
  }
  for (int k = fewest; k < most; k++) {
    const F p = exp(load(s + k * stride) - top);
    store(s + k * stride, p);
    block = where(above(count, k), block + p, block);
  }
  const F fade = exp(before - top);
  store(tops, top);
  store(sums, first ? block : load(sums) * fade + block);
  return fade;
}

// Rows in lanes: L of them. kt[D][64] and v[64][D] fp32; s is scratch for 64 * L numbers.
template <int L>
TIO_FN void lanes_step(AttentionTile& tile, const float* kt, const float* v, int D, float scale, int64_t first, float* s) {
  constexpr int N = W == 16 ? L / 16 : 2, R = kRows, span = N * W;
  const Counts counts(tile, first, L);
  const int fewest = counts.fewest, most = counts.most;
  for (int c = 0; c < L; c += span) {
    for (int k = 0; k < most; k += R) {
      F acc[R][N] = {};
      multiply<R, N>(kt + k, kKeys, tile.q + c, L, 0, D, acc);
#pragma GCC unroll 16
      for (int r = 0; r < R; r++)
#pragma GCC unroll 8
        for (int n = 0; n < N; n++) store(s + (k + r) * L + c + n * W, acc[r][n] * set1(scale));
    }
    F fade[N];
#pragma GCC unroll 8
    for (int n = 0; n < N; n++) {
      const int lane = c + n * W;
      fade[n] = soften(s + lane, L, counts.of + lane, fewest, most, first == 0, tile.top + lane, tile.sum + lane);
    }
    for (int d = 0; d < D; d += R) {
      F acc[R][N];
      float* to = tile.acc + d * L + c;
#pragma GCC unroll 16
      for (int r = 0; r < R; r++)
#pragma GCC unroll 8
        for (int n = 0; n < N; n++) acc[r][n] = first == 0 ? zero() : load(to + r * L + n * W) * fade[n];
      multiply<R, N>(v + d, D, s + c, L, 0, fewest, acc);
      if (fewest < most) multiply_where<R, N>(v + d, D, s + c, L, counts.of + c, fewest, most, acc);
#pragma GCC unroll 16
      for (int r = 0; r < R; r++)
#pragma GCC unroll 8
        for (int n = 0; n < N; n++) store(to + r * L + n * W, acc[r][n]);
    }
  }
}

// Where the next `terms` terms of a pass fetch ahead in a block half of 64 * D elements at `at`; null past its end.
template <int N, class T>
TIO_INLINE const char* ahead_of(const T* at, int D, int pass, int terms) {
  const int64_t lines = int(sizeof(T)) * N * W / 64 > 1 ? int(sizeof(T)) * N * W / 64 : 1, begin = pass * lines * terms * 64;
  return at && begin < int64_t(sizeof(T)) * kKeys * D ? reinterpret_cast<const char*>(at) + begin : nullptr;
}

// acc[r][d] of `R` rows of a few-tile, for N vectors of d.
template <int R, int N, class T>
TIO_INLINE void few_values(const float* p, const T* v, const T* next, int D, int d, const float* fade, const Counts& counts, bool first, float* acc) {
  F sum[R][N];
#pragma GCC unroll 16
  for (int r = 0; r < R; r++)
#pragma GCC unroll 8
    for (int n = 0; n < N; n++) sum[r][n] = first ? zero() : load(acc + r * D + d + n * W) * set1(fade[r]);
  multiply<R, N>(p, W, v + d, D, 0, counts.fewest, sum, ahead_of<N>(next, D, d / (N * W), kKeys));
#pragma GCC unroll 16
  for (int r = 0; r < R; r++) {
    F one[1][N];
#pragma GCC unroll 8
    for (int n = 0; n < N; n++) one[0][n] = sum[r][n];
    if (counts.of[r] > counts.fewest) multiply<1, N>(p + r, W, v + d, D, counts.fewest, counts.of[r], one);
#pragma GCC unroll 8
    for (int n = 0; n < N; n++) store(acc + r * D + d + n * W, one[0][n]);
  }
}

// At most R rows. kt and v as they lie in the page, next: the keys of the following block or null; s is scratch for 64 * W numbers.
template <int R, class T>
TIO_INLINE void few_rows(AttentionTile& tile, const T* kt, const T* v, const T* next, int D, float scale, int64_t first, float* s) {
  constexpr int N = W == 16 ? (R <= 4 ? 4 : 2) : (R == 8 ? 1 : R == 4 ? 2 : 4);
  const Counts counts(tile, first, W);
  float by_row[R * kKeys], fades[W];
  for (int k = 0; k < counts.most; k += N * W) {
    F acc[R][N] = {};
    multiply<R, N>(tile.q, kFew, kt + k, kKeys, 0, D, acc, ahead_of<N>(v, D, k / (N * W), D));
#pragma GCC unroll 16
    for (int r = 0; r < R; r++)
#pragma GCC unroll 8
      for (int n = 0; n < N; n++) store(by_row + r * kKeys + k + n * W, acc[r][n] * set1(scale));
  }
  for (int k = 0; k < counts.most; k += W) {
    F turned[W];
#pragma GCC unroll 16
    for (int i = 0; i < W; i++) turned[i] = load(by_row + (i < R ? i : 0) * kKeys + k);
    transpose(turned);
#pragma GCC unroll 16
    for (int i = 0; i < W; i++) store(s + (k + i) * W, turned[i]);
  }
  store(fades, soften(s, W, counts.of, counts.fewest, counts.most, first == 0, tile.top, tile.sum));
  int d = 0;
  for (; d + N * W <= D; d += N * W) few_values<R, N>(s, v, next, D, d, fades, counts, first == 0, tile.acc);
  for (; d < D; d += W) few_values<R, 1>(s, v, next, D, d, fades, counts, first == 0, tile.acc);
}

template <class T>
TIO_FN void few_step(AttentionTile& tile, const T* kt, const T* v, const T* next, int D, float scale, int64_t first, float* s) {
  if (tile.rows == 1) few_rows<1>(tile, kt, v, next, D, scale, first, s);
  else if (tile.rows == 2) few_rows<2>(tile, kt, v, next, D, scale, first, s);
  else if (tile.rows <= 4) few_rows<4>(tile, kt, v, next, D, scale, first, s);
  else few_rows<8>(tile, kt, v, next, D, scale, first, s);
}

// Query rows into tile.q[D][L], or [D][8]; missing rows repeat the first.
template <class T>
TIO_FN void load_queries(const T* const* rows, AttentionTile& tile, int D, int L) {
  for (int c = 0; c < L; c += W)
    for (int d = 0; d < D; d += W) {
      F turned[W];
#pragma GCC unroll 16
      for (int i = 0; i < W; i++) turned[i] = load(rows[c + i < tile.rows ? c + i : 0] + d);
      transpose(turned);
#pragma GCC unroll 16
      for (int i = 0; i < W; i++) store(tile.q + (d + i) * L + c, turned[i], W < L ? W : L);
    }
}

TIO_INLINE void finish_lse(const AttentionTile& tile, float* const* lse) {
  if (!lse) return;
  for (int c = 0; c < tile.rows; c += W) {
    float lanes[W];
    store(lanes, load(tile.top + c) + log(load(tile.sum + c)));
    for (int i = 0; i < W && c + i < tile.rows; i++) *lse[c + i] = lanes[i];
  }
}

// o = round(acc / sum) of each row, and lse where it is wanted.
template <class T>
TIO_FN void finish_lanes(AttentionTile& tile, int D, int L, T* const* o, float* const* lse) {
  for (int c = 0; c < L && c < tile.rows; c += W) {
    const F sum = load(tile.sum + c);
    for (int d = 0; d < D; d += W) {
      F turned[W];
#pragma GCC unroll 16
      for (int i = 0; i < W; i++) turned[i] = load(tile.acc + (d + i) * L + c) / sum;
      transpose(turned);
#pragma GCC unroll 16
      for (int i = 0; i < W; i++)
        if (c + i < tile.rows) store(o[c + i] + d, turned[i]);
    }
  }
  finish_lse(tile, lse);
}

template <class T>
TIO_FN void finish_few(AttentionTile& tile, int D, T* const* o, float* const* lse) {
  for (int r = 0; r < tile.rows; r++)
    for (int d = 0; d < D; d += W) store(o[r] + d, load(tile.acc + r * D + d) / set1(tile.sum[r]));
  finish_lse(tile, lse);
}

TIO_FN void widen(const bf16* from, float* to, int n) {
  for (int i = 0; i < n; i += W) store(to + i, load(from + i));
}

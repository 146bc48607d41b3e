#include "inverse_rms.h"
#include "counts.h"
// Partials that are single terms: rows of an embedding's gradient, terms of a norm's. And the sum's value.

// Adds n partials. `Add` adds to high where several threads may do so.
template <class Add>
TIO_INLINE void add_one(float p, const Grid& grid, int64_t* low, Add add_high) {
  if (magnitude_bits(p) < grid.large) *low = int64_t(uint64_t(*low) + grid.count(p));
  else if (const int64_t count = grid.high_count(p)) add_high(count);
}

// W partials to low, which nobody else writes; false if one of them is large, and then nothing is added.
TIO_INLINE bool add_vector(F p, D scale, I large, int64_t* low, I& peak) {
  const I bits = magnitude(p);
  peak = larger(peak, bits);
  if (__builtin_expect(any_at_least(bits, large), 0)) return false;
  L one, two;
  shifted(p, scale, one, two);
  store_long(low, load_long(low) + one - set1_long(kCountBits));
  store_long(low + W / 2, load_long(low + W / 2) + two - set1_long(kCountBits));
  return true;
}

// One row of n partials; `term(k)` and `term(k, count)` give them.
template <class Term, class AddHigh>
TIO_INLINE void add_terms(const Term& term, int64_t n, const Grid& grid, int64_t* low, const AddHigh& add_high, I& peak) {
  const D scale = set1_double(grid.scale);
  const I large = set1(int32_t(grid.large));
  for (int64_t k = 0; k < n; k += W) {
    const int here = int(n - k < W ? n - k : W);
    const F p = here == W ? term.at(k) : term.at(k, here);
    if (here == W && add_vector(p, scale, large, low + k, peak)) continue;
    float each[W];
    store(each, p);
    for (int i = 0; i < here; i++) {
      peak = larger(peak, magnitude(set1(each[i])));
      add_one(each[i], grid, low + k + i, [&](int64_t count) { add_high(k + i, count); });
    }
  }
}

template <class T>
struct RowTerms {
  const T* row;
  TIO_INLINE F at(int64_t k) const { return load(row + k); }
  TIO_INLINE F at(int64_t k, int n) const { return load(row + k, n); }
};
template <class T>
struct NormTerms {
  const T *dy, *x;
  F inverse;
  TIO_INLINE F at(int64_t k) const { return load(dy + k) * (load(x + k) * inverse); }
  TIO_INLINE F at(int64_t k, int n) const { return load(dy + k, n) * (load(x + k, n) * inverse); }
};

struct AddHigh {
  int64_t* high;
  void operator()(int64_t k, int64_t count) const { high[k] += count; }
};
struct AddHighShared {
  int64_t* high;
  void operator()(int64_t k, int64_t count) const { __atomic_fetch_add(high + k, count, __ATOMIC_RELAXED); }
};

// Columns [0, n) of all rows to the rows ids[r] of low; returns the bits of the largest |partial|.
template <class T>
TIO_FN uint32_t sum_rows(const T* rows, int64_t stride, const int64_t* ids, int64_t count, int64_t n, const Grid& grid, int64_t* low, int64_t low_row, int64_t* high,
                         int64_t high_row) {
  I peak = set1(0);
  for (int64_t r = 0; r < count; r++) {
    if (r + 4 < count) {
      const char* next = reinterpret_cast<const char*>(low + ids[r + 4] * low_row);
      for (int64_t at = 0; at < n * 8; at += 64) __builtin_prefetch(next + at, 1);
    }
    add_terms(RowTerms<T>{rows + r * stride}, n, grid, low + ids[r] * low_row, AddHigh{high + ids[r] * high_row}, peak);
  }
  return largest(peak);
}

// The terms of a norm's weight: dy * (x * inverse), for some rows. `low` is this thread's own.
template <class T>
TIO_FN uint32_t sum_norm_terms(const T* const* dy, const T* const* x, int rows, int64_t H, float eps, const Grid& grid, int64_t* low, int64_t* high, float* parts) {
  float inverse[kTileRows];
  inverse_rms(x, rows, H, eps, parts, inverse);
  I peak = set1(0);
  for (int r = 0; r < rows; r++) add_terms(NormTerms<T>{dy[r], x[r], set1(inverse[r])}, H, grid, low, AddHighShared{high}, peak);
  return largest(peak);
}

// W / 2 numbers of at most 2^51, with one rounding to fp32.
#if TIO_IS_AVX512
TIO_INLINE void store_rounded(char* to, D x) { _mm256_storeu_ps(reinterpret_cast<float*>(to), _mm512_cvtpd_ps((__m512d)x)); }
#elif TIO_IS_AVX2
TIO_INLINE void store_rounded(char* to, D x) { _mm_storeu_ps(reinterpret_cast<float*>(to), _mm256_cvtpd_ps((__m256d)x)); }
#else
TIO_INLINE void store_rounded(char* to, D x) {
  float y[W / 2];
  for (int i = 0; i < W / 2; i++) y[i] = float(x[i]);
  std::memcpy(to, y, sizeof y);
}
#endif

// Elements [begin, end) of the value. `out` may lie over the front of `low`: everything goes by way of memcpy, ascending.
TIO_FN void value_range(const char* low, const char* high, int unit, int split, double scale, char* out, int64_t begin, int64_t end) {
  constexpr int n = W / 2;
  int64_t i = begin;
  for (; i < end; i += n) {
    const int here = int(end - i < n ? end - i : n);
    int64_t l[n] = {}, h[n] = {};
    std::memcpy(l, low + i * 8, size_t(here) * 8);
    if (high) std::memcpy(h, high + i * 8, size_t(here) * 8);
    const L x = load_long(l), apart = ((x + (uint64_t(1) << 51)) >> 52) | load_long(h);
    uint64_t any = 0;
    for (int j = 0; j < n; j++) any |= apart[j];
    if (here == n && !any) {
      store_rounded(out + i * 4, ((D)(x + kCountBits) - set1_double(kCount)) * set1_double(scale));
      continue;
    }
    for (int j = 0; j < here; j++) {
      const float y = round_sum(l[j], h[j], unit, split);
      std::memcpy(out + (i + j) * 4, &y, 4);
    }
  }
}

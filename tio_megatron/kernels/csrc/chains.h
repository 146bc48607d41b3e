// Ascending sums over contiguous memory, W of them side by side: each lane is one chain, so no chain is ever split. Included inside a
// body, after vec.h and elementary.h: no guard.
//
// The W chains lie in W different places, so W x W numbers are loaded, transposed in registers, and added vector by vector.

#include "transpose.h"

// What a chain adds. `term(i, k)` is W terms of chain i from k on, `term(i, k, n)` the last n of them; `step` takes one term of each chain.
template <class T>
struct Squares {
  const T* const* at;
  TIO_INLINE F term(int i, int k) const { return load(at[i] + k); }
  TIO_INLINE F term(int i, int k, int n) const { return load(at[i] + k, n); }
  TIO_INLINE static F step(F t, F sum) { return fma(t, t, sum); }
};

// exp(x - max).
struct Exponentials {
  const float* const* at;
  const float* max;
  TIO_INLINE F term(int i, int k) const { return exp(load(at[i] + k) - set1(max[i])); }
  TIO_INLINE F term(int i, int k, int n) const { return exp(load(at[i] + k, n) - set1(max[i])); }
  TIO_INLINE static F step(F t, F sum) { return sum + t; }
};

// exp(d) * d with d = x - max: what an entropy sums. Where exp is +0 the term is -0, for d = -inf too.
TIO_INLINE F weighted_exponential(F d) { return exp(d) * larger(set1(-128.0f), d); }  // NaN passes

struct WeightedExponentials {
  const float* const* at;
  const float* max;
  TIO_INLINE F term(int i, int k) const { return weighted_exponential(load(at[i] + k) - set1(max[i])); }
  TIO_INLINE F term(int i, int k, int n) const { return weighted_exponential(load(at[i] + k, n) - set1(max[i])); }
  TIO_INLINE static F step(F t, F sum) { return sum + t; }
};

// Chains of `length` terms, from +0, ascending.
template <class Terms>
TIO_INLINE F chains(const Terms& terms, int length) {
  F sum = zero(), r[W];
  int k = 0;
  for (; k + W <= length; k += W) {
#pragma GCC unroll 16
    for (int i = 0; i < W; i++) r[i] = terms.term(i, k);
    transpose(r);
#pragma GCC unroll 16
    for (int i = 0; i < W; i++) sum = Terms::step(r[i], sum);
  }
  if (k < length) {
#pragma GCC unroll 16
    for (int i = 0; i < W; i++) r[i] = terms.term(i, k, length - k);
    transpose(r);
    for (int i = 0; i < length - k; i++) sum = Terms::step(r[i], sum);
  }
  return sum;
}

// The same for a sum of products, of two loads each.
template <class Products>
TIO_INLINE F product_chains(const Products& products, int length) {
  F sum = zero(), a[W], b[W];
  int k = 0;
  for (; k + W <= length; k += W) {
#pragma GCC unroll 16
    for (int i = 0; i < W; i++) products.pair(i, k, a[i], b[i]);
    transpose(a);
    transpose(b);
#pragma GCC unroll 16
    for (int i = 0; i < W; i++) sum = fma(a[i], b[i], sum);
  }
  if (k < length) {
#pragma GCC unroll 16
    for (int i = 0; i < W; i++) products.pair(i, k, a[i], b[i], length - k);
    transpose(a);
    transpose(b);
    for (int i = 0; i < length - k; i++) sum = fma(a[i], b[i], sum);
  }
  return sum;
}

// The sum along a row, for several rows: chains of kRowChain terms, the last one shorter, joined by the tree. A source aims lane
// `lane` at term `begin` of row `row`, and sums the W chains it is aimed at. `parts` holds rows * chains numbers.
template <class Source>
TIO_INLINE void row_sums(Source& source, int rows, int64_t terms, float* parts, float* sums) {
  const int full = int(terms / kRowChain), rest = int(terms % kRowChain), count = full + (rest > 0);
  float lanes[W];
  for (int s0 = 0; s0 < rows * full; s0 += W) {
    const int n = rows * full - s0 < W ? rows * full - s0 : W;
    for (int i = 0; i < W; i++) {
      const int s = s0 + (i < n ? i : 0);
      source.aim(i, s / full, int64_t(s % full) * kRowChain);
    }
    store(lanes, source.sum(kRowChain));
    for (int i = 0; i < n; i++) parts[(s0 + i) / full * count + (s0 + i) % full] = lanes[i];
  }
  for (int r0 = 0; rest && r0 < rows; r0 += W) {
    const int n = rows - r0 < W ? rows - r0 : W;
    for (int i = 0; i < W; i++) source.aim(i, r0 + (i < n ? i : 0), int64_t(full) * kRowChain);
    store(lanes, source.sum(rest));
    for (int i = 0; i < n; i++) parts[(r0 + i) * count + full] = lanes[i];
  }
  for (int r = 0; r < rows; r++) sums[r] = join(parts + int64_t(r) * count, count);
}

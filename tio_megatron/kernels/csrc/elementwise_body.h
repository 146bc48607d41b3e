// Elementwise kernels: a number's place decides nothing.
#include "elementary.h"

struct Exp {
  TIO_INLINE static F of(F x) { return exp(x); }
};
struct Log {
  TIO_INLINE static F of(F x) { return log(x); }
};
struct Silu {
  TIO_INLINE static F of(F x) { return x / (set1(1.0f) + exp(-x)); }
};

template <class Function, class T>
TIO_INLINE void map(const T* x, T* y, int64_t n) {
  int64_t k = 0;
  for (; k + W <= n; k += W) store(y + k, Function::of(load(x + k)));
  if (k < n) store(y + k, Function::of(load(x + k, int(n - k))), int(n - k));
}

TIO_FN void map_exp(const float* x, float* y, int64_t n) { map<Exp>(x, y, n); }
TIO_FN void map_log(const float* x, float* y, int64_t n) { map<Log>(x, y, n); }
template <class T>
TIO_FN void map_silu(const T* x, T* y, int64_t n) {
  map<Silu>(x, y, n);
}

// The derivative of silu: s * (1 + x * (1 - s)).
TIO_INLINE F silu_slope(F x) {
  const F s = sigmoid(x);
  return s * fma(x, set1(1.0f) - s, set1(1.0f));
}

template <class T>
TIO_FN void silu_backward(const T* dy, const T* x, T* dx, int64_t n) {
  int64_t k = 0;
  for (; k + W <= n; k += W) store(dx + k, load(dy + k) * silu_slope(load(x + k)));
  if (k < n) store(dx + k, load(dy + k, int(n - k)) * silu_slope(load(x + k, int(n - k))), int(n - k));
}

// What a store to T and a load give back.
TIO_INLINE F rounded(F x, float) { return x; }
TIO_INLINE F rounded(F x, bf16) { return (F)(round_to_bf16(x) << 16); }

template <class T>
TIO_FN void swiglu_row(const T* gate, const T* up, T* y, int64_t n) {
  int64_t k = 0;
  for (; k + W <= n; k += W) store(y + k, rounded(Silu::of(load(gate + k)), T{}) * load(up + k));
  if (k < n) store(y + k, rounded(Silu::of(load(gate + k, int(n - k))), T{}) * load(up + k, int(n - k)), int(n - k));
}

template <class T>
TIO_INLINE void swiglu_gradient(F d, F gate, F up, F& dgate, F& dup) {
  const F one = set1(1.0f), below = one + exp(-gate), s = one / below;
  dgate = (d * up) * (s * fma(gate, one - s, one));
  dup = d * rounded(gate / below, T{});
}

template <class T>
TIO_FN void swiglu_row_backward(const T* dy, const T* gate, const T* up, T* dgate, T* dup, int64_t n) {
  F a, b;
  int64_t k = 0;
  for (; k + W <= n; k += W) {
    swiglu_gradient<T>(load(dy + k), load(gate + k), load(up + k), a, b);
    store(dgate + k, a);
    store(dup + k, b);
  }
  if (k == n) return;
  const int w = int(n - k);
  swiglu_gradient<T>(load(dy + k, w), load(gate + k, w), load(up + k, w), a, b);
  store(dgate + k, a, w);
  store(dup + k, b, w);
}

// W numbers of each half from k on, or the last n.
template <class T>
TIO_INLINE void rotate_pair(const T* x, const float* cos_sin, int64_t half, int64_t k, F sign, T* y) {
  const F a = load(x + k), b = load(x + half + k), c = load(cos_sin + k), s = load(cos_sin + half + k) * sign;
  store(y + k, fma(a, c, -(b * s)));
  store(y + half + k, fma(b, c, a * s));
}
template <class T>
TIO_INLINE void rotate_pair(const T* x, const float* cos_sin, int64_t half, int64_t k, F sign, T* y, int n) {
  const F a = load(x + k, n), b = load(x + half + k, n), c = load(cos_sin + k, n), s = load(cos_sin + half + k, n) * sign;
  store(y + k, fma(a, c, -(b * s)), n);
  store(y + half + k, fma(b, c, a * s), n);
}

// The heads of one token: the first 2 * half of their D elements rotated, the others kept. `sign` is 1, or -1 to rotate back.
template <class T>
TIO_FN void rotate(const Rows<const T>& x, int64_t row, int64_t heads, const float* cos_sin, int64_t half, int64_t D, float sign, T* y) {
  for (int64_t h = 0; h < heads; h++, y += D) {
    const T* from = x[row + h];
    int64_t k = 0;
    for (; k + W <= half; k += W) rotate_pair(from, cos_sin, half, k, set1(sign), y);
    if (k < half) rotate_pair(from, cos_sin, half, k, set1(sign), y, int(half - k));
    for (k = 2 * half; k < D; k++) y[k] = from[k];
  }
}

// Columns [c0, c1) of parts[P][n], summed by the tree over P.
TIO_FN void tree_columns(const float* parts, int64_t P, int64_t n, int64_t c0, int64_t c1, float* y) {
  for (int64_t c = c0; c < c1; c += W) {
    const int w = int(c1 - c < W ? c1 - c : W);
    F stack[64];
    int height = 0;
    for (int64_t p = 0; p < P; p++) {
      F top = w == W ? load(parts + p * n + c) : load(parts + p * n + c, w);
      for (int m = merges_after(p, P); m > 0; m--) top = stack[--height] + top;
      stack[height++] = top;
    }
    store(y + c, stack[0], w);
  }
}

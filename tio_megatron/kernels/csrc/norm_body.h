// RMSNorm of a tile of rows.
#include "inverse_rms.h"

// Sum of (dy * w) * x.
template <class T>
struct GradientSource {
  const T* const* dy;
  const T* const* x;
  const float* w;
  const T *dy_at[W], *x_at[W];
  const float* w_at[W];
  TIO_INLINE void aim(int lane, int row, int64_t begin) {
    dy_at[lane] = dy[row] + begin;
    x_at[lane] = x[row] + begin;
    w_at[lane] = w + begin;
  }
  TIO_INLINE void pair(int i, int k, F& a, F& b) const {
    a = load(dy_at[i] + k) * load(w_at[i] + k);
    b = load(x_at[i] + k);
  }
  TIO_INLINE void pair(int i, int k, F& a, F& b, int n) const {
    a = load(dy_at[i] + k, n) * load(w_at[i] + k, n);
    b = load(x_at[i] + k, n);
  }
  TIO_INLINE F sum(int length) const { return product_chains(*this, length); }
};

template <class T>
TIO_FN void add_rows(const T* const* x, const T* const* residual, T* const* total, int rows, int64_t H) {
  for (int r = 0; r < rows; r++) {
    int64_t k = 0;
    for (; k + W <= H; k += W) store(total[r] + k, load(x[r] + k) + load(residual[r] + k));
    if (k < H) store(total[r] + k, load(x[r] + k, int(H - k)) + load(residual[r] + k, int(H - k)), int(H - k));
  }
}

template <class T>
TIO_FN void norm_rows(const T* const* x, int rows, int64_t H, const float* w, float eps, T* y, float* parts) {
  float inverse[kTileRows];
  inverse_rms(x, rows, H, eps, parts, inverse);
  for (int r = 0; r < rows; r++) {
    const F inv = set1(inverse[r]);
    T* to = y + r * H;
    int64_t k = 0;
    for (; k + W <= H; k += W) store(to + k, (load(x[r] + k) * inv) * load(w + k));
    if (k < H) store(to + k, (load(x[r] + k, int(H - k)) * inv) * load(w + k, int(H - k)), int(H - k));
  }
}

template <class T>
TIO_FN void norm_rows_backward(const T* const* dy, const T* const* x, int rows, int64_t H, const float* w, float eps, T* dx, float* inverse, float* parts) {
  float products[kTileRows];
  inverse_rms(x, rows, H, eps, parts, inverse);
  GradientSource<T> source{dy, x, w, {}, {}, {}};
  row_sums(source, rows, H, parts, products);
  for (int r = 0; r < rows; r++) {
    const F inv = set1(inverse[r]), factor = set1(((products[r] / float(H)) * inverse[r]) * inverse[r]);
    T* to = dx + r * H;
    int64_t k = 0;
    for (; k + W <= H; k += W) store(to + k, (load(dy[r] + k) * load(w + k) - load(x[r] + k) * factor) * inv);
    const int n = int(H - k);
    if (n) store(to + k, (load(dy[r] + k, n) * load(w + k, n) - load(x[r] + k, n) * factor) * inv, n);
  }
}

// sums[column] over the rows [0, rows) of one chain: dy * (x * inverse), for columns [0, n).
template <class T>
TIO_FN void weight_chain(const Rows<const T>& dy, const Rows<const T>& x, const float* inverse, int64_t row0, int rows, int64_t column, int n, float* sums) {
  for (int c = 0; c < n; c++) sums[c] = 0.0f;
  for (int64_t r = row0; r < row0 + rows; r++) {
    const F inv = set1(inverse[r]);
    const T *d = dy[r] + column, *v = x[r] + column;
    int c = 0;
    for (; c + W <= n; c += W) store(sums + c, fma(load(d + c), load(v + c) * inv, load(sums + c)));
    if (c < n) store(sums + c, fma(load(d + c, n - c), load(v + c, n - c) * inv, load(sums + c, n - c)), n - c);
  }
}

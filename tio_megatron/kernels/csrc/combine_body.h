// One token's rows joined over experts, and the gradient.
#include "elementary.h"
#include "chains.h"

// V vectors of columns from c on (the last `n` wide): the walk over leaves with a stack.
template <int V, class T>
TIO_INLINE void combine_columns(const T* rows, int64_t stride, const Leaf* leaves, int count, int64_t c, int n, float* out) {
  F stack[64][V];  // a level of the tree each
  int height = 0;
  for (int l = 0; l < count; l++) {
    const T* row = rows + leaves[l].row * stride + c;
    const F prob = set1(leaves[l].prob);
    F top[V];
    for (int v = 0; v < V; v++) top[v] = (n == W ? load(row + v * W) : load(row + v * W, n)) * prob;
    for (int m = 0; m < leaves[l].merges; m++) {
      height--;
      for (int v = 0; v < V; v++) top[v] = stack[height][v] + top[v];
    }
    for (int v = 0; v < V; v++) stack[height][v] = top[v];
    height++;
  }
  for (int v = 0; v < V; v++) {
    const F sum = count ? stack[0][v] : -zero();  // absent
    if (n == W) store(out + c + v * W, sum);
    else store(out + c + v * W, sum, n);
  }
}

template <class T>
TIO_FN void combine_token(const T* rows, int64_t stride, const Leaf* leaves, int count, int64_t H, float* out) {
  int64_t c = 0;
  for (; c + 4 * W <= H; c += 4 * W) combine_columns<4>(rows, stride, leaves, count, c, W, out);
  for (; c < H; c += W) combine_columns<1>(rows, stride, leaves, count, c, int(H - c < W ? H - c : W), out);
}

// to = round(d * prob).
template <class D, class T>
TIO_FN void weighted_row(const D* d, float prob, int64_t H, T* to) {
  int64_t c = 0;
  for (; c + W <= H; c += W) store(to + c, load(d + c) * set1(prob));
  if (c < H) store(to + c, load(d + c, int(H - c)) * set1(prob), int(H - c));
}

template <class D, class T>
struct RowProducts {
  const D* const* d;
  const T* const* row;
  const D* d_at[W];
  const T* row_at[W];
  TIO_INLINE void aim(int lane, int r, int64_t begin) {
    d_at[lane] = d[r] + begin;
    row_at[lane] = row[r] + begin;
  }
  TIO_INLINE void pair(int i, int k, F& a, F& b) const {
    a = load(d_at[i] + k);
    b = load(row_at[i] + k);
  }
  TIO_INLINE void pair(int i, int k, F& a, F& b, int n) const {
    a = load(d_at[i] + k, n);
    b = load(row_at[i] + k, n);
  }
  TIO_INLINE F sum(int length) const { return product_chains(*this, length); }
};

// sums[i] = sum over H of d[i] * row[i], by the norm's rule.
template <class D, class T>
TIO_FN void row_products(const D* const* d, const T* const* row, int count, int64_t H, float* parts, float* sums) {
  RowProducts<D, T> source{d, row, {}, {}};
  row_sums(source, count, H, parts, sums);
}

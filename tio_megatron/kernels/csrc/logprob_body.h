// Log-softmax over a vocabulary. A block of the vocabulary is one ascending chain; W blocks are summed side by side.
#include "elementary.h"
#include "chains.h"

// NaN is not counted; a zero comes out as +0.
TIO_FN float row_max(const float* x, int64_t n) {
  F a = set1(-__builtin_inff()), b = a, c = a, d = a;
  int64_t k = 0;
  for (; k + 4 * W <= n; k += 4 * W) {
    a = larger(load(x + k), a);
    b = larger(load(x + k + W), b);
    c = larger(load(x + k + 2 * W), c);
    d = larger(load(x + k + 3 * W), d);
  }
  for (; k + W <= n; k += W) a = larger(load(x + k), a);
  float lanes[W], top = -__builtin_inff();
  store(lanes, larger(larger(a, b), larger(c, d)));
  for (int i = 0; i < W; i++) top = lanes[i] > top ? lanes[i] : top;
  for (; k < n; k++) top = x[k] > top ? x[k] : top;
  return top + 0.0f;
}

// leaves[b] = sum of exp(d), or of exp(d) * d, with d = x - top, over block b of x[n]; the last block may be shorter.
template <bool weighted>
TIO_FN void block_sums(const float* x, int64_t n, int64_t block, float top, float* leaves) {
  using Terms = std::conditional_t<weighted, WeightedExponentials, Exponentials>;
  const int64_t full = n / block, rest = n % block;
  float max[W], lanes[W];
  const float* at[W];
  for (int i = 0; i < W; i++) max[i] = top;
  for (int64_t b = 0; b < full; b += W) {
    const int count = int(full - b < W ? full - b : W);
    for (int i = 0; i < W; i++) at[i] = x + (b + (i < count ? i : 0)) * block;
    store(lanes, chains(Terms{at, max}, int(block)));
    for (int i = 0; i < count; i++) leaves[b + i] = lanes[i];
  }
  if (!rest) return;
  for (int i = 0; i < W; i++) at[i] = x + full * block;
  store(lanes, chains(Terms{at, max}, int(rest)));
  leaves[full] = lanes[0];
}

TIO_FN void log_values(const float* x, const float* top, const float* sum, float* y, int64_t n) {
  for (int64_t k = 0; k < n; k += W) {
    const int w = int(n - k < W ? n - k : W);
    store(y + k, (load(x + k, w) - load(top + k, w)) - log(load(sum + k, w)), w);
  }
}

TIO_FN void entropies(const float* sum, const float* weighted, float* y, int64_t n) {
  for (int64_t k = 0; k < n; k += W) {
    const int w = int(n - k < W ? n - k : W);
    const F s = load(sum + k, w);
    store(y + k, log(s) - load(weighted + k, w) / s, w);
  }
}

TIO_FN void log_softmax_row(const float* x, int64_t n, float top, float sum, float* y) {
  const F m = set1(top), l = log(set1(sum));
  int64_t k = 0;
  for (; k + W <= n; k += W) store(y + k, (load(x + k) - m) - l);
  if (k < n) store(y + k, (load(x + k, int(n - k)) - m) - l, int(n - k));
}

// d * (onehot - exp(x - top) / sum) for n columns; the target is set apart by the caller.
TIO_FN void softmax_gradient(const float* x, int64_t n, float d, float top, float sum, float* y) {
  for (int64_t k = 0; k < n; k += W) {
    const int w = int(n - k < W ? n - k : W);
    store(y + k, set1(d) * (zero() - exp(load(x + k, w) - set1(top)) / set1(sum)), w);
  }
}

TIO_FN float target_gradient(float x, float d, float top, float sum) {
  float lanes[W];
  store(lanes, set1(d) * (set1(1.0f) - exp(set1(x) - set1(top)) / set1(sum)));
  return lanes[0];
}

// d * p * (mean - log-weight) for n columns, with p = exp(x - top) / sum: an entropy's gradient.
TIO_FN void entropy_gradient(const float* x, int64_t n, float d, float top, float sum, float weighted, float* y) {
  const F mean = set1(weighted) / set1(sum);
  for (int64_t k = 0; k < n; k += W) {
    const int w = int(n - k < W ? n - k : W);
    const F low = load(x + k, w) - set1(top);
    store(y + k, set1(d) * (exp(low) / set1(sum) * (mean - larger(set1(-128.0f), low))), w);
  }
}

// One step of Adam; the roundings are those of kernels/adam/reference.py.

struct AdamNumbers {
  F beta1, new1, beta2, new2, eps, decay, rate, correction;
};

template <bool kDecoupled>
TIO_INLINE F adam(F w, F g, F& m, F& v, const AdamNumbers& n) {
  if (!kDecoupled) g = fma(n.decay, w, g);
  m = fma(n.beta1, m, n.new1 * g);
  v = fma(n.beta2, v, (n.new2 * g) * g);
  const F direction = m / fma(sqrt(v), n.correction, n.eps);
  return fma(-n.rate, direction, kDecoupled ? fma(-n.decay, w, w) : w);
}

// numbers: beta1, 1 - beta1, beta2, 1 - beta2, eps, decay, rate, correction. `out` may be null.
template <bool kDecoupled>
TIO_FN void adam_run(float* w, const float* g, float* m, float* v, bf16* out, int64_t n, const float* numbers) {
  const AdamNumbers all{set1(numbers[0]), set1(numbers[1]), set1(numbers[2]), set1(numbers[3]), set1(numbers[4]), set1(numbers[5]), set1(numbers[6]), set1(numbers[7])};
  int64_t k = 0;
  for (; k + W <= n; k += W) {
    F first = load(m + k), second = load(v + k);
    const F now = adam<kDecoupled>(load(w + k), load(g + k), first, second, all);
    store(w + k, now);
    store(m + k, first);
    store(v + k, second);
    if (out) store(out + k, now);
  }
  if (k < n) {
    const int rest = int(n - k);
    F first = load(m + k, rest), second = load(v + k, rest);
    const F now = adam<kDecoupled>(load(w + k, rest), load(g + k, rest), first, second, all);
    store(w + k, now, rest);
    store(m + k, first, rest);
    store(v + k, second, rest);
    if (out) store(out + k, now, rest);
  }
}

TIO_FN void scale_run(float* x, int64_t n, float factor) {
  int64_t k = 0;
  for (; k + W <= n; k += W) store(x + k, load(x + k) * set1(factor));
  if (k < n) store(x + k, load(x + k, int(n - k)) * set1(factor), int(n - k));
}

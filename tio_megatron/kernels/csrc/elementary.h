// exp, log and sigmoid of W numbers: one polynomial each, the same bits in every lane and instruction set. Included inside a body, after
// vec.h, once per instruction set: no guard. The definition, and where the constants come from: kernels/math/reference.py.

// a > b ? a : b, so b when either is NaN; and the same with <.
#if TIO_IS_AVX512
TIO_INLINE F larger(F a, F b) { return (F)_mm512_max_ps((__m512)a, (__m512)b); }
TIO_INLINE F smaller(F a, F b) { return (F)_mm512_min_ps((__m512)a, (__m512)b); }
#elif TIO_IS_AVX2
TIO_INLINE F larger(F a, F b) { return (F)_mm256_max_ps((__m256)a, (__m256)b); }
TIO_INLINE F smaller(F a, F b) { return (F)_mm256_min_ps((__m256)a, (__m256)b); }
#else
TIO_INLINE F larger(F a, F b) { return select(a > b, a, b); }
TIO_INLINE F smaller(F a, F b) { return select(a < b, a, b); }
#endif

// y * 2^n for a whole n from -150 to 128, rounded once: the first factor leaves y normal.
TIO_INLINE F scale_by_power(F y, F n, F shifted) {
#if TIO_IS_AVX512
  return (F)_mm512_scalef_ps((__m512)y, (__m512)n);
#else
  const I whole = (I)shifted - (I)set1(12582912.0f), half = whole >> 1;
  return y * (F)((half + set1(127)) << 23) * (F)((whole - half + set1(127)) << 23);
#endif
}

TIO_INLINE F exp(F x) {
  const F clamped = smaller(set1(89.0f), larger(set1(-104.0f), x));  // NaN passes
  const F shifted = fma(clamped, set1(0x1.715476p+0f), set1(12582912.0f)), n = shifted - set1(12582912.0f);
  const F rough = fma(n, set1(-0x1.62e4p-1f), clamped);
  const F r = fma(n, set1(-0x1.7f7d1cp-20f), rough);
  const F r_error = fma(n, set1(-0x1.7f7d1cp-20f), rough - r);
  const F head = set1(1.0f) + r, square = r * r;
  const F tail = fma(fma(r, r, -square), set1(0.5f), fma(r_error, head, r - (head - set1(1.0f))));
  F p = set1(0x1.9df7f6p-13f);
  p = fma(p, r, set1(0x1.6d4cdap-10f));
  p = fma(p, r, set1(0x1.111310p-7f));
  p = fma(p, r, set1(0x1.5554e8p-5f));
  p = fma(p, r, set1(0x1.555554p-3f));
  return scale_by_power(head + fma(square, set1(0.5f), fma(p, square * r, tail)), n, shifted);
}

TIO_INLINE F log(F x) {
  const I small = x < set1(0x1p-126f);
  const I code = (I)select(small, x * set1(0x1p23f), x), e = (code - set1(0x3F3504F3)) >> 23;
  const F y = (F)(code - (e << 23)) - set1(1.0f);
  const F n = __builtin_convertvector(e, F) - select(small, set1(23.0f), zero());
  const F square = y * y;
  F p = set1(0x1.1484e8p-4f);
  p = fma(p, y, set1(-0x1.de1004p-4f));
  p = fma(p, y, set1(0x1.e6c03ep-4f));
  p = fma(p, y, set1(-0x1.fc26acp-4f));
  p = fma(p, y, set1(0x1.233b78p-3f));
  p = fma(p, y, set1(-0x1.555c4ep-3f));
  p = fma(p, y, set1(0x1.99a478p-3f));
  p = fma(p, y, set1(-0x1.000006p-2f));
  p = fma(p, y, set1(0x1.555548p-2f));
  const F tail = fma(n, set1(0x1.7f7d1cp-20f), p * y * square);
  F result = fma(n, set1(0x1.62e4p-1f), y + fma(square, set1(-0.5f), tail));
  const F infinity = set1(__builtin_inff());
  result = select(x == infinity, x, result);
  result = select((x < zero()) | (x != x), set1(__builtin_nanf("")), result);
  return select(x == zero(), -infinity, result);
}

TIO_INLINE F sigmoid(F x) { return set1(1.0f) / (set1(1.0f) + exp(-x)); }

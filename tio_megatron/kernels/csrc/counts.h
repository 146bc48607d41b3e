// W partials at once to the counts of grid.h. Included inside a body, after vec.h: no guard.

// W / 2 numbers of 64 bits.
typedef double D __attribute__((vector_size(4 * TIO_W)));
typedef uint64_t L __attribute__((vector_size(4 * TIO_W)));

TIO_INLINE L load_long(const void* p) {
  L x;
  std::memcpy(&x, p, sizeof x);
  return x;
}
TIO_INLINE void store_long(void* p, L x) { std::memcpy(p, &x, sizeof x); }
TIO_INLINE L set1_long(uint64_t x) { return L{} + x; }
TIO_INLINE D set1_double(double x) { return D{} + x; }

// The first and the last half of x * scale + kCount. The product is exact, so fused or not is the same.
#if TIO_IS_AVX512
TIO_INLINE void shifted(F x, D scale, L& first, L& last) {
  const __m512d s = (__m512d)scale, c = _mm512_set1_pd(kCount);
  first = (L)_mm512_fmadd_pd(_mm512_cvtps_pd(_mm512_castps512_ps256((__m512)x)), s, c);
  last = (L)_mm512_fmadd_pd(_mm512_cvtps_pd(_mm512_extractf32x8_ps((__m512)x, 1)), s, c);
}
TIO_INLINE bool any_at_least(I x, I limit) { return _mm512_cmpge_epi32_mask((__m512i)x, (__m512i)limit) != 0; }
TIO_INLINE I larger(I a, I b) { return (I)_mm512_max_epi32((__m512i)a, (__m512i)b); }
#elif TIO_IS_AVX2
TIO_INLINE void shifted(F x, D scale, L& first, L& last) {
  const __m256d s = (__m256d)scale, c = _mm256_set1_pd(kCount);
  first = (L)_mm256_fmadd_pd(_mm256_cvtps_pd(_mm256_castps256_ps128((__m256)x)), s, c);
  last = (L)_mm256_fmadd_pd(_mm256_cvtps_pd(_mm256_extractf128_ps((__m256)x, 1)), s, c);
}
TIO_INLINE bool any_at_least(I x, I limit) { return _mm256_movemask_ps((__m256)(~(limit > x))) != 0; }
TIO_INLINE I larger(I a, I b) { return (I)_mm256_max_epi32((__m256i)a, (__m256i)b); }
#else
TIO_INLINE void shifted(F x, D scale, L& first, L& last) {
  D low, high;
  for (int i = 0; i < W / 2; i++) {
    low[i] = x[i];
    high[i] = x[i + W / 2];
  }
  first = (L)(low * scale + set1_double(kCount));
  last = (L)(high * scale + set1_double(kCount));
}
TIO_INLINE bool any_at_least(I x, I limit) {
  for (int i = 0; i < W; i++)
    if (x[i] >= limit[i]) return true;
  return false;
}
TIO_INLINE I larger(I a, I b) {
  I r;
  for (int i = 0; i < W; i++) r[i] = a[i] > b[i] ? a[i] : b[i];
  return r;
}
#endif

TIO_INLINE I magnitude(F x) { return (I)x & set1(0x7fffffff); }
TIO_INLINE uint32_t largest(I x) {
  uint32_t most = 0;
  for (int i = 0; i < W; i++) most = uint32_t(x[i]) > most ? uint32_t(x[i]) : most;
  return most;
}

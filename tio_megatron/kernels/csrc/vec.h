// Vectors of W fp32 numbers, for the instruction set for_each_isa.h is compiling. Included several times: no guard.
//
// F, I and U are the compiler's own vectors of fp32, int32 and uint32: + - * / & | ^ << >> and comparisons (which give I, all ones
// where true) work on them, and casts between them keep the bits. A product is fused with a sum only where fma is written. Every
// function gives the same bytes in every instruction set.

constexpr int W = TIO_W;
typedef float F __attribute__((vector_size(4 * TIO_W)));
typedef int32_t I __attribute__((vector_size(4 * TIO_W)));
typedef uint32_t U __attribute__((vector_size(4 * TIO_W)));

// W 32-bit words of memory holding anything.
TIO_INLINE U load_words(const void* p) {
  U x;
  std::memcpy(&x, p, sizeof x);
  return x;
}
TIO_INLINE void store_words(void* p, U x) { std::memcpy(p, &x, sizeof x); }

#if TIO_IS_AVX512
TIO_INLINE F set1(float x) { return (F)_mm512_set1_ps(x); }
TIO_INLINE I set1(int32_t x) { return (I)_mm512_set1_epi32(x); }
TIO_INLINE F fma(F a, F b, F c) { return (F)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c); }
TIO_INLINE F sqrt(F x) { return (F)_mm512_sqrt_ps((__m512)x); }
TIO_INLINE F load(const float* p) { return (F)_mm512_loadu_ps(p); }
TIO_INLINE void store(float* p, F x) { _mm512_storeu_ps(p, (__m512)x); }
TIO_INLINE F load(const bf16* p) { return (F)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16); }
TIO_INLINE F load(const float* p, int n) { return (F)_mm512_maskz_loadu_ps(__mmask16((1u << n) - 1), p); }
TIO_INLINE void store(float* p, F x, int n) { _mm512_mask_storeu_ps(p, __mmask16((1u << n) - 1), (__m512)x); }
TIO_INLINE F load(const bf16* p, int n) { return (F)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(__mmask16((1u << n) - 1), p)), 16); }
#else
TIO_INLINE F set1(float x) { return F{x, x, x, x, x, x, x, x}; }
TIO_INLINE I set1(int32_t x) { return I{x, x, x, x, x, x, x, x}; }
TIO_INLINE F load(const float* p) {
  F x;
  std::memcpy(&x, p, sizeof x);
  return x;
}
TIO_INLINE void store(float* p, F x) { std::memcpy(p, &x, sizeof x); }
#if TIO_IS_AVX2
TIO_INLINE F fma(F a, F b, F c) { return (F)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c); }
TIO_INLINE F sqrt(F x) { return (F)_mm256_sqrt_ps((__m256)x); }
TIO_INLINE F load(const bf16* p) { return (F)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p)), 16); }
#else
TIO_INLINE F fma(F a, F b, F c) {
  F r;
  for (int i = 0; i < W; i++) r[i] = __builtin_fmaf(a[i], b[i], c[i]);
  return r;
}
TIO_INLINE F sqrt(F x) {
  F r;
  for (int i = 0; i < W; i++) r[i] = __builtin_sqrtf(x[i]);
  return r;
}
TIO_INLINE F load(const bf16* p) {
  F r;
  for (int i = 0; i < W; i++) r[i] = to_float(p[i]);
  return r;
}
#endif
// The first n of W numbers; the others are +0 when loaded, untouched in memory when stored.
template <class T>
TIO_INLINE F load(const T* p, int n) {
  T t[W] = {};
  for (int i = 0; i < n; i++) t[i] = p[i];
  return load(t);
}
TIO_INLINE void store(float* p, F x, int n) {
  for (int i = 0; i < n; i++) p[i] = x[i];
}
#endif

// Rows of a W x W square of 32-bit lanes become its columns.
#if TIO_IS_AVX512
TIO_INLINE void transpose(U (&x)[W]) {
  __m512i a[16], b[16];
#pragma GCC unroll 8
  for (int i = 0; i < 16; i += 2) {
    a[i] = _mm512_unpacklo_epi32((__m512i)x[i], (__m512i)x[i + 1]);
    a[i + 1] = _mm512_unpackhi_epi32((__m512i)x[i], (__m512i)x[i + 1]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 16; i += 4)
#pragma GCC unroll 2
    for (int j = 0; j < 2; j++) {
      b[i + 2 * j] = _mm512_unpacklo_epi64(a[i + j], a[i + 2 + j]);
      b[i + 2 * j + 1] = _mm512_unpackhi_epi64(a[i + j], a[i + 2 + j]);
    }
  // b[4 * q + c] holds, in its 128-bit part p, rows 4q to 4q + 3 of column 4p + c.
#pragma GCC unroll 4
  for (int c = 0; c < 4; c++) {
    __m512i low01 = _mm512_shuffle_i32x4(b[c], b[4 + c], 0x44), high01 = _mm512_shuffle_i32x4(b[c], b[4 + c], 0xee);
    __m512i low23 = _mm512_shuffle_i32x4(b[8 + c], b[12 + c], 0x44), high23 = _mm512_shuffle_i32x4(b[8 + c], b[12 + c], 0xee);
    x[c] = (U)_mm512_shuffle_i32x4(low01, low23, 0x88);
    x[4 + c] = (U)_mm512_shuffle_i32x4(low01, low23, 0xdd);
    x[8 + c] = (U)_mm512_shuffle_i32x4(high01, high23, 0x88);
    x[12 + c] = (U)_mm512_shuffle_i32x4(high01, high23, 0xdd);
  }
}
#elif TIO_IS_AVX2
TIO_INLINE void transpose(U (&x)[W]) {
  __m256i a[8], b[8];
#pragma GCC unroll 4
  for (int i = 0; i < 8; i += 2) {
    a[i] = _mm256_unpacklo_epi32((__m256i)x[i], (__m256i)x[i + 1]);
    a[i + 1] = _mm256_unpackhi_epi32((__m256i)x[i], (__m256i)x[i + 1]);
  }
#pragma GCC unroll 2
  for (int i = 0; i < 8; i += 4)
#pragma GCC unroll 2
    for (int j = 0; j < 2; j++) {
      b[i + 2 * j] = _mm256_unpacklo_epi64(a[i + j], a[i + 2 + j]);
      b[i + 2 * j + 1] = _mm256_unpackhi_epi64(a[i + j], a[i + 2 + j]);
    }
#pragma GCC unroll 4
  for (int c = 0; c < 4; c++) {
    x[c] = (U)_mm256_permute2x128_si256(b[c], b[4 + c], 0x20);
    x[4 + c] = (U)_mm256_permute2x128_si256(b[c], b[4 + c], 0x31);
  }
}
#else
TIO_INLINE void transpose(U (&x)[W]) {
  for (int i = 0; i < W; i++)
    for (int j = 0; j < i; j++) {
      const uint32_t t = x[i][j];
      x[i][j] = x[j][i];
      x[j][i] = t;
    }
}
#endif

TIO_INLINE F zero() { return F{}; }
TIO_INLINE F select(I mask, F yes, F no) { return (F)((mask & (I)yes) | (~mask & (I)no)); }

// bf16 codes of x in the low half of each lane; see from_float<bf16>.
TIO_INLINE U round_to_bf16(F x) {
  U u = (U)x;
  U rounded = (u + (U)set1(0x7fff) + ((u >> 16) & (U)set1(1))) >> 16;
  U nan = (U)(x != x);
  return (nan & ((u >> 16) | (U)set1(0x40))) | (~nan & rounded);
}
#if TIO_IS_AVX512
TIO_INLINE void store(bf16* p, F x) { _mm256_storeu_si256((__m256i*)p, _mm512_cvtepi32_epi16((__m512i)round_to_bf16(x))); }
TIO_INLINE void store(bf16* p, F x, int n) { _mm256_mask_storeu_epi16(p, __mmask16((1u << n) - 1), _mm512_cvtepi32_epi16((__m512i)round_to_bf16(x))); }
#else
#if TIO_IS_AVX2
TIO_INLINE void store(bf16* p, F x) {
  __m256i u = (__m256i)round_to_bf16(x);
  _mm_storeu_si128((__m128i*)p, _mm256_castsi256_si128(_mm256_permute4x64_epi64(_mm256_packus_epi32(u, u), 0x08)));
}
#else
TIO_INLINE void store(bf16* p, F x) {
  U u = round_to_bf16(x);
  for (int i = 0; i < W; i++) p[i].bits = uint16_t(u[i]);
}
#endif
TIO_INLINE void store(bf16* p, F x, int n) {
  U u = round_to_bf16(x);
  for (int i = 0; i < n; i++) p[i].bits = uint16_t(u[i]);
}
#endif

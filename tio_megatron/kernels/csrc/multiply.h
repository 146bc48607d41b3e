// The inner product loop of attention: chains of fma side by side in registers. Included inside a body, after vec.h: no guard.

// Rows taken together, each of some vectors: enough chains to hide the latency of fma.
constexpr int kRows = W == 16 ? 8 : 4;

// acc[r][n] continued over k in [k0, k1): fma(a[r + k * a_step], b[k * b_step + column], .), column W * n + lane.
// `ahead`: memory that will be read next, a share of it (a full block's bytes over all terms and passes) fetched with every term.
template <int R, int N, class B>
TIO_INLINE void multiply(const float* a, int64_t a_step, const B* b, int64_t b_step, int k0, int k1, F (&acc)[R][N], const char* ahead = nullptr) {
  constexpr int lines = int(sizeof(B)) * N * W / 64;
  for (int k = k0; k < k1; k++) {
    if (ahead)
#pragma GCC unroll 4
      for (int l = 0; l < (lines ? lines : 1); l++) __builtin_prefetch(ahead + (k * (lines ? lines : 1) + l) * 64);
    F bk[N];
#pragma GCC unroll 8
    for (int n = 0; n < N; n++) bk[n] = load(b + k * b_step + n * W);
#pragma GCC unroll 16
    for (int r = 0; r < R; r++) {
      const F ak = set1(a[r + k * a_step]);
#pragma GCC unroll 8
      for (int n = 0; n < N; n++) acc[r][n] = fma(ak, bk[n], acc[r][n]);
    }
  }
}

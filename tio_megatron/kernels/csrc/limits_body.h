// What one core can do at most, for benchmarks.

// `rounds` times 24 independent vector fma, enough to fill every pipeline; returns something that depends on all.
TIO_FN float fma_rounds(int64_t rounds) {
  constexpr int n = W == 16 ? 24 : 12;
  F acc[n], x = set1(0.999f), y = set1(1e-3f);
  for (int i = 0; i < n; i++) acc[i] = set1(float(i));
  for (int64_t r = 0; r < rounds; r++)
#pragma GCC unroll 24
    for (int i = 0; i < n; i++) acc[i] = fma(acc[i], x, y);
  F sum = acc[0];
  for (int i = 1; i < n; i++) sum = sum + acc[i];
  return sum[0];
}
TIO_FN double operations_of(int64_t rounds) { return 2.0 * double(rounds) * W * (W == 16 ? 24 : 12); }

// Reads `bytes` (a multiple of 1024) in ascending order.
TIO_FN int32_t read_memory(const char* from, int64_t bytes) {
  I acc[4] = {};
  for (int64_t at = 0; at < bytes; at += 1024) {
    __builtin_prefetch(from + at + 4096);
#pragma GCC unroll 32
    for (int i = 0; i < 1024; i += 4 * W) acc[(i / (4 * W)) % 4] ^= (I)load((const float*)(from + at + i));
  }
  I sum = acc[0] ^ acc[1] ^ acc[2] ^ acc[3];
  return sum[0];
}

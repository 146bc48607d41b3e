// W vectors of W numbers, turned: afterwards lane j of vector i is what lane i of vector j was. Moves only. Included inside a body, after
// vec.h: no guard. Halves, quarters, ... of the vectors are swapped across the diagonal, log2(W) times.

#if TIO_W == 16
TIO_INLINE void transpose(F* r) {
#pragma GCC unroll 16
  for (int i = 0; i < 8; i++) {
    const F a = r[i], b = r[i + 8];
    r[i] = __builtin_shuffle(a, b, (I){0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23});
    r[i + 8] = __builtin_shuffle(a, b, (I){8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31});
  }
#pragma GCC unroll 16
  for (int n = 0; n < 8; n++) {
    const int i = (n & 4) * 2 + (n & 3);
    const F a = r[i], b = r[i + 4];
    r[i] = __builtin_shuffle(a, b, (I){0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27});
    r[i + 4] = __builtin_shuffle(a, b, (I){4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31});
  }
#pragma GCC unroll 16
  for (int n = 0; n < 8; n++) {
    const int i = (n & 6) * 2 + (n & 1);
    const F a = r[i], b = r[i + 2];
    r[i] = __builtin_shuffle(a, b, (I){0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29});
    r[i + 2] = __builtin_shuffle(a, b, (I){2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31});
  }
#pragma GCC unroll 16
  for (int n = 0; n < 8; n++) {
    const F a = r[2 * n], b = r[2 * n + 1];
    r[2 * n] = __builtin_shuffle(a, b, (I){0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30});
    r[2 * n + 1] = __builtin_shuffle(a, b, (I){1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11, 27, 13, 29, 15, 31});
  }
}
#else
TIO_INLINE void transpose(F* r) {
#pragma GCC unroll 16
  for (int i = 0; i < 4; i++) {
    const F a = r[i], b = r[i + 4];
    r[i] = __builtin_shuffle(a, b, (I){0, 1, 2, 3, 8, 9, 10, 11});
    r[i + 4] = __builtin_shuffle(a, b, (I){4, 5, 6, 7, 12, 13, 14, 15});
  }
#pragma GCC unroll 16
  for (int n = 0; n < 4; n++) {
    const int i = (n & 2) * 2 + (n & 1);
    const F a = r[i], b = r[i + 2];
    r[i] = __builtin_shuffle(a, b, (I){0, 1, 8, 9, 4, 5, 12, 13});
    r[i + 2] = __builtin_shuffle(a, b, (I){2, 3, 10, 11, 6, 7, 14, 15});
  }
#pragma GCC unroll 16
  for (int n = 0; n < 4; n++) {
    const F a = r[2 * n], b = r[2 * n + 1];
    r[2 * n] = __builtin_shuffle(a, b, (I){0, 8, 2, 10, 4, 12, 6, 14});
    r[2 * n + 1] = __builtin_shuffle(a, b, (I){1, 9, 3, 11, 5, 13, 7, 15});
  }
}
#endif

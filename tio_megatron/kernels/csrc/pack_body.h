// Between matrices in memory and the forms the product reads: panels of a weight, fp32 rows of an activation. Moves numbers, adds none.

alignas(64) constexpr float kZeros[kChain] = {};

// Where column j of a weight's panel lies inside a row of the panel.
TIO_INLINE int place(float*, int j) { return j; }
TIO_INLINE int place(bf16*, int j) { return j < 16 ? 2 * j : 2 * (j - 16) + 1; }

// Squares of a weight whose terms are contiguous (column j from `column(j)` on), starting at term k: rows k to k + step(T) of the panel.
constexpr int step(float*) { return W; }
constexpr int step(bf16*) { return 2 * W; }

template <class T>
struct Columns {
  const T* from;
  int64_t row;
  int count;
  // A missing column reads zeros.
  TIO_INLINE const T* at(int j, int k) const { return j < count ? from + j * row + k : reinterpret_cast<const T*>(kZeros) + k; }
};

// 32 columns are 32 streams, too many for the processor to foresee.
TIO_INLINE void fetch(const void* now) { __builtin_prefetch(static_cast<const char*>(now) + 128); }

TIO_INLINE void pack_squares(const Columns<float>& columns, int k, float* to) {
  for (int j = 0; j < kPanel; j += W) {
    U x[W];
#pragma GCC unroll 16
    for (int i = 0; i < W; i++) {
      const float* from = columns.at(j + i, k);
      fetch(from);
      x[i] = load_words(from);
    }
    transpose(x);
#pragma GCC unroll 16
    for (int i = 0; i < W; i++) store_words(to + i * kPanel + j, x[i]);
  }
}

// A word of memory holds two terms of one column, a word of a panel one term of two columns.
TIO_INLINE void pack_squares(const Columns<bf16>& columns, int k, bf16* to) {
  for (int j = 0; j < 16; j += W) {
    U even[W], odd[W];
#pragma GCC unroll 16
    for (int i = 0; i < W; i++) {
      const bf16 *low = columns.at(j + i, k), *high = columns.at(j + i + 16, k);
      fetch(low);
      fetch(high);
      const U a = load_words(low), b = load_words(high);
      even[i] = (a & 0xffffu) | (b << 16);
      odd[i] = (a >> 16) | (b & 0xffff0000u);
    }
    transpose(even);
#pragma GCC unroll 16
    for (int i = 0; i < W; i++) store_words(to + (2 * i) * kPanel + 2 * j, even[i]);
    transpose(odd);
#pragma GCC unroll 16
    for (int i = 0; i < W; i++) store_words(to + (2 * i + 1) * kPanel + 2 * j, odd[i]);
  }
}

TIO_INLINE void unpack_squares(const float* from, const Columns<float>& columns, int k) {
  for (int j = 0; j < kPanel; j += W) {
    U x[W];
#pragma GCC unroll 16
    for (int i = 0; i < W; i++) x[i] = load_words(from + i * kPanel + j);
    transpose(x);
    for (int i = 0; i < W && j + i < columns.count; i++) store_words(const_cast<float*>(columns.at(j + i, k)), x[i]);
  }
}
TIO_INLINE void unpack_squares(const bf16* from, const Columns<bf16>& columns, int k) {
  for (int j = 0; j < 16; j += W) {
    U even[W], odd[W];
#pragma GCC unroll 16
    for (int i = 0; i < W; i++) {
      even[i] = load_words(from + (2 * i) * kPanel + 2 * j);
      odd[i] = load_words(from + (2 * i + 1) * kPanel + 2 * j);
    }
    transpose(even);
    transpose(odd);
    for (int i = 0; i < W; i++) {
      if (j + i < columns.count) store_words(const_cast<bf16*>(columns.at(j + i, k)), (even[i] & 0xffffu) | (odd[i] << 16));
      if (j + i + 16 < columns.count) store_words(const_cast<bf16*>(columns.at(j + i + 16, k)), (even[i] >> 16) | (odd[i] & 0xffff0000u));
    }
  }
}

TIO_INLINE void pack_row(const float* from, float* to) { std::memcpy(to, from, kPanel * sizeof(float)); }
TIO_INLINE void pack_row(const bf16* from, bf16* to) {
  for (int j = 0; j < 16; j += W) store_words(to + 2 * j, ((U)load(from + j) >> 16) | (U)load(from + j + 16));
}

// At most kChain terms of `count` columns into [terms][32]; columns past the last become zero.
template <class T>
TIO_INLINE void pack_piece(const T* from, int64_t row, int64_t col, int count, int terms, T* to) {
  int k = 0;
  if (col == 1) {
    const Columns<T> columns{from, row, count};
    for (; k + step(to) <= terms; k += step(to)) pack_squares(columns, k, to + k * kPanel);
  } else if (row == 1 && count == kPanel) {
    for (; k < terms; k++) pack_row(from + k * col, to + k * kPanel);
  }
  for (; k < terms; k++)
    for (int j = 0; j < kPanel; j++) to[k * kPanel + place(to, j)] = j < count ? from[j * row + k * col] : T{};
}

template <class T>
TIO_FN void pack_chunk(const T* from, int64_t row, int64_t col, int count, const Chunk& chunk, T* to) {
  pack_piece(from + chunk.begin[0] * col, row, col, count, chunk.split, to);
  if (chunk.split < chunk.length) pack_piece(from + chunk.begin[1] * col, row, col, count, chunk.length - chunk.split, to + chunk.split * kPanel);
}

// A whole panel.
template <class T>
TIO_FN void pack_panel(const T* from, int64_t row, int64_t col, int count, int64_t terms, T* to) {
  for (int64_t k = 0; k < terms; k += kChain) pack_piece(from + k * col, row, col, count, int(terms - k < kChain ? terms - k : kChain), to + k * kPanel);
}

// The inverse, to columns of contiguous terms.
template <class T>
TIO_FN void unpack_panel(const T* from, int count, int64_t terms, T* to, int64_t row) {
  for (int64_t k0 = 0; k0 < terms; k0 += kChain) {
    const int here = int(terms - k0 < kChain ? terms - k0 : kChain);
    const Columns<T> columns{to + k0, row, count};
    const T* panel = from + k0 * kPanel;
    int k = 0;
    for (; k + step(to) <= here; k += step(to)) unpack_squares(panel + k * kPanel, columns, k);
    for (; k < here; k++)
      for (int j = 0; j < count; j++) to[j * row + k0 + k] = panel[k * kPanel + place(to, j)];
  }
}

// `terms` terms of `rows` rows of an activation to fp32, into rows of kChain.
template <class T>
TIO_INLINE void convert_piece(const T* from, int64_t row, int64_t col, int64_t rows, int terms, float* to) {
  int64_t i = 0;
  if (row == 1 && col != 1)
    for (; i + W <= rows; i += W) {
      int k = 0;
      for (; k + W <= terms; k += W) {
        U x[W];
#pragma GCC unroll 16
        for (int t = 0; t < W; t++) x[t] = (U)load(from + i + (k + t) * col);
        transpose(x);
#pragma GCC unroll 16
        for (int t = 0; t < W; t++) store_words(to + (i + t) * kChain + k, x[t]);
      }
      for (; k < terms; k++)
        for (int t = 0; t < W; t++) to[(i + t) * kChain + k] = to_float(from[i + t + k * col]);
    }
  for (; i < rows; i++) {
    const T* x = from + i * row;
    float* y = to + i * kChain;
    int k = 0;
    if (col == 1)
      for (; k + W <= terms; k += W) store(y + k, load(x + k));
    for (; k < terms; k++) y[k] = to_float(x[k * col]);
  }
}
template <class T>
TIO_FN void convert_chunk(const T* from, int64_t row, int64_t col, int64_t rows, const Chunk& chunk, float* to) {
  convert_piece(from + chunk.begin[0] * col, row, col, rows, chunk.split, to);
  if (chunk.split < chunk.length) convert_piece(from + chunk.begin[1] * col, row, col, rows, chunk.length - chunk.split, to + chunk.split);
}

// fp32 rows to the output, rounded to its type.
template <class T>
TIO_FN void write_rows(const float* from, int64_t from_row, int64_t rows, int64_t columns, T* to, int64_t to_row) {
  for (int64_t i = 0; i < rows; i++) {
    int64_t j = 0;
    for (; j + W <= columns; j += W) store(to + i * to_row + j, load(from + i * from_row + j));
    if (j < columns) store(to + i * to_row + j, load(from + i * from_row + j, int(columns - j)), int(columns - j));
  }
}

#include "pack_body.h"
// The product inside one task. An output element is one chain of fma per chunk, so tiles and tasks may have any shape.

// Rows taken together: enough independent chains to hide the latency of fma, few enough for the registers.
constexpr int kRows = W == 16 ? 12 : 6;

// Bytes of converted a that stay in the second-level cache beside the panel being read.
constexpr int64_t kCached = 256 << 10;

// How far ahead of the arithmetic a weight is fetched. A panel follows another in memory, so this also fetches the next one.
constexpr int kAhead = 8 << 10;

// Lanes c to c + W of both halves of a panel's row.
TIO_INLINE void load_pair(const float* row, int c, F& low, F& high) {
  low = load(row + c);
  high = load(row + 16 + c);
}
TIO_INLINE void load_pair(const bf16* row, int c, F& low, F& high) {
  const U both = load_words(row + 2 * c);
  low = (F)(both << 16);
  high = (F)(both & 0xffff0000u);
}

// R rows by one panel, one chunk: the chains, then the folds with the stack. Stack: [depth][row][column].
template <int R, class T>
TIO_INLINE void tile(const float* a, const T* b, const Chunk& chunk, float* stack, int64_t level, int64_t stack_row) {
  // A panel at once where the registers allow, else in two passes.
  constexpr int lanes = R * kPanel / W <= 2 * kRows ? 16 : W, pairs = lanes / W;
  for (int c = 0; c < 16; c += lanes) {
    F acc[R][2 * pairs];
#pragma GCC unroll 16
    for (int i = 0; i < R; i++)
#pragma GCC unroll 4
      for (int j = 0; j < 2 * pairs; j++) acc[i][j] = zero();
    for (int k = 0; k < chunk.length; k++) {
      const T* row = b + k * kPanel;
      F bk[2 * pairs];
      __builtin_prefetch(reinterpret_cast<const char*>(row) + kAhead);
      if (sizeof(T) == 4) __builtin_prefetch(reinterpret_cast<const char*>(row) + kAhead + 64);
#pragma GCC unroll 2
      for (int j = 0; j < pairs; j++) load_pair(row, c + j * W, bk[2 * j], bk[2 * j + 1]);
#pragma GCC unroll 16
      for (int i = 0; i < R; i++) {
        const F ak = set1(a[i * kChain + k]);
#pragma GCC unroll 4
        for (int j = 0; j < 2 * pairs; j++) acc[i][j] = fma(ak, bk[j], acc[i][j]);
      }
    }
    int height = chunk.depth;
#pragma GCC unroll 16
    for (int i = 0; i < R; i++)
#pragma GCC unroll 4
      for (int j = 0; j < 2 * pairs; j++) {
        // Register j holds the columns from here on.
        float* at = stack + i * stack_row + (j & 1) * 16 + c + (j >> 1) * W;
        F sum = acc[i][j];
        for (int m = 1; m <= chunk.merges; m++) sum = load(at + (height - m) * level) + sum;
        store(at + (height - chunk.merges) * level, sum);
      }
  }
}

template <class T>
TIO_FN void tile_rows(int rows, const float* a, const T* b, const Chunk& chunk, float* stack, int64_t level, int64_t stack_row) {
  switch (rows) {
#define TIO_CASE(R)                                                                       \
  case R:                                                                                 \
    if constexpr (R <= kRows) tile<R>(a, b, chunk, stack, level, stack_row); \
    break;
    TIO_CASE(1) TIO_CASE(2) TIO_CASE(3) TIO_CASE(4) TIO_CASE(5) TIO_CASE(6)
    TIO_CASE(7) TIO_CASE(8) TIO_CASE(9) TIO_CASE(10) TIO_CASE(11) TIO_CASE(12)
#undef TIO_CASE
  }
}

// One chunk of panel p: where it lies in a packed weight, or a copy made now.
template <class T>
TIO_INLINE const T* chunk_of(const Weight& weight, int64_t terms, int64_t p, const Chunk& chunk, T* scratch) {
  const T* b = static_cast<const T*>(weight.b.data);
  if (weight.packed) return b + (p * terms + chunk.begin[0]) * kPanel;
  const int64_t n = p * kPanel, left = weight.columns - n;
  pack_chunk(b + n * weight.b.row, weight.b.row, weight.b.col, int(left < kPanel ? left : kPanel), chunk, scratch);
  return scratch;
}

template <class T>
TIO_FN void run_task(const Product& product, const Task& task, float* stack, void* scratch) {
  const Weight& weight = *task.weight;
  const int64_t rows = task.row1 - task.row0, blocks = (rows + kRows - 1) / kRows;
  // With few rows every chunk of a is at hand in the cache: panels are then walked one by one, so that a packed weight is read front
  // to back. With many rows one chunk of a serves all panels of the task before the next one is fetched.
  const int64_t walk = rows * product.terms * int64_t(sizeof(float)) <= kCached ? 1 : task.panel1 - task.panel0;
  for (int64_t first = task.panel0; first < task.panel1; first += walk) {
    const int64_t columns = walk * kPanel, level = rows * columns;
    for (size_t c = 0; c < product.order->chunks.size(); c++) {
      const Chunk& chunk = product.order->chunks[c];
      const float* a = product.a + (int64_t(c) * product.a_rows + task.row0 - product.a_first) * kChain;
      for (int64_t p = 0; p < walk; p++) {
        const T* b = chunk_of(weight, product.terms, first + p, chunk, static_cast<T*>(scratch));
        for (int64_t i = 0; i < blocks; i++) {
          const int64_t r0 = rows * i / blocks, r1 = rows * (i + 1) / blocks;
          tile_rows(int(r1 - r0), a + r0 * kChain, b, chunk, stack + p * kPanel + r0 * columns, level, columns);
        }
      }
    }
    const int64_t n = first * kPanel, left = weight.columns - n, at = task.row0 * product.c.row + n;
    const int64_t width = left < columns ? left : columns;
    if (product.c.type == kBFloat16) write_rows(stack, columns, rows, width, static_cast<bf16*>(product.c.data) + at, product.c.row);
    else write_rows(stack, columns, rows, width, static_cast<float*>(product.c.data) + at, product.c.row);
  }
}

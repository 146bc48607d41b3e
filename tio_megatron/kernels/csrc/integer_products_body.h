#include "counts.h"
// Sums of products over tokens inside one task. All grains of an output tile pass before the next tile.

// Rows (columns of dy) and columns (columns of x) of a tile: its chains hide the latency of fma and fill the registers.
constexpr int kTileRows = W == 16 ? 12 : 6, kTileColumns = 2 * W;

// Grains from which on a tile's counts are summed in a place of their own.
constexpr int kTileGrains = 8;

TIO_FN int tile_rows_of() { return kTileRows; }
TIO_FN int tile_columns_of() { return kTileColumns; }

// Columns [0, columns) of rows order[0..rows) to fp32, as [tile][row][width]; columns past the last become zero.
template <int width, class T>
TIO_INLINE void pack_tiles(const T* from, int64_t stride, const int64_t* order, int64_t rows, int64_t columns, float* to) {
  for (int64_t r = 0; r < rows; r++) {
    const T* row = from + (order ? order[r] : r) * stride;
    for (int64_t c = 0; c < columns; c += width) {
      float* tile = to + c * rows + r * width;
      const int n = int(columns - c < width ? columns - c : width);
      for (int j = 0; j < width; j += W) {
        const int here = n - j < 0 ? 0 : n - j < W ? n - j : W, room = width - j < W ? width - j : W;
        const F x = here == W ? load(row + c + j) : load(row + c + j, here);
        if (room == W) store(tile + j, x);
        else store(tile + j, x, room);
      }
    }
  }
}
template <class T>
TIO_FN void pack_left(const T* from, int64_t stride, const int64_t* order, int64_t rows, int64_t columns, float* to) {
  pack_tiles<kTileRows>(from, stride, order, rows, columns, to);
}
template <class T>
TIO_FN void pack_right(const T* from, int64_t stride, const int64_t* order, int64_t rows, int64_t columns, float* to) {
  pack_tiles<kTileColumns>(from, stride, order, rows, columns, to);
}

// One chain from +0: `terms` rows of both packed operands.
template <int R>
TIO_INLINE void chain_tile(const float* a, const float* b, int64_t terms, F (&acc)[R][2]) {
#pragma GCC unroll 16
  for (int i = 0; i < R; i++) acc[i][0] = acc[i][1] = zero();
  for (int64_t k = 0; k < terms; k++) {
    const F b0 = load(b + k * kTileColumns), b1 = load(b + k * kTileColumns + W);
#pragma GCC unroll 16
    for (int i = 0; i < R; i++) {
      const F ak = set1(a[k * kTileRows + i]);
      acc[i][0] = fma(ak, b0, acc[i][0]);
      acc[i][1] = fma(ak, b1, acc[i][1]);
    }
  }
}

// The partial of one grain, its chains joined by the tree. Stack: [depth][row][column].
template <int R>
TIO_INLINE void grain_tile(const float* a, const float* b, int64_t terms, float* stack, F (&acc)[R][2]) {
  if (terms <= kChain) return chain_tile<R>(a, b, terms, acc);
  constexpr int level = kTileRows * kTileColumns;
  const int64_t chains = (terms + kChain - 1) / kChain;
  int height = 0;
  for (int64_t c = 0; c < chains; c++) {
    const int64_t k = c * kChain;
    chain_tile<R>(a + k * kTileRows, b + k * kTileColumns, terms - k < kChain ? terms - k : kChain, acc);
    const int merges = merges_after(c, chains);
#pragma GCC unroll 16
    for (int i = 0; i < R; i++)
#pragma GCC unroll 2
      for (int j = 0; j < 2; j++) {
        float* at = stack + i * kTileColumns + j * W;
        F sum = acc[i][j];
        for (int m = 1; m <= merges; m++) sum = load(at + (height - m) * level) + sum;
        store(at + (height - merges) * level, sum);
        acc[i][j] = sum;
      }
    height += 1 - merges;
  }
}

// A partial of a tile that is large or not finite somewhere: one by one.
__attribute__((noinline, cold)) TIO_FN void add_large(const float* partial, int rows, int columns, const Grid& grid, int64_t* low, int64_t low_row, int64_t* high,
                                                      int64_t high_row) {
  for (int i = 0; i < rows; i++)
    for (int j = 0; j < columns; j++) {
      const float p = partial[i * kTileColumns + j];
      int64_t* to = low + i * low_row + j;
      if (magnitude_bits(p) < grid.large) *to = int64_t(uint64_t(*to) + grid.count(p));
      else high[i * high_row + j] += grid.high_count(p);
    }
}

// Adds a tile of counts to the target.
TIO_FN void add_tile(const int64_t* tile, int rows, int columns, int64_t* low, int64_t low_row) {
  for (int i = 0; i < rows; i++, low += low_row, tile += kTileColumns) {
    int j = 0;
    for (; j + W / 2 <= columns; j += W / 2) store_long(low + j, load_long(low + j) + load_long(tile + j));
    for (; j < columns; j++) low[j] = int64_t(uint64_t(low[j]) + uint64_t(tile[j]));
  }
}

// All grains of one tile, each partial added to `low`: the target, or a tile that is whole. Returns the bits of the largest |partial|.
template <int R>
TIO_INLINE uint32_t sum_tile(const float* a, const float* b, const IntegerTask& task, int columns, float* stack, int64_t* low, int64_t low_row, int64_t* high) {
  const IntegerTarget& target = *task.target;
  const D scale = set1_double(target.grid.scale);
  const I large = set1(int32_t(target.grid.large));
  I peak = set1(0);
  for (int64_t g = task.grain0; g < task.grain1; g++) {
    const int64_t first = task.starts[g] - task.row0, terms = task.starts[g + 1] - task.starts[g];
    if (!terms) continue;
    F acc[R][2];
    grain_tile<R>(a + first * kTileRows, b + first * kTileColumns, terms, stack, acc);
    I top = set1(0);
#pragma GCC unroll 16
    for (int i = 0; i < R; i++) top = larger(top, larger(magnitude(acc[i][0]), magnitude(acc[i][1])));
    peak = larger(peak, top);
    if (__builtin_expect(any_at_least(top, large), 0)) {
#pragma GCC unroll 16
      for (int i = 0; i < R; i++) {
        store(stack + i * kTileColumns, acc[i][0]);
        store(stack + i * kTileColumns + W, acc[i][1]);
      }
      add_large(stack, R, columns, target.grid, low, low_row, high, target.high_row);
      continue;
    }
#pragma GCC unroll 16
    for (int i = 0; i < R; i++)
#pragma GCC unroll 2
      for (int j = 0; j < 2; j++) {
        int64_t* at = low + i * low_row + j * W;
        L one, two;
        shifted(acc[i][j], scale, one, two);
        store_long(at, load_long(at) + one - set1_long(kCountBits));
        store_long(at + W / 2, load_long(at + W / 2) + two - set1_long(kCountBits));
      }
  }
  return largest(peak);
}

// Scratch: the stack of grain_tile, and a tile of counts.
TIO_FN uint32_t sum_task(const IntegerTask& task, float* stack, int64_t* tile) {
  uint32_t peak = 0;
  const IntegerTarget& target = *task.target;
  for (int64_t n = task.left0; n < task.left1; n += kTileRows)
    for (int64_t k = task.right0; k < task.right1; k += kTileColumns) {
      const int rows = int(task.left1 - n < kTileRows ? task.left1 - n : kTileRows), columns = int(task.right1 - k < kTileColumns ? task.right1 - k : kTileColumns);
      const float *a = task.left + (n - task.left_first) * task.rows, *b = task.right + (k - task.right_first) * task.rows;
      int64_t *low = target.low + n * target.low_row + k, *high = target.high + n * target.high_row + k;
      for (int i = 0; i < rows; i++) {
        const char* line = reinterpret_cast<const char*>(low + i * target.low_row);
        for (int64_t at = 0; at < columns * 8; at += 64) __builtin_prefetch(line + at, 1);
      }
      // Rows of the target lie apart, which makes their lines displace each other in the cache: a tile pays from some grains on.
      const bool apart = task.grain1 - task.grain0 >= kTileGrains || columns < kTileColumns;
      if (apart) std::memset(tile, 0, sizeof(int64_t) * kTileRows * kTileColumns);
      int64_t *to = apart ? tile : low, to_row = apart ? kTileColumns : target.low_row;
      uint32_t found = 0;
      switch (rows) {
#define TIO_CASE(R)                                                                                         \
  case R:                                                                                                   \
    if constexpr (R <= kTileRows) found = sum_tile<R>(a, b, task, columns, stack, to, to_row, high); \
    break;
        TIO_CASE(1) TIO_CASE(2) TIO_CASE(3) TIO_CASE(4) TIO_CASE(5) TIO_CASE(6)
        TIO_CASE(7) TIO_CASE(8) TIO_CASE(9) TIO_CASE(10) TIO_CASE(11) TIO_CASE(12)
#undef TIO_CASE
      }
      if (apart) add_tile(tile, rows, columns, low, target.low_row);
      peak = found > peak ? found : peak;
    }
  return peak;
}

// The product inside one task. An output element is one chain of fma per chunk, so tiles and tasks may have any shape.

// Rows taken together: enough independent chains to hide the latency of fma, few enough for the registers.
constexpr int kRows = W == 16 ? 12 : 6;

// Panels taken together by a tile of few rows, for the same reason.
constexpr int panels_for(int rows) { return rows == 1 ? 4 : rows <= 4 ? 2 : 1; }

TIO_INLINE void load_pair(const float* b, F& low, F& high) {
  low = load(b);
  high = load(b + 16);
}
TIO_INLINE void load_pair(const bf16* b, F& low, F& high) {
  U both;
  std::memcpy(&both, b, sizeof both);
  low = (F)(both << 16);
  high = (F)(both & 0xffff0000u);
}
// Where lane `c` of the pair starts inside a row of a panel.
TIO_INLINE const float* at_lane(const float* b, int c) { return b + c; }
TIO_INLINE const bf16* at_lane(const bf16* b, int c) { return b + 2 * c; }

// R rows by P panels, one chunk: the chains, then the folds with the stack. Stack: [depth][row][column].
template <int R, int P, class T>
TIO_INLINE void tile(const float* a, const T* b, int64_t b_panel, const Chunk& chunk, float* stack, int64_t level, int64_t stack_row) {
  for (int c = 0; c < 16; c += W) {
    F acc[R][2 * P];
#pragma GCC unroll 16
    for (int i = 0; i < R; i++)
#pragma GCC unroll 8
      for (int j = 0; j < 2 * P; j++) acc[i][j] = zero();
    const T* at = at_lane(b, c);
    for (int k = 0; k < chunk.length; k++) {
      F bk[2 * P];
#pragma GCC unroll 8
      for (int p = 0; p < P; p++) load_pair(at + p * b_panel + k * kPanel, bk[2 * p], bk[2 * p + 1]);
#pragma GCC unroll 16
      for (int i = 0; i < R; i++) {
        F ak = set1(a[i * kChain + k]);
#pragma GCC unroll 8
        for (int j = 0; j < 2 * P; j++) acc[i][j] = fma(ak, bk[j], acc[i][j]);
      }
    }
    int height = chunk.depth;
    for (int m = 0; m < chunk.merges; m++) {
      height--;
#pragma GCC unroll 16
      for (int i = 0; i < R; i++)
#pragma GCC unroll 8
        for (int j = 0; j < 2 * P; j++) acc[i][j] = load(stack + height * level + i * stack_row + j * 16 + c) + acc[i][j];
    }
#pragma GCC unroll 16
    for (int i = 0; i < R; i++)
#pragma GCC unroll 8
      for (int j = 0; j < 2 * P; j++) store(stack + height * level + i * stack_row + j * 16 + c, acc[i][j]);
  }
}

template <int P, class T>
TIO_FN void tile_rows(int rows, const float* a, const T* b, int64_t b_panel, const Chunk& chunk, float* stack, int64_t level, int64_t stack_row) {
  switch (rows) {
#define TIO_CASE(R)                                                          \
  case R:                                                                    \
    if constexpr (R <= kRows && P <= panels_for(R)) tile<R, P>(a, b, b_panel, chunk, stack, level, stack_row); \
    break;
    TIO_CASE(1) TIO_CASE(2) TIO_CASE(3) TIO_CASE(4) TIO_CASE(5) TIO_CASE(6) TIO_CASE(7) TIO_CASE(8) TIO_CASE(9) TIO_CASE(10) TIO_CASE(11) TIO_CASE(12)
#undef TIO_CASE
  }
}

// Column j of a panel goes to this place of its row.
TIO_INLINE int place(float*, int j) { return j; }
TIO_INLINE int place(bf16*, int j) { return j < 16 ? 2 * j : 2 * (j - 16) + 1; }

// [columns, terms] of a matrix into [terms][32]; columns past the last become zero.
template <class T>
TIO_FN void pack_panel(const T* from, int64_t row, int64_t col, int columns, int64_t terms, T* to) {
  if (columns < kPanel) std::memset(to, 0, sizeof(T) * terms * kPanel);
  for (int64_t k = 0; k < terms; k++)
    for (int j = 0; j < columns; j++) to[k * kPanel + place(to, j)] = from[j * row + k * col];
}

// The inverse.
template <class T>
TIO_FN void unpack_panel(const T* from, int columns, int64_t terms, T* to, int64_t row) {
  for (int j = 0; j < columns; j++)
    for (int64_t k = 0; k < terms; k++) to[j * row + k] = from[k * kPanel + place((T*)nullptr, j)];
}

// One chunk of rows [row0, row1) to fp32.
template <class T>
TIO_FN void convert_chunk(const T* from, int64_t row, int64_t col, int64_t rows, const Chunk& chunk, float* to) {
  for (int64_t i = 0; i < rows; i++) {
    const T* x = from + i * row + chunk.begin * col;
    float* y = to + i * kChain;
    int k = 0;
    if (col == 1)
      for (; k + W <= chunk.length; k += W) store(y + k, load(x + k));
    for (; k < chunk.length; k++) y[k] = to_float(x[k * col]);
  }
}

template <class T>
TIO_FN void write_rows(const float* from, int64_t from_row, int64_t rows, int64_t columns, T* to, int64_t to_row) {
  for (int64_t i = 0; i < rows; i++) {
    int64_t j = 0;
    for (; j + W <= columns; j += W) store(to + i * to_row + j, load(from + i * from_row + j));
    if (j < columns) store(to + i * to_row + j, load(from + i * from_row + j), int(columns - j));
  }
}

template <class T>
TIO_FN void run_task(const Product& product, const Task& task, float* stack, void* panel_scratch) {
  const Weight& weight = *task.weight;
  int64_t rows = task.row1 - task.row0, columns = (task.panel1 - task.panel0) * kPanel, level = rows * columns;
  int64_t blocks = (rows + kRows - 1) / kRows;
  int group = panels_for(int(rows < kRows ? rows : kRows));
  for (size_t c = 0; c < product.order->chunks.size(); c++) {
    const Chunk& chunk = product.order->chunks[c];
    const float* a = product.a + (int64_t(c) * product.a_rows + task.row0 - product.a_first) * kChain;
    for (int64_t p = task.panel0; p < task.panel1;) {
      int panels = p + group <= task.panel1 ? group : 1;
      const T* b = static_cast<const T*>(weight.packed) + (p * product.terms + chunk.begin) * kPanel;
      int64_t b_panel = product.terms * kPanel;
      if (weight.raw.data) {
        T* scratch = static_cast<T*>(panel_scratch);
        b_panel = kChain * kPanel;
        for (int i = 0; i < panels; i++) {
          int64_t n = (p + i) * kPanel, left = weight.columns - n;
          const T* from = static_cast<const T*>(weight.raw.data) + n * weight.raw.row + chunk.begin * weight.raw.col;
          pack_panel(from, weight.raw.row, weight.raw.col, int(left < kPanel ? left : kPanel), chunk.length, scratch + i * b_panel);
        }
        b = scratch;
      }
      float* top = stack + (p - task.panel0) * kPanel;
      for (int64_t i = 0; i < blocks; i++) {
        int64_t r0 = rows * i / blocks, r1 = rows * (i + 1) / blocks;
        const float* ai = a + r0 * kChain;
        float* si = top + r0 * columns;
        if (panels == 4) tile_rows<4>(int(r1 - r0), ai, b, b_panel, chunk, si, level, columns);
        else if (panels == 2) tile_rows<2>(int(r1 - r0), ai, b, b_panel, chunk, si, level, columns);
        else tile_rows<1>(int(r1 - r0), ai, b, b_panel, chunk, si, level, columns);
      }
      p += panels;
    }
  }
  int64_t n = task.panel0 * kPanel, left = weight.columns - n, at = task.row0 * product.c.row + n;
  if (left > columns) left = columns;
  if (product.c.type == kBFloat16) write_rows(stack, columns, rows, left, static_cast<bf16*>(product.c.data) + at, product.c.row);
  else write_rows(stack, columns, rows, left, static_cast<float*>(product.c.data) + at, product.c.row);
}

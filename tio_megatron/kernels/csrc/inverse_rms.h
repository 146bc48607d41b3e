// The factor of RMSNorm. The sums of squares of W chains are taken side by side, whichever rows they belong to. Included inside a body,
// after vec.h: no guard.
#include "elementary.h"
#include "chains.h"

template <class T>
struct SquareSource {
  const T* const* rows;
  const T* at[W];
  TIO_INLINE void aim(int lane, int row, int64_t begin) { at[lane] = rows[row] + begin; }
  TIO_INLINE F sum(int length) const { return chains(Squares<T>{at}, length); }
};

// 1 / sqrt(mean of squares + eps) of each row.
template <class T>
TIO_INLINE void inverse_rms(const T* const* x, int rows, int64_t H, float eps, float* parts, float* inverse) {
  SquareSource<T> source{x, {}};
  row_sums(source, rows, H, parts, inverse);
  for (int r = 0; r < rows; r += W) {
    const int n = rows - r < W ? rows - r : W;
    store(inverse + r, set1(1.0f) / sqrt(load(inverse + r, n) / set1(float(H)) + set1(eps)), n);
  }
}

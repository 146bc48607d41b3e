// Vocabulary embedding: rows are moved, the gradient adds tokens in ascending order.
#include "rows.h"

using namespace tio;

namespace {

template <class T>
void add_row(const T* from, int64_t n, float* to) {
  for (int64_t c = 0; c < n; c++) to[c] = to[c] + to_float(from[c]);
}

}  // namespace

// w[V, H] of elements of `size` bytes (row stride in elements) to out[T, H]; zero bytes where the row is not in [first, first + V).
TIO_API int tio_embedding(const int64_t* ids, int64_t T, const void* w, int64_t size, int64_t stride, int64_t V, int64_t H, int64_t first, void* out, int threads) {
#pragma omp parallel for num_threads(useful_threads(threads, T * H)) schedule(static)
  for (int64_t t = 0; t < T; t++) {
    const int64_t row = ids[t] - first;
    char* to = static_cast<char*>(out) + t * H * size;
    if (row >= 0 && row < V) std::memcpy(to, static_cast<const char*>(w) + row * stride * size, size_t(H * size));
    else std::memset(to, 0, size_t(H * size));
  }
  return 0;
}

// dw[V, H] fp32 from dout[T, H]. Threads take columns, so each element's tokens come in order.
TIO_API int tio_embedding_backward(const void* dout, int type, int64_t stride, const int64_t* ids, int64_t T, int64_t V, int64_t H, int64_t first, float* dw, int threads) {
  constexpr int64_t kColumns = 256;
#pragma omp parallel num_threads(useful_threads(threads, T * H))
  {
    FloatMode mode;
#pragma omp for schedule(static)
    for (int64_t c0 = 0; c0 < H; c0 += kColumns) {
      const int64_t n = std::min(kColumns, H - c0);
      for (int64_t v = 0; v < V; v++) std::fill(dw + v * H + c0, dw + v * H + c0 + n, 0.0f);
      for (int64_t t = 0; t < T; t++) {
        const int64_t row = ids[t] - first;
        if (row < 0 || row >= V) continue;
        float* to = dw + row * H + c0;
        if (type == kBFloat16) add_row(static_cast<const bf16*>(dout) + t * stride + c0, n, to);
        else add_row(static_cast<const float*>(dout) + t * stride + c0, n, to);
      }
    }
  }
  return 0;
}

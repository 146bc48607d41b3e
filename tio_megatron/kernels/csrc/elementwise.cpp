// The C interface of elementwise kernels and of the tree's sum over a stack of tensors.
#include "order.h"
#include "pieces.h"

#define TIO_BODY "elementwise_body.h"
#include "for_each_isa.h"

namespace tio {
namespace {

template <class T>
void swiglu(const T* x, T* y, int64_t rows, int64_t n, int threads) {
  in_pieces(rows, 1, n * 3, threads, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; r++) TIO_PICK(swiglu_row<T>)(x + r * 2 * n, x + r * 2 * n + n, y + r * n, n);
  });
}

template <class T>
void swiglu_backward(const T* dy, const T* x, T* dx, int64_t rows, int64_t n, int threads) {
  in_pieces(rows, 1, n * 5, threads, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; r++)
      TIO_PICK(swiglu_row_backward<T>)(dy + r * n, x + r * 2 * n, x + r * 2 * n + n, dx + r * 2 * n, dx + r * 2 * n + n, n);
  });
}

template <class T>
void rope(const Rows<const T>& x, int64_t tokens, int64_t heads, int64_t D, const int64_t* positions, const float* table, int64_t half, float sign, T* y, int threads) {
  in_pieces(tokens, 1, heads * D * 2, threads, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; t++) TIO_PICK(rotate<T>)(x, t * heads, heads, table + positions[t] * 2 * half, half, D, sign, y + t * heads * D);
  });
}

}  // namespace
}  // namespace tio

using namespace tio;

TIO_API int tio_exp(const float* x, float* y, int64_t n, int threads) {
  in_pieces(n, 1024, 2, threads, [&](int64_t begin, int64_t end) { TIO_PICK(map_exp)(x + begin, y + begin, end - begin); });
  return 0;
}

TIO_API int tio_log(const float* x, float* y, int64_t n, int threads) {
  in_pieces(n, 1024, 2, threads, [&](int64_t begin, int64_t end) { TIO_PICK(map_log)(x + begin, y + begin, end - begin); });
  return 0;
}

TIO_API int tio_silu(const void* x, int type, void* y, int64_t n, int threads) {
  auto run = [&](auto zero) {
    using T = decltype(zero);
    const T* from = static_cast<const T*>(x);
    T* to = static_cast<T*>(y);
    in_pieces(n, 1024, 2, threads, [&](int64_t begin, int64_t end) { TIO_PICK(map_silu<T>)(from + begin, to + begin, end - begin); });
  };
  if (type == kBFloat16) run(bf16{});
  else run(0.0f);
  return 0;
}

TIO_API int tio_silu_backward(const void* dy, const void* x, int type, void* dx, int64_t n, int threads) {
  auto run = [&](auto zero) {
    using T = decltype(zero);
    in_pieces(n, 1024, 3, threads, [&](int64_t begin, int64_t end) {
      TIO_PICK(silu_backward<T>)(static_cast<const T*>(dy) + begin, static_cast<const T*>(x) + begin, static_cast<T*>(dx) + begin, end - begin);
    });
  };
  if (type == kBFloat16) run(bf16{});
  else run(0.0f);
  return 0;
}

// x[rows, 2n], gate first, to y[rows, n].
TIO_API int tio_swiglu(const void* x, int type, void* y, int64_t rows, int64_t n, int threads) {
  if (type == kBFloat16) swiglu(static_cast<const bf16*>(x), static_cast<bf16*>(y), rows, n, threads);
  else swiglu(static_cast<const float*>(x), static_cast<float*>(y), rows, n, threads);
  return 0;
}

TIO_API int tio_swiglu_backward(const void* dy, const void* x, int type, void* dx, int64_t rows, int64_t n, int threads) {
  if (type == kBFloat16) swiglu_backward(static_cast<const bf16*>(dy), static_cast<const bf16*>(x), static_cast<bf16*>(dx), rows, n, threads);
  else swiglu_backward(static_cast<const float*>(dy), static_cast<const float*>(x), static_cast<float*>(dx), rows, n, threads);
  return 0;
}

// x[tokens, heads, D] (layout: rows.h) to y, contiguous. Returns 2 if a position is not a row of table[rows, 2 * half].
TIO_API int tio_rope(const void* x, const int64_t* layout, int type, int64_t tokens, int64_t heads, int64_t D, const int64_t* positions, const float* table, int64_t rows,
                     int64_t half, int inverse, void* y, int threads) {
  for (int64_t t = 0; t < tokens; t++)
    if (positions[t] < 0 || positions[t] >= rows) return 2;
  const float sign = inverse ? -1.0f : 1.0f;
  if (type == kBFloat16) rope<bf16>({static_cast<const bf16*>(x), layout[0], layout[1], layout[2]}, tokens, heads, D, positions, table, half, sign, static_cast<bf16*>(y), threads);
  else rope<float>({static_cast<const float*>(x), layout[0], layout[1], layout[2]}, tokens, heads, D, positions, table, half, sign, static_cast<float*>(y), threads);
  return 0;
}

// parts[P, n] to y[n].
TIO_API int tio_tree_add(const float* parts, int64_t P, int64_t n, float* y, int threads) {
  in_pieces(n, 64, P + 1, threads, [&](int64_t begin, int64_t end) { TIO_PICK(tree_columns)(parts, P, n, begin, end, y); });
  return 0;
}

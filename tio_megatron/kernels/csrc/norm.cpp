// RMSNorm's C interface: rows are independent, so threads take tiles of them.
#include "order.h"
#include "rows.h"

namespace tio {
constexpr int kTileRows = 16;
}

#define TIO_BODY "norm_body.h"
#include "for_each_isa.h"

namespace tio {
namespace {

constexpr int kColumns = 512;

struct Weights {
  Scratch<float> scratch;
  Weights(const void* w, int type, int64_t H) : scratch(size_t(H)) {
    if (!scratch.get()) return;
    for (int64_t k = 0; k < H; k++) scratch.get()[k] = type == kBFloat16 ? to_float(static_cast<const bf16*>(w)[k]) : static_cast<const float*>(w)[k];
  }
};

template <class T>
int norm(const Rows<const T>& x, const Rows<const T>* residual, T* total, int64_t rows, int64_t H, const float* w, float eps, T* y, int threads) {
  int failed = 0;
#pragma omp parallel num_threads(useful_threads(threads, rows * H)) reduction(| : failed)
  {
    FloatMode mode;
    Scratch<float> parts(size_t(kTileRows * (H / kRowChain + 1)));
    if (!parts.get()) failed = 1;
#pragma omp for schedule(static)
    for (int64_t r0 = 0; r0 < rows; r0 += kTileRows) {
      if (failed) continue;
      const int n = int(std::min<int64_t>(kTileRows, rows - r0));
      const T *at[kTileRows], *more[kTileRows];
      T* sum[kTileRows];
      for (int i = 0; i < n; i++) {
        at[i] = x[r0 + i];
        if (!residual) continue;
        more[i] = (*residual)[r0 + i];
        sum[i] = total + (r0 + i) * H;
      }
      if (residual) {
        TIO_PICK(add_rows<T>)(at, more, sum, n, H);
        for (int i = 0; i < n; i++) at[i] = sum[i];
      }
      TIO_PICK(norm_rows<T>)(at, n, H, w, eps, y + r0 * H, parts.get());
    }
  }
  return failed;
}

template <class T>
int backward(const Rows<const T>& dy, const Rows<const T>& x, int64_t rows, int64_t H, const float* w, float eps, T* dx, float* dw, int threads) {
  Scratch<float> inverse(size_t(rows + kTileRows));
  if (!inverse.get()) return 1;
  const int64_t chunks = (rows + kRowChain - 1) / kRowChain;
  int failed = 0;
#pragma omp parallel num_threads(useful_threads(threads, rows * H)) reduction(| : failed)
  {
    FloatMode mode;
    Scratch<float> parts(size_t(kTileRows * (H / kRowChain + 1))), stack(size_t(70 * kColumns));
    if (!parts.get() || !stack.get()) failed = 1;
#pragma omp for schedule(static)
    for (int64_t r0 = 0; r0 < rows; r0 += kTileRows) {
      if (failed) continue;
      const int n = int(std::min<int64_t>(kTileRows, rows - r0));
      const T *dy_at[kTileRows], *x_at[kTileRows];
      float inverses[kTileRows];
      for (int i = 0; i < n; i++) dy_at[i] = dy[r0 + i], x_at[i] = x[r0 + i];
      TIO_PICK(norm_rows_backward<T>)(dy_at, x_at, n, H, w, eps, dx + r0 * H, inverses, parts.get());
      std::copy(inverses, inverses + n, inverse.get() + r0);
    }
#pragma omp for schedule(static)
    for (int64_t c0 = 0; c0 < H; c0 += kColumns) {
      if (failed) continue;
      const int n = int(std::min<int64_t>(kColumns, H - c0));
      int height = 0;
      for (int64_t chunk = 0; chunk < chunks; chunk++) {
        const int length = int(std::min<int64_t>(kRowChain, rows - chunk * kRowChain));
        TIO_PICK(weight_chain<T>)(dy, x, inverse.get(), chunk * kRowChain, length, c0, n, stack.get() + height++ * kColumns);
        for (int m = merges_after(chunk, chunks); m > 0; m--, height--) {
          float *left = stack.get() + (height - 2) * kColumns, *right = left + kColumns;
          for (int c = 0; c < n; c++) left[c] = left[c] + right[c];
        }
      }
      for (int c = 0; c < n; c++) dw[c0 + c] = chunks ? stack.get()[c] : 0.0f;
    }
  }
  return failed;
}

template <class T>
Rows<const T> view(const void* data, const int64_t* layout) {
  return {static_cast<const T*>(data), layout[0], layout[1], layout[2]};
}

}  // namespace
}  // namespace tio

using namespace tio;

// Every function returns 0, or 1 when there is no memory. A layout is {outer stride, inner count, inner stride} (rows.h).

// y = rms_norm(x). With a residual: total = round(x + residual), y = rms_norm(total). y and total are contiguous.
TIO_API int tio_rms_norm(const void* x, const int64_t* x_layout, const void* residual, const int64_t* residual_layout, void* total, int type, int64_t rows,
                         int64_t H, const void* w, int w_type, float eps, void* y, int threads) {
  Weights weights(w, w_type, H);
  if (!weights.scratch.get()) return 1;
  auto run = [&](auto zero) {
    using T = decltype(zero);
    Rows<const T> more{};
    if (residual) more = view<T>(residual, residual_layout);
    return norm<T>(view<T>(x, x_layout), residual ? &more : nullptr, static_cast<T*>(total), rows, H, weights.scratch.get(), eps, static_cast<T*>(y), threads);
  };
  return type == kBFloat16 ? run(bf16{}) : run(0.0f);
}

// dx[rows, H] in the type of x, dw[H] fp32.
TIO_API int tio_rms_norm_backward(const void* dy, const int64_t* dy_layout, const void* x, const int64_t* x_layout, int type, int64_t rows, int64_t H, const void* w,
                                  int w_type, float eps, void* dx, float* dw, int threads) {
  Weights weights(w, w_type, H);
  if (!weights.scratch.get()) return 1;
  auto run = [&](auto zero) {
    using T = decltype(zero);
    return backward<T>(view<T>(dy, dy_layout), view<T>(x, x_layout), rows, H, weights.scratch.get(), eps, static_cast<T*>(dx), dw, threads);
  };
  return type == kBFloat16 ? run(bf16{}) : run(0.0f);
}

// The product's C interface: linear, matmul and grouped products. Cuts the work in tasks; a task's shape never changes a byte.
#include "product.h"

#include <new>
#include <vector>

#define TIO_BODY "product_body.h"
#include "for_each_isa.h"

namespace tio {
namespace {

constexpr int64_t kTaskRows = 192, kTaskPanels = 8, kConvertedFloats = int64_t(16) << 20;
constexpr int kMaxGroup = 4;

void convert(const Matrix& a, int64_t row0, int64_t rows, const Chunk& chunk, float* to) {
  if (a.type == kBFloat16) TIO_PICK(convert_chunk<bf16>)(static_cast<const bf16*>(a.data) + row0 * a.row, a.row, a.col, rows, chunk, to);
  else TIO_PICK(convert_chunk<float>)(static_cast<const float*>(a.data) + row0 * a.row, a.row, a.col, rows, chunk, to);
}

// offsets[e] to offsets[e + 1] are the rows of weight e.
int run(const Matrix& a, int64_t terms, int64_t leaves, const std::vector<Weight>& weights, const int64_t* offsets, const Output& c, int threads) {
  const Order order(terms, leaves);
  const int64_t chunks = int64_t(order.chunks.size()), total = offsets[weights.size()];
  const int64_t span = std::max<int64_t>(kTaskRows, kConvertedFloats / (chunks * kChain) / kTaskRows * kTaskRows);
  const int64_t a_rows = std::min(span, total);
  Scratch<float> converted(size_t(chunks * a_rows * kChain));
  if (!converted.get()) return 1;
  int failed = 0;
  for (int64_t first = 0; first < total; first += span) {
    const int64_t last = std::min(first + span, total);
    Product product{&order, terms, converted.get(), first, a_rows, c};
    std::vector<Task> tasks;
    int64_t widest = 1, tallest = 1;
    for (size_t e = 0; e < weights.size(); e++) {
      const int64_t lo = std::max(first, offsets[e]), hi = std::min(last, offsets[e + 1]);
      const int64_t panels = (weights[e].columns + kPanel - 1) / kPanel;
      for (int64_t p = 0; p < panels; p += kTaskPanels)
        for (int64_t r = lo; r < hi; r += kTaskRows) {
          tasks.push_back({&weights[e], r, std::min(r + kTaskRows, hi), p, std::min(p + kTaskPanels, panels)});
          tallest = std::max(tallest, tasks.back().row1 - r);
          widest = std::max(widest, tasks.back().panel1 - p);
        }
    }
    const int64_t count = int64_t(tasks.size());
#pragma omp parallel num_threads(threads) reduction(| : failed)
    {
      FloatMode mode;
      Scratch<float> stack(size_t(order.depth * tallest * widest * kPanel)), panel(size_t(kMaxGroup * kChain * kPanel));
#pragma omp for schedule(static)
      for (int64_t chunk = 0; chunk < chunks; chunk++)
        convert(a, first, last - first, order.chunks[chunk], converted.get() + chunk * a_rows * kChain);
      if (!stack.get() || !panel.get()) failed = 1;
#pragma omp for schedule(dynamic, 1)
      for (int64_t t = 0; t < count; t++) {
        if (failed) continue;
        if (tasks[t].weight->type == kBFloat16) TIO_PICK(run_task<bf16>)(product, tasks[t], stack.get(), panel.get());
        else TIO_PICK(run_task<float>)(product, tasks[t], stack.get(), panel.get());
      }
    }
    if (failed) return 1;
  }
  return 0;
}

template <class T>
void pack(const T* from, int64_t row, int64_t col, int64_t columns, int64_t terms, T* to, int threads, bool back) {
  const int64_t panels = (columns + kPanel - 1) / kPanel;
#pragma omp parallel for num_threads(threads) schedule(static)
  for (int64_t p = 0; p < panels; p++) {
    const int count = int(std::min<int64_t>(kPanel, columns - p * kPanel));
    if (back) TIO_PICK(unpack_panel<T>)(from + p * terms * kPanel, count, terms, to + p * kPanel * row, row);
    else TIO_PICK(pack_panel<T>)(from + p * kPanel * row, row, col, count, terms, to + p * terms * kPanel);
  }
}

}  // namespace
}  // namespace tio

using namespace tio;

// Every function returns 0, or 1 when there is no memory. Types are those of isa.h. Arguments are checked by the caller.

// c[M, N] = a[M, K] * b[N, K]^T, operands of any strides.
TIO_API int tio_matmul(const void* a, int a_type, int64_t a_row, int64_t a_col, const void* b, int b_type, int64_t b_row, int64_t b_col, int64_t M, int64_t N,
                       int64_t K, int64_t leaves, void* c, int c_type, int64_t c_row, int threads) try {
  const int64_t offsets[] = {0, M};
  return run({a, Type(a_type), a_row, a_col}, K, leaves, {{{b, Type(b_type), b_row, b_col}, nullptr, Type(b_type), N}}, offsets, {c, Type(c_type), c_row}, threads);
} catch (const std::bad_alloc&) {
  return 1;
}

// Rows offsets[e] to offsets[e + 1] of a times weight e, packed at packed + e * stride elements. One weight: linear.
TIO_API int tio_linear_packed(const void* a, int a_type, int64_t a_row, int64_t a_col, const void* packed, int b_type, int64_t weights, int64_t N, int64_t K,
                              const int64_t* offsets, int64_t leaves, void* c, int c_type, int64_t c_row, int threads) try {
  std::vector<Weight> all;
  const int64_t bytes = (N + kPanel - 1) / kPanel * kPanel * K * (b_type == kBFloat16 ? 2 : 4);
  for (int64_t e = 0; e < weights; e++) all.push_back({{nullptr, Type(b_type), 0, 0}, static_cast<const char*>(packed) + e * bytes, Type(b_type), N});
  return run({a, Type(a_type), a_row, a_col}, K, leaves, all, offsets, {c, Type(c_type), c_row}, threads);
} catch (const std::bad_alloc&) {
  return 1;
}

// w[N, K] to panels [ceil(N / 32)][K][32] of the same type.
TIO_API int tio_pack(const void* w, int type, int64_t row, int64_t col, int64_t N, int64_t K, void* to, int threads) {
  if (type == kBFloat16) pack(static_cast<const bf16*>(w), row, col, N, K, static_cast<bf16*>(to), threads, false);
  else pack(static_cast<const float*>(w), row, col, N, K, static_cast<float*>(to), threads, false);
  return 0;
}

// The inverse, to rows of stride `row`.
TIO_API int tio_unpack(const void* packed, int type, int64_t N, int64_t K, void* w, int64_t row, int threads) {
  if (type == kBFloat16) pack(static_cast<const bf16*>(packed), row, 1, N, K, static_cast<bf16*>(w), threads, true);
  else pack(static_cast<const float*>(packed), row, 1, N, K, static_cast<float*>(w), threads, true);
  return 0;
}

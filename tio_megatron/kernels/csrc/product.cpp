// The product's C interface: linear, matmul and grouped products. Cuts the work in tasks; a task's shape never changes a byte.
#include "product.h"

#if defined(__linux__)
#include <sys/mman.h>
#endif
#include <new>
#include <vector>

#define TIO_BODY "product_body.h"
#include "for_each_isa.h"

namespace tio {
namespace {

constexpr int64_t kTaskRows = 192, kTaskPanels = 8;

// Rows are converted this many numbers at a time: bounds the scratch memory.
constexpr int64_t kConvertedFloats = int64_t(4) << 20;

// Below this many multiplications one thread is faster than two.
constexpr double kSmall = 2e5;

void convert(const Matrix& a, int64_t row0, int64_t rows, const Chunk& chunk, float* to) {
  if (a.type == kBFloat16) TIO_PICK(convert_chunk<bf16>)(static_cast<const bf16*>(a.data) + row0 * a.row, a.row, a.col, rows, chunk, to);
  else TIO_PICK(convert_chunk<float>)(static_cast<const float*>(a.data) + row0 * a.row, a.row, a.col, rows, chunk, to);
}

struct Problem {
  Matrix a;
  std::vector<Weight> weights;
  const int64_t* offsets;  // offsets[e] to offsets[e + 1] are the rows of weight e
  int64_t terms, leaves;
  bool paired;
  Output c;
};

// Tasks of the rows [first, last): small enough for the caches, and several per thread where there is work for it.
std::vector<Task> cut(const Problem& problem, int64_t first, int64_t last, int threads) {
  const int64_t panels = (problem.weights[0].columns + kPanel - 1) / kPanel;
  int64_t blocks = 0;
  for (size_t e = 0; e < problem.weights.size(); e++)
    blocks += (std::max<int64_t>(0, std::min(last, problem.offsets[e + 1]) - std::max(first, problem.offsets[e])) + kTaskRows - 1) / kTaskRows;
  const int64_t step = threads == 1 ? kTaskPanels : std::clamp<int64_t>(blocks * panels / (4 * threads), 1, kTaskPanels);
  std::vector<Task> tasks;
  for (size_t e = 0; e < problem.weights.size(); e++) {
    const int64_t lo = std::max(first, problem.offsets[e]), hi = std::min(last, problem.offsets[e + 1]);
    for (int64_t p = 0; p < panels; p += step)
      for (int64_t r = lo; r < hi; r += kTaskRows) tasks.push_back({&problem.weights[e], r, std::min(r + kTaskRows, hi), p, std::min(p + step, panels)});
  }
  return tasks;
}

int run(const Problem& problem, int threads) {
  const Order order(problem.terms, problem.leaves, problem.paired);
  const int64_t chunks = int64_t(order.chunks.size()), total = problem.offsets[problem.weights.size()];
  const int64_t span = std::max<int64_t>(kTaskRows, kConvertedFloats / (chunks * kChain) / kTaskRows * kTaskRows), a_rows = std::min(span, total);
  if (double(total) * double(problem.weights[0].columns) * double(problem.terms) < kSmall) threads = 1;
  Scratch<float> converted(size_t(chunks * a_rows * kChain));
  if (!converted.get()) return 1;
  int failed = 0;
  for (int64_t first = 0; first < total; first += span) {
    const int64_t last = std::min(first + span, total), blocks = (last - first + kTaskRows - 1) / kTaskRows;
    const Product product{&order, problem.terms, converted.get(), first, a_rows, problem.c};
    const std::vector<Task> tasks = cut(problem, first, last, threads);
    const int64_t count = int64_t(tasks.size());
    int64_t largest = 0;
    for (const Task& task : tasks) largest = std::max(largest, (task.row1 - task.row0) * (task.panel1 - task.panel0) * kPanel);
#pragma omp parallel num_threads(threads) reduction(| : failed)
    {
      FloatMode mode;
      Scratch<float> stack(size_t(order.depth * largest)), panel(size_t(kChain * kPanel));
      if (!stack.get() || !panel.get()) failed = 1;
#pragma omp for schedule(static)
      for (int64_t i = 0; i < chunks * blocks; i++) {
        const int64_t chunk = i / blocks, row = i % blocks * kTaskRows, rows = std::min(kTaskRows, last - first - row);
        convert(problem.a, first + row, rows, order.chunks[chunk], converted.get() + (chunk * a_rows + row) * kChain);
      }
#pragma omp for schedule(dynamic, 1)
      for (int64_t t = 0; t < count; t++) {
        if (failed) continue;
        if (tasks[t].weight->b.type == kBFloat16) TIO_PICK(run_task<bf16>)(product, tasks[t], stack.get(), panel.get());
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

// Rows offsets[e] to offsets[e + 1] of a[rows, K] times weight e, for `weights` weights [N, K]: b[e] is its first element, or with
// `packed` its panels (then the strides are not read).
TIO_API int tio_product(const void* a, int a_type, int64_t a_row, int64_t a_col, const void* const* b, int b_type, int packed, int64_t b_row, int64_t b_col,
                        int64_t weights, const int64_t* offsets, int64_t N, int64_t K, int64_t leaves, int paired, void* c, int c_type, int64_t c_row,
                        int threads) try {
  Problem problem{{a, Type(a_type), a_row, a_col}, {}, offsets, K, leaves, paired != 0, {c, Type(c_type), c_row}};
  for (int64_t e = 0; e < weights; e++) problem.weights.push_back({{b[e], Type(b_type), b_row, b_col}, packed != 0, N});
  return run(problem, threads);
} catch (const std::bad_alloc&) {
  return 1;
}

// The weight gradient of the grouped product: c[e] = dy[rows of e, N]^T * x[rows of e, K], fp32, contiguous [weights, N, K]; +0 for no rows.
TIO_API int tio_grouped_wgrad(const void* dy, int dy_type, int64_t dy_row, const void* x, int x_type, int64_t x_row, int64_t weights, const int64_t* offsets,
                              int64_t N, int64_t K, float* c, int threads) try {
  const int64_t span[] = {0, N}, dy_size = dy_type == kBFloat16 ? 2 : 4, x_size = x_type == kBFloat16 ? 2 : 4;
  for (int64_t e = 0; e < weights; e++) {
    const int64_t first = offsets[e], rows = offsets[e + 1] - first;
    float* to = c + e * N * K;
    if (!rows) {
      std::memset(to, 0, size_t(N * K) * sizeof(float));
      continue;
    }
    const Matrix left{static_cast<const char*>(dy) + first * dy_row * dy_size, Type(dy_type), 1, dy_row};
    const Matrix right{static_cast<const char*>(x) + first * x_row * x_size, Type(x_type), 1, x_row};
    if (run({left, {{right, false, K}}, span, rows, 1, false, {to, kFloat32, K}}, threads)) return 1;
  }
  return 0;
} catch (const std::bad_alloc&) {
  return 1;
}

// w[N, K] to panels [ceil(N / 32)][K][32] of the same type.
TIO_API int tio_pack(const void* w, int type, int64_t row, int64_t col, int64_t N, int64_t K, void* to, int threads) {
  if (type == kBFloat16) pack(static_cast<const bf16*>(w), row, col, N, K, static_cast<bf16*>(to), threads, false);
  else pack(static_cast<const float*>(w), row, col, N, K, static_cast<float*>(to), threads, false);
  return 0;
}

// Asks for large pages below memory that nobody has written yet: a packed weight is read from end to end, and one page of 2 MiB in
// place of 512 saves the processor's look-ups. Advice only: where the system declines, nothing changes.
TIO_API int tio_advise(void* memory, int64_t bytes) {
#if defined(MADV_HUGEPAGE)
  const uintptr_t page = 4096, first = (uintptr_t(memory) + page - 1) / page * page, last = (uintptr_t(memory) + uintptr_t(bytes)) / page * page;
  if (first < last) madvise(reinterpret_cast<void*>(first), last - first, MADV_HUGEPAGE);
#endif
  return 0;
}

// The inverse, to rows of stride `row`.
TIO_API int tio_unpack(const void* packed, int type, int64_t N, int64_t K, void* w, int64_t row, int threads) {
  if (type == kBFloat16) pack(static_cast<const bf16*>(packed), row, 1, N, K, static_cast<bf16*>(w), threads, true);
  else pack(static_cast<const float*>(packed), row, 1, N, K, static_cast<float*>(w), threads, true);
  return 0;
}

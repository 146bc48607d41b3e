// Exact sums of single terms over tokens (embedding rows, norm weights), and the value of a sum: the C interface.
#include "grid.h"
#include "order.h"
#include "rows.h"

namespace tio {

constexpr int kTileRows = 16;

// (high * 2^(split - 24) + low) * 2^unit, rounded once to fp32, half to even.
inline float round_sum(int64_t low, int64_t high, int unit, int split) {
  const __int128 sum = __int128(high) * (int64_t(1) << (split - 24)) + low;
  if (!sum) return 0.0f;
  unsigned __int128 size = sum < 0 ? -(unsigned __int128)(sum) : (unsigned __int128)(sum);
  const int length = uint64_t(size >> 64) ? 128 - __builtin_clzll(uint64_t(size >> 64)) : 64 - __builtin_clzll(uint64_t(size));
  const int last = std::max(length + unit - 24, -149), drop = last - unit;  // the exponent of the last bit kept
  if (drop >= 128) size = 0;
  else if (drop > 0) {
    const unsigned __int128 half = (unsigned __int128)(1) << (drop - 1), rest = size & (2 * half - 1);
    size >>= drop;
    if (rest > half || (rest == half && (size & 1))) size++;
  }
  const double value = std::ldexp(double(uint64_t(size)), drop > 0 ? last : unit);
  return float(sum < 0 ? -value : value);
}

}  // namespace tio

#define TIO_BODY "integer_sum_body.h"
#include "for_each_isa.h"

namespace tio {
namespace {

// Threads share the columns, so that no number has two writers.
template <class T>
uint32_t add_rows(const T* rows, int64_t stride, const int64_t* ids, int64_t R, int64_t H, const Grid& grid, int64_t* low, int64_t low_row, int64_t* high, int64_t high_row,
                  int threads) {
  const int count = useful_threads(threads, R * H * 2);
  const int64_t piece = ((H + count - 1) / count + 63) / 64 * 64;
  uint32_t peak = 0;
#pragma omp parallel for num_threads(count) schedule(static) reduction(max : peak)
  for (int64_t c = 0; c < H; c += piece) {
    FloatMode mode;
    peak = std::max(peak, TIO_PICK(sum_rows<T>)(rows + c, stride, ids, R, std::min(piece, H - c), grid, low + c, low_row, high + c, high_row));
  }
  return peak;
}

// Threads share the rows; each adds its own sum, in any order, since it is exact.
template <class T>
int add_norm_terms(const Rows<const T>& dy, const Rows<const T>& x, int64_t rows, int64_t H, float eps, const Grid& grid, int64_t* low, int64_t* high, uint32_t& peak,
                   int threads) {
  int failed = 0;
  uint32_t found = 0;
#pragma omp parallel num_threads(useful_threads(threads, rows * H)) reduction(| : failed) reduction(max : found)
  {
    FloatMode mode;
    Scratch<int64_t> own{size_t(H)};
    Scratch<float> parts(size_t(kTileRows * (H / kRowChain + 1)));
    if (!own.get() || !parts.get()) failed = 1;
    else std::fill(own.get(), own.get() + H, 0);
#pragma omp for schedule(static)
    for (int64_t r0 = 0; r0 < rows; r0 += kTileRows) {
      if (failed) continue;
      const int n = int(std::min<int64_t>(kTileRows, rows - r0));
      const T *dy_at[kTileRows], *x_at[kTileRows];
      for (int i = 0; i < n; i++) dy_at[i] = dy[r0 + i], x_at[i] = x[r0 + i];
      found = std::max(found, TIO_PICK(sum_norm_terms<T>)(dy_at, x_at, n, H, eps, grid, own.get(), high, parts.get()));
    }
#pragma omp critical(tio_norm_terms)
    for (int64_t k = 0; !failed && k < H; k++) low[k] += own.get()[k];
  }
  peak = found;
  return failed;
}

}  // namespace
}  // namespace tio

using namespace tio;

// rows[R, H] to the rows ids[r] of low[V, H]. Returns 0, or 2 if an id is outside, and then nothing is written.
TIO_API int tio_add_rows(const void* rows, int type, int64_t stride, const int64_t* ids, int64_t R, int64_t V, int64_t H, int64_t unit, int64_t split, int64_t* low,
                         int64_t low_row, int64_t* high, int64_t high_row, float* peak, int threads) {
  for (int64_t r = 0; r < R; r++)
    if (ids[r] < 0 || ids[r] >= V) return 2;
  const Grid grid(unit, split);
  auto run = [&](auto zero) {
    using T = decltype(zero);
    return add_rows<T>(static_cast<const T*>(rows), stride, ids, R, H, grid, low, low_row, high, high_row, threads);
  };
  raise(peak, type == kBFloat16 ? run(bf16{}) : run(0.0f));
  return 0;
}

// The terms dy * (x / rms(x)) of all rows to low[H]. Layouts: rows.h. Returns 0, or 1 when there is no memory.
TIO_API int tio_add_norm_terms(const void* dy, const int64_t* dy_layout, const void* x, const int64_t* x_layout, int type, int64_t rows, int64_t H, float eps, int64_t unit,
                               int64_t split, int64_t* low, int64_t* high, float* peak, int threads) {
  const Grid grid(unit, split);
  uint32_t found = 0;
  auto run = [&](auto zero) {
    using T = decltype(zero);
    const auto view = [](const void* data, const int64_t* layout) { return Rows<const T>{static_cast<const T*>(data), layout[0], layout[1], layout[2]}; };
    return add_norm_terms<T>(view(dy, dy_layout), view(x, x_layout), rows, H, eps, grid, low, high, found, threads);
  };
  const int failed = type == kBFloat16 ? run(bf16{}) : run(0.0f);
  if (!failed) raise(peak, found);
  return failed;
}

// The value of n sums to fp32. `out` may start where `low` does: what is written in one round was read in an earlier one.
TIO_API int tio_sum_value(const void* low, const void* high, int64_t n, int64_t unit, int64_t split, void* out, int threads) {
  constexpr int64_t kFirst = 1 << 14;
  const double scale = std::ldexp(1.0, int(unit));
  const char *l = static_cast<const char*>(low), *h = static_cast<const char*>(high);
  for (int64_t begin = 0; begin < n;) {
    const int64_t end = begin ? std::min(2 * begin, n) : std::min(kFirst, n), count = useful_threads(threads, 3 * (end - begin));
    const int64_t piece = begin ? ((end - begin + count - 1) / count + 15) / 16 * 16 : end;
#pragma omp parallel for num_threads(int(count)) schedule(static)
    for (int64_t i = begin; i < end; i += piece) {
      FloatMode mode;
      TIO_PICK(value_range)(l, h, int(unit), int(split), scale, static_cast<char*>(out), i, std::min(i + piece, end));
    }
    begin = end;
  }
  return 0;
}

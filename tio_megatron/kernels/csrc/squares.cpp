// The exact sum of squares of fp32 numbers, in integers: no rounding, so no order. The layout is stated in kernels/squares/__init__.py.
#include "pieces.h"

namespace tio {
namespace {

constexpr int kLimbs = 18, kNumbers = kLimbs + 2;  // limbs, then how many numbers are infinite and how many NaN
constexpr int kExponents = 256, kLanes = 4;
constexpr int64_t kBlock = int64_t(kLanes) << 13;  // of one exponent, a lane sums at most 2^13 squares below 2^48, all lanes together fit 63 bits

inline uint32_t magnitude(float x) {
  uint32_t u;
  std::memcpy(&u, &x, 4);
  return u & 0x7fffffffu;
}

// Limbs to [0, 2^32), the last apart, which takes what is above.
void carry(int64_t* limbs) {
  for (int i = 0; i + 1 < kLimbs; i++) {
    limbs[i + 1] += limbs[i] >> 32;
    limbs[i] &= 0xffffffff;
  }
}

// At most kBlock numbers. A number with exponent code e is m * 2^(max(e, 1) - 150); equal codes are summed first, in lanes so that no
// addition waits for the one before.
void add_block(const float* x, int64_t n, int64_t* limbs) {
  uint64_t sums[kLanes][kExponents] = {};
  const auto add = [&](int lane, float value) {
    const uint32_t u = magnitude(value), e = u >> 23, m = (u & 0x7fffffu) | (uint32_t(e != 0) << 23);
    sums[lane][e] += uint64_t(m) * m;
  };
  int64_t k = 0;
  for (; k + kLanes <= n; k += kLanes)
    for (int lane = 0; lane < kLanes; lane++) add(lane, x[k + lane]);
  for (; k < n; k++) add(0, x[k]);
  for (int lane = 1; lane < kLanes; lane++)
    for (int e = 0; e < kExponents; e++) sums[0][e] += sums[lane][e];
  for (int e = 0; e < kExponents - 1; e++) {
    const uint64_t sum = sums[0][e];
    if (!sum) continue;
    const int bit = 2 * (std::max(e, 1) - 1), at = bit / 32, shift = bit % 32;
    const uint64_t low = (sum & 0xffffffffu) << shift, high = (sum >> 32) << shift;
    limbs[at] += int64_t(low & 0xffffffffu);
    limbs[at + 1] += int64_t((low >> 32) + (high & 0xffffffffu));
    if (high >> 32) limbs[at + 2] += int64_t(high >> 32);
  }
  carry(limbs);
  if (sums[0][kExponents - 1])
    for (k = 0; k < n; k++) {
      limbs[kLimbs] += magnitude(x[k]) == 0x7f800000u;
      limbs[kLimbs + 1] += magnitude(x[k]) > 0x7f800000u;
    }
}

}  // namespace
}  // namespace tio

using namespace tio;

// Adds the squares of x[n] to total[20].
TIO_API int tio_add_squares(const float* x, int64_t n, int64_t* total, int threads) {
  in_pieces(n, kBlock, 1, threads, [&](int64_t begin, int64_t end) {
    int64_t own[kNumbers] = {};
    for (int64_t at = begin; at < end; at += kBlock) add_block(x + at, std::min(kBlock, end - at), own);
#pragma omp critical(tio_squares)
    for (int i = 0; i < kNumbers; i++) total[i] += own[i];
  });
  carry(total);
  return 0;
}

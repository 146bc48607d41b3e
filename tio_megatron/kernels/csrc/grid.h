// An exact sum of fp32 partials in 64-bit integers, so that their order is free.
//
// A partial p is rounded once, half to even, to a multiple of 2^unit, and the number of units is added to `low`. One of 2^(unit + split)
// or more is a multiple of 2^(unit + split - 24) already, and is added to `high` as so many of these. One of 2^(unit + 2 * split - 24)
// or more, and one that is not finite, is added nowhere; the largest |p| tells the caller (not finite: infinity).
// Definition: kernels/integer_sum/reference.py.
#pragma once
#include "isa.h"

namespace tio {

constexpr uint32_t kInfinityBits = 0x7f800000u;

// Added to a number of less than 2^51, a sum whose last bit is 1: the addition rounds half to even, and the bits count from kCountBits.
constexpr double kCount = 6755399441055744.0;
constexpr uint64_t kCountBits = 0x4338000000000000u;

inline uint32_t magnitude_bits(float x) {
  uint32_t u;
  std::memcpy(&u, &x, 4);
  return u & 0x7fffffffu;
}

// The bits of the least fp32 number of at least 2^e; infinity where there is none.
inline uint32_t power_bits(int64_t e) { return e > 127 ? kInfinityBits : e >= -126 ? uint32_t(e + 127) << 23 : e >= -149 ? 1u << (e + 149) : 1u; }

struct Grid {
  double scale, high_scale;  // units per 1
  uint32_t large, limit;     // from these magnitudes on: to high, to nowhere

  Grid(int64_t unit, int64_t split)
      : scale(std::ldexp(1.0, int(-unit))), high_scale(std::ldexp(1.0, int(24 - unit - split))), large(power_bits(unit + split)), limit(power_bits(unit + 2 * split - 24)) {}

  // Units of a partial below `large`, and of one from there on. A product by a power of two is exact here: fp32 in, float64 out.
  uint64_t count(float p) const {
    const double shifted = double(p) * scale + kCount;
    uint64_t bits;
    std::memcpy(&bits, &shifted, 8);
    return bits - kCountBits;
  }
  int64_t high_count(float p) const { return magnitude_bits(p) < limit ? int64_t(double(p) * high_scale) : 0; }
};

// The running maximum of |partial| that the caller keeps.
inline void raise(float* peak, uint32_t bits) {
  const uint32_t before = magnitude_bits(*peak), now = std::min(std::max(before, bits), kInfinityBits);
  std::memcpy(peak, &now, 4);
}

}  // namespace tio

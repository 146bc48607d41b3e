// What every kernel shares and no instruction set changes: element types, the choice of instruction set, the floating-point mode.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#if defined(__x86_64__)
#include <immintrin.h>
#define TIO_X86 1
#endif

#define TIO_API extern "C" __attribute__((visibility("default")))

namespace tio {

struct bf16 {
  uint16_t bits;
};

// Codes of element types in the C interface.
enum Type : int { kFloat32 = 0, kBFloat16 = 1 };

inline float to_float(float x) { return x; }
inline float to_float(bf16 x) {
  uint32_t u = uint32_t(x.bits) << 16;
  float f;
  std::memcpy(&f, &u, 4);
  return f;
}
template <class T>
T from_float(float x);
template <>
inline float from_float<float>(float x) {
  return x;
}
// Round half to even; a NaN stays a (quiet) NaN instead of being carried into infinity.
template <>
inline bf16 from_float<bf16>(float x) {
  uint32_t u;
  std::memcpy(&u, &x, 4);
  if ((u & 0x7fffffffu) > 0x7f800000u) return bf16{uint16_t((u >> 16) | 0x40)};
  return bf16{uint16_t((u + 0x7fffu + ((u >> 16) & 1)) >> 16)};
}

enum class Isa : int { generic = 0, avx2 = 1, avx512 = 2 };

// The instruction set in force. All give the same bytes; see isa.cpp.
Isa isa();

// Kernels define denormals and round-to-nearest. Any thread that computes holds one of these: another library may have left
// flush-to-zero on in this thread, and gets its mode back afterwards.
class FloatMode {
 public:
#if TIO_X86
  FloatMode() : saved_(_mm_getcsr()) { _mm_setcsr(0x1f80); }
  ~FloatMode() { _mm_setcsr(saved_); }

 private:
  unsigned saved_;
#elif defined(__aarch64__)
  FloatMode() : saved_(__builtin_aarch64_get_fpcr()) { __builtin_aarch64_set_fpcr(0); }
  ~FloatMode() { __builtin_aarch64_set_fpcr(saved_); }

 private:
  unsigned saved_;
#else
  FloatMode() {}
#endif
  FloatMode(const FloatMode&) = delete;
  FloatMode& operator=(const FloatMode&) = delete;
};

// Memory for one call, aligned to a cache line. get() is null when there is none left.
template <class T>
class Scratch {
 public:
  explicit Scratch(size_t count) : data_(static_cast<T*>(std::aligned_alloc(64, (count * sizeof(T) + 63) / 64 * 64 + 64))) {}
  ~Scratch() { std::free(data_); }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  T* get() const { return data_; }

 private:
  T* data_;
};

}  // namespace tio

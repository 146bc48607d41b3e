// The choice of instruction set, and what the library says about itself.
#include "isa.h"

#ifndef TIO_SOURCES
#define TIO_SOURCES "unknown"
#endif

namespace tio {
namespace {

bool has(Isa isa) {
  switch (isa) {
#if TIO_X86
    case Isa::avx512:
      return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
             __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    case Isa::avx2:
      return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
#endif
    case Isa::generic:
      return true;
    default:
      return false;
  }
}

const char* const kNames[] = {"generic", "avx2", "avx512"};

Isa best() { return has(Isa::avx512) ? Isa::avx512 : has(Isa::avx2) ? Isa::avx2 : Isa::generic; }

Isa current = best();

}  // namespace

Isa isa() { return current; }

}  // namespace tio

// Raised whenever the bytes of any kernel change: it is part of the fingerprint that trainer and rollout compare.
TIO_API const char* tio_version() { return "cpu-1"; }

// Hash of the sources this library was built from.
TIO_API const char* tio_sources() { return TIO_SOURCES; }

TIO_API const char* tio_isa() { return tio::kNames[int(tio::isa())]; }

// Returns 0, or 1 for a name that is unknown or not supported by this processor.
TIO_API int tio_set_isa(const char* name) {
  for (int i = 0; i < 3; i++)
    if (!std::strcmp(name, tio::kNames[i]) && tio::has(tio::Isa(i))) {
      tio::current = tio::Isa(i);
      return 0;
    }
  return 1;
}

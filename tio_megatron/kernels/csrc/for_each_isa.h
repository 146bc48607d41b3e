// Compiles one body per instruction set, each in a namespace of its own:
//
//   #define TIO_BODY "product_body.h"
//   #include "for_each_isa.h"          // tio::generic::f, tio::avx2::f, tio::avx512::f
//   ... TIO_PICK(f)(arguments) ...     // the one in force
//
// A body includes nothing but other bodies; it sees the vectors of vec.h and marks every function with TIO_FN, or TIO_INLINE to be always inlined.
// No function in a body may use OpenMP: threads are started by the code that picks.
#include "isa.h"

#if TIO_X86
#define TIO_PICK(...) (::tio::isa() == ::tio::Isa::avx512 ? ::tio::avx512::__VA_ARGS__ : ::tio::isa() == ::tio::Isa::avx2 ? ::tio::avx2::__VA_ARGS__ : ::tio::generic::__VA_ARGS__)
#else
#define TIO_PICK(...) (::tio::generic::__VA_ARGS__)
#endif

#define TIO_FN TIO_TARGET
#define TIO_INLINE TIO_TARGET __attribute__((always_inline)) inline

namespace tio {

namespace generic {
#define TIO_TARGET
#define TIO_W 8
#define TIO_IS_GENERIC 1
#include "vec.h"
#include TIO_BODY
#undef TIO_IS_GENERIC
#undef TIO_W
#undef TIO_TARGET
}  // namespace generic

#if TIO_X86
namespace avx2 {
#define TIO_TARGET __attribute__((target("avx2,fma")))
#define TIO_W 8
#define TIO_IS_AVX2 1
#include "vec.h"
#include TIO_BODY
#undef TIO_IS_AVX2
#undef TIO_W
#undef TIO_TARGET
}  // namespace avx2

namespace avx512 {
#define TIO_TARGET __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")))
#define TIO_W 16
#define TIO_IS_AVX512 1
#include "vec.h"
#include TIO_BODY
#undef TIO_IS_AVX512
#undef TIO_W
#undef TIO_TARGET
}  // namespace avx512
#endif

}  // namespace tio

// The C interface of the optimizer's elementwise kernels.
#include "pieces.h"

#define TIO_BODY "adam_body.h"
#include "for_each_isa.h"

using namespace tio;

// w, m, v [n] in place; numbers[8] as in adam_body.h; out[n] bf16 or null.
TIO_API int tio_adam(float* w, const float* g, float* m, float* v, void* out, int64_t n, const float* numbers, int decoupled, int threads) {
  bf16* rounded = static_cast<bf16*>(out);
  in_pieces(n, 1024, 7, threads, [&](int64_t begin, int64_t end) {
    bf16* to = rounded ? rounded + begin : nullptr;
    if (decoupled) TIO_PICK(adam_run<true>)(w + begin, g + begin, m + begin, v + begin, to, end - begin, numbers);
    else TIO_PICK(adam_run<false>)(w + begin, g + begin, m + begin, v + begin, to, end - begin, numbers);
  });
  return 0;
}

// x[n] times factor, in place.
TIO_API int tio_scale(float* x, int64_t n, float factor, int threads) {
  in_pieces(n, 1024, 2, threads, [&](int64_t begin, int64_t end) { TIO_PICK(scale_run)(x + begin, end - begin, factor); });
  return 0;
}

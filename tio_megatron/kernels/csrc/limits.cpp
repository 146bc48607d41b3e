// The machine's own limits, measured with the instructions the kernels use: what a benchmark compares a kernel's speed with.
#define TIO_BODY "limits_body.h"
#include "for_each_isa.h"

// Runs fma in registers; writes the floating-point operations done.
TIO_API int tio_limit_fma(int64_t rounds, double* operations) {
  tio::FloatMode mode;
  volatile float keep = TIO_PICK(fma_rounds)(rounds);
  (void)keep;
  *operations = TIO_PICK(operations_of)(rounds);
  return 0;
}

// Reads memory once, in order.
TIO_API int tio_limit_read(const void* from, int64_t bytes) {
  volatile int32_t keep = TIO_PICK(read_memory)(static_cast<const char*>(from), bytes / 1024 * 1024);
  (void)keep;
  return 0;
}

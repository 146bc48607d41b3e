// Elementwise work spread over threads.
#pragma once
#include "rows.h"

namespace tio {

// Calls work(begin, end) for pieces of [0, n), each a multiple of `grain` numbers but the last.
template <class Work>
void in_pieces(int64_t n, int64_t grain, int64_t numbers_each, int threads, Work work) {
  const int count = useful_threads(threads, n * numbers_each);
  const int64_t piece = (std::max<int64_t>(1, (n + count - 1) / count) + grain - 1) / grain * grain;
#pragma omp parallel num_threads(count)
  {
    FloatMode mode;
#pragma omp for schedule(static)
    for (int64_t begin = 0; begin < n; begin += piece) work(begin, std::min(begin + piece, n));
  }
}

}  // namespace tio

// Rows of a tensor that may be a view: all axes but the last, as two nested loops; the last axis is contiguous.
#pragma once
#include "isa.h"

namespace tio {

template <class T>
struct Rows {
  T* data;
  int64_t outer_stride, inner, inner_stride;
  T* operator[](int64_t row) const { return data + row / inner * outer_stride + row % inner * inner_stride; }
};

// Threads worth starting for work of `items` numbers read or written.
inline int useful_threads(int threads, int64_t items) { return int(std::max<int64_t>(1, std::min<int64_t>(threads, items / 16384))); }

}  // namespace tio

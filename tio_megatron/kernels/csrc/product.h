// The matrix product's plan: what is multiplied, in which memory forms. c[m, n] = sum over k of a[m, k] * b[n, k].
//
//   a   converted to fp32 before the product, as [chunk][row][256]: rows in any number can then be taken together
//   b   panels of 32 columns, as [panel][k][32]; "packed" weights are kept so, other operands are packed chunk by chunk
//       inside a row of a panel, bf16 column j lies beside column 16 + j: one 32-bit lane holds both
#pragma once
#include "isa.h"
#include "order.h"

namespace tio {

constexpr int kPanel = 32;

// A matrix in memory; strides in elements.
struct Matrix {
  const void* data;
  Type type;
  int64_t row, col;
};

struct Weight {
  Matrix b;      // element [n, k] at n * row + k * col, or the panels of a packed weight
  bool packed;
  int64_t columns;  // N
};

struct Output {
  void* data;
  Type type;
  int64_t row;  // stride of a row, in elements
};

// What every task of one call shares.
struct Product {
  const Order* order;
  int64_t terms;     // K
  const float* a;    // converted rows, the first of them row `a_first`
  int64_t a_first, a_rows;
  Output c;
};

// One task: the rows [row0, row1) and the panels [panel0, panel1) of one weight.
struct Task {
  const Weight* weight;
  int64_t row0, row1, panel0, panel1;
};

}  // namespace tio

// The attention walk's plan. A task is a run of query rows of one sequence and one key/value head; a row is a (position, query head)
// pair, position major, so that the heads of a group share every key they read. Rows are cut in tiles:
//
//   lanes  16 or 32 rows, one per lane: everything vertical; for prefill. Reads keys and values in fp32, converted once per task and block.
//   few    at most 8 rows: lanes are keys, then head elements; for decode, which must stream the pages as they lie.
//
// Both do the same arithmetic on a row, in the order that attention/reference.py defines; a row's tile never changes its bytes.
#pragma once
#include "isa.h"

namespace tio {

constexpr int kKeys = 64;       // keys per block: part of the contract
constexpr int kLanes = 32;      // rows of the larger tile
constexpr int kFew = 8;
constexpr int kTaskRows = 256;  // rows that share one conversion of a block

// [token, head, D] with a contiguous last axis; strides in elements.
template <class T>
struct View {
  T* data;
  int64_t token, head;
  T* at(int64_t t, int64_t h) const { return data + t * token + h * head; }
};

struct AttentionTile {
  int rows;
  int64_t sees[kLanes];  // keys of the sequence each row sees; lanes past `rows` repeat row 0
  float top[kLanes], sum[kLanes];
  float *q, *acc;  // lanes: [D][16 or 32] both; few: q [D][8], acc [8][D]
};

}  // namespace tio

// Attention backward: C interface. A task is one sequence and key/value head; its query heads come one after another, so that the sum over
// the group is theirs in ascending order. Query and key blocks are 64 positions of the sequence.
#include "attention.h"

#include <new>
#include <vector>

namespace tio {

// A block of query positions of one head; rows [first, last) of the 64 exist.
struct BackwardQueries {
  int first, last;
  float *turned, *plain, *grad_turned, *grad;  // q and do
  const float *lse, *delta;
};

struct BackwardKeys {
  int count;
  float *keys_turned, *keys, *values_turned;
};

}  // namespace tio

#define TIO_BODY "attention_backward_body.h"
#include "for_each_isa.h"

namespace tio {
namespace {

template <class T>
struct Tensors {
  View<const T> grad, q, k, v, o;
  View<const float> lse;
  View<T> dq, dk, dv;
};

// Memory of one task; null when there is none left.
struct Room {
  int64_t blocks, D;
  Scratch<float> queries, keys, tiles, dq, totals, ones;
  Room(int64_t query_blocks, int64_t key_blocks, int64_t d)
      : blocks(query_blocks), D(d), queries(size_t(blocks * (4 * D + 2) * kKeys)), keys(size_t(4 * D * kKeys)), tiles(size_t(3 * kKeys * kKeys)),
        dq(size_t(blocks * D * kKeys)), totals(size_t(2 * key_blocks * D * kKeys)), ones(size_t(2 * D * kKeys)) {}
  bool ok() const { return queries.get() && keys.get() && tiles.get() && dq.get() && totals.get() && ones.get(); }
};

template <class T>
int run_task(const Tensors<T>& x, int64_t q0, int64_t queries, int64_t k0, int64_t keys, int64_t g, int64_t group, int D, float scale) {
  const int64_t offset = keys - queries, first_block = offset / kKeys, key_blocks = (keys + kKeys - 1) / kKeys;
  if (queries == 0) {
    for (int64_t t = k0; t < k0 + keys; t++) {
      std::fill(x.dk.at(t, g), x.dk.at(t, g) + D, T{});
      std::fill(x.dv.at(t, g), x.dv.at(t, g) + D, T{});
    }
    return 0;
  }
  Room room(key_blocks - first_block, key_blocks, D);
  if (!room.ok()) return 1;
  const int64_t form = D * kKeys;
  float *total_k = room.totals.get(), *total_v = total_k + key_blocks * form, *one_k = room.ones.get(), *one_v = one_k + form;
  std::fill(total_k, total_k + 2 * key_blocks * form, 0.0f);
  std::fill(room.tiles.get(), room.tiles.get() + 3 * kKeys * kKeys, 0.0f);
  std::vector<BackwardQueries> blocks(static_cast<size_t>(room.blocks));
  const T* rows[kKeys];
  for (int64_t head = g * group; head < (g + 1) * group; head++) {
    std::fill(room.dq.get(), room.dq.get() + room.blocks * form, 0.0f);
    for (int64_t b = 0; b < room.blocks; b++) {
      BackwardQueries& block = blocks[size_t(b)];
      const int64_t p0 = (first_block + b) * kKeys;
      float* at = room.queries.get() + b * (4 * form + 2 * kKeys);
      block = {int(std::max<int64_t>(offset - p0, 0)), int(std::min<int64_t>(keys - p0, kKeys)), at, at + form, at + 2 * form, at + 3 * form, at + 4 * form, at + 4 * form + kKeys};
      auto turn = [&](const View<const T>& from, float* turned, float* plain) {
        for (int i = block.first; i < block.last; i++) rows[i] = from.at(q0 + p0 + i - offset, head);
        TIO_PICK(both_forms<T>)(rows, block.first, block.last, D, turned, plain);
      };
      turn(x.q, block.turned, block.plain);
      turn(x.grad, block.grad_turned, block.grad);
      turn(x.o, room.keys.get(), nullptr);
      float *lse = at + 4 * form, *delta = lse + kKeys;
      TIO_PICK(row_deltas)(block.grad_turned, room.keys.get(), D, delta);
      for (int i = block.first; i < block.last; i++) lse[i] = *x.lse.at(q0 + p0 + i - offset, head);
    }
    for (int64_t kb = 0; kb < key_blocks; kb++) {
      float* at = room.keys.get();
      BackwardKeys block{int(std::min<int64_t>(keys - kb * kKeys, kKeys)), at, at + form, at + 2 * form};
      for (int j = 0; j < block.count; j++) rows[j] = x.k.at(k0 + kb * kKeys + j, g);
      TIO_PICK(both_forms<T>)(rows, 0, block.count, D, block.keys_turned, block.keys);
      for (int j = 0; j < block.count; j++) rows[j] = x.v.at(k0 + kb * kKeys + j, g);
      TIO_PICK(both_forms<T>)(rows, 0, block.count, D, block.values_turned, nullptr);
      std::fill(one_k, one_k + 2 * form, 0.0f);
      for (int64_t b = std::max<int64_t>(kb - first_block, 0); b < room.blocks; b++) {
        float* tiles = room.tiles.get();
        TIO_PICK(backward_tile)(blocks[size_t(b)], block, D, scale, first_block + b == kb, room.dq.get() + b * form, one_k, one_v, tiles, tiles + kKeys * kKeys,
                                tiles + 2 * kKeys * kKeys);
      }
      TIO_PICK(add_into)(one_k, total_k + kb * form, form);
      TIO_PICK(add_into)(one_v, total_v + kb * form, form);
    }
    for (int64_t t = 0; t < queries; t++)
      TIO_PICK(round_row<T>)(room.dq.get() + (offset + t - first_block * kKeys) * D, scale, D, x.dq.at(q0 + t, head));
  }
  for (int64_t t = 0; t < keys; t++) {
    TIO_PICK(round_row<T>)(total_k + t * D, scale, D, x.dk.at(k0 + t, g));
    TIO_PICK(round_row<T>)(total_v + t * D, 1.0f, D, x.dv.at(k0 + t, g));
  }
  return 0;
}

template <class T>
int run(const Tensors<T>& x, const int32_t* cu_q, const int32_t* cu_k, int64_t B, int64_t H, int64_t G, int D, float scale, int threads) {
  int failed = 0;
#pragma omp parallel num_threads(int(std::max<int64_t>(1, std::min<int64_t>(threads, B * G)))) reduction(| : failed)
  {
    FloatMode mode;
#pragma omp for schedule(dynamic, 1)
    for (int64_t i = 0; i < B * G; i++) {
      const int64_t b = i / G;
      if (!failed) failed = run_task(x, cu_q[b], cu_q[b + 1] - cu_q[b], cu_k[b], cu_k[b + 1] - cu_k[b], i % G, H / G, D, scale);
    }
  }
  return failed;
}

}  // namespace
}  // namespace tio

using namespace tio;

// Strides are {token, head} in elements; lse and the results are contiguous. Returns 0, or 1 when there is no memory.
TIO_API int tio_attention_backward(const void* grad, const int64_t* grad_strides, const void* q, const int64_t* q_strides, const void* k, const int64_t* k_strides,
                                   const void* v, const int64_t* v_strides, const void* o, const int64_t* o_strides, const float* lse, int type, const int32_t* cu_q,
                                   const int32_t* cu_k, int64_t B, int64_t H, int64_t G, int D, float scale, void* dq, void* dk, void* dv, int threads) {
  auto start = [&](auto zero) {
    using T = decltype(zero);
    auto view = [](const void* p, const int64_t* strides) { return View<const T>{static_cast<const T*>(p), strides[0], strides[1]}; };
    const Tensors<T> x{view(grad, grad_strides), view(q, q_strides), view(k, k_strides), view(v, v_strides), view(o, o_strides), {lse, H, 1},
                       {static_cast<T*>(dq), H * D, D}, {static_cast<T*>(dk), G * D, D}, {static_cast<T*>(dv), G * D, D}};
    return run<T>(x, cu_q, cu_k, B, H, G, D, scale, threads);
  };
  return type == kBFloat16 ? start(bf16{}) : start(0.0f);
}

// Combining expert rows: C interface. A token's present choices are the leaves of a tree over all experts; absent ones are skipped.
#include <vector>

#include "order.h"
#include "rows.h"

namespace tio {

// How a token's present leaves, ascending, are joined: push row `row` times `prob`, then fold the two topmost sums `merges` times.
struct Leaf {
  int64_t row;
  float prob;
  int merges;
};

}  // namespace tio

#define TIO_BODY "combine_body.h"
#include "for_each_isa.h"

namespace tio {
namespace {

// Two neighbours meet at the level of the highest bit in which their leaves differ. Folds wait until the next leaf is known.
int plan(const int64_t* leaf, int count, Leaf* out) {
  int levels[64], height = 0;
  for (int i = 0; i < count; i++) {
    const int meet = i + 1 < count ? 64 - __builtin_clzll(uint64_t(leaf[i] ^ leaf[i + 1])) : 64;
    out[i].merges = 0;
    while (height > 0 && levels[height - 1] < meet) {
      height--;
      out[i].merges++;
    }
    levels[height++] = meet;
  }
  return count;
}

}  // namespace
}  // namespace tio

using namespace tio;

// rows[R, H] (row stride `stride`), index and ids and probs [T, k] (probs may be null) to out[nodes, T, H] fp32. Node n is the leaves
// [starts[n], starts[n] + sizes[n]). Returns 2 for a row out of range, 3 for an expert out of range, 4 for ids that do not ascend.
TIO_API int tio_combine(const void* rows, int type, int64_t stride, int64_t R, int64_t H, const int64_t* index, const int64_t* ids, const float* probs, int64_t T,
                        int64_t k, int64_t experts, const int64_t* starts, const int64_t* sizes, int64_t nodes, float* out, int threads) {
  int refused = 0;
  for (int64_t t = 0; t < T && !refused; t++) {
    int64_t last = -1;
    for (int64_t j = t * k; j < (t + 1) * k && !refused; j++) {
      if (index[j] < 0) continue;
      if (index[j] >= R) refused = 2;
      else if (ids[j] < 0 || ids[j] >= experts) refused = 3;
      else if (ids[j] <= last) refused = 4;
      last = ids[j];
    }
  }
  if (refused) return refused;
#pragma omp parallel num_threads(useful_threads(threads, T * k * H))
  {
    FloatMode mode;
    std::vector<Leaf> leaves(static_cast<size_t>(k));
    std::vector<int64_t> at(static_cast<size_t>(k));
#pragma omp for schedule(static)
    for (int64_t t = 0; t < T; t++)
      for (int64_t n = 0; n < nodes; n++) {
        int count = 0;
        for (int64_t j = t * k; j < (t + 1) * k; j++) {
          if (index[j] < 0 || ids[j] < starts[n] || ids[j] >= starts[n] + sizes[n]) continue;
          at[count] = ids[j];
          leaves[count++] = {index[j], probs ? probs[j] : 1.0f, 0};
        }
        plan(at.data(), count, leaves.data());
        float* to = out + (n * T + t) * H;
        if (type == kBFloat16) TIO_PICK(combine_token<bf16>)(static_cast<const bf16*>(rows), stride, leaves.data(), count, H, to);
        else TIO_PICK(combine_token<float>)(static_cast<const float*>(rows), stride, leaves.data(), count, H, to);
      }
  }
  return 0;
}

namespace tio {
namespace {

constexpr int kChoices = 16;  // taken together

template <class D, class T>
int backward(const D* dout, int64_t dout_stride, const T* rows, int64_t stride, int64_t R, int64_t H, const int64_t* index, const float* probs, int64_t tokens, int64_t k,
             T* drows, float* dprobs, int threads) {
  std::vector<char> chosen(size_t(R), 0);
  std::vector<int64_t> choices;
  for (int64_t i = 0; i < tokens * k; i++) {
    if (index[i] < 0) {
      if (dprobs) dprobs[i] = 0.0f;
      continue;
    }
    if (index[i] >= R) return 2;
    if (chosen[size_t(index[i])]++) return 3;
    choices.push_back(i);
  }
  for (int64_t r = 0; r < R; r++)
    if (!chosen[size_t(r)]) std::memset(static_cast<void*>(drows + r * H), 0, sizeof(T) * size_t(H));
  const int64_t count = int64_t(choices.size());
  int failed = 0;
#pragma omp parallel num_threads(useful_threads(threads, count * H * 2)) reduction(| : failed)
  {
    FloatMode mode;
    Scratch<float> parts(size_t(kChoices * (H / kRowChain + 1)));
    if (!parts.get()) failed = 1;
#pragma omp for schedule(static)
    for (int64_t c0 = 0; c0 < count; c0 += kChoices) {
      if (failed) continue;
      const int n = int(std::min<int64_t>(kChoices, count - c0));
      const D* d[kChoices];
      const T* row[kChoices];
      float sums[kChoices];
      for (int i = 0; i < n; i++) {
        const int64_t choice = choices[size_t(c0 + i)], r = index[choice];
        d[i] = dout + choice / k * dout_stride;
        row[i] = rows + r * stride;
        TIO_PICK(weighted_row<D, T>)(d[i], probs ? probs[choice] : 1.0f, H, drows + r * H);
      }
      if (!dprobs) continue;
      TIO_PICK(row_products<D, T>)(d, row, n, H, parts.get(), sums);
      for (int i = 0; i < n; i++) dprobs[choices[size_t(c0 + i)]] = sums[i];
    }
  }
  return failed;
}

}  // namespace
}  // namespace tio

// drows[R, H] in the type of rows, dprobs[T, k] fp32 (both probs null, or neither). Returns 2 for a row out of range, 3 for a row chosen twice.
TIO_API int tio_combine_backward(const void* dout, int dout_type, int64_t dout_stride, const void* rows, int type, int64_t stride, int64_t R, int64_t H,
                                 const int64_t* index, const float* probs, int64_t T, int64_t k, void* drows, float* dprobs, int threads) {
  auto run = [&](auto d_zero, auto zero) {
    using D = decltype(d_zero);
    using E = decltype(zero);
    return backward(static_cast<const D*>(dout), dout_stride, static_cast<const E*>(rows), stride, R, H, index, probs, T, k, static_cast<E*>(drows), dprobs, threads);
  };
  if (dout_type == kBFloat16) return type == kBFloat16 ? run(bf16{}, bf16{}) : run(bf16{}, 0.0f);
  return type == kBFloat16 ? run(0.0f, bf16{}) : run(0.0f, 0.0f);
}

// Routing of W tokens side by side, one in each lane.
#include "elementary.h"
#include "transpose.h"

TIO_INLINE float largest_of(const float* x, int64_t n) {
  F top = set1(-__builtin_inff());
  int64_t k = 0;
  for (; k + W <= n; k += W) top = larger(load(x + k), top);
  float lanes[W], best = -__builtin_inff();
  store(lanes, top);
  for (int i = 0; i < W; i++) best = lanes[i] > best ? lanes[i] : best;
  for (; k < n; k++) best = x[k] > best ? x[k] : best;
  return best;
}

// Sums of exp(x - max) over the experts of W tokens, one in each lane: chains of kRouterChain, joined by the tree. Keeps the exponentials.
TIO_INLINE F sum_exponentials(const float* const* x, const float* max, float* const* keep, int64_t E) {
  const int64_t chains = (E + kRouterChain - 1) / kRouterChain;
  F stack[64], sum = zero();
  int height = 0;
  for (int64_t e = 0; e < E; e += W) {
    const int n = int(E - e < W ? E - e : W);
    F r[W];
#pragma GCC unroll 16
    for (int i = 0; i < W; i++) {
      r[i] = exp(load(x[i] + e, n) - set1(max[i]));
      store(keep[i] + e, r[i], n);
    }
    transpose(r);
    for (int i = 0; i < n; i++) {
      sum = sum + r[i];
      if ((e + i + 1) % kRouterChain && e + i + 1 < E) continue;
      for (int m = merges_after((e + i) / kRouterChain, chains); m > 0; m--) sum = stack[--height] + sum;
      stack[height++] = sum;
      sum = zero();
    }
  }
  return stack[0];
}

// Softmax of rows of logits[tokens, E] into p[tokens, E].
TIO_FN void softmax_rows(const float* logits, int tokens, int64_t E, float* p) {
  for (int t0 = 0; t0 < tokens; t0 += W) {
    const float* at[W];
    float *keep[W], top[W], lanes[W];
    for (int i = 0; i < W; i++) {
      const int t = t0 + i < tokens ? t0 + i : t0;
      at[i] = logits + t * E;
      keep[i] = p + t * E;
      top[i] = largest_of(at[i], E);
    }
    store(lanes, sum_exponentials(at, top, keep, E));
    for (int t = t0; t < tokens && t < t0 + W; t++) {
      const F sum = set1(lanes[t - t0]);
      for (int64_t e = 0; e < E; e += W) {
        const int n = int(E - e < W ? E - e : W);
        store(p + t * E + e, load(p + t * E + e, n) / sum, n);
      }
    }
  }
}

// The k largest of p[E], the lower id first among equals, in ascending order of id. A NaN row takes the first k. p is overwritten where chosen.
TIO_FN void choose(float* p, int64_t E, int64_t k, bool normalise, int64_t* ids, float* probs) {
  const float taken = -1.0f;  // below every probability
  for (int64_t j = 0; j < k; j++) {
    const float best = largest_of(p, E);
    int64_t e = 0;
    if (best >= 0.0f)
      while (p[e] != best) e++;
    else  // every remaining one is NaN
      while (p[e] == taken) e++;
    int64_t place = j;
    for (; place > 0 && ids[place - 1] > e; place--) {
      ids[place] = ids[place - 1];
      probs[place] = probs[place - 1];
    }
    ids[place] = e;
    probs[place] = p[e];
    p[e] = taken;
  }
  if (!normalise) return;
  float sum = 0.0f;
  for (int64_t j = 0; j < k; j++) sum += probs[j];
  for (int64_t j = 0; j < k; j++) probs[j] = probs[j] / sum;
}

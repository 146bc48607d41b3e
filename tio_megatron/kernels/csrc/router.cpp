// Routing's C interface. logits[T, E] and p[T, E] are contiguous fp32.
#include "order.h"
#include "rows.h"

#define TIO_BODY "router_body.h"
#include "for_each_isa.h"

namespace tio {
namespace {

constexpr int64_t kTokens = 16;  // taken together

// Calls work(first token, tokens, their probabilities) with room for kTokens + 1 rows.
template <class Work>
int over_tokens(const float* logits, int64_t T, int64_t E, int threads, Work work) {
  int failed = 0;
#pragma omp parallel num_threads(useful_threads(threads, T * E * 8)) reduction(| : failed)
  {
    FloatMode mode;
    Scratch<float> p(size_t((kTokens + 1) * E));
    if (!p.get()) failed = 1;
#pragma omp for schedule(static)
    for (int64_t t = 0; t < T; t += kTokens) {
      if (failed) continue;
      const int n = int(std::min(kTokens, T - t));
      TIO_PICK(softmax_rows)(logits + t * E, n, E, p.get());
      work(t, n, p.get());
    }
  }
  return failed;
}

// probs of the chosen, from the whole softmax.
void gather(const float* p, const int64_t* ids, int64_t k, bool normalise, float* probs) {
  float sum = 0.0f;
  for (int64_t j = 0; j < k; j++) sum += probs[j] = p[ids[j]];
  for (int64_t j = 0; normalise && j < k; j++) probs[j] = probs[j] / sum;
}

// fl(a[e] * b[e]) summed over the experts: chains of kRouterChain, joined by the tree. `stack` has room for 64.
float row_sum(const float* a, const float* b, int64_t E, float* stack) {
  const int64_t chains = (E + kRouterChain - 1) / kRouterChain;
  int height = 0;
  for (int64_t c = 0; c < chains; c++) {
    float sum = 0.0f;
    for (int64_t e = c * kRouterChain, end = std::min(E, e + kRouterChain); e < end; e++) sum += a[e] * b[e];
    for (int m = merges_after(c, chains); m > 0; m--) sum = stack[--height] + sum;
    stack[height++] = sum;
  }
  return stack[0];
}

// A probability in whole units of 2^-40, half to even. The sum below 2^53 leaves the integer in the low bits.
inline int64_t counts_of(float p) {
  const double magic = 0x1.8p52;
  const double sum = double(p) * 0x1p40 + magic;
  int64_t bits, zero;
  std::memcpy(&bits, &sum, 8);
  std::memcpy(&zero, &magic, 8);
  return bits - zero;
}

bool inside(const int64_t* values, int64_t n, int64_t low, int64_t high) {
  return std::all_of(values, values + n, [=](int64_t v) { return low <= v && v < high; });
}

}  // namespace
}  // namespace tio

using namespace tio;

TIO_API int tio_router_scores(const float* logits, int64_t T, int64_t E, float* scores, int threads) {
  return over_tokens(logits, T, E, threads, [&](int64_t t, int n, const float* p) { std::memcpy(scores + t * E, p, sizeof(float) * n * E); });
}

TIO_API int tio_route(const float* logits, int64_t T, int64_t E, int64_t k, int normalise, int64_t* ids, float* probs, int threads) {
  return over_tokens(logits, T, E, threads, [&](int64_t t, int n, float* p) {
    for (int i = 0; i < n; i++) TIO_PICK(choose)(p + i * E, E, k, normalise, ids + (t + i) * k, probs + (t + i) * k);
  });
}

// dlogits[T, E] from dprobs[T, k], k at most E. Returns 2 if an id is not an expert.
TIO_API int tio_route_backward(const float* dprobs, const float* logits, const int64_t* ids, int64_t T, int64_t E, int64_t k, int normalise, float* dlogits, int threads) {
  for (int64_t i = 0; i < T * k; i++)
    if (ids[i] < 0 || ids[i] >= E) return 2;
  return over_tokens(logits, T, E, threads, [&](int64_t t, int n, float* p) {
    float* const chosen = p + kTokens * E;
    for (int i = 0; i < n; i++, t++, p += E) {
      const float* d = dprobs + t * k;
      const int64_t* id = ids + t * k;
      float *out = dlogits + t * E, mean = 0.0f;
      gather(p, id, k, normalise, chosen);
      for (int64_t j = 0; j < k; j++) mean += d[j] * chosen[j];
      if (normalise) {
        std::fill(out, out + E, 0.0f);
        for (int64_t j = 0; j < k; j++) out[id[j]] = chosen[j] * (d[j] - mean);
      } else {
        for (int64_t e = 0; e < E; e++) out[e] = p[e] * (0.0f - mean);
        for (int64_t j = 0; j < k; j++) out[id[j]] = p[id[j]] * (d[j] - mean);
      }
    }
  });
}

// For each sample, sums[S, 2E + 1]: choices of each expert, probabilities of each expert in units of 2^-40, tokens with a NaN probability.
// sample[t] is -1 for a token that does not count. sums must be zero. Returns 2 if an id or a sample is outside.
TIO_API int tio_balance_sums(const float* logits, const int64_t* ids, const int64_t* sample, int64_t T, int64_t E, int64_t k, int64_t S, int64_t* sums, int threads) {
  if (!inside(sample, T, -1, S)) return 2;
  for (int64_t t = 0; t < T; t++)
    if (sample[t] >= 0 && !inside(ids + t * k, k, 0, E)) return 2;
  const int64_t width = 2 * E + 1;
  int failed = 0;
#pragma omp parallel num_threads(useful_threads(threads, T * E * 8)) reduction(| : failed)
  {
    FloatMode mode;
    Scratch<float> p(size_t(kTokens * E));
    Scratch<int64_t> mine(size_t(S * width));
    const bool ready = p.get() && mine.get();
    if (!ready) failed = 1;
    else std::fill(mine.get(), mine.get() + S * width, int64_t(0));
#pragma omp for schedule(static)
    for (int64_t t0 = 0; t0 < T; t0 += kTokens) {
      if (!ready) continue;
      const int n = int(std::min(kTokens, T - t0));
      TIO_PICK(softmax_rows)(logits + t0 * E, n, E, p.get());
      for (int i = 0; i < n; i++) {
        if (sample[t0 + i] < 0) continue;
        int64_t* const to = mine.get() + sample[t0 + i] * width;
        const float* const row = p.get() + i * E;
        for (int64_t j = 0; j < k; j++) to[ids[(t0 + i) * k + j]]++;
        if (row[0] != row[0]) to[2 * E]++;  // NaN fills its row
        else
          for (int64_t e = 0; e < E; e++) to[E + e] += counts_of(row[e]);
      }
    }
#pragma omp critical
    for (int64_t i = 0; ready && i < S * width; i++) sums[i] += mine.get()[i];
  }
  return failed;
}

// dlogits[T, E] of the sum over tokens and experts of weights[sample, expert] * probability: p (w - sum of w p); +0 where sample[t] is -1.
TIO_API int tio_balance_backward(const float* logits, const float* weights, const int64_t* sample, int64_t T, int64_t E, int64_t S, float* dlogits, int threads) {
  if (!inside(sample, T, -1, S)) return 2;
  return over_tokens(logits, T, E, threads, [&](int64_t t, int n, const float* p) {
    float stack[64];
    for (int i = 0; i < n; i++, t++, p += E) {
      float* const out = dlogits + t * E;
      std::fill(out, out + E, 0.0f);
      if (sample[t] < 0) continue;
      const float* const w = weights + sample[t] * E;
      const float mean = row_sum(w, p, E, stack);
      for (int64_t e = 0; e < E; e++) out[e] = p[e] * (w[e] - mean);
    }
  });
}

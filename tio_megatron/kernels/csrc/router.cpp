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

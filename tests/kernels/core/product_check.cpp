// The product without torch or Python: against its definition in plain loops, in every instruction set. Prints a hash of all results,
// which is the same on every processor; exit status 1 and the place of the first difference otherwise.
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <vector>

extern "C" {
int tio_set_isa(const char* name);
int tio_product(const void* a, int a_type, int64_t a_row, int64_t a_col, const void* const* b, int b_type, int packed, int64_t b_row, int64_t b_col,
                int64_t weights, const int64_t* offsets, int64_t N, int64_t K, int64_t leaves, int paired, void* c, int c_type, int64_t c_row, int threads);
int tio_grouped_wgrad(const void* dy, int dy_type, int64_t dy_row, const void* x, int x_type, int64_t x_row, int64_t weights, const int64_t* offsets,
                      int64_t N, int64_t K, float* c, int threads);
int tio_pack(const void* w, int type, int64_t row, int64_t col, int64_t N, int64_t K, void* to, int threads);
}

namespace {

uint32_t state = 1;
uint32_t next() { return state = state * 1664525u + 1013904223u; }

// Magnitudes over many binades, so that every order has other bytes.
float number() {
  const float x = float(int32_t(next())) / 2147483648.0f;
  return std::ldexp(x, int(next() >> 28) - 8);
}
uint16_t bf16_of(float x) {
  uint32_t u;
  std::memcpy(&u, &x, 4);
  return uint16_t(u >> 16);
}
float of_bf16(uint16_t x) {
  const uint32_t u = uint32_t(x) << 16;
  float f;
  std::memcpy(&f, &u, 4);
  return f;
}

// The balanced tree on the next power of two, by recursion; places from n on are absent.
float tree(const std::vector<float>& x, size_t first, size_t size) {
  if (size == 1) return x[first];
  const size_t half = size / 2;
  const float left = tree(x, first, half);
  return first + half < x.size() ? left + tree(x, first + half, half) : left;
}
float tree(const std::vector<float>& x) {
  size_t size = 1;
  while (size < x.size()) size *= 2;
  return tree(x, 0, size);
}

float define(const std::vector<float>& a, const std::vector<float>& b, int64_t leaves) {
  const size_t length = a.size() / size_t(leaves);
  std::vector<float> joined;
  for (int64_t leaf = 0; leaf < leaves; leaf++) {
    std::vector<float> chains;
    for (size_t k = 0; k < length; k++) {
      if (k % 256 == 0) chains.push_back(0.0f);
      const size_t at = size_t(leaf) * length + k;
      chains.back() = std::fma(a[at], b[at], chains.back());
    }
    joined.push_back(tree(chains));
  }
  return tree(joined);
}

uint64_t hash = 1469598103934665603ull;
void add(const void* p, size_t n) {
  for (size_t i = 0; i < n; i++) hash = (hash ^ static_cast<const uint8_t*>(p)[i]) * 1099511628211ull;
}

int cases = 0;
bool same(const char* isa, const char* what, const std::vector<float>& got, const std::vector<float>& want) {
  cases++;
  add(got.data(), got.size() * 4);
  for (size_t i = 0; i < got.size(); i++)
    if (std::memcmp(&got[i], &want[i], 4)) {
      std::printf("%s, %s, element %zu: %a against %a\n", isa, what, i, got[i], want[i]);
      return false;
    }
  return true;
}

bool check(const char* isa, int64_t M, int64_t N, int64_t K, int64_t leaves, bool bf16) {
  std::vector<float> a(M * K), b(N * K), want(M * N), got(M * N);
  std::vector<uint16_t> a16(M * K), b16(N * K);
  for (int64_t i = 0; i < M * K; i++) a16[i] = bf16_of(a[i] = number()), a[i] = bf16 ? of_bf16(a16[i]) : a[i];
  for (int64_t i = 0; i < N * K; i++) b16[i] = bf16_of(b[i] = number()), b[i] = bf16 ? of_bf16(b16[i]) : b[i];
  for (int64_t m = 0; m < M; m++)
    for (int64_t n = 0; n < N; n++) want[m * N + n] = define({a.begin() + m * K, a.begin() + (m + 1) * K}, {b.begin() + n * K, b.begin() + (n + 1) * K}, leaves);
  const void *pa = bf16 ? static_cast<const void*>(a16.data()) : a.data(), *pb = bf16 ? static_cast<const void*>(b16.data()) : b.data();
  const int64_t offsets[] = {0, M};
  if (tio_product(pa, bf16, K, 1, &pb, bf16, 0, K, 1, 1, offsets, N, K, leaves, 0, got.data(), 0, N, 2)) return false;
  bool ok = same(isa, "weight as it lies", got, want);
  std::vector<char> packed((N + 31) / 32 * 32 * K * (bf16 ? 2 : 4));
  const void* panels = packed.data();
  tio_pack(pb, bf16, K, 1, N, K, packed.data(), 1);
  std::fill(got.begin(), got.end(), NAN);
  if (tio_product(pa, bf16, K, 1, &panels, bf16, 1, 0, 0, 1, offsets, N, K, leaves, 0, got.data(), 0, N, 1)) return false;
  ok &= same(isa, "packed", got, want);
  // a gradient of the weight: the same operands, terms and rows exchanged
  std::vector<float> dw(N * K), dw_want(N * K);
  std::vector<float> dy(M * N);
  for (float& x : dy) x = number();
  for (int64_t n = 0; n < N; n++)
    for (int64_t k = 0; k < K; k++) {
      std::vector<float> left, right;
      for (int64_t m = 0; m < M; m++) left.push_back(dy[m * N + n]), right.push_back(a[m * K + k]);
      dw_want[n * K + k] = define(left, right, 1);
    }
  if (tio_grouped_wgrad(dy.data(), 0, N, pa, bf16, K, 1, offsets, N, K, dw.data(), 1)) return false;
  return ok & same(isa, "weight gradient", dw, dw_want);
}

}  // namespace

int main() {
  uint64_t first = 0;
  const int64_t shapes[][4] = {{1, 5, 8, 1}, {13, 33, 600, 2}, {7, 40, 96, 8}, {2, 64, 1284, 1}, {300, 3, 70, 1}, {1, 1, 1, 1}};
  for (const char* isa : {"generic", "avx2", "avx512"}) {
    if (tio_set_isa(isa)) continue;
    state = 1, hash = 1469598103934665603ull;
    for (const auto& s : shapes)
      for (bool bf16 : {false, true})
        if (!check(isa, s[0], s[1], s[2], s[3], bf16)) return 1;
    if (!first) first = hash;
    if (hash != first) return std::printf("%s: another hash\n", isa), 1;
  }
  std::printf("%d cases equal, hash %016llx\n", cases, static_cast<unsigned long long>(first));
}

// The order of one output element's sum, shared by every kernel with a product in it.
//
// The K terms are cut in `leaves` equal leaves, a leaf in chains of at most 256 terms from its start. Chains are summed by fma from
// +0; the chains of a leaf are joined by the tree, then the leaves are. Chunks are visited in ascending k with a stack: push the
// chain, then fold the two topmost values `merges` times (contract/tree.py: ReductionTree.merges).
#pragma once
#include <algorithm>
#include <cstdint>
#include <vector>

namespace tio {

constexpr int kChain = 256;
constexpr int kRowChain = 32;    // of a sum along a row, or over rows
constexpr int kRouterChain = 8;  // of the router's sum over experts

// A chain. Its terms lie in memory from begin[0] on and, where it crosses from the first half of a paired axis into the second, after
// `split` terms from begin[1] on.
struct Chunk {
  int64_t begin[2];
  int split;
  int length;  // terms, at most kChain
  int depth;   // values on the stack before this chain is pushed
  int merges;  // folds after it
};

// Folds after value i of a tree over n.
inline int merges_after(int64_t i, int64_t n) { return i + 1 == n ? __builtin_popcountll(uint64_t(n - 1)) : __builtin_ctzll(uint64_t(i + 1)); }

// The tree over n values that are all there; they are overwritten. Level by level, an odd last one waits.
inline float join(float* values, int64_t n) {
  for (; n > 1; n = (n + 1) / 2) {
    for (int64_t i = 0; i < n / 2; i++) values[i] = values[2 * i] + values[2 * i + 1];
    if (n % 2) values[n / 2] = values[n - 1];
  }
  return values[0];
}

struct Order {
  std::vector<Chunk> chunks;
  int depth = 1;  // the stack's largest height

  // `paired`: the axis is two halves side by side ([gate; up]); leaf j is leaf j of the first half, then leaf j of the second.
  Order(int64_t terms, int64_t leaves, bool paired) {
    const int64_t length = terms / leaves, chains = (length + kChain - 1) / kChain, half = paired ? length / 2 : length;
    chunks.reserve(size_t(leaves * chains));
    int height = 0;
    for (int64_t leaf = 0; leaf < leaves; leaf++)
      for (int64_t chain = 0; chain < chains; chain++) {
        const int merges = merges_after(chain, chains) + (chain + 1 == chains ? merges_after(leaf, leaves) : 0);
        const int64_t first = chain * kChain, count = std::min<int64_t>(length - first, kChain);
        const int64_t low = leaf * half, high = terms / 2 + leaf * half;
        Chunk chunk{{low + first, 0}, int(count), int(count), height, merges};
        if (paired && first >= half) chunk.begin[0] = high + first - half;
        else if (paired && first + count > half) chunk.begin[1] = high, chunk.split = int(half - first);
        chunks.push_back(chunk);
        depth = std::max(depth, height + 1);
        height += 1 - merges;
      }
  }
};

}  // namespace tio

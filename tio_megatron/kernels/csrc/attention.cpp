// Attention forward: C interface, tasks, and pages. Dense keys and values are put into pages first, so there is one walk.
#include "attention.h"

#include <new>
#include <vector>

#define TIO_BODY "attention_body.h"
#include "for_each_isa.h"

namespace tio {
namespace {

// A cache of pages [page][head][keys / 64] of { keys [D][64], values [64][D] }; strides in elements.
template <class T>
struct Pages {
  T* data;
  int64_t page_stride, heads, keys_per_page;
  int D;
  T* block(int64_t page, int64_t head, int64_t inside) const { return data + page * page_stride + (head * (keys_per_page / kKeys) + inside) * 2 * kKeys * D; }
};

struct Sequence {
  int64_t first, queries, keys;  // its first query row, and lengths
  const int32_t* pages;
};

template <class T>
void put(const Pages<T>& pages, int64_t slot, int64_t g, const T* k, const T* v) {
  const int64_t place = slot % pages.keys_per_page;
  T* block = pages.block(slot / pages.keys_per_page, g, place / kKeys);
  const int64_t j = place % kKeys;
  for (int d = 0; d < pages.D; d++) block[d * kKeys + j] = k[d];
  std::copy(v, v + pages.D, block + (kKeys + j) * pages.D);
}

struct Task {
  int64_t sequence, head, row0, row1;
};

// Memory of one thread, used again for each task.
struct Room {
  Scratch<float> tiles, wide, scores;
  explicit Room(int D) : tiles(size_t(2 * kTaskRows * D)), wide(size_t(2 * kKeys * D)), scores(size_t(kKeys * kLanes)) {}
  bool ok() const { return tiles.get() && wide.get() && scores.get(); }
};

const float* widened(const float* block, float*, int) { return block; }
const float* widened(const bf16* block, float* to, int count) {
  TIO_PICK(widen)(block, to, count);
  return to;
}

template <class T>
void run_task(const Task& task, const Sequence& sequence, const View<const T>& q, const Pages<const T>& pages, int64_t group, float scale, const View<T>& o,
              const View<float>* lse, Room& room) {
  const int D = pages.D;
  AttentionTile tiles[kTaskRows / kLanes + 1];
  int sizes[kTaskRows / kLanes + 1], count = 0;
  float* memory = room.tiles.get();
  const T* in[kLanes];
  T* out[kLanes];
  float* sums[kLanes];
  auto rows_of = [&](int64_t row, int n) {
    for (int i = 0; i < n; i++) {
      const int64_t t = sequence.first + (row + i) / group, h = task.head * group + (row + i) % group;
      in[i] = q.at(t, h);
      out[i] = o.at(t, h);
      sums[i] = lse ? lse->at(t, h) : nullptr;
    }
  };
  for (int64_t row = task.row0; row < task.row1; row += tiles[count++].rows) {
    AttentionTile& tile = tiles[count];
    const int64_t left = task.row1 - row;
    const int size = left > 16 ? kLanes : left > kFew ? 16 : kFew;
    sizes[count] = size;
    tile.rows = int(std::min<int64_t>(left, size));
    tile.q = memory;
    tile.acc = memory + size * D;
    memory += 2 * size * D;
    for (int i = 0; i < kLanes; i++) {
      tile.sees[i] = sequence.keys - sequence.queries + (row + (i < tile.rows ? i : 0)) / group + 1;
      tile.top[i] = -__builtin_inff();
      tile.sum[i] = 0.0f;
    }
    rows_of(row, tile.rows);
    TIO_PICK(load_queries<T>)(in, tile, D, size);
  }
  const int64_t last = sequence.keys - sequence.queries + (task.row1 - 1) / group + 1, per_page = pages.keys_per_page / kKeys;
  for (int64_t b = 0; b * kKeys < last; b++) {
    const T* block = pages.block(sequence.pages[b / per_page], task.head, b % per_page);
    const float* wide = nullptr;
    for (int i = 0; i < count; i++) {
      AttentionTile& tile = tiles[i];
      if (tile.sees[tile.rows - 1] <= b * kKeys) continue;
      if (sizes[i] == kFew) {
        const T* next = (b + 1) * kKeys < last ? pages.block(sequence.pages[(b + 1) / per_page], task.head, (b + 1) % per_page) : nullptr;
        TIO_PICK(few_step<T>)(tile, block, block + kKeys * D, next, D, scale, b * kKeys, room.scores.get());
        continue;
      }
      if (!wide) wide = widened(block, room.wide.get(), 2 * kKeys * D);
      if (sizes[i] == kLanes) TIO_PICK(lanes_step<kLanes>)(tile, wide, wide + kKeys * D, D, scale, b * kKeys, room.scores.get());
      else TIO_PICK(lanes_step<16>)(tile, wide, wide + kKeys * D, D, scale, b * kKeys, room.scores.get());
    }
  }
  int64_t row = task.row0;
  for (int i = 0; i < count; row += tiles[i++].rows) {
    rows_of(row, tiles[i].rows);
    if (sizes[i] == kFew) TIO_PICK(finish_few<T>)(tiles[i], D, out, lse ? sums : nullptr);
    else TIO_PICK(finish_lanes<T>)(tiles[i], D, sizes[i], out, lse ? sums : nullptr);
  }
}

template <class T>
int run(const std::vector<Sequence>& sequences, const View<const T>& q, const Pages<const T>& pages, int64_t group, float scale, const View<T>& o, const View<float>* lse,
        int threads) {
  std::vector<Task> tasks;
  for (size_t s = 0; s < sequences.size(); s++)
    for (int64_t row = 0, rows = sequences[s].queries * group; row < rows; row += kTaskRows)
      for (int64_t g = 0; g < pages.heads; g++) tasks.push_back({int64_t(s), g, row, std::min<int64_t>(row + kTaskRows, rows)});
  const int64_t count = int64_t(tasks.size());
  int failed = 0;
#pragma omp parallel num_threads(int(std::max<int64_t>(1, std::min<int64_t>(threads, count)))) reduction(| : failed)
  {
    FloatMode mode;
    Room room(pages.D);
    if (!room.ok()) failed = 1;
#pragma omp for schedule(dynamic, 1)
    for (int64_t i = count - 1; i >= 0; i--)  // the longest walks first
      if (!failed) run_task(tasks[i], sequences[tasks[i].sequence], q, pages, group, scale, o, lse, room);
  }
  return failed;
}

// Keys and values of every sequence into pages of 64 of their own.
template <class T>
int dense(const View<const T>& q, const View<const T>& k, const View<const T>& v, const int32_t* cu_q, const int32_t* cu_k, int64_t B, int64_t H, int64_t G, int D,
          float scale, const View<T>& o, const View<float>& lse, int threads) {
  std::vector<Sequence> sequences;
  int64_t blocks = 0;
  for (int64_t i = 0; i < B; i++) blocks += (cu_k[i + 1] - cu_k[i] + kKeys - 1) / kKeys;
  std::vector<int32_t> numbers(static_cast<size_t>(blocks));
  for (int64_t i = 0; i < blocks; i++) numbers[i] = int32_t(i);
  Scratch<T> memory(size_t(blocks * G * 2 * kKeys * D));
  if (!memory.get()) return 1;
  const Pages<T> pages{memory.get(), G * 2 * kKeys * D, G, kKeys, D};
  int64_t next = 0;
  for (int64_t i = 0; i < B; i++) {
    const int64_t keys = cu_k[i + 1] - cu_k[i];
    sequences.push_back({cu_q[i], cu_q[i + 1] - cu_q[i], keys, numbers.data() + next});
#pragma omp parallel for collapse(2) num_threads(keys * G * D > 65536 ? threads : 1)
    for (int64_t g = 0; g < G; g++)
      for (int64_t b = 0; b < (keys + kKeys - 1) / kKeys; b++)
        for (int64_t j = b * kKeys; j < std::min(keys, (b + 1) * kKeys); j++) put(pages, next * kKeys + j, g, k.at(cu_k[i] + j, g), v.at(cu_k[i] + j, g));
    next += (keys + kKeys - 1) / kKeys;
  }
  return run<T>(sequences, q, {pages.data, pages.page_stride, pages.heads, pages.keys_per_page, D}, H / G, scale, o, &lse, threads);
}

template <class T>
int write(const View<const T>& k, const View<const T>& v, int64_t tokens, const Pages<T>& pages, int64_t page_count, const int64_t* slots, int threads) {
  for (int64_t t = 0; t < tokens; t++)
    if (slots[t] >= page_count * pages.keys_per_page) return 2;
#pragma omp parallel for num_threads(tokens * pages.heads * pages.D > 65536 ? threads : 1) schedule(static)
  for (int64_t g = 0; g < pages.heads; g++)
    for (int64_t t = 0; t < tokens; t++)
      if (slots[t] >= 0) put(pages, slots[t], g, k.at(t, g), v.at(t, g));
  return 0;
}

template <class T>
int paged(const View<const T>& q, int64_t tokens, const Pages<const T>& pages, int64_t page_count, const int32_t* table, int64_t table_stride, int64_t table_width,
          const int32_t* lengths, const int32_t* starts, int64_t B, int64_t H, float scale, const View<T>& o, int threads) {
  std::vector<Sequence> sequences;
  for (int64_t i = 0; i < B; i++) {
    const int64_t queries = starts[i + 1] - starts[i], keys = lengths[i], used = (keys + pages.keys_per_page - 1) / pages.keys_per_page;
    if (queries == 0) continue;
    if (starts[i] < 0 || queries < 0 || starts[i + 1] > tokens) return 2;
    if (keys < queries || used > table_width) return 3;
    for (int64_t p = 0; p < used; p++)
      if (table[i * table_stride + p] < 0 || table[i * table_stride + p] >= page_count) return 4;
    sequences.push_back({starts[i], queries, keys, table + i * table_stride});
  }
  return run<T>(sequences, q, pages, H / pages.heads, scale, o, nullptr, threads);
}

}  // namespace
}  // namespace tio

using namespace tio;

// Every function returns 0, or 1 when there is no memory. Strides are {token, head} in elements; the last axis is contiguous.

// o[T, H, D], lse[T, H], both contiguous.
TIO_API int tio_attention(const void* q, const int64_t* q_strides, const void* k, const int64_t* k_strides, const void* v, const int64_t* v_strides, int type,
                          const int32_t* cu_q, const int32_t* cu_k, int64_t B, int64_t H, int64_t G, int D, float scale, void* o, float* lse, int threads) try {
  auto run = [&](auto zero) {
    using T = decltype(zero);
    auto view = [](const void* p, const int64_t* strides) { return View<const T>{static_cast<const T*>(p), strides[0], strides[1]}; };
    return dense<T>(view(q, q_strides), view(k, k_strides), view(v, v_strides), cu_q, cu_k, B, H, G, D, scale, {static_cast<T*>(o), H * D, D}, {lse, H, 1}, threads);
  };
  return type == kBFloat16 ? run(bf16{}) : run(0.0f);
} catch (const std::bad_alloc&) {
  return 1;
}

// Returns 2 for a slot past the cache; negative slots are skipped.
TIO_API int tio_write_pages(const void* k, const int64_t* k_strides, const void* v, const int64_t* v_strides, int type, int64_t tokens, void* cache, int64_t page_stride,
                            int64_t page_count, int64_t G, int64_t keys_per_page, int D, const int64_t* slots, int threads) {
  auto run = [&](auto zero) {
    using T = decltype(zero);
    auto view = [](const void* p, const int64_t* strides) { return View<const T>{static_cast<const T*>(p), strides[0], strides[1]}; };
    return write<T>(view(k, k_strides), view(v, v_strides), tokens, {static_cast<T*>(cache), page_stride, G, keys_per_page, D}, page_count, slots, threads);
  };
  return type == kBFloat16 ? run(bf16{}) : run(0.0f);
}

// Returns 2 for starts past the tokens, 3 for lengths that do not fit, 4 for a page past the cache.
TIO_API int tio_attention_paged(const void* q, const int64_t* q_strides, int type, int64_t tokens, const void* cache, int64_t page_stride, int64_t page_count, int64_t G,
                                int64_t keys_per_page, int D, const int32_t* table, int64_t table_stride, int64_t table_width, const int32_t* lengths,
                                const int32_t* starts, int64_t B, int64_t H, float scale, void* o, const int64_t* o_strides, int threads) try {
  auto run = [&](auto zero) {
    using T = decltype(zero);
    return paged<T>({static_cast<const T*>(q), q_strides[0], q_strides[1]}, tokens, {static_cast<const T*>(cache), page_stride, G, keys_per_page, D}, page_count, table,
                    table_stride, table_width, lengths, starts, B, H, scale, {static_cast<T*>(o), o_strides[0], o_strides[1]}, threads);
  };
  return type == kBFloat16 ? run(bf16{}) : run(0.0f);
} catch (const std::bad_alloc&) {
  return 1;
}

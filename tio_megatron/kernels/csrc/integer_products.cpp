// Exact sums over tokens of products (the gradient of weights): the C interface. Cuts the work in passes and tasks, which change no byte.
#include <new>
#include <vector>

#include "grid.h"
#include "order.h"

namespace tio {

// One sum [N, K] and where it lies.
struct IntegerTarget {
  int64_t *low, low_row, *high, high_row;
  Grid grid;
  float* peak;
};

// The tiles [left0, left1) x [right0, right1) of one target, over its grains [grain0, grain1). Operands are packed in tiles of all `rows`
// of these grains, from column `left_first` and `right_first` on.
struct IntegerTask {
  const IntegerTarget* target;
  const float *left, *right;
  const int64_t* starts;
  int64_t grain0, grain1, row0, rows, left_first, right_first, left0, left1, right0, right1;
  uint32_t peak;
};

}  // namespace tio

#define TIO_BODY "integer_products_body.h"
#include "for_each_isa.h"

namespace tio {
namespace {

// A target is read and written once per so many rows of grains; more would push the packed operands out of the second-level cache.
constexpr int64_t kPassRows = 1024;

// Numbers packed at a time: bounds the scratch memory.
constexpr int64_t kPacked = int64_t(4) << 20;

// Numbers of either operand that a task keeps in the second-level cache.
constexpr int64_t kTaskLeft = 64 << 10, kTaskRight = 96 << 10;

// Columns packed by one thread at a time.
constexpr int64_t kPackColumns = 192;

// Below this many multiplications one thread is faster than two.
constexpr double kSmall = 2e5;

struct Operand {
  const void* data;
  Type type;
  int64_t row, columns;
};

struct Problem {
  Operand dy, x;
  const int64_t *order, *starts, *of;
  std::vector<IntegerTarget> targets;
};

int64_t round_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

// Some columns of both operands for some grains of one target.
struct Piece {
  size_t target;
  int64_t grain0, grain1, left0, left1, right0, right1, at;  // `at`: of its packed operands, left first
};

struct Packing {
  bool left;
  const Operand* from;
  int64_t row0, rows, column0, column1;
  float* to;
};

struct Plan {
  const Problem& problem;
  const int64_t tile_rows = TIO_PICK(tile_rows_of)(), tile_columns = TIO_PICK(tile_columns_of)();

  int64_t rows(const Piece& piece) const { return problem.starts[piece.grain1] - problem.starts[piece.grain0]; }
  int64_t left_numbers(const Piece& piece) const { return round_up(rows(piece) * round_up(piece.left1 - piece.left0, tile_rows), 16); }
  int64_t numbers(const Piece& piece) const { return left_numbers(piece) + round_up(rows(piece) * round_up(piece.right1 - piece.right0, tile_columns), 16); }

  // All pieces in order; those of one pass fit the scratch memory and write different numbers.
  std::vector<std::vector<Piece>> passes() const {
    std::vector<std::vector<Piece>> found;
    int64_t used = kPacked;
    for (size_t e = 0; e < problem.targets.size(); e++)
      for (int64_t g = problem.of[e]; g < problem.of[e + 1];) {
        int64_t end = g + 1;
        while (end < problem.of[e + 1] && problem.starts[end + 1] - problem.starts[g] <= kPassRows) end++;
        const int64_t rows = problem.starts[end] - problem.starts[g], N = problem.dy.columns, K = problem.x.columns;
        const int64_t most_k = std::max(tile_columns, kPacked / 2 / std::max<int64_t>(rows, 1) / tile_columns * tile_columns), width = std::min(K, most_k);
        const int64_t most_n = std::max(tile_rows, (kPacked / std::max<int64_t>(rows, 1) - round_up(width, tile_columns)) / tile_rows * tile_rows);
        bool first = true;
        for (int64_t k = 0; rows && k < K; k += width)
          for (int64_t n = 0; n < N; n += most_n) {
            Piece piece{e, g, end, n, std::min(n + most_n, N), k, std::min(k + width, K), 0};
            const bool again = first && !found.empty() && found.back().back().target == e;
            if (again || used + numbers(piece) > kPacked) {
              found.emplace_back();
              used = 0;
            }
            first = false;
            piece.at = used;
            used += numbers(piece);
            found.back().push_back(piece);
          }
        g = end;
      }
    return found;
  }

  std::vector<Packing> packings(const std::vector<Piece>& pass, float* memory) const {
    std::vector<Packing> found;
    for (const Piece& piece : pass) {
      const int64_t row0 = problem.starts[piece.grain0], n = rows(piece);
      float *left = memory + piece.at, *right = left + left_numbers(piece);
      const int64_t left_step = kPackColumns / tile_rows * tile_rows, right_step = kPackColumns / tile_columns * tile_columns;
      for (int64_t c = piece.left0; c < piece.left1; c += left_step)
        found.push_back({true, &problem.dy, row0, n, c, std::min(c + left_step, piece.left1), left + (c - piece.left0) * n});
      for (int64_t c = piece.right0; c < piece.right1; c += right_step)
        found.push_back({false, &problem.x, row0, n, c, std::min(c + right_step, piece.right1), right + (c - piece.right0) * n});
    }
    return found;
  }

  std::vector<IntegerTask> tasks(const std::vector<Piece>& pass, const float* memory, int threads) const {
    std::vector<IntegerTask> found;
    for (const Piece& piece : pass) {
      const int64_t row0 = problem.starts[piece.grain0], n = rows(piece);
      const int64_t high = std::max<int64_t>(1, kTaskLeft / (n * tile_rows)) * tile_rows;
      int64_t wide = std::max<int64_t>(1, kTaskRight / (n * tile_columns)) * tile_columns;
      if (threads > 1) wide = std::min(wide, std::max<int64_t>(1, (piece.right1 - piece.right0) / (4 * threads) / tile_columns) * tile_columns);
      const float *left = memory + piece.at, *right = left + left_numbers(piece);
      for (int64_t k = piece.right0; k < piece.right1; k += wide)
        for (int64_t m = piece.left0; m < piece.left1; m += high)
          found.push_back({&problem.targets[piece.target], left, right, problem.starts, piece.grain0, piece.grain1, row0, n, piece.left0, piece.right0, m,
                           std::min(m + high, piece.left1), k, std::min(k + wide, piece.right1), 0});
    }
    return found;
  }
};

void pack(const Packing& p, const int64_t* order) {
  const int64_t shift = p.column0 + (order ? 0 : p.row0 * p.from->row);
  const int64_t* rows = order ? order + p.row0 : nullptr;
  auto run = [&](auto zero) {
    using T = decltype(zero);
    const T* from = static_cast<const T*>(p.from->data) + shift;
    if (p.left) TIO_PICK(pack_left<T>)(from, p.from->row, rows, p.rows, p.column1 - p.column0, p.to);
    else TIO_PICK(pack_right<T>)(from, p.from->row, rows, p.rows, p.column1 - p.column0, p.to);
  };
  if (p.from->type == kBFloat16) run(bf16{});
  else run(0.0f);
}

int run(Problem& problem, int threads) {
  const Plan plan{problem};
  int64_t longest = 1, largest = 0;
  for (int64_t g = problem.of[0]; g < problem.of[problem.targets.size()]; g++) longest = std::max(longest, problem.starts[g + 1] - problem.starts[g]);
  int depth = 1;
  for (int64_t chains = (longest + kChain - 1) / kChain; chains > 1; chains = (chains + 1) / 2) depth++;
  const std::vector<std::vector<Piece>> passes = plan.passes();
  for (const std::vector<Piece>& pass : passes) largest = std::max(largest, pass.back().at + plan.numbers(pass.back()));
  Scratch<float> packed(size_t(largest) + 16);
  if (!packed.get()) return 1;
  const int64_t tile = plan.tile_rows * plan.tile_columns;
  int failed = 0;
  for (const std::vector<Piece>& pass : passes) {
    const std::vector<Packing> packings = plan.packings(pass, packed.get());
    double work = 0;
    for (const Piece& piece : pass) work += double(plan.rows(piece)) * double(piece.left1 - piece.left0) * double(piece.right1 - piece.right0);
    const int used = work < kSmall ? 1 : threads;
    std::vector<IntegerTask> tasks = plan.tasks(pass, packed.get(), used);
    const int64_t pack_count = int64_t(packings.size()), count = int64_t(tasks.size());
#pragma omp parallel num_threads(used) reduction(| : failed)
    {
      FloatMode mode;
      Scratch<float> stack(size_t(depth * tile));
      Scratch<int64_t> counts{size_t(tile)};
      if (!stack.get() || !counts.get()) failed = 1;
#pragma omp for schedule(dynamic, 1)
      for (int64_t i = 0; i < pack_count; i++) pack(packings[i], problem.order);
#pragma omp for schedule(dynamic, 1)
      for (int64_t t = 0; t < count; t++)
        if (!failed) tasks[t].peak = TIO_PICK(sum_task)(tasks[t], stack.get(), counts.get());
    }
    if (failed) return 1;
    for (const IntegerTask& task : tasks) raise(task.target->peak, task.peak);
  }
  return 0;
}

bool ascending(const int64_t* values, int64_t n, int64_t last) {
  if (values[0] < 0 || values[n - 1] > last) return false;
  for (int64_t i = 1; i < n; i++)
    if (values[i] < values[i - 1]) return false;
  return true;
}

}  // namespace
}  // namespace tio

using namespace tio;

// For each of `targets` sums low[e] [N, K] and its grains of[e] to of[e + 1]: the partial of grain g is the product over rows starts[g] to
// starts[g + 1] of dy[., N] and x[., K], taken through `order` [listed] where it is given. unit, split: of each sum.
// Returns 0, 1 when there is no memory, 2 for `starts`, 3 for `of`, 4 for `order` that are not ascending or reach outside; then nothing is written.
TIO_API int tio_add_products(const void* dy, int dy_type, int64_t dy_row, const void* x, int x_type, int64_t x_row, int64_t rows, int64_t N, int64_t K, const int64_t* order,
                             int64_t listed, const int64_t* starts, int64_t grains, const int64_t* of, int64_t targets, int64_t* const* low, const int64_t* low_row,
                             int64_t* const* high, const int64_t* high_row, float* const* peak, const int64_t* unit, const int64_t* split, int threads) try {
  if (!ascending(starts, grains + 1, order ? listed : rows)) return 2;
  if (!ascending(of, targets + 1, grains)) return 3;
  for (int64_t i = 0; order && i < listed; i++)
    if (order[i] < 0 || order[i] >= rows) return 4;
  Problem problem{{dy, Type(dy_type), dy_row, N}, {x, Type(x_type), x_row, K}, order, starts, of, {}};
  for (int64_t e = 0; e < targets; e++) problem.targets.push_back({low[e], low_row[e], high[e], high_row[e], Grid(unit[e], split[e]), peak[e]});
  return N && K ? run(problem, threads) : 0;
} catch (const std::bad_alloc&) {
  return 1;
}

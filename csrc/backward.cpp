// The gradients of attention: the weights are made again, nothing of size L x S is kept.
//
// The plain loop, for a row with weights A, entropy H, output o and an incoming gradient of each (dO, dH,
// dlse, dmax): dV += A^T dO; dA = dO V^T; the gradient of the scores is
//     dS = A * (dA - dO.o + dlse - dH * (log A + H)) + dmax at the argmax;
// dQ = scale * dS K; dK = scale * dS^T Q. Dropout's factors M make it dV += (A * M)^T dO and dA = M * dO V^T.
// Five products over the cells. What makes it fast:
//   1. A piece of work is a block of keys against all rows that see it, of every head that reads those keys:
//   dK
//      and dV are summed where they lie, in the cache, and each product is done once.
//   2. dQ is summed over the blocks of keys in their order: a block adds to some rows when the block before
//   it
//      has. All go through the rows in one order, so each follows the one before at a distance and none waits
//      long.
//   3. A row's constants are folded into two numbers, so that the entropy's gradient costs a multiply-add a
//   cell.
//
// Bits: the order of every sum is that of the blocks, which depend on sizes of a sequence alone.
#include <atomic>
#include <thread>

#include "dropout.h"
#include "pool.h"

namespace multihead {
namespace MH_BUILD {
namespace {

constexpr int kBlockRows = 96;   // rows of a block, whole tiles
constexpr int kBlockKeys = 192;  // keys of a block, whole tiles and panels
static_assert(kBlockRows <= kRows && kBlockKeys <= kKeys && kBlockRows % kTileRows == 0 &&
              kBlockKeys % kTileRows == 0 && kBlockKeys % kColumns == 0);
constexpr double kSerialWork = 1.0e6;  // multiply-adds under which waking a thread costs more than it gives

// o (n tiles of R rows, kColumns) = a . b, added to what o holds if kAdd, over the terms of each tile. The
// rows of a are kRow numbers apart and its terms kTerm, the terms of b ld.
template <int R, int kRow, int kTerm, bool kAdd>
MH_LOOP void product_tiles(const Real* a, const Real* b, int64_t ld, const Columns* terms, int n, Real* o) {
  for (int t = 0; t < n; ++t, a += R * kRow, o += R * kColumns) {
    if (kAdd && terms[t].from >= terms[t].to) continue;
    Reals acc[R][kPanelVectors] = {};
    const Real* left = a + int64_t{terms[t].from} * kTerm;
    const Real* right = b + terms[t].from * ld;
#pragma GCC unroll 4
    for (int j = terms[t].from; j < terms[t].to; ++j, left += kTerm, right += ld) {
      Reals column[kPanelVectors];
      for (int u = 0; u < kPanelVectors; ++u) column[u] = load(right + u * kLanes);
      for (int r = 0; r < R; ++r)
        for (int u = 0; u < kPanelVectors; ++u) acc[r][u] += left[r * kRow] * column[u];
    }
    for (int r = 0; r < R; ++r)
      for (int u = 0; u < kPanelVectors; ++u) {
        Real* const at = o + r * kColumns + u * kLanes;
        store(at, kAdd ? load(at) + acc[r][u] : acc[r][u]);
      }
  }
}

// Whether n numbers, whole vectors of them, are finite.
bool all_finite(const Real* x, int64_t n) {
  constexpr int kChains = 4;  // sums that do not wait for each other
  Reals odd[kChains] = {};    // x - x is 0 for a finite x, NaN otherwise
  int64_t i = 0;
  for (; i + kChains * kLanes <= n; i += kChains * kLanes)
    for (int k = 0; k < kChains; ++k) {
      const Reals v = load(x + i + k * kLanes);
      odd[k] += v - v;
    }
  for (; i < n; i += kLanes) {
    const Reals v = load(x + i);
    odd[0] += v - v;
  }
  const Reals sum = odd[0] + odd[1] + odd[2] + odd[3];
  for (int lane = 0; lane < kLanes; ++lane)
    if (sum[lane] != 0) return false;
  return true;
}

// Numbers from one packed row to the next: whole panels, and an odd number of cache lines, so that a column
// of panels does not fall on few sets of the cache.
int64_t row_stride(int64_t width) {
  const int64_t line = 64 / sizeof(Real), step = std::max<int64_t>(kColumns, line);
  const int64_t stride = ceil_div(width, step) * step;
  return stride / line % 2 ? stride : stride + line;
}

// Dot products of kDots pairs of rows. Each sums in the order of score_tiles: then dO.o of a row that sees
// one key is dO.v to the bit, and their difference 0. Side by side, because each sum waits for its last
// product.
constexpr int kDots = 8;
template <typename T>
MH_LOOP void dots(const Matrix<T>* a, const Matrix<T>* b, int64_t width, Real* out) {
  const int64_t step_a = a[0].column, step_b = b[0].column;
  std::fill_n(out, kDots, Real(0));
  for (int64_t from = 0; from < width; from += kDepth) {
    Real sum[kDots] = {};
    for (int64_t e = from; e < std::min(width, from + kDepth); ++e)
      for (int k = 0; k < kDots; ++k) sum[k] += widen(a[k].data[e * step_a]) * widen(b[k].data[e * step_b]);
    for (int k = 0; k < kDots; ++k) out[k] = from ? out[k] + sum[k] : sum[k];
  }
}

// Which blocks of keys the rows of a block see, [first, last], and the next one to add to their dQ.
struct Turn {
  int32_t first, last;
  std::atomic<int32_t> next;
};

// What a block of rows is multiplied by: the constants of a row's formula.
struct Constants {
  alignas(64) Real top[kRows], inverse[kRows];
  alignas(64) Real shift[kRows], lean[kRows];  // dS = A * (dA + lean * (s - top) + shift)
  Real share[kRows];  // of the keys, beside the sink: what the output was multiplied by
};

// A thread's work space.
struct Space {
  Row row[kRows];
  Constants of;
  Real *query, *upstream;                  // rows (kRows, row_stride): scaled queries; dO and d_class_mass
  Real *weights, *change, *slopes, *kept;  // cells (kRows, kScoreRow): A, dS, tanh's slope, dropout's factors
  Real *keys, *key_columns, *values,
      *classes;                     // packed: (D, kColumns), (keys, kColumns), (E, kColumns), (C, ..)
  Real *d_query, *d_key, *d_value;  // sums: panels (rows or keys, kColumns)
};

class Kernel {
 public:
  explicit Kernel(const Backward<Real>& problem)
      : f(problem),
        score(problem, row_stride(problem.D)),
        dropout(problem),
        group(f.G ? f.H / f.G : 1),
        width(f.d_output.data ? f.E : 0),
        upstream_row(row_stride(width + f.C)),
        key_panels(ceil_div(f.D, kColumns)),
        value_panels(ceil_div(f.E, kColumns)),
        key_blocks(ceil_div(f.S, kBlockKeys)),
        stream_rows(group * f.L),
        row_blocks(ceil_div(stream_rows, kBlockRows)),
        in_place(f.stored == (kSingle ? Stored::kFloat : Stored::kDouble) && f.d_query.column == 1),
        bias_of(f.d_bias.data == nullptr ? Bias::kNone
                : f.d_bias.column == 0   ? Bias::kRows
                : f.d_bias.row == 0      ? Bias::kColumns
                                         : Bias::kCells) {}

  bool run() {
    const double work = 2.5 * double(f.B * f.H * f.L) * double(f.S) * double(f.D + f.E);
    const int threads = work < kSerialWork ? 1 : std::max(1, f.threads);
    prepare(threads);
    const bool at_once = key_blocks == 1;  // a thread begins with the rows that it goes on with
    if (!at_once && !for_each(f.B * f.G * row_blocks, threads, f.interrupted, [&](int64_t item, int) {
          start_rows(item / row_blocks / f.G, item / row_blocks % f.G, item % row_blocks);
        }))
      return false;
    // Heads whose cells of the bias's gradient are one are worked on by one thread, one after the other.
    const bool one_batch = bias_of == Bias::kCells && f.d_bias.batch == 0;
    const bool one_head = bias_of == Bias::kCells && f.d_bias.head == 0;
    const int64_t batches = one_batch ? std::min<int64_t>(f.B, 1) : f.B;
    const int64_t heads = one_head ? std::min<int64_t>(f.G, 1) : f.G;
    if (!for_each(batches * heads * key_blocks, threads, f.interrupted, [&](int64_t item, int thread) {
          const int64_t block = item % key_blocks, of = item / key_blocks;
          for (int64_t b = one_batch ? 0 : of / heads; b < (one_batch ? f.B : of / heads + 1); ++b)
            for (int64_t g = one_head ? 0 : of % heads; g < (one_head ? f.G : of % heads + 1); ++g) {
              for (int64_t rows = 0; at_once && rows < row_blocks; ++rows) start_rows(b, g, rows);
              add_keys(b, g, block, spaces[thread]);
            }
        }))
      return false;
    finish();
    return true;
  }

 private:
  enum class Bias { kNone, kCells, kRows, kColumns };  // what of dS is summed to the bias's gradient

  void prepare(int threads) {
    const int64_t rows = f.B * f.H * f.L;
    shift = allocate<Real>(rows);
    if (f.d_entropy) lean = allocate<Real>(rows);
    if (f.sinks) share = allocate<Real>(rows);
    if (f.d_query.data && !in_place) sums = allocate<Real>(rows * f.D);
    const auto zeros = [](int64_t n) {
      Buffer<double> made = allocate<double>(n);
      std::fill_n(made.get(), n, 0.0);
      return made;
    };
    if (f.d_sinks) of_sink = zeros(rows);
    if (f.d_slopes) of_slope = zeros(rows);
    if (bias_of == Bias::kRows) of_bias = zeros(rows);
    if (bias_of == Bias::kColumns) of_bias = zeros(f.B * f.H * f.S);
    turns.reset(new Turn[static_cast<size_t>(f.B * f.G * row_blocks)]);

    const int64_t n = kBlockKeys;
    const int64_t sizes[] = {kBlockRows * score.query_row,
                             kBlockRows * upstream_row,
                             kBlockRows * kScoreRow,
                             kBlockRows * kScoreRow,
                             f.softcap != 0 ? kBlockRows * kScoreRow : 0,
                             dropout.on ? kBlockRows * kScoreRow : 0,
                             n * f.D,
                             n * key_panels * kColumns,
                             n * f.E,
                             n * f.C,
                             kBlockRows * key_panels * kColumns,
                             n * key_panels * kColumns,
                             n * value_panels * kColumns};
    int64_t all = 0;
    for (int64_t size : sizes) all += ceil_div(size, 16) * 16;
    scratch = allocate<Real>(threads * all);
    spaces = allocate<Space>(threads);
    for (int t = 0; t < threads; ++t) {
      Space& s = spaces[t];
      Real* next = scratch.get() + t * all;
      Real** const arrays[] = {&s.query,   &s.upstream, &s.weights,     &s.change, &s.slopes,
                               &s.kept,    &s.keys,     &s.key_columns, &s.values, &s.classes,
                               &s.d_query, &s.d_key,    &s.d_value};
      for (int i = 0; i < 13; ++i) *arrays[i] = next, next += ceil_div(sizes[i], 16) * 16;
    }
  }

  int rows_in(int64_t block) const {
    return static_cast<int>(std::min<int64_t>(kBlockRows, stream_rows - block * kBlockRows));
  }

  // Calls f(r, head, query) for the rows of a block: the heads of a group lie one after the other.
  template <typename F>
  void each_row(int64_t g, int64_t block, F&& call) const {
    const int64_t first = block * kBlockRows;
    int64_t h = g * group + first / f.L, i = first % f.L;
    for (int r = 0, n = rows_in(block); r < n; ++r) {
      call(r, h, i);
      if (++i == f.L) ++h, i = 0;
    }
  }

  int64_t at(int64_t b, int64_t h, int64_t i) const { return (b * f.H + h) * f.L + i; }
  Turn& turn_of(int64_t b, int64_t g, int64_t block) { return turns[(b * f.G + g) * row_blocks + block]; }
  Real* sum_of(int64_t b, int64_t h, int64_t i) const {
    return in_place ? static_cast<Real*>(f.d_query.data) + b * f.d_query.batch + h * f.d_query.head +
                          i * f.d_query.row
                    : sums.get() + at(b, h, i) * f.D;
  }

  // The constants of a block of rows, and which keys they see.
  void start_rows(int64_t b, int64_t g, int64_t block) {
    Span some{f.S, 0};
    each_row(g, block, [&](int, int64_t, int64_t i) {
      const Span span = score.span_of(b, i);
      if (span.begin < span.end) some = {std::min(some.begin, span.begin), std::max(some.end, span.end)};
    });
    with_stored(f.stored, [&](const auto* type) { start_each(type, b, g, block); });
    Turn& turn = turn_of(b, g, block);
    const bool any = some.begin < some.end;
    turn.first = any ? static_cast<int32_t>(some.begin / kBlockKeys) : 0;
    turn.last = any ? static_cast<int32_t>((some.end - 1) / kBlockKeys) : -1;
    turn.next.store(turn.first, std::memory_order_relaxed);
    if (!any && f.d_query.data)
      with_stored(f.stored, [&](const auto* type) {
        each_row(g, block, [&](int, int64_t h, int64_t i) {
          const auto to = written(type, f.d_query, b, h, i);
          for (int64_t d = 0; d < f.D; ++d) narrow(Real(0), to + d * f.d_query.column);
        });
      });
  }

  template <typename T>
  static T* written(const T*, const Tensor& tensor, int64_t b, int64_t head, int64_t row) {
    return static_cast<T*>(tensor.data) + b * tensor.batch + head * tensor.head + row * tensor.row;
  }

  template <typename T>
  void start_each(const T* type, int64_t b, int64_t g, int64_t block) {
    struct Place {
      int64_t h, i;
    } place[kDots];
    Matrix<T> gradient[kDots], output[kDots];
    Real inner[kDots] = {};
    int count = 0;
    const int n = rows_in(block);
    each_row(g, block, [&](int r, int64_t h, int64_t i) {
      place[count++] = {h, i};
      if (count < kDots && r + 1 < n) return;
      if (f.d_output.data) {
        for (int k = 0; k < kDots; ++k) {
          const Place& of = place[std::min(k, count - 1)];
          gradient[k] = head_of(type, f.d_output, b, of.h, of.i);
          output[k] = head_of(type, f.output, b, of.h, of.i);
        }
        dots(gradient, output, f.E, inner);
      }
      for (int k = 0; k < count; ++k) start_row(b, place[k].h, place[k].i, inner[k]);
      count = 0;
    });
  }

  void start_row(int64_t b, int64_t h, int64_t i, double inner) {
    const int64_t n = at(b, h, i);
    const double inverse = f.inverse[n], d_lse = f.d_lse ? f.d_lse[n] : 0.0;
    shift[n] = 0;
    if (lean) lean[n] = 0;
    if (share) share[n] = 0;
    if (inverse == 0) {  // its lse is the sink
      if (of_sink) of_sink[n] = d_lse;
      return;
    }
    double keys = 1;
    const double log_inverse = f.sinks || f.d_entropy ? std::log(inverse) : 0.0;
    if (f.sinks) {
      const double lse = f.top[n] * (f.top[n] == kLowest ? 1.0 : kLn2) - log_inverse;
      const double d_mass = f.d_sink_mass ? f.d_sink_mass[n] : 0.0;
      keys = 1 / (1 + std::exp(f.sinks[h] - lse));
      const double sink = 1 / (1 + std::exp(lse - f.sinks[h]));
      share[n] = static_cast<Real>(keys);
      if (of_sink) of_sink[n] = sink * (d_lse - inner + keys * d_mass);
      inner += sink * (d_lse - inner + keys * d_mass);
    }
    double sum = d_lse - inner;
    if (f.d_class_mass)
      for (int64_t c = 0; c < f.C; ++c)
        sum -= double(f.d_class_mass[n * f.C + c]) * f.class_mass[n * f.C + c];
    if (f.d_entropy) {
      sum -= f.d_entropy[n] * (log_inverse + f.entropy[n]);
      lean[n] = static_cast<Real>(-f.d_entropy[n] * kLn2);
    }
    shift[n] = static_cast<Real>(sum);
  }

  // Everything that goes through a block of keys of one head.
  void add_keys(int64_t b, int64_t g, int64_t key_block, Space& s) {
    const int64_t first = key_block * kBlockKeys;
    const int64_t count = std::min<int64_t>(kBlockKeys, f.S - first);
    const int64_t padded = ceil_div(count, kColumns) * kColumns;
    bool odd = false;
    with_stored(f.stored, [&](const auto* type) {
      const auto keys = head_of(type, f.key, b, g, first);
      pack_turned(keys, count, f.D, s.keys);
      odd = pack_columns(keys, count, f.D, padded, key_panels, s.key_columns);
      if (!width) return;
      pack_turned(head_of(type, f.value, b, g, first), count, f.E, s.values);
      odd = !all_finite(s.values, padded * f.E) || odd;
    });
    if (f.C) {
      std::fill_n(s.classes, padded * f.C, Real(0));
      const int32_t* const classes = f.classes + b * f.class_batch + first;
      for (int64_t j = 0; j < count; ++j)
        if (classes[j] >= 0 && classes[j] < f.C)
          s.classes[j / kColumns * kColumns * f.C + classes[j] * kColumns + j % kColumns] = 1;
    }
    std::fill_n(s.d_key, padded * key_panels * kColumns, Real(0));
    std::fill_n(s.d_value, padded * value_panels * kColumns, Real(0));
    for (int64_t block = row_blocks - 1; block >= 0; --block) {
      const Turn& turn = turn_of(b, g, block);
      if (turn.first <= key_block && key_block <= turn.last) add_rows(b, g, block, key_block, padded, odd, s);
    }
    const Real of_key = static_cast<Real>(f.softcap != 0 ? f.softcap : kLn2);
    unpack_keys(f.d_key, b, g, first, count, padded, f.D, of_key, s.d_key);
    unpack_keys(f.d_value, b, g, first, count, padded, f.E, 1, s.d_value);
  }

  void unpack_keys(const Tensor& to, int64_t b, int64_t g, int64_t first, int64_t count, int64_t padded,
                   int64_t columns, Real factor, const Real* from) const {
    if (!to.data) return;
    with_stored(f.stored, [&](const auto* type) {
      for (int64_t j = 0; j < count; ++j)
        for (int64_t e = 0; e < columns; e += kColumns)
          unpack_row(from + e * padded + j * kColumns, std::min<int64_t>(kColumns, columns - e), factor,
                     written(type, to, b, g, first + j) + e * to.column, to.column);
    });
  }

  // A block of rows against a block of keys.
  void add_rows(int64_t b, int64_t g, int64_t block, int64_t key_block, int64_t padded, bool odd, Space& s) {
    const int n = rows_in(block), tiles = static_cast<int>(ceil_div(n, kTileRows));
    const int64_t first = key_block * kBlockKeys;
    odd = !pack_rows(b, g, block, s) || odd;
    Columns seen[kTiles];
    score.of_block(s.query, s.keys, n, first, padded, s.row, seen, s.weights,
                   f.softcap != 0 ? s.slopes : nullptr);
    bool any = false;
    for (int t = 0; t < tiles; ++t) any = any || seen[t].from < seen[t].to;
    if (any) {
      if (dropout.on)
        for (int r = 0; r < n; ++r)
          dropout.factors(b, s.row[r], first, seen[r / kTileRows], s.kept + r * kScoreRow);
      gradients_of_weights(n, padded, seen, s);
      if (odd)
        change_exactly(n, first, padded, seen, s);
      else if (f.d_entropy)
        change<true>(n, padded, seen, s);
      else
        change<false>(n, padded, seen, s);
      if (dropout.on)
        for (int r = 0; r < n; ++r) drop(s, r, seen[r / kTileRows], s.weights);
      if (f.d_max_logit) add_to_argmax(b, g, block, first, padded, s);
      if (f.d_slopes || bias_of != Bias::kNone) sum_cells(b, g, block, key_block, seen, s);
      if (f.softcap != 0) uncap(n, seen, s);
      if (odd)
        multiply_exactly(n, first, padded, seen, s);
      else
        multiply(n, padded, seen, s);
    }
    take_turn(b, g, block, key_block, any, s);
  }

  // Packs a block of rows; false when some number is not finite. A row without keys is zeros.
  bool pack_rows(int64_t b, int64_t g, int64_t block, Space& s) const {
    bool finite = true;
    const int64_t query_row = score.query_row;
    with_stored(f.stored, [&](const auto* type) {
      each_row(g, block, [&](int r, int64_t h, int64_t i) {
        const int64_t n = at(b, h, i);
        const bool empty = f.inverse[n] == 0;
        score.set_row(s.row[r], b, h, i);
        if (empty) s.row[r].span = {0, 0};
        const Real inverse = f.inverse[n], top = empty ? Real(0) : f.top[n],
                   factor = share ? share[n] : Real(1);
        s.of.inverse[r] = inverse, s.of.top[r] = top, s.of.shift[r] = shift[n], s.of.share[r] = factor;
        s.of.lean[r] = lean ? lean[n] : Real(0);
        const Real sum = inverse + top + shift[n] + s.of.lean[r] + factor;
        finite = finite && sum - sum == 0;
        Real* const query = s.query + r * query_row;
        Real* const upstream = s.upstream + r * upstream_row;
        std::fill_n(query + (empty ? 0 : f.D), query_row - (empty ? 0 : f.D), Real(0));
        std::fill_n(upstream + (empty ? 0 : width + f.C), upstream_row - (empty ? 0 : width + f.C), Real(0));
        if (empty) return;
        pack_row(head_of(type, f.query, b, h, i), f.D, score.factor, query);
        if (width) pack_row(head_of(type, f.d_output, b, h, i), f.E, factor, upstream);
        if (f.C) std::copy_n(f.d_class_mass + n * f.C, f.C, upstream + width);
      });
    });
    const int n = rows_in(block);
    return finite && all_finite(s.query, n * query_row) && all_finite(s.upstream, n * upstream_row);
  }

  // dA in the columns that a tile sees: dO V^T, through dropout, and the gradient of the mass of each key's
  // class.
  void gradients_of_weights(int n, int64_t padded, const Columns* seen, Space& s) const {
    const int tiles = static_cast<int>(ceil_div(n, kTileRows));
    for (int column = 0; column < padded; column += kColumns)
      for (int t = 0, next; t < tiles; t = next) {
        const auto sees = [&](int u) { return seen[u].from <= column && column < seen[u].to; };
        for (next = t + 1; next < tiles && sees(t) == sees(next);) ++next;
        if (!sees(t)) continue;
        const int begin = t * kTileRows, end = std::min(n, next * kTileRows);
        Real* const to = s.change + begin * kScoreRow + column;
        const Real* const from = s.upstream + begin * upstream_row;
        bool add = false;
        const auto product = [&](const Real* rows, const Real* panel, int64_t depth) {
          for (int64_t d = 0; d < depth; d += kDepth, add = true)
            by_tiles(end - begin, [&](auto tile, int r, int count) {
              (add ? score_tiles<tile.count, kScoreRow, true>
                   : score_tiles<tile.count, kScoreRow, false>)(rows + r * upstream_row + d, upstream_row,
                                                                panel + d * kColumns,
                                                                std::min(depth - d, kDepth), count,
                                                                to + r * kScoreRow);
            });
        };
        product(from, s.values + column * f.E, width);
        if (dropout.on && add)
          for (int r = begin; r < end; ++r) drop(s, r, {column, column + kColumns}, s.change);
        product(from + width, s.classes + column * f.C, f.C);
        if (!add)
          for (int r = 0; r < end - begin; ++r) std::fill_n(to + r * kScoreRow, kColumns, Real(0));
      }
  }

  static void drop(const Space& s, int r, Columns columns, Real* cells) {
    for (int64_t c = r * kScoreRow + columns.from, end = r * kScoreRow + columns.to; c < end; c += kLanes)
      store(cells + c, load(cells + c) * load(s.kept + c));
  }

  // From scores to weights, and from the gradients of those to the gradients of the scores, with zeros where
  // a tile sees nothing.
  template <bool kLean>
  MH_LOOP static void change(int n, int64_t padded, const Columns* seen, Space& s) {
    for (int r = 0; r < n; ++r) {
      Real* const a = s.weights + r * kScoreRow;
      Real* const d = s.change + r * kScoreRow;
      const Columns in = clear_outside(seen[r / kTileRows], padded, a, d);
      const Real top = s.of.top[r], inverse = s.of.inverse[r], shift = s.of.shift[r], lean = s.of.lean[r];
#pragma GCC unroll 4
      for (int c = in.from; c < in.to; c += kLanes) {
        const Reals x = floored(load(a + c) - top);
        const Reals p = exp2(x) * inverse;
        const Reals inner = load(d + c) + (kLean ? x * lean + shift : all(shift));
        store(a + c, p);
        store(d + c, p > 0 ? p * inner : Reals{});  // dA of an invisible key may be infinite
      }
    }
  }

  static Columns clear_outside(Columns seen, int64_t padded, Real* a, Real* d) {
    for (Real* const x : {a, d}) {
      std::fill_n(x, seen.from, Real(0));
      std::fill_n(x + seen.to, padded - seen.to, Real(0));
    }
    return seen;
  }

  // The same where numbers are not finite: what is invisible is zero, whatever it would be.
  void change_exactly(int n, int64_t first, int64_t padded, const Columns* seen, Space& s) const {
    for (int r = 0; r < n; ++r) {
      Real* const a = s.weights + r * kScoreRow;
      Real* const d = s.change + r * kScoreRow;
      const Columns in = clear_outside(seen[r / kTileRows], padded, a, d);
      for (int c = in.from; c < in.to; c += kLanes) {
        const Reals x = floored(load(a + c) - s.of.top[r]);
        const Reals p = exp2(x) * s.of.inverse[r], inner = load(d + c) + (x * s.of.lean[r] + s.of.shift[r]);
        for (int lane = 0; lane < kLanes; ++lane) {
          const bool visible = sees(s.row[r], first + c + lane);
          a[c + lane] = visible ? p[lane] : 0;
          d[c + lane] = visible ? p[lane] * inner[lane] : 0;
        }
      }
    }
  }

  bool sees(const Row& row, int64_t j) const {
    return row.span.begin <= j && j < row.span.end && !(score.hides && score.hidden(row, j));
  }

  void add_to_argmax(int64_t b, int64_t g, int64_t block, int64_t first, int64_t padded, Space& s) const {
    each_row(g, block, [&](int r, int64_t h, int64_t i) {
      const int64_t n = at(b, h, i), j = f.argmax[n] - first;
      if (f.inverse[n] != 0 && 0 <= j && j < padded) s.change[r * kScoreRow + j] += f.d_max_logit[n];
    });
  }

  // Sums of dS for the gradients of the bias and of the slopes. Sums over rows and cells are of this thread
  // alone; those over keys are added to what the block before has left.
  void sum_cells(int64_t b, int64_t g, int64_t block, int64_t key_block, const Columns* seen, Space& s) {
    if (f.d_slopes || bias_of == Bias::kRows) wait_for_turn(turn_of(b, g, block), key_block);
    const int64_t first = key_block * kBlockKeys;
    each_row(g, block, [&](int r, int64_t h, int64_t i) {
      const Columns in = seen[r / kTileRows];
      const int64_t end = std::min<int64_t>(in.to, f.S - first);
      const Real* const d = s.change + r * kScoreRow;
      if (f.d_slopes) {
        const Real position = static_cast<Real>(s.row[r].position - first);
        Real sum = 0;
        for (int64_t c = in.from; c < end; ++c) sum += d[c] * std::abs(position - static_cast<Real>(c));
        of_slope[at(b, h, i)] -= sum;
      }
      if (bias_of == Bias::kRows) {
        Real sum = 0;
        for (int64_t c = in.from; c < end; ++c) sum += d[c];
        of_bias[at(b, h, i)] += sum;
      } else if (bias_of == Bias::kColumns) {
        double* const to = of_bias.get() + (b * f.H + h) * f.S + first;
        for (int64_t c = in.from; c < end; ++c) to[c] += d[c];
      } else if (bias_of == Bias::kCells) {
        Real* const to = static_cast<Real*>(f.d_bias.data) + b * f.d_bias.batch + h * f.d_bias.head +
                         i * f.d_bias.row + first * f.d_bias.column;
        for (int64_t c = in.from; c < end; ++c) to[c * f.d_bias.column] += d[c];
      }
    });
  }

  // From the gradient of a capped score to that of q.k. Where dS is 0 the slope may never have been made.
  void uncap(int n, const Columns* seen, Space& s) const {
    for (int r = 0; r < n; ++r)
      for (int c = seen[r / kTileRows].from; c < seen[r / kTileRows].to; c += kLanes) {
        Real* const d = s.change + r * kScoreRow + c;
        const Reals x = load(d);
        store(d, x != 0 ? x * load(s.slopes + r * kScoreRow + c) : Reals{});
      }
  }

  // dV += A^T dO, dK += dS^T Q, and this block's part of dQ, dS K.
  void multiply(int n, int64_t padded, const Columns* seen, Space& s) const {
    // The rows that see a tile of keys.
    Columns rows[kKeys / kTileRows + 1];
    const int key_tiles = static_cast<int>(ceil_div(padded, kTileRows));
    for (int k = 0; k < key_tiles; ++k) {
      const auto sees = [&](int t) {
        return seen[t].from < (k + 1) * kTileRows && k * kTileRows < seen[t].to;
      };
      int from = 0, to = static_cast<int>(ceil_div(n, kTileRows));
      while (from < to && !sees(from)) ++from;
      while (from < to && !sees(to - 1)) --to;
      rows[k] = {from * kTileRows, std::min(n, to * kTileRows)};
    }
    const auto over_rows = [&](const Real* cells, const Real* right, int64_t ld, int64_t panels, Real* to) {
      for (int64_t e = 0; e < panels; ++e)
        by_tiles(static_cast<int>(padded), [&](auto tile, int j, int count) {
          product_tiles<tile.count, 1, kScoreRow, true>(cells + j, right + e * kColumns, ld,
                                                        rows + j / kTileRows, count,
                                                        to + (e * padded + j) * kColumns);
        });
    };
    if (f.d_value.data && width) over_rows(s.weights, s.upstream, upstream_row, value_panels, s.d_value);
    if (f.d_key.data) over_rows(s.change, s.query, score.query_row, key_panels, s.d_key);
    if (!f.d_query.data) return;
    for (int64_t e = 0; e < key_panels; ++e)
      by_tiles(n, [&](auto tile, int r, int count) {
        product_tiles<tile.count, kScoreRow, 1, false>(
            s.change + r * kScoreRow, s.key_columns + e * padded * kColumns, kColumns, seen + r / kTileRows,
            count, s.d_query + (e * kBlockRows + r) * kColumns);
      });
  }

  // The same where numbers are not finite: a cell at a time, without the invisible ones.
  void multiply_exactly(int n, int64_t first, int64_t padded, const Columns* seen, Space& s) const {
    const auto add = [](Real factor, const Real* from, int64_t from_panel, int64_t panels, Real* to,
                        int64_t to_panel) {
      for (int64_t e = 0; e < panels; ++e)
        for (int c = 0; c < kColumns; ++c) to[e * to_panel + c] += factor * from[e * from_panel + c];
    };
    std::fill_n(s.d_query, kBlockRows * key_panels * kColumns, Real(0));
    for (int r = 0; r < n; ++r)
      for (int j = seen[r / kTileRows].from; j < seen[r / kTileRows].to; ++j) {
        if (!sees(s.row[r], first + j)) continue;
        const Real p = s.weights[r * kScoreRow + j], d = s.change[r * kScoreRow + j];
        const int64_t key = j * kColumns, key_panel = padded * kColumns;
        if (width) add(p, s.upstream + r * upstream_row, kColumns, value_panels, s.d_value + key, key_panel);
        add(d, s.query + r * score.query_row, kColumns, key_panels, s.d_key + key, key_panel);
        add(d, s.key_columns + key, key_panel, key_panels, s.d_query + r * kColumns, kBlockRows * kColumns);
      }
  }

  static void wait_for_turn(const Turn& turn, int64_t key_block) {
    while (turn.next.load(std::memory_order_acquire) != key_block) std::this_thread::yield();
  }

  // Adds a block of keys' part of dQ, if any, when the blocks before it have.
  void take_turn(int64_t b, int64_t g, int64_t block, int64_t key_block, bool any, Space& s) {
    Turn& turn = turn_of(b, g, block);
    wait_for_turn(turn, key_block);
    if (f.d_query.data) {
      const bool begins = key_block == turn.first, ends = key_block == turn.last;
      with_stored(f.stored, [&](const auto* type) {
        each_row(g, block, [&](int r, int64_t h, int64_t i) {
          const Real factor = static_cast<Real>(f.scale);
          const auto to = written(type, f.d_query, b, h, i);
          const int64_t column = f.d_query.column;
          Real* const sum = begins && ends && any ? nullptr : sum_of(b, h, i);
          for (int64_t e = 0; e < f.D; e += kColumns) {
            const Real* const from = s.d_query + e * kBlockRows + r * kColumns;
            const int64_t columns = std::min<int64_t>(kColumns, f.D - e);
            if (!sum)
              unpack_row(from, columns, factor, to + e * column, column);
            else if (begins)
              for (int64_t c = 0; c < columns; ++c) sum[e + c] = any ? from[c] : Real(0);
            else if (any)
              for (int64_t c = 0; c < columns; ++c) sum[e + c] += from[c];
          }
          if (sum && ends) unpack_row(sum, f.D, factor, to, column);
        });
      });
    }
    turn.next.store(static_cast<int32_t>(key_block + 1), std::memory_order_release);
  }

  // Sums over sequences, heads and rows, in their order.
  void finish() const {
    const auto by_head = [&](const Buffer<double>& rows, Real* to) {
      if (!to) return;
      for (int64_t h = 0; h < f.H; ++h) {
        double sum = 0;
        for (int64_t b = 0; b < f.B; ++b)
          for (int64_t i = 0; i < f.L; ++i) sum += rows[at(b, h, i)];
        to[h] = static_cast<Real>(sum);
      }
    };
    by_head(of_slope, f.d_slopes);
    by_head(of_sink, f.d_sinks);
    if (!of_bias) return;
    const Tensor& to = f.d_bias;
    const int64_t n = bias_of == Bias::kRows ? f.L : f.S, step = bias_of == Bias::kRows ? to.row : to.column;
    if (f.B * f.H * n == 0) return;
    const int64_t cells = 1 + (f.B - 1) * to.batch + (f.H - 1) * to.head + (n - 1) * step;
    Buffer<double> sum = allocate<double>(cells);
    std::fill_n(sum.get(), cells, 0.0);
    for (int64_t b = 0; b < f.B; ++b)
      for (int64_t h = 0; h < f.H; ++h)
        for (int64_t x = 0; x < n; ++x)
          sum[b * to.batch + h * to.head + x * step] += of_bias[(b * f.H + h) * n + x];
    for (int64_t x = 0; x < cells; ++x) static_cast<Real*>(to.data)[x] = static_cast<Real>(sum[x]);
  }

  const Backward<Real>& f;
  const Scores score;
  const Dropout dropout;
  const int64_t group, width, upstream_row, key_panels, value_panels;
  const int64_t key_blocks, stream_rows, row_blocks;
  const bool in_place;  // whether dQ is summed where it goes
  const Bias bias_of;
  Buffer<Real> shift, lean, share, sums, scratch;  // of rows (B, H, L), dQ (B, H, L, D), a thread's
  Buffer<double> of_sink, of_slope, of_bias;
  std::unique_ptr<Turn[]> turns;
  Buffer<Space> spaces;
};

}  // namespace

bool backward(const Backward<Real>& problem) { return Kernel(problem).run(); }

}  // namespace MH_BUILD
}  // namespace multihead

// Attention of few queries over many keys, as when a model writes: bound by reading the keys and values.
//
// Nothing is packed. A key or value is read once, where it lies, for all the query rows of its head's group.
#include "decode.h"
#include "dropout.h"
#include "parts.h"
#include "pool.h"

namespace multihead {
namespace MH_BUILD {
namespace {

constexpr int kFewQueries = 8;
constexpr int kFew = 16;    // query rows that share a key, at most
constexpr int kChunk = 32;  // keys, or values, that stay in the L1 cache for all rows

// Both loops over a block ask for what the next one reads, `ahead`, as they go along: a core that computes
// and waits for memory in turn gets half of what the memory gives.

// Dot products of R query rows (ld numbers a row, zeros at their ends) with n keys, `width` wide, n a
// multiple of kLanes / R.
template <int R, typename T>
MH_LOOP void score_rows(const Real* query, int64_t ld, const T* const* key, int n, int64_t width,
                        Real* scores, const T* const* ahead) {
  constexpr int N = kLanes / R;
  for (; n > 0; n -= N, key += N, ahead += N, scores += N) {
    Reals acc[kLanes];  // of row r and key k: r * N + k
    for (Reals& sum : acc) sum = Reals{};
    const T *k[N], *next[N];
    for (int i = 0; i < N; ++i) k[i] = key[i], next[i] = ahead[i];
    int64_t d = 0;
    for (; d + kLanes <= width; d += kLanes)
      for (int i = 0; i < N; ++i) {
        __builtin_prefetch(next[i] + d, 0, 2);
        const Reals of_key = load(k[i] + d);
        for (int r = 0; r < R; ++r) acc[r * N + i] += load(query + r * ld + d) * of_key;
      }
    if (d < width)
      for (int i = 0; i < N; ++i) {
        alignas(64) Real rest[kLanes] = {};
        for (int64_t c = d; c < width; ++c) rest[c - d] = widen(k[i][c]);
        for (int r = 0; r < R; ++r) acc[r * N + i] += load(query + r * ld + d) * load(rest);
      }
    const Reals sums = sum_each(acc);
    for (int r = 0; r < R; ++r)
      for (int i = 0; i < N; ++i) scores[r * kScoreRow + i] = sums[r * N + i];
  }
}

// Adds n values times their weights p (R, kScoreRow) to R rows of o, V vectors of columns from `from` on.
// Answers NaN in some lane where one of these numbers is not finite.
template <int R, int V, typename T>
MH_LOOP Reals add_values(const T* const* value, const Real* p, int n, int64_t from, Real* o, int64_t ld,
                         const T* const* ahead) {
  Reals acc[R][V], odd{};
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < V; ++v) acc[r][v] = load(o + r * ld + from + v * kLanes);
  for (int j = 0; j < n; ++j) {
    const T* const at = value[j] + from;
    for (int64_t v = 0; v < V * kLanes; v += 64 / int64_t{sizeof(T)})
      __builtin_prefetch(ahead[j] + from + v, 0, 2);
    Reals x[V];
    for (int v = 0; v < V; ++v) x[v] = load(at + v * kLanes), odd += x[v] - x[v];
    for (int r = 0; r < R; ++r)
      for (int v = 0; v < V; ++v) acc[r][v] += p[r * kScoreRow + j] * x[v];
  }
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < V; ++v) store(o + r * ld + from + v * kLanes, acc[r][v]);
  return odd;
}

// Calls f with the number of rows of a tile, 4, 2 or 1, and the first of them.
template <typename F>
MH_INLINE void by_few(int rows, F&& f) {
  int r = 0;
  if constexpr (kLanes >= 4)
    for (; r + 4 <= rows; r += 4) f(Rows<4>{}, r);
  for (; r + 2 <= rows; r += 2) f(Rows<2>{}, r);
  if (r < rows) f(Rows<1>{}, r);
}

class Decoder {
 public:
  explicit Decoder(const Forward<Real>& problem)
      : f(problem),
        score(problem),
        dropout(problem),
        finish(problem, score, problem.E),
        rows(static_cast<int>(f.H / f.G * f.L)),
        query_row(ceil_div(f.D, kLanes) * kLanes),
        output_row(ceil_div(f.E + f.C, kColumns) * kColumns),
        parts(f.S, rows, {output_row, kColumns, output_row / kColumns}) {}

  bool run() {
    const int64_t kv_heads = f.B * f.G;
    if (kv_heads * rows == 0) return true;
    const double work = double(kv_heads) * rows * double(f.S) * double(f.D + f.E);
    const int threads = work < kSerialWork ? 1 : std::max(1, f.threads);
    workers = allocate<Worker>(threads);
    floats = allocate<Real>(threads * worker_numbers());
    parts.prepare(kv_heads);
    return for_each(kv_heads * parts.count, threads, f.interrupted, [&](int64_t item, int thread) {
      const int64_t kv = item / parts.count, part = item % parts.count;
      with_cached(f, [&](const auto* type) { attend(type, kv, part, thread); });
      Worker& w = workers[thread];
      if (!parts.leave(kv, part, w.gathered, w.row)) return;
      const Real* const output = parts.join(kv, score.hides, w.row, w.gathered);
      finish(kv / f.G, w.row, rows, w.gathered, output, output_row, kColumns, w.finish);
    });
  }

 private:
  struct Worker {
    Row row[kFew];
    Gathered gathered;
    FinishSpace finish;
    const void *key[kKeys], *value[kKeys];
    Real key_scale[kKeys], value_scale[kKeys];  // where there are scales
  };

  // Of a thread: queries, scores, the output of a part and what it was before the newest block.
  int64_t worker_numbers() const {
    return ceil_div(rows * (query_row + kScoreRow + output_row) + kKeys * (f.D + f.E), 16) * 16;
  }

  void set_rows(int64_t kv, Row* row) const {
    for (int r = 0; r < rows; ++r) score.set_row(row[r], kv / f.G, kv % f.G * (f.H / f.G) + r / f.L, r % f.L);
  }

  template <typename T>
  void attend(const T*, int64_t kv, int64_t part, int thread) {
    Worker& w = workers[thread];
    Real* const query = floats.get() + thread * worker_numbers();
    Real* const scores = query + rows * query_row;
    Real* const before = scores + rows * kScoreRow;
    T* const copies = reinterpret_cast<T*>(before + rows * output_row);
    Real* const output = parts.output(kv, part);
    const int64_t b = kv / f.G, g = kv % f.G;

    set_rows(kv, w.row);
    Span seen{f.S, 0};
    for (int r = 0; r < rows; ++r)
      if (w.row[r].span.begin < w.row[r].span.end) seen = hull(seen, w.row[r].span);
    seen = Parts::within(seen, part);
    w.gathered.clear();
    std::fill_n(output, rows * output_row, Real(0));
    if (seen.begin < seen.end) {
      for (int r = 0; r < rows; ++r) {
        std::fill_n(query + r * query_row, query_row, Real(0));
        score.pack_query(b, w.row[r], query + r * query_row);
      }
      const T** const key = reinterpret_cast<const T**>(w.key);
      const T** const value = reinterpret_cast<const T**>(w.value);
      const auto place_keys = [&](int64_t first, Columns columns) {
        place(f.key, b, g, seen, first, columns, f.D, copies, key, f.key_scales, w.key_scale);
      };
      int64_t first = seen.begin / kKeys * kKeys;
      Columns columns = columns_of(seen, first);
      place_keys(first, columns);
      while (first < seen.end) {
        place(f.value, b, g, seen, first, columns, f.E, copies + kKeys * f.D, value, f.value_scales,
              w.value_scale);
        score_keys(w, query, key, value, first, columns, scores);
        Columns row_seen[kFew];
        std::fill_n(row_seen, rows, columns);
        if (f.observe)
          w.gathered.add<true>(scores, rows, row_seen, first);
        else
          w.gathered.add<false>(scores, rows, row_seen, first);
        const int64_t next = first + kKeys;
        const Columns next_columns = next < seen.end ? columns_of(seen, next) : Columns{0, 0};
        place_keys(next, next_columns);
        multiply_values(w, key, value, b, first, columns, scores, output, before);
        first = next, columns = next_columns;
      }
    }
  }

  // The columns of a block that a part sees: whole panels. A key beyond the last that is there stands for
  // itself again, and nobody sees it.
  static Columns columns_of(Span seen, int64_t first) {
    return {static_cast<int>(std::max<int64_t>(seen.begin - first, 0) / kColumns * kColumns),
            static_cast<int>(ceil_div(std::min<int64_t>(seen.end - first, kKeys), kColumns) * kColumns)};
  }

  // Where the rows of a block lie, beside each other in themselves (copied if they are not), and their
  // scales. A key that the part does not see is stood for by the nearest that it sees.
  template <typename T>
  void place(const Tensor& tensor, int64_t b, int64_t g, Span seen, int64_t first, Columns columns,
             int64_t width, T* copies, const T** at, const float* scales, Real* scale) const {
    const int64_t begin = std::max(seen.begin, first + columns.from),
                  end = std::min(seen.end, first + columns.to);
    if (begin >= end) return;
    each_key(static_cast<const T*>(nullptr), f, tensor, b, g, begin, end,
             [&](const T* row, int64_t j, int64_t page) {
               const int64_t c = j - first;
               at[c] = row;
               if (scales) scale[c] = scales[page];
               if (tensor.column == 1) return;
               T* const copy = copies + c * width;
               for (int64_t d = 0; d < width; ++d) copy[d] = row[d * tensor.column];
               at[c] = copy;
             });
    for (int64_t c = columns.from; c < columns.to; ++c) {
      const int64_t nearest = std::clamp(c, begin - first, end - 1 - first);
      at[c] = at[nearest];
      if (scales) scale[c] = scale[nearest];
    }
  }

  template <typename T>
  void score_keys(Worker& w, const Real* query, const T* const* key, const T* const* value, int64_t first,
                  Columns columns, Real* scores) const {
    for (int c = columns.from; c < columns.to; c += kChunk) {
      const int n = std::min(columns.to - c, kChunk);
      by_few(rows, [&](auto tile, int r) {
        score_rows<tile.count>(query + r * query_row, query_row, key + c, n, f.D, scores + r * kScoreRow + c,
                               value + c);
      });
    }
    Row* const row = w.row;
    if (f.key_scales) multiply(w.key_scale, columns, scores);
    const bool whole = !score.adds && !score.hides;
    for (int r = 0; r < rows; ++r)
      for (int c = columns.from; c < columns.to; c += kColumns) {
        Real* const s = scores + r * kScoreRow + c;
        if (f.softcap != 0) score.cap(s);
        const int64_t j = first + c;
        if (!whole || row[r].span.begin > j || row[r].span.end < j + kColumns) score.adjust(row[r], j, s);
      }
  }

  template <typename T>
  void multiply_values(Worker& w, const T* const* next_key, const T* const* value, int64_t b, int64_t first,
                       Columns columns, Real* p, Real* output, Real* before) const {
    for (int r = 0; r < rows; ++r)
      for (int64_t e = 0; e < output_row; e += kLanes) {
        const Reals rescaled = load(output + r * output_row + e) * w.gathered.rescale[r];
        store(output + r * output_row + e, rescaled), store(before + r * output_row + e, rescaled);
      }
    if (f.C) add_classes(f.classes + b * f.class_batch + first, first, columns, p, output);
    if (f.value_scales) multiply(w.value_scale, columns, p);
    if (dropout.on)
      for (int r = 0; r < rows; ++r) dropout(b, w.row[r], first, columns, p + r * kScoreRow);
    Reals odd{};
    const int end = static_cast<int>(std::min<int64_t>(columns.to, f.S - first));
    for (int c = columns.from; c < end; c += kChunk) {
      const int n = std::min(end - c, kChunk);
      by_few(rows, [&](auto tile, int r) {
        constexpr int R = tile.count, V = 8 / R;
        Real* const o = output + r * output_row;
        const Real* const weights = p + r * kScoreRow + c;
        int64_t e = 0;
        for (; e + V * kLanes <= f.E; e += V * kLanes)
          odd += add_values<R, V>(value + c, weights, n, e, o, output_row, next_key + c);
        for (; e + kLanes <= f.E; e += kLanes)
          odd += add_values<R, 1>(value + c, weights, n, e, o, output_row, next_key + c);
        for (; e < f.E; ++e)
          for (int j = 0; j < n; ++j) {
            const Real x = widen(value[c + j][e]);
            odd[0] += x - x;
            for (int row = 0; row < R; ++row) o[row * output_row + e] += weights[row * kScoreRow + j] * x;
          }
      });
    }
    Real odd_one = 0;
    for (int lane = 0; lane < kLanes; ++lane) odd_one += odd[lane];
    if (odd_one == odd_one) return;
    // A value is not finite: once more, with the keys that a row sees alone.
    for (int r = 0; r < rows; ++r) {
      Real* const o = output + r * output_row;
      std::copy_n(before + r * output_row, f.E, o);
      for (int c = columns.from; c < end; ++c) {
        const int64_t j = first + c;
        if (j < w.row[r].span.begin || j >= w.row[r].span.end || (score.hides && score.hidden(w.row[r], j)))
          continue;
        for (int64_t e = 0; e < f.E; ++e) o[e] += p[r * kScoreRow + c] * widen(value[c][e]);
      }
    }
  }

  // Rows times the scales of their columns; 0 stays 0, whatever the scale of a key that is not seen.
  void multiply(const Real* scale, Columns columns, Real* of_rows) const {
    for (int r = 0; r < rows; ++r)
      for (int c = columns.from; c < columns.to; c += kLanes) {
        Real* const at = of_rows + r * kScoreRow + c;
        const Reals x = load(at);
        store(at, x == 0 ? x : x * load(scale + c));
      }
  }

  void add_classes(const int32_t* classes, int64_t first, Columns columns, const Real* p,
                   Real* output) const {
    for (int c = columns.from; c < std::min<int64_t>(columns.to, f.S - first); ++c)
      if (classes[c] >= 0 && classes[c] < f.C)
        for (int r = 0; r < rows; ++r) output[r * output_row + f.E + classes[c]] += p[r * kScoreRow + c];
  }

  const Forward<Real>& f;
  const Scores score;
  const Dropout dropout;
  const Finish finish;
  const int rows;
  const int64_t query_row, output_row;
  Parts parts;
  Buffer<Worker> workers;
  Buffer<Real> floats;
};

}  // namespace

bool decodes(const Forward<Real>& f) { return f.G > 0 && f.L <= kFewQueries && f.L * (f.H / f.G) <= kFew; }

bool decode(const Forward<Real>& problem) { return Decoder(problem).run(); }

}  // namespace MH_BUILD
}  // namespace multihead

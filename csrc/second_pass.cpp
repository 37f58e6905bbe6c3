// What keys, distances and cells of a map gather over rows. The weights are made again, a block at a time,
// from what the first pass left of each row; so this costs its scores and exponentials, no softmax and no
// values.
//
// A head's rows are cut into parts of a size that depends on L alone. Each part has its own sums, which are
// added from top to bottom: the bits depend on neither the threads nor the batch.
#include "pool.h"
#include "scores.h"

namespace multihead {
namespace MH_BUILD {
namespace {

constexpr int64_t kPartRows = 16 * kRows;
constexpr int64_t kParts = 8;  // of a head, at most: they have S sums each

class Pass {
 public:
  explicit Pass(const SecondPass<Real>& problem)
      : f(problem),
        score(problem),
        group(f.G ? f.H / f.G : 1),
        padded_keys(ceil_div(f.S, kColumns) * kColumns),
        key_blocks(ceil_div(f.S, kKeys)),
        part_rows(std::max(kPartRows, ceil_div(ceil_div(f.L, kParts), kRows) * kRows)),
        parts(std::max<int64_t>(1, ceil_div(f.L, part_rows))),
        keys_at(0),
        maxima_at(keys_at + (f.received ? f.S : 0)),
        distances_at(maxima_at + (f.received_max ? f.S : 0)),
        map_at(distances_at + (f.distances ? 2 * f.sides + 1 : 0)),
        map_max_at(map_at + (f.map ? f.cells * f.cells : 0)),
        sums(map_max_at + (f.map_max ? f.cells * f.cells : 0)) {}

  bool run() {
    const int64_t heads = f.B * f.H;
    if (heads == 0) return true;
    const int threads = std::max(1, f.threads);
    query_numbers = ceil_div(kRows * f.D, 16) * 16;
    workers = allocate<Worker>(threads);
    scratch = allocate<Real>(threads * query_numbers);
    packed = allocate<Real>(f.B * f.G * padded_keys * f.D);
    partial = allocate<Real>(heads * parts * sums);
    std::fill_n(partial.get(), heads * parts * sums, Real(0));
    return for_each(f.B * f.G * key_blocks, threads, f.interrupted,
                    [&](int64_t item, int) { pack(item / key_blocks, item % key_blocks); }) &&
           for_each(heads * parts, threads, f.interrupted,
                    [&](int64_t item, int thread) { pass(item / parts, item % parts, thread); }) &&
           for_each(heads, threads, f.interrupted, [&](int64_t head, int) { add_parts(head); });
  }

 private:
  struct Worker {
    Row row[kRows];
    alignas(64) Real scores[kRows * kScoreRow];
    alignas(64) Real sum[kKeys], largest[kKeys];  // over some rows, of each key of a block
  };

  void pack(int64_t kv, int64_t block) const {
    const int64_t first = block * kKeys;
    with_stored(f.stored, [&](const auto* type) {
      pack_turned(head_of(type, f.key, kv / f.G, kv % f.G, first), std::min<int64_t>(kKeys, f.S - first), f.D,
                  packed.get() + (kv * padded_keys + first) * f.D);
    });
  }

  void pass(int64_t head, int64_t part, int thread) {
    Worker& w = workers[thread];
    Real* const query = scratch.get() + thread * query_numbers;
    Real* const own = partial.get() + (head * parts + part) * sums;
    const int64_t b = head / f.H, h = head % f.H;
    const Real* const keys = packed.get() + (b * f.G + h / group) * padded_keys * f.D;
    const int64_t last = std::min(f.L, (part + 1) * part_rows);
    for (int64_t i = part * part_rows; i < last; i += kRows) {
      const int n_rows = static_cast<int>(std::min<int64_t>(kRows, last - i));
      Span seen{f.S, 0};
      for (int r = 0; r < n_rows; ++r) {
        score.set_row(w.row[r], b, h, i + r);
        if (w.row[r].span.begin < w.row[r].span.end) seen = hull(seen, w.row[r].span);
        if (f.top_keys) {
          std::fill_n(f.top_keys + (head * f.L + i + r) * f.k, f.k, -1);
          std::fill_n(f.top_weights + (head * f.L + i + r) * f.k, f.k, Real(0));
        }
      }
      score.pack_queries(b, w.row, n_rows, query);
      for (int64_t first = seen.begin / kKeys * kKeys; first < seen.end; first += kKeys) {
        const int padded = static_cast<int>(std::min<int64_t>(kKeys, padded_keys - first));
        Columns tile_seen[kTiles];
        score.of_block(query, keys + first * f.D, n_rows, first, padded, w.row, tile_seen, w.scores);
        for (int r = 0; r < n_rows; ++r)
          weigh(head * f.L + i + r, w.row[r], first, tile_seen[r / kTileRows], padded,
                w.scores + r * kScoreRow);
        for (int from = 0, to; from < n_rows; from = to) {
          // Rows of the same line of the map; all of the block where there is no map.
          const int64_t line = f.cells ? (i + from) * f.cells / f.L : 0;
          to = f.cells ? static_cast<int>(std::min<int64_t>(n_rows, ceil_div((line + 1) * f.L, f.cells) - i))
                       : n_rows;
          gather_keys(w, from, to, padded);
          add_to_keys(w, first, padded, own);
          if (f.cells) add_to_map(w, line, first, padded, own);
        }
        for (int r = 0; r < n_rows; ++r) {
          const Columns some = tile_seen[r / kTileRows];
          if (some.from == some.to) continue;
          if (f.distances) add_distances(w.row[r], b, i + r, first, some, w.scores + r * kScoreRow, own);
          if (f.top_keys) keep_top(head * f.L + i + r, w.row[r], first, some, w.scores + r * kScoreRow);
        }
      }
    }
  }

  // Scores to weights, 0 in the columns that are not seen.
  MH_INLINE void weigh(int64_t at, const Row& row, int64_t first, Columns seen, int padded, Real* s) const {
    const Real top = f.top[at] == -kInfinity ? Real(0) : f.top[at], inverse = f.inverse[at];
    std::fill(s, s + seen.from, Real(0));
    std::fill(s + seen.to, s + padded, Real(0));
    for (int c = seen.from; c < seen.to; c += kLanes) {
      const Reals x = load(s + c);
      store(s + c, x == -kInfinity ? Reals{} : exp2(floored(x - top)) * inverse);
    }
    if (inverse == inverse) return;
    // The weights of this row are NaN, those of visible scores of -inf too.
    for (int64_t j = std::max(row.span.begin, first + seen.from); j < std::min(row.span.end, first + seen.to);
         ++j)
      if (!score.hides || !score.hidden(row, j)) s[j - first] = inverse;
  }

  // The sum and the largest of each column of rows [from, to).
  MH_LOOP void gather_keys(Worker& w, int from, int to, int padded) const {
    for (int c = 0; c < padded; c += kLanes) {
      Reals sum{}, largest{};
      for (int r = from; r < to; ++r) {
        const Reals p = load(w.scores + r * kScoreRow + c);
        sum += p;
        largest = (p <= largest) | (largest != largest) ? largest : p;  // NaN stays
      }
      store(w.sum + c, sum), store(w.largest + c, largest);
    }
  }

  static Real larger(Real a, Real b) { return a != a || a > b ? a : b; }

  void add_to_keys(const Worker& w, int64_t first, int padded, Real* own) const {
    const int n = static_cast<int>(std::min<int64_t>(padded, f.S - first));
    if (f.received)
      for (int c = 0; c < n; ++c) own[keys_at + first + c] += w.sum[c];
    if (f.received_max)
      for (int c = 0; c < n; ++c) {
        Real& largest = own[maxima_at + first + c];
        largest = larger(largest, w.largest[c]);
      }
  }

  void add_to_map(const Worker& w, int64_t line, int64_t first, int padded, Real* own) const {
    const int n = static_cast<int>(std::min<int64_t>(padded, f.S - first));
    for (int c = 0; c < n;) {
      const int64_t cell = (first + c) * f.cells / f.S;
      const int end = static_cast<int>(std::min<int64_t>(n, ceil_div((cell + 1) * f.S, f.cells) - first));
      Real sum = 0, largest = 0;
      for (; c < end; ++c) sum += w.sum[c], largest = larger(largest, w.largest[c]);
      if (f.map) own[map_at + line * f.cells + cell] += sum;
      if (f.map_max) {
        Real& so_far = own[map_max_at + line * f.cells + cell];
        so_far = larger(so_far, largest);
      }
    }
  }

  void add_distances(const Row& row, int64_t b, int64_t i, int64_t first, Columns seen, const Real* p,
                     Real* own) const {
    Real* const middle = own + distances_at + f.sides;
    const int64_t at = f.positions[b] + i;
    const int64_t begin = std::max(row.span.begin, first + seen.from),
                  end = std::min(row.span.end, first + seen.to);
    for (int64_t j = begin; j < end;) {
      const int64_t distance = at - j;
      const int64_t k = std::min<int64_t>(f.sides, distance ? 64 - __builtin_clzll(std::abs(distance)) : 0);
      // As far as the distances have as many bits: down to 2^(k-1) in the past, up to 2^k - 1 in the future.
      int64_t to = distance > 0   ? at - (int64_t{1} << (k - 1)) + 1
                   : distance < 0 ? at + (int64_t{1} << k)
                                  : j + 1;
      if (k == f.sides && distance < 0) to = end;
      to = std::min(to, end);
      middle[distance < 0 ? -k : k] += sum(p + (j - first), static_cast<int>(to - j));
      j = to;
    }
  }

  static Real sum(const Real* p, int n) {
    Reals lanes{};
    int c = 0;
    for (; c + kLanes <= n; c += kLanes) lanes += load(p + c);
    Real total = 0;
    for (; c < n; ++c) total += p[c];
    for (int lane = 0; lane < kLanes; ++lane) total += lanes[lane];
    return total;
  }

  // Keeps a row's k heaviest keys, from the heaviest on; NaN is heavier than any number.
  void keep_top(int64_t at, const Row& row, int64_t first, Columns seen, const Real* p) const {
    int64_t* const keys = f.top_keys + at * f.k;
    Real* const weights = f.top_weights + at * f.k;
    const int64_t begin = std::max(row.span.begin, first + seen.from),
                  end = std::min(row.span.end, first + seen.to);
    if (keys[f.k - 1] >= 0) {  // most blocks hold nothing that is heavy enough
      const Real least = weights[f.k - 1];
      Ints any{};
      for (int c = seen.from; c < seen.to; c += kLanes)
        any |= (load(p + c) > least) | (load(p + c) != load(p + c));
      Int found = 0;
      for (int lane = 0; lane < kLanes; ++lane) found |= any[lane];
      if (!found) return;
    }
    for (int64_t j = begin; j < end; ++j) {
      const Real x = p[j - first];
      const bool full = keys[f.k - 1] >= 0;
      if (full && !heavier(x, weights[f.k - 1])) continue;
      if (!full && score.hides && score.hidden(row, j)) continue;
      int64_t place = f.k - 1;
      for (; place > 0 && (keys[place - 1] < 0 || heavier(x, weights[place - 1])); --place)
        keys[place] = keys[place - 1], weights[place] = weights[place - 1];
      keys[place] = j, weights[place] = x;
    }
  }

  static bool heavier(Real x, Real than) { return than == than && (x != x || x > than); }

  void add_parts(int64_t head) {
    Real* const total = partial.get() + head * parts * sums;
    for (int64_t part = 1; part < parts; ++part) {
      const Real* const of = total + part * sums;
      for (int64_t n = 0; n < sums; ++n)
        total[n] = (n >= maxima_at && n < distances_at) || n >= map_max_at ? larger(total[n], of[n])
                                                                           : total[n] + of[n];
    }
    const auto write = [&](Real* to, int64_t at, int64_t n) {
      if (to) std::copy_n(total + at, n, to + head * n);
    };
    write(f.received, keys_at, f.S), write(f.received_max, maxima_at, f.S);
    write(f.distances, distances_at, 2 * f.sides + 1);
    write(f.map, map_at, f.cells * f.cells), write(f.map_max, map_max_at, f.cells * f.cells);
  }

  const SecondPass<Real>& f;
  const Scores score;
  const int64_t group, padded_keys, key_blocks, part_rows, parts;
  // Where the sums of a part lie: those of keys, distances and the map.
  const int64_t keys_at, maxima_at, distances_at, map_at, map_max_at, sums;
  int64_t query_numbers = 0;
  Buffer<Worker> workers;
  Buffer<Real> scratch, packed, partial;
};

}  // namespace

bool second_pass(const SecondPass<Real>& problem) { return Pass(problem).run(); }

}  // namespace MH_BUILD
}  // namespace multihead

// The scores of a block of rows against a block of keys, in units of log 2: what is seen, what is added.
#pragma once

#include <cmath>

#include "packing.h"

namespace multihead {
namespace MH_BUILD {

constexpr int kRows = 144;             // query rows of a block
constexpr int kKeys = 256;             // keys of a block
constexpr int kScoreRow = kKeys + 16;  // numbers from one row of scores to the next: not a power of two
constexpr int kTiles = kRows / kTileRows;
constexpr int64_t kDepth = 128;  // products summed in one go: a longer sum of a dot product rounds too often

static_assert(kRows % kTileRows == 0 && kRows % kLanes == 0 && kKeys % kColumns == 0,
              "blocks are whole tiles");
static_assert(kKeys / kColumns <= 64, "a bit for each panel of a block");

constexpr Real kLowest = std::numeric_limits<Real>::lowest();

// The keys of a row: [begin, end).
struct Span {
  int64_t begin, end;
};

inline Span hull(Span a, Span b) { return {std::min(a.begin, b.begin), std::max(a.end, b.end)}; }

// A query row of a block.
struct Row {
  int64_t h, i;
  Span span;
  int64_t visible;      // keys that it sees
  const uint8_t* mask;  // its cells, null where there is none
  const void* bias;
  const int64_t* documents;  // of the keys
  int64_t document;          // its own
  Real slope;
  int64_t position;
};

class Scores {
 public:
  explicit Scores(const Problem<Real>& problem) : Scores(problem, problem.D) {}
  // `query_row`: numbers from one packed query to the next.
  Scores(const Problem<Real>& problem, int64_t query_row)
      : p(problem),
        query_row(query_row),
        adds(p.bias.data || p.slopes),
        hides(p.mask.data || p.bias.data || p.key_documents),
        factor(static_cast<Real>(p.softcap != 0 ? p.scale / p.softcap : p.scale * kLog2E)) {}

  const Problem<Real>& p;
  const int64_t query_row;
  const bool adds, hides;  // whether something is added to scores, and whether keys of a span may be hidden
  // What the query carries: it turns a dot product into a score in units of log 2, or, with a softcap, into
  // the argument of tanh.
  const Real factor;

  Span span_of(int64_t b, int64_t i) const {
    if (p.span_begin) return {p.span_begin[b * p.span_batch + i], p.span_end[b * p.span_batch + i]};
    return {0, p.causal ? std::clamp<int64_t>(p.query_start + i + 1, 0, p.S) : p.S};
  }

  // Fills in a row where it lies: copied from a temporary, its fields would wait for their stores.
  void set_row(Row& row, int64_t b, int64_t h, int64_t i) const {
    row.h = h, row.i = i;
    row.span = span_of(b, i);
    row.visible = hides ? 0 : std::max<int64_t>(0, row.span.end - row.span.begin);
    row.mask = nullptr, row.bias = nullptr, row.documents = nullptr, row.slope = 0;
    if (!adds && !hides) return;
    if (p.mask.data)
      row.mask =
          static_cast<const uint8_t*>(p.mask.data) + b * p.mask.batch + h * p.mask.head + i * p.mask.row;
    if (p.bias.data)
      with_stored(p.bias_stored, [&](const auto* type) {
        row.bias =
            static_cast<decltype(type)>(p.bias.data) + b * p.bias.batch + h * p.bias.head + i * p.bias.row;
      });
    if (p.key_documents)
      row.documents = p.key_documents + b * p.S, row.document = p.query_documents[b * p.L + i];
    if (p.slopes) row.slope = static_cast<Real>(p.slopes[h] * kLog2E), row.position = p.positions[b] + i;
  }

  // Whether a key of a row's span is hidden from it all the same; asked only where `hides`.
  bool hidden(const Row& row, int64_t j) const {
    return (row.mask && !row.mask[j * p.mask.column]) || (row.bias && bias_of(row, j) == -kInfinity) ||
           (row.documents && row.documents[j] != row.document);
  }

  // The query of a row (D,), times `factor`.
  void pack_query(int64_t b, const Row& row, Real* out) const {
    with_stored(p.stored, [&](const auto* type) {
      pack_row(head_of(type, p.query, b, row.h, row.i), p.D, factor, out);
    });
  }

  // Those of rows (n_rows, D).
  void pack_queries(int64_t b, const Row* row, int n_rows, Real* out) const {
    for (int r = 0; r < n_rows; ++r) pack_query(b, row[r], out + r * p.D);
  }

  // The scores (n_rows, kScoreRow) of packed queries against a block of `padded` packed keys from `first` on,
  // -inf where a row does not see the key. They are there in the columns that a row's tile sees, tile_seen;
  // with a softcap `slopes` (if any, laid out as the scores) gets tanh's slope, 1 - tanh^2.
  void of_block(const Real* query, const Real* keys, int n_rows, int64_t first, int64_t padded, Row* row,
                Columns* tile_seen, Real* scores, Real* slopes = nullptr) const {
    const int tiles = static_cast<int>(ceil_div(n_rows, kTileRows));
    Span every[kTiles];  // the keys that all rows of a tile see
    uint64_t panels[kTiles];
    for (int t = 0; t < tiles; ++t) {
      const int begin = t * kTileRows, end = std::min(n_rows, begin + kTileRows);
      Span some{p.S, 0};
      every[t] = {0, p.S};
      for (int r = begin; r < end; ++r) {
        every[t] = {std::max(every[t].begin, row[r].span.begin), std::min(every[t].end, row[r].span.end)};
        if (row[r].span.begin < row[r].span.end) some = hull(some, row[r].span);
      }
      const int64_t from = std::clamp<int64_t>(some.begin - first, 0, padded) / kColumns;
      const int64_t to = ceil_div(std::clamp<int64_t>(some.end - first, 0, padded), kColumns);
      panels[t] = 0;
      for (int64_t panel = from; panel < to; ++panel)
        if (!hides || holds_visible(row + begin, end - begin, first + panel * kColumns))
          panels[t] |= uint64_t{1} << panel;
      tile_seen[t] = panels[t] ? Columns{__builtin_ctzll(panels[t]) * kColumns,
                                         (64 - __builtin_clzll(panels[t])) * kColumns}
                               : Columns{0, 0};
    }
    for (int column = 0; column < padded; column += kColumns)
      for (int t = 0, next; t < tiles; t = next) {
        // A run of tiles that see this panel, or of those that do not.
        const auto sees = [&](int u) { return panels[u] >> (column / kColumns) & 1; };
        for (next = t + 1; next < tiles && sees(t) == sees(next);) ++next;
        const int begin = t * kTileRows, end = std::min(n_rows, next * kTileRows);
        const int64_t at = begin * kScoreRow + column;
        if (sees(t))
          of_panel(query + begin * query_row, keys + column * p.D, end - begin, scores + at,
                   slopes ? slopes + at : nullptr);
        for (int u = t; u < next; ++u) {
          const bool whole = every[u].begin <= first + column && every[u].end >= first + column + kColumns;
          if (sees(u) && whole && !adds && !hides) continue;
          for (int r = u * kTileRows; r < std::min(n_rows, (u + 1) * kTileRows); ++r)
            if (Real* const s = scores + r * kScoreRow + column; sees(u))
              adjust(row[r], first + column, s);
            else
              std::fill_n(s, kColumns, -kInfinity);
        }
      }
  }

  // What comes after the softcap on a row's scores of kColumns keys from first_key on: bias, ALiBi, -inf for
  // what it does not see. Counts row.visible where keys may be hidden.
  void adjust(Row& row, int64_t first_key, Real* s) const {
    const int begin = static_cast<int>(std::clamp<int64_t>(row.span.begin - first_key, 0, kColumns));
    const int end = static_cast<int>(std::clamp<int64_t>(row.span.end - first_key, begin, kColumns));
    if (!adds && !hides) {
      std::fill_n(s, begin, -kInfinity);
      std::fill_n(s + end, kColumns - end, -kInfinity);
      return;
    }
    if (begin == 0 && end == kColumns && !row.documents && (!row.mask || p.mask.column <= 1) &&
        (!row.bias || p.bias.column <= 1))
      return adjust_whole(row, first_key, s);
    for (int c = 0; c < kColumns; ++c) {
      const int64_t j = first_key + c;
      const bool gone = c < begin || c >= end || (hides && hidden(row, j));
      if (row.bias && !gone) s[c] += std::max(bias_of(row, j) * Real(kLog2E), kLowest);
      if (row.slope != 0) s[c] -= row.slope * static_cast<Real>(std::abs(row.position - j));
      s[c] = gone ? -kInfinity : s[c];
      row.visible += hides && !gone;
    }
  }

  // From the argument of tanh to the capped score, for a row of kColumns.
  void cap(Real* s, Real* slopes = nullptr) const {
    for (int c = 0; c < kColumns; c += kLanes) {
      const Reals t = tanh(load(s + c));
      store(s + c, t * static_cast<Real>(p.softcap * kLog2E));
      if (slopes) store(slopes + c, 1 - t * t);
    }
  }

 private:
  // Scores of some rows on one panel of keys.
  void of_panel(const Real* query, const Real* panel, int n_rows, Real* out, Real* slopes) const {
    by_tiles(n_rows, [&](auto rows, int r, int n) {
      const Real* const q = query + r * query_row;
      Real* const s = out + r * kScoreRow;
      score_tiles<rows.count, kScoreRow, false>(q, query_row, panel, std::min(p.D, kDepth), n, s);
      for (int64_t d = kDepth; d < p.D; d += kDepth)
        score_tiles<rows.count, kScoreRow, true>(q + d, query_row, panel + d * kColumns,
                                                 std::min(p.D - d, kDepth), n, s);
    });
    if (p.softcap != 0)
      for (int r = 0; r < n_rows; ++r) cap(out + r * kScoreRow, slopes ? slopes + r * kScoreRow : nullptr);
  }

  // Whether some row sees a key of a panel.
  bool holds_visible(const Row* row, int n_rows, int64_t first_key) const {
    for (int r = 0; r < n_rows; ++r) {
      const int64_t end = std::min(row[r].span.end, first_key + kColumns);
      for (int64_t j = std::max(row[r].span.begin, first_key); j < end; ++j)
        if (!hidden(row[r], j)) return true;
    }
    return false;
  }

  Real bias_of(const Row& row, int64_t j) const {
    return with_stored(p.bias_stored, [&](const auto* type) -> Real {
      return widen(static_cast<decltype(type)>(row.bias)[j * p.bias.column]);
    });
  }

  // adjust for a panel that lies in the row's span whole, its cells beside each other.
  void adjust_whole(Row& row, int64_t first_key, Real* s) const {
    Ints seen{};
    for (int c = 0; c < kColumns; c += kLanes) {
      const int64_t j = first_key + c;
      Reals x = load(s + c);
      Ints gone{};
      if (row.bias) {
        const Reals bias = with_stored(p.bias_stored, [&](const auto* type) -> Reals {
          const auto* const cells = static_cast<decltype(type)>(row.bias);
          return p.bias.column ? load(cells + j) : all(widen(*cells));
        });
        const Reals units = bias * Real(kLog2E);  // a finite bias stays finite
        gone |= bias == -kInfinity;
        x += units < kLowest ? all(kLowest) : units;
      }
      if (row.slope != 0) {
        const Reals distance =
            all(static_cast<Real>(row.position - j)) - __builtin_convertvector(iota(), Reals);
        x -= row.slope * magnitude_of(distance);
      }
      if (row.mask) gone |= p.mask.column ? load_bytes(row.mask + j) == 0 : all(Int{*row.mask}) == 0;
      store(s + c, gone ? all(-kInfinity) : x);
      seen -= gone == 0;
    }
    if (hides)
      for (int lane = 0; lane < kLanes; ++lane) row.visible += seen[lane];
  }
};

}  // namespace MH_BUILD
}  // namespace multihead

// Attention with its statistics, in one pass over the keys. Compiled once per instruction set.
//
// The plain loop: for each query row, over the keys it sees, with the running maximum m, the sum
// l of e^(s - m), and the output o = sum of e^(s - m) v; a new maximum rescales l and o
// (Milakov and Gimelshein 2018; Dao et al. 2022). What makes it fast:
//   1. Keys and values are packed once into panels (tiles.h), shared by all rows and heads that read them.
//   2. kRows rows x kKeys keys are a block: its scores stay in the L2 cache, a panel in L1.
//   3. Blocks and tiles that no row of theirs sees are skipped; the longest work starts first.
//   4. Scores live in units of log 2 (the query carries scale * log2 e), so the softmax is one exp2.
// What it sees is a handful of sums beside l, each taken from the scores less the maximum and from
// positions relative to the block's heaviest key, merged across blocks in double by Chan's formula.
//
// Bits: a row's arithmetic depends on its own scores and on the place of the block borders, which
// are multiples of kKeys. Not on threads, batch, other rows, or on being observed.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdlib>
#include <limits>
#include <memory>
#include <new>

#include "attention.h"
#include "pool.h"
#include "softmax.h"

namespace multihead {
namespace MH_LEVEL {
namespace {

constexpr int kTiles = kRows / kTileRows;
constexpr int64_t kDepth = 128;  // products summed in one go: a longer sum of a dot product rounds too often
constexpr int64_t kFusedFloats = 96 * 1024;  // keys and values that fit the L2 cache beside a block
constexpr double kSerialWork = 1.0e6;  // multiply-adds under which waking a thread costs more than it gives

constexpr float kLowest = std::numeric_limits<float>::lowest();
constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

struct Free {
  void operator()(void* p) const { std::free(p); }
};
template <typename T>
using Buffer = std::unique_ptr<T[], Free>;

// Uninitialised, at a cache line's border.
template <typename T>
Buffer<T> allocate(int64_t count) {
  const size_t bytes = (static_cast<size_t>(std::max<int64_t>(count, 1)) * sizeof(T) + 63) / 64 * 64;
  T* p = static_cast<T*>(std::aligned_alloc(64, bytes));
  if (!p) throw std::bad_alloc();
  return Buffer<T>(p);
}

// The keys that row i of sequence b sees.
struct Span {
  int64_t begin, end;
};

Span span_of(const Forward& f, int64_t b, int64_t i) {
  if (f.span_begin) return {f.span_begin[b * f.span_batch + i], f.span_end[b * f.span_batch + i]};
  if (f.causal) return {0, std::clamp<int64_t>(f.query_start + i + 1, 0, f.S)};
  return {0, f.S};
}

// A query row of a block.
struct Row {
  int64_t h, i;
  Span span;
  int64_t visible;      // keys that it sees
  const uint8_t* mask;  // its cells, null where there is none
  const float* bias;
  const int64_t* documents;  // of the keys
  int64_t document;          // its own
  float slope;
  int64_t position;
};

// A block's rows and what they have gathered: one a thread.
struct Block {
  Row row[kRows];
  Gathered gathered;
  int64_t count;  // of keys, and its logarithm: rows of one mask often see as many
  double log_count;
};

// The packed keys and values of one key/value head, a block of keys after the other. A block holds
// its key panels (depth, kColumns), then its value panels (keys, kColumns); `unusual` marks blocks
// with a value that is not finite, whose invisible keys must not be multiplied by 0.
struct Packed {
  float* floats;
  uint8_t* unusual;
};

class Kernel {
 public:
  explicit Kernel(const Forward& problem)
      : f(problem),
        group(f.G ? f.H / f.G : 1),
        value_panels(ceil_div(f.E + f.C, kColumns)),
        key_floats(f.D + value_panels * kColumns),
        padded_keys(ceil_div(f.S, kColumns) * kColumns),
        key_blocks(ceil_div(f.S, kKeys)),
        // Few queries (decoding): the rows of all heads that share keys go together.
        heads_together(f.L < 2 * kRows ? group : 1),
        stream_rows(heads_together * f.L),
        row_blocks(ceil_div(stream_rows, kRows)),
        adds(f.bias.data || f.slopes),
        hides(f.mask.data || f.bias.data || f.key_documents) {}

  bool run() {
    const int64_t outputs = f.B * f.H * f.L;
    if (outputs == 0) return true;
    const double work = double(outputs) * double(f.S) * double(f.D + f.E);
    const int threads = work < kSerialWork ? 1 : std::max(1, f.threads);
    prepare(threads);
    const int64_t kv_heads = f.B * f.G;
    const int64_t streams = f.B * (f.H / heads_together);
    // Small keys and values: a thread packs a head and uses it at once, from its own cache.
    if (padded_keys * key_floats <= kFusedFloats && kv_heads >= 2 * threads) {
      packed = allocate<float>(threads * padded_keys * key_floats);
      unusual = allocate<uint8_t>(threads * std::max<int64_t>(key_blocks, 1));
      return each(kv_heads, threads, [&](int64_t kv, int thread) {
        const Packed own = packed_at(thread);
        for (int64_t block = 0; block < key_blocks; ++block) pack(kv, block, own);
        const int64_t per_kv = group / heads_together;
        for (int64_t s = kv * per_kv; s < (kv + 1) * per_kv; ++s)
          for (int64_t block = 0; block < row_blocks; ++block) attend(s, block, own, thread);
      });
    }
    packed = allocate<float>(kv_heads * padded_keys * key_floats);
    unusual = allocate<uint8_t>(kv_heads * std::max<int64_t>(key_blocks, 1));
    const bool complete = each(kv_heads * key_blocks, threads, [&](int64_t item, int) {
      pack(item / key_blocks, item % key_blocks, packed_at(item / key_blocks));
    });
    return complete && each(streams * row_blocks, threads, [&](int64_t item, int thread) {
             // Head after head, while its keys are at hand; the last rows first, which see the most
             // keys under a causal mask, so that short work is left for the end.
             const int64_t stream = item / row_blocks;
             const int64_t block = row_blocks - 1 - item % row_blocks;
             attend(stream, block, packed_at(stream * heads_together / group), thread);
           });
  }

 private:
  template <typename F>
  bool each(int64_t items, int threads, F&& body) {
    Task task{[](void* self, int64_t item, int thread) { (*static_cast<F*>(self))(item, thread); }, &body};
    return multihead::run(items, threads, task, f.interrupted);
  }

  Packed packed_at(int64_t kv) const {
    return {packed.get() + kv * padded_keys * key_floats, unusual.get() + kv * key_blocks};
  }

  void prepare(int threads) {
    query_floats = kRows * f.D;
    scratch_floats = ceil_div(query_floats + kRows * kScoreRow + kRows * value_panels * kColumns, 16) * 16;
    scratch = allocate<float>(threads * scratch_floats);
    blocks = allocate<Block>(threads);
    for (int t = 0; t < threads; ++t) blocks[t].count = 0;
  }

  void pack(int64_t kv, int64_t block, const Packed& to) const {
    const int64_t b = kv / f.G, g = kv % f.G;
    const int64_t first = block * kKeys;
    const int64_t count = std::min<int64_t>(kKeys, f.S - first);
    const int64_t padded = ceil_div(count, kColumns) * kColumns;
    const float* key = f.key.data + b * f.key.batch + g * f.key.head + first * f.key.row;
    float* const keys = to.floats + first * key_floats;
    for (int64_t j = 0; j < padded; j += kLanes)
      pack_keys(key + j * f.key.row, std::clamp<int64_t>(count - j, 0, kLanes),
                keys + j / kColumns * kColumns * f.D + j % kColumns);
    float* const values = keys + padded * f.D;
    const float* value = f.value.data + b * f.value.batch + g * f.value.head + first * f.value.row;
    to.unusual[block] = pack_values(value, count, padded, values);
    if (f.C) pack_classes(f.classes + b * f.class_batch + first, count, padded, values);
  }

  // One vector of keys, `count` of them there and the rest zero, to a panel's columns.
  void pack_keys(const float* key, int64_t count, float* panel) const {
    int64_t d = 0;
    if (count == kLanes && f.key.column == 1)
      for (; d + kLanes <= f.D; d += kLanes) {
        Floats r[kLanes];
        for (int j = 0; j < kLanes; ++j) r[j] = load(key + j * f.key.row + d);
        transpose(r);
        for (int i = 0; i < kLanes; ++i) store(panel + (d + i) * kColumns, r[i]);
      }
    for (; d < f.D; ++d)
      for (int j = 0; j < kLanes; ++j)
        panel[d * kColumns + j] = j < count ? key[j * f.key.row + d * f.key.column] : 0.0f;
  }

  // Value panels (padded keys, kColumns); answers whether any value is not finite.
  bool pack_values(const float* value, int64_t count, int64_t padded, float* out) const {
    Floats odd{};  // x - x is 0 for a finite x, NaN otherwise
    float odd_scalar = 0;
    for (int64_t e = 0; e < value_panels * kColumns; e += kColumns, out += padded * kColumns) {
      const int64_t columns = std::clamp<int64_t>(f.E - e, 0, kColumns);
      const bool whole = columns == kColumns && f.value.column == 1;
      for (int64_t j = 0; j < padded; ++j) {
        float* to = out + j * kColumns;
        const float* from = value + j * f.value.row + e * f.value.column;
        if (whole && j < count) {
          for (int v = 0; v < kPanelVectors; ++v) {
            const Floats x = load(from + v * kLanes);
            odd += x - x;
            store(to + v * kLanes, x);
          }
        } else {
          for (int c = 0; c < kColumns; ++c) {
            const float x = j < count && c < columns ? from[c * f.value.column] : 0.0f;
            odd_scalar += x - x;
            to[c] = x;
          }
        }
      }
    }
    for (int lane = 0; lane < kLanes; ++lane) odd_scalar += odd[lane];
    return std::isnan(odd_scalar);
  }

  // Column E + c of the value is 1 for the keys of class c.
  void pack_classes(const int32_t* classes, int64_t count, int64_t padded, float* out) const {
    for (int64_t j = 0; j < count; ++j)
      if (const int64_t c = classes[j]; c >= 0 && c < f.C) {
        const int64_t column = f.E + c;
        out[column / kColumns * kColumns * padded + j * kColumns + column % kColumns] = 1.0f;
      }
  }

  void attend(int64_t stream, int64_t block, const Packed& kv, int thread) const {
    float* const query = scratch.get() + thread * scratch_floats;
    float* const scores = query + ceil_div(query_floats, 16) * 16;
    float* const output = scores + kRows * kScoreRow;
    Row* const row = blocks[thread].row;
    Gathered& gathered = blocks[thread].gathered;

    const int64_t streams = f.H / heads_together;
    const int64_t b = stream / streams, first_head = stream % streams * heads_together;
    const int64_t first_row = block * kRows;
    const int n_rows = static_cast<int>(std::min<int64_t>(kRows, stream_rows - first_row));
    Span some{f.S, 0};
    for (int64_t r = 0, h = first_head + first_row / f.L, i = first_row % f.L; r < n_rows; ++r) {
      set_row(b, h, i, row[r]);
      if (row[r].span.begin < row[r].span.end) some = join(some, row[r].span);
      if (++i == f.L) ++h, i = 0;
    }
    pack_queries(b, row, n_rows, query);
    gathered.clear();
    std::fill_n(output, kRows * value_panels * kColumns, 0.0f);

    for (int64_t first = some.begin / kKeys * kKeys; first < some.end; first += kKeys) {
      const int64_t padded = std::min<int64_t>(kKeys, padded_keys - first);
      const float* const keys = kv.floats + first * key_floats;
      const float* const values = keys + padded * f.D;
      Columns tile_seen[kTiles], row_seen[kRows];
      score_block(query, keys, n_rows, first, padded, row, tile_seen, scores);
      for (int r = 0; r < n_rows; ++r) row_seen[r] = tile_seen[r / kTileRows];
      if (f.observe)
        gathered.add<true>(scores, n_rows, row_seen, first);
      else
        gathered.add<false>(scores, n_rows, row_seen, first);
      for (int64_t e = 0; e < value_panels; ++e) {
        const float* const panel = values + e * padded * kColumns;
        float* const o = output + e * kRows * kColumns;
        if (kv.unusual[first / kKeys])
          value_exactly(n_rows, row_seen, scores, panel, row, first, gathered.rescale, o);
        else
          by_tiles(n_rows, [&](auto rows, int r, int n) {
            value_tiles<rows.count, kScoreRow>(scores + r * kScoreRow, panel, tile_seen + r / kTileRows, n,
                                               gathered.rescale + r, o + r * kColumns);
          });
      }
    }
    for (int r = 0; r < n_rows; ++r) finish(b, blocks[thread], r, output + r * kColumns);
  }

  static Span join(Span a, Span b) { return {std::min(a.begin, b.begin), std::max(a.end, b.end)}; }

  void set_row(int64_t b, int64_t h, int64_t i, Row& row) const {
    row.h = h, row.i = i, row.span = span_of(f, b, i);
    row.visible = hides ? 0 : std::max<int64_t>(0, row.span.end - row.span.begin);
    if (!adds && !hides) return;
    row.mask = f.mask.data ? f.mask.data + b * f.mask.batch + h * f.mask.head + i * f.mask.row : nullptr;
    row.bias = f.bias.data ? f.bias.data + b * f.bias.batch + h * f.bias.head + i * f.bias.row : nullptr;
    row.documents = f.key_documents ? f.key_documents + b * f.S : nullptr;
    row.document = f.key_documents ? f.query_documents[b * f.L + i] : 0;
    row.slope = f.slopes ? f.slopes[h] * kLog2E : 0;
    row.position = f.slopes ? f.positions[b] + i : 0;
  }

  // Whether a key of a row's span is hidden from it all the same; asked only where `hides`.
  bool hidden(const Row& row, int64_t j) const {
    return (row.mask && !row.mask[j * f.mask.column]) ||
           (row.bias && row.bias[j * f.bias.column] == -kInfinity) ||
           (row.documents && row.documents[j] != row.document);
  }

  // The scores of a block of keys, -inf where a row does not see the key, in the columns that its tile sees.
  void score_block(const float* query, const float* keys, int n_rows, int64_t first, int64_t padded, Row* row,
                   Columns* tile_seen, float* scores) const {
    const int tiles = static_cast<int>(ceil_div(n_rows, kTileRows));
    Span every[kTiles];  // the keys that all rows of a tile see
    uint64_t panels[kTiles];
    for (int t = 0; t < tiles; ++t) {
      const int begin = t * kTileRows, end = std::min(n_rows, begin + kTileRows);
      Span some{f.S, 0};
      every[t] = {0, f.S};
      for (int r = begin; r < end; ++r) {
        every[t] = {std::max(every[t].begin, row[r].span.begin), std::min(every[t].end, row[r].span.end)};
        if (row[r].span.begin < row[r].span.end) some = join(some, row[r].span);
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
        if (sees(t))
          score(query + begin * f.D, keys + column * f.D, end - begin, scores + begin * kScoreRow + column);
        for (int u = t; u < next; ++u) {
          const bool whole = every[u].begin <= first + column && every[u].end >= first + column + kColumns;
          if (sees(u) && whole && !adds && !hides) continue;
          for (int r = u * kTileRows; r < std::min(n_rows, (u + 1) * kTileRows); ++r)
            if (float* const s = scores + r * kScoreRow + column; sees(u))
              adjust(row[r], first + column, s);
            else
              std::fill_n(s, kColumns, -kInfinity);
        }
      }
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

  // What comes after the softcap on a row's scores of one panel: bias, ALiBi, -inf for what it does not see.
  void adjust(Row& row, int64_t first_key, float* s) const {
    const int begin = static_cast<int>(std::clamp<int64_t>(row.span.begin - first_key, 0, kColumns));
    const int end = static_cast<int>(std::clamp<int64_t>(row.span.end - first_key, begin, kColumns));
    if (!adds && !hides) {
      std::fill_n(s, begin, -kInfinity);
      std::fill_n(s + end, kColumns - end, -kInfinity);
      return;
    }
    if (begin == 0 && end == kColumns && !row.documents && (!row.mask || f.mask.column <= 1) &&
        (!row.bias || f.bias.column <= 1))
      return adjust_whole(row, first_key, s);
    for (int c = 0; c < kColumns; ++c) {
      const int64_t j = first_key + c;
      const bool gone = c < begin || c >= end || (hides && hidden(row, j));
      if (row.bias && !gone) s[c] += std::max(row.bias[j * f.bias.column] * kLog2E, kLowest);
      if (row.slope != 0) s[c] -= row.slope * static_cast<float>(std::abs(row.position - j));
      s[c] = gone ? -kInfinity : s[c];
      row.visible += hides && !gone;
    }
  }

  // The same for a panel that lies in the row's span whole, its cells beside each other.
  void adjust_whole(Row& row, int64_t first_key, float* s) const {
    Ints seen{};
    for (int c = 0; c < kColumns; c += kLanes) {
      const int64_t j = first_key + c;
      Floats x = load(s + c);
      Ints gone{};
      if (row.bias) {
        const Floats bias = f.bias.column ? load(row.bias + j) : all(*row.bias);
        const Floats units = bias * kLog2E;  // a finite bias stays finite
        gone |= bias == -kInfinity;
        x += units < kLowest ? all(kLowest) : units;
      }
      if (row.slope != 0) {
        const Floats distance =
            all(static_cast<float>(row.position - j)) - __builtin_convertvector(iota(), Floats);
        x -= row.slope * (Floats)((Ints)distance & INT32_MAX);
      }
      if (row.mask) gone |= f.mask.column ? load_bytes(row.mask + j) == 0 : all(*row.mask) == 0;
      store(s + c, gone ? all(-kInfinity) : x);
      seen -= gone == 0;
    }
    if (hides)
      for (int lane = 0; lane < kLanes; ++lane) row.visible += seen[lane];
  }

  // Rows of D, times what turns a dot product into a score's logarithm base 2 (or, with a softcap,
  // into the argument of tanh).
  void pack_queries(int64_t b, const Row* row, int n_rows, float* out) const {
    const float factor = f.softcap ? f.scale / f.softcap : static_cast<float>(f.scale * kLog2E);
    for (int r = 0; r < n_rows; ++r, out += f.D) {
      const float* q = f.query.data + b * f.query.batch + row[r].h * f.query.head + row[r].i * f.query.row;
      int64_t d = 0;
      if (f.query.column == 1)
        for (; d + kLanes <= f.D; d += kLanes) store(out + d, load(q + d) * factor);
      for (; d < f.D; ++d) out[d] = q[d * f.query.column] * factor;
    }
  }

  // Scores of some rows on one panel of keys.
  void score(const float* query, const float* panel, int n_rows, float* out) const {
    by_tiles(n_rows, [&](auto rows, int r, int n) {
      const float* const q = query + r * f.D;
      float* const s = out + r * kScoreRow;
      score_tiles<rows.count, kScoreRow, false>(q, f.D, panel, std::min(f.D, kDepth), n, s);
      for (int64_t d = kDepth; d < f.D; d += kDepth)
        score_tiles<rows.count, kScoreRow, true>(q + d, f.D, panel + d * kColumns, std::min(f.D - d, kDepth),
                                                 n, s);
    });
    if (f.softcap)
      for (int r = 0; r < n_rows; ++r)
        for (int c = 0; c < kColumns; c += kLanes) {
          float* const at = out + r * kScoreRow + c;
          store(at, tanh(load(at)) * (f.softcap * kLog2E));
        }
  }

  // value_tiles for a block with values that are not finite: only visible keys are multiplied.
  void value_exactly(int n_rows, const Columns* seen, const float* p, const float* panel, const Row* row,
                     int64_t first, const float* rescale, float* o) const {
    for (int r = 0; r < n_rows; ++r, p += kScoreRow, o += kColumns) {
      if (seen[r].from >= seen[r].to) continue;
      const int64_t begin = std::clamp<int64_t>(row[r].span.begin - first, seen[r].from, seen[r].to);
      const int64_t end = std::clamp<int64_t>(row[r].span.end - first, seen[r].from, seen[r].to);
      for (int c = 0; c < kColumns; ++c) {
        float acc = 0;
        for (int64_t j = begin; j < end; ++j)
          if (!hides || !hidden(row[r], first + j)) acc += p[j] * panel[j * kColumns + c];
        o[c] = o[c] * rescale[r] + acc;
      }
    }
  }

  // The argmax of a row whose visible scores are all -inf.
  int64_t first_visible(const Row& row) const {
    int64_t j = row.span.begin;
    while (hides && hidden(row, j)) ++j;
    return j;
  }

  static double log_of(int64_t count, Block& block) {
    if (count != block.count) block.count = count, block.log_count = std::log(double(count));
    return block.log_count;
  }

  void finish(int64_t b, Block& block, int r, const float* o) const {
    const Row& row = block.row[r];
    const Gathered& g = block.gathered;
    const int64_t at = (b * f.H + row.h) * f.L + row.i;
    const bool empty = row.visible == 0;
    // With a score of inf, or with none above -inf, the sums are not those of the definition: 0 / 0.
    const bool infinite = std::isinf(g.max[r]) && !(g.max[r] < 0 && std::isnan(g.total[r]));
    const double total = infinite && !empty ? kNaN : g.total[r];
    // kLowest stands for the type's lowest number, which has no like in units of log 2 (adjust).
    const double units = g.max[r] == kLowest ? 1.0 : kLn2;
    const double max = std::isnan(g.total[r]) && !infinite ? kNaN : double(g.max[r]) * units;
    const double log_total = f.lse || f.sinks || f.observe ? std::log(total) : 0.0;
    const double lse = empty ? -kInfinity : max + log_total;
    double share = 1;  // of the keys, beside the sink
    if (f.sinks) {
      const double sink = f.sinks[row.h], top = std::max(lse, sink);
      const double keys = std::exp(lse - top), both = keys + std::exp(sink - top);
      share = empty ? 0.0 : keys / both;
      if (f.sink_mass) f.sink_mass[at] = static_cast<float>(empty ? 1.0 : std::exp(sink - top) / both);
    }
    const float factor = empty ? 0.0f : static_cast<float>(share / total);
    float* out = f.output.data + b * f.output.batch + row.h * f.output.head + row.i * f.output.row;
    for (int64_t e = 0; e < f.E; e += kColumns) {
      const float* from = o + e * kRows;
      if (empty || f.output.column != 1 || e + kColumns > f.E)
        for (int64_t c = e; c < std::min(f.E, e + kColumns); ++c)
          out[c * f.output.column] = empty ? 0.0f : from[c - e] * factor;
      else
        for (int v = 0; v < kColumns; v += kLanes) store(out + e + v, load(from + v) * factor);
    }

    if (f.lse) f.lse[at] = static_cast<float>(lse);
    const double weight = empty ? 1.0 : total;
    for (int64_t c = 0; c < f.C; ++c) {
      const int64_t column = f.E + c;
      f.class_mass[at * f.C + c] = static_cast<float>(
          empty ? 0.0 : o[column / kColumns * kRows * kColumns + column % kColumns] / weight);
    }
    if (!f.observe) return;
    const double variance = g.spread[r] / weight;
    const double rounded = empty ? 0.0 : log_total - g.moment[r] * kLn2 / weight;
    const double entropy = rounded < 0 ? 0.0 : rounded;  // rounding
    if (f.max_logit) f.max_logit[at] = static_cast<float>(max);
    if (f.max_weight) f.max_weight[at] = static_cast<float>(empty ? 0.0 : 1.0 / weight);
    if (f.argmax) f.argmax[at] = empty || g.argmax[r] >= 0 ? g.argmax[r] : first_visible(row);
    if (f.entropy) f.entropy[at] = static_cast<float>(entropy);
    if (f.evenness) {
      f.evenness[at] = static_cast<float>(row.visible < 2 ? kNaN : entropy / log_of(row.visible, block));
    }
    if (f.effective_keys)
      f.effective_keys[at] = static_cast<float>(empty ? 0.0 : weight * weight / g.squares[r]);
    if (f.key_mean) f.key_mean[at] = static_cast<float>(empty ? kNaN : g.mean[r] + 0 * weight);
    if (f.key_variance) f.key_variance[at] = static_cast<float>(empty ? kNaN : variance);
  }

  const Forward& f;
  const int64_t group, value_panels, key_floats, padded_keys, key_blocks, heads_together, stream_rows,
      row_blocks;
  const bool adds, hides;  // whether something is added to scores, and whether keys of a span may be hidden
  int64_t query_floats = 0, scratch_floats = 0;
  Buffer<float> scratch, packed;
  Buffer<uint8_t> unusual;
  Buffer<Block> blocks;
};

}  // namespace

bool forward(const Forward& problem) { return Kernel(problem).run(); }

}  // namespace MH_LEVEL
}  // namespace multihead

// Attention with its statistics, in one pass over the keys. Compiled once per instruction set and type.
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
#include "decode.h"
#include "dropout.h"
#include "parts.h"
#include "pool.h"

namespace multihead {
namespace MH_BUILD {
namespace {

constexpr int64_t kFusedBytes = 384 * 1024;  // keys and values that fit the L2 cache beside a block

// A block's rows and what they have gathered: one a thread.
struct Block {
  Row row[kRows];
  Gathered gathered;
  FinishSpace finish;
};

// The packed keys and values of one key/value head, a block of keys after the other. A block holds
// its key panels (D, kColumns), then its value panels (keys, kColumns); `unusual` marks blocks
// with a value that is not finite, whose invisible keys must not be multiplied by 0.
struct Packed {
  Real* numbers;
  uint8_t* unusual;
};

class Kernel {
 public:
  explicit Kernel(const Forward<Real>& problem)
      : f(problem),
        score(problem),
        dropout(problem),
        // Weights are dropped for the value alone: then the classes have panels of their own.
        first_class(dropout.on ? ceil_div(f.E, kColumns) * kColumns : f.E),
        finish(problem, score, first_class),
        group(f.G ? f.H / f.G : 1),
        value_panels(ceil_div(first_class + f.C, kColumns)),
        key_numbers(f.D + value_panels * kColumns),
        padded_keys(ceil_div(f.S, kColumns) * kColumns),
        key_blocks(ceil_div(f.S, kKeys)),
        // Few queries: the rows of all heads that share keys go together.
        heads_together(f.L < 2 * kRows ? group : 1),
        stream_rows(heads_together * f.L),
        row_blocks(ceil_div(stream_rows, kRows)),
        parts(f.S, stream_rows, {kColumns, stream_rows * kColumns, value_panels}) {}

  bool run() {
    const int64_t outputs = f.B * f.H * f.L;
    if (outputs == 0) return true;
    const double work = double(outputs) * double(f.S) * double(f.D + f.E);
    const int threads = work < kSerialWork ? 1 : std::max(1, f.threads);
    prepare(threads);
    const int64_t kv_heads = f.B * f.G;
    const int64_t streams = f.B * (f.H / heads_together);
    // One block of rows over many keys: those that a thread packs are used once, at once.
    if (row_blocks == 1 && parts.count > 1) {
      packed = allocate<Real>(threads * kKeys * key_numbers);
      parts.prepare(streams);
      return for_each(streams * parts.count, threads, f.interrupted, [&](int64_t item, int thread) {
        attend_part(item / parts.count, item % parts.count, thread);
      });
    }
    // Small keys and values: a thread packs a head and uses it at once, from its own cache.
    if (padded_keys * key_numbers * int64_t{sizeof(Real)} <= kFusedBytes && kv_heads >= 2 * threads) {
      packed = allocate<Real>(threads * padded_keys * key_numbers);
      unusual = allocate<uint8_t>(threads * std::max<int64_t>(key_blocks, 1));
      return for_each(kv_heads, threads, f.interrupted, [&](int64_t kv, int thread) {
        const Packed own = packed_at(thread);
        for (int64_t block = 0; block < key_blocks; ++block) pack(kv, block, own, thread);
        const int64_t per_kv = group / heads_together;
        for (int64_t s = kv * per_kv; s < (kv + 1) * per_kv; ++s)
          for (int64_t block = 0; block < row_blocks; ++block) attend(s, block, own, thread);
      });
    }
    packed = allocate<Real>(kv_heads * padded_keys * key_numbers);
    unusual = allocate<uint8_t>(kv_heads * std::max<int64_t>(key_blocks, 1));
    const bool complete =
        for_each(kv_heads * key_blocks, threads, f.interrupted, [&](int64_t item, int thread) {
          pack(item / key_blocks, item % key_blocks, packed_at(item / key_blocks), thread);
        });
    return complete && for_each(streams * row_blocks, threads, f.interrupted, [&](int64_t item, int thread) {
             // Head after head, while its keys are at hand; the last rows first, which see the most
             // keys under a causal mask, so that short work is left for the end.
             const int64_t stream = item / row_blocks;
             const int64_t block = row_blocks - 1 - item % row_blocks;
             attend(stream, block, packed_at(stream * heads_together / group), thread);
           });
  }

 private:
  Packed packed_at(int64_t kv) const {
    return {packed.get() + kv * padded_keys * key_numbers, unusual.get() + kv * key_blocks};
  }

  void prepare(int threads) {
    query_numbers = ceil_div(kRows * f.D, 16) * 16;
    scratch_numbers = ceil_div(query_numbers + kRows * kScoreRow + kRows * value_panels * kColumns, 16) * 16;
    scratch = allocate<Real>(threads * scratch_numbers);
    blocks = allocate<Block>(threads);
    if (f.pages) plain = allocate<Real>(threads * kKeys * std::max(f.D, f.E));
  }

  void pack(int64_t kv, int64_t block, const Packed& to, int thread) const {
    to.unusual[block] = pack_block(kv, block * kKeys, to.numbers + block * kKeys * key_numbers, thread);
  }

  // Answers whether some value is not finite.
  bool pack_block(int64_t kv, int64_t first, Real* keys, int thread) const {
    const int64_t b = kv / f.G, g = kv % f.G;
    const int64_t count = std::min<int64_t>(kKeys, f.S - first);
    const int64_t padded = ceil_div(count, kColumns) * kColumns;
    Real* const values = keys + padded * f.D;
    bool unusual = false;
    if (f.pages) {  // plain rows first
      Real* const rows = plain.get() + thread * kKeys * std::max(f.D, f.E);
      gather(f.key, f.key_scales, kv, first, count, f.D, rows);
      pack_turned(Matrix<Real>{rows, f.D, 1}, count, f.D, keys);
      gather(f.value, f.value_scales, kv, first, count, f.E, rows);
      unusual = pack_columns(Matrix<Real>{rows, f.E, 1}, count, f.E, padded, value_panels, values);
    } else {
      with_stored(f.stored, [&](const auto* type) {
        pack_turned(head_of(type, f.key, b, g, first), count, f.D, keys);
        unusual = pack_columns(head_of(type, f.value, b, g, first), count, f.E, padded, value_panels, values);
      });
    }
    if (f.C) pack_classes(f.classes + b * f.class_batch + first, count, padded, values);
    return unusual;
  }

  // Rows of a cache in pages, as the core computes with them. What no row of the sequence sees is 0, and not
  // read.
  void gather(const Tensor& tensor, const float* scales, int64_t kv, int64_t first, int64_t count,
              int64_t width, Real* out) const {
    const int64_t b = kv / f.G, g = kv % f.G;
    Span seen{f.S, 0};
    for (int64_t i = 0; i < f.L; ++i)
      if (const Span span = score.span_of(b, i); span.begin < span.end) seen = hull(seen, span);
    const int64_t begin = std::clamp(seen.begin, first, first + count);
    const int64_t end = std::clamp(seen.end, begin, first + count);
    std::fill_n(out, count * width, Real(0));
    with_cached(f, [&](const auto* type) {
      each_key(type, f, tensor, b, g, begin, end, [&](const auto* row, int64_t j, int64_t page) {
        Real* const to = out + (j - first) * width;
        const Real scale = scales ? static_cast<Real>(scales[page]) : Real(1);
        for (int64_t d = 0; d < width; ++d) to[d] = widen(row[d * tensor.column]) * scale;
      });
    });
  }

  // Column first_class + c of the value is 1 for the keys of class c.
  void pack_classes(const int32_t* classes, int64_t count, int64_t padded, Real* out) const {
    for (int64_t j = 0; j < count; ++j)
      if (const int64_t c = classes[j]; c >= 0 && c < f.C) {
        const int64_t column = first_class + c;
        out[column / kColumns * kColumns * padded + j * kColumns + column % kColumns] = 1;
      }
  }

  // A block of rows that a thread has begun with: their sequence, how many they are, the keys that they see.
  struct Begun {
    int64_t b;
    int rows;
    Span seen;
  };

  Real* query_of(int thread) const { return scratch.get() + thread * scratch_numbers; }
  Real* scores_of(int thread) const { return query_of(thread) + query_numbers; }

  void attend(int64_t stream, int64_t block, const Packed& kv, int thread) {
    Real* const output = scores_of(thread) + kRows * kScoreRow;
    const Begun of = begin(stream, block, thread);
    std::fill_n(output, kRows * value_panels * kColumns, Real(0));
    for (int64_t first = of.seen.begin / kKeys * kKeys; first < of.seen.end; first += kKeys)
      add_keys(of, first, kv.numbers + first * key_numbers, kv.unusual[first / kKeys], output,
               kRows * kColumns, thread);
    finish(of.b, blocks[thread].row, of.rows, blocks[thread].gathered, output, kColumns, kRows * kColumns,
           blocks[thread].finish);
  }

  // The only block of a stream against a part of its keys. The last part finishes.
  void attend_part(int64_t stream, int64_t part, int thread) {
    Real* const output = parts.output(stream, part);
    Real* const keys = packed.get() + thread * kKeys * key_numbers;
    Block& block = blocks[thread];
    const Begun of = begin(stream, 0, thread);
    const Span seen = Parts::within(of.seen, part);
    std::fill_n(output, parts.numbers(), Real(0));
    for (int64_t first = seen.begin / kKeys * kKeys; first < seen.end; first += kKeys) {
      const bool unusual = pack_block(stream * heads_together / group, first, keys, thread);
      add_keys(of, first, keys, unusual, output, parts.layout.panel, thread);
    }
    if (!parts.leave(stream, part, block.gathered, block.row)) return;
    const Real* const all = parts.join(stream, score.hides, block.row, block.gathered);
    finish(of.b, block.row, of.rows, block.gathered, all, kColumns, parts.layout.panel, block.finish);
  }

  Begun begin(int64_t stream, int64_t block, int thread) {
    Row* const row = blocks[thread].row;
    const int64_t streams = f.H / heads_together, first_row = block * kRows;
    const int64_t first_head = stream % streams * heads_together;
    Begun of{stream / streams, static_cast<int>(std::min<int64_t>(kRows, stream_rows - first_row)), {f.S, 0}};
    for (int64_t r = 0, h = first_head + first_row / f.L, i = first_row % f.L; r < of.rows; ++r) {
      score.set_row(row[r], of.b, h, i);
      if (row[r].span.begin < row[r].span.end) of.seen = hull(of.seen, row[r].span);
      if (++i == f.L) ++h, i = 0;
    }
    score.pack_queries(of.b, row, of.rows, query_of(thread));
    blocks[thread].gathered.clear();
    return of;
  }

  // Adds a block of packed keys and values to what the rows have gathered and to their output, in panels
  // `panel` numbers apart.
  void add_keys(const Begun& of, int64_t first, const Real* keys, bool unusual, Real* output, int64_t panel,
                int thread) {
    Real* const scores = scores_of(thread);
    Row* const row = blocks[thread].row;
    Gathered& gathered = blocks[thread].gathered;
    const int64_t padded = std::min<int64_t>(kKeys, padded_keys - first);
    const Real* const values = keys + padded * f.D;
    Columns tile_seen[kTiles], row_seen[kRows];
    score.of_block(query_of(thread), keys, of.rows, first, padded, row, tile_seen, scores);
    for (int r = 0; r < of.rows; ++r) row_seen[r] = tile_seen[r / kTileRows];
    if (f.observe)
      gathered.add<true>(scores, of.rows, row_seen, first);
    else
      gathered.add<false>(scores, of.rows, row_seen, first);
    const auto multiply_panels = [&](int64_t from, int64_t to) {
      for (int64_t e = from; e < to; ++e) {
        const Real* const value = values + e * padded * kColumns;
        Real* const o = output + e * panel;
        if (unusual)
          value_exactly(of.rows, row_seen, scores, value, row, first, gathered.rescale, o);
        else
          by_tiles(of.rows, [&](auto rows, int r, int n) {
            value_tiles<rows.count, kScoreRow>(scores + r * kScoreRow, value, tile_seen + r / kTileRows, n,
                                               gathered.rescale + r, o + r * kColumns);
          });
      }
    };
    if (dropout.on) {
      multiply_panels(first_class / kColumns, value_panels);
      for (int r = 0; r < of.rows; ++r) dropout(of.b, row[r], first, row_seen[r], scores + r * kScoreRow);
      multiply_panels(0, first_class / kColumns);
    } else {
      multiply_panels(0, value_panels);
    }
  }

  // value_tiles for a block with values that are not finite: only visible keys are multiplied.
  void value_exactly(int n_rows, const Columns* seen, const Real* p, const Real* panel, const Row* row,
                     int64_t first, const Real* rescale, Real* o) const {
    for (int r = 0; r < n_rows; ++r, p += kScoreRow, o += kColumns) {
      if (seen[r].from >= seen[r].to) continue;
      const int64_t begin = std::clamp<int64_t>(row[r].span.begin - first, seen[r].from, seen[r].to);
      const int64_t end = std::clamp<int64_t>(row[r].span.end - first, seen[r].from, seen[r].to);
      for (int c = 0; c < kColumns; ++c) {
        Real acc = 0;
        for (int64_t j = begin; j < end; ++j)
          if (!score.hides || !score.hidden(row[r], first + j)) acc += p[j] * panel[j * kColumns + c];
        o[c] = o[c] * rescale[r] + acc;
      }
    }
  }

  const Forward<Real>& f;
  const Scores score;
  const Dropout dropout;
  const int64_t first_class;  // its column among those of the value
  const Finish finish;
  const int64_t group, value_panels, key_numbers, padded_keys, key_blocks, heads_together, stream_rows,
      row_blocks;
  Parts parts;
  int64_t query_numbers = 0, scratch_numbers = 0;
  Buffer<Real> scratch, packed, plain;
  Buffer<uint8_t> unusual;
  Buffer<Block> blocks;
};

}  // namespace

bool forward(const Forward<Real>& problem) {
  return decodes(problem) ? decode(problem) : Kernel(problem).run();
}

}  // namespace MH_BUILD
}  // namespace multihead

// The two matrix products, a register tile at a time.
//
// Scores: R rows of queries against one panel of keys. Output: R rows of weights against one panel
// of value columns. A panel is kColumns wide, so a tile is R x kColumns accumulators that stay in
// registers over the whole inner loop: with R = 6 and two vectors a panel, 12 accumulators, two
// panel vectors and one broadcast fill the 16 registers of AVX2, and each of the 12 multiply-adds
// needs 8/12 of a load.
//
// A row's arithmetic does not depend on R: the same bits whatever tile it falls in.
#pragma once

#include "vectors.h"

namespace multihead {
namespace MH_BUILD {

constexpr int kTileRows = 6;
#if defined(__aarch64__)
constexpr int kPanelVectors = 4;  // 32 registers of 4 floats: a tile of 24 accumulators
#else
constexpr int kPanelVectors = 2;
#endif
constexpr int kColumns = kLanes * kPanelVectors;

// Keys or columns [from, to) of a block.
struct Columns {
  int from, to;
};

// Each is a loop over tiles in a function of its own, never inlined: the compiler gives the inner
// loop all registers, and a call a tile would cost a tenth of the time.
#define MH_LOOP inline __attribute__((noinline))

// s (n tiles of R rows, kStride floats a row) = q (n * R, depth; ld floats a row) . k (depth, kColumns),
// added to what s holds if kAdd
template <int R, int kStride, bool kAdd>
MH_LOOP void score_tiles(const Real* q, int64_t ld, const Real* k, int64_t depth, int n, Real* s) {
  for (int t = 0; t < n; ++t, q += R * ld, s += R * kStride) {
    Reals acc[R][kPanelVectors] = {};
#pragma GCC unroll 8
    for (int64_t d = 0; d < depth; ++d) {
      Reals key[kPanelVectors];
      for (int v = 0; v < kPanelVectors; ++v) key[v] = load(k + d * kColumns + v * kLanes);
      for (int r = 0; r < R; ++r)
        for (int v = 0; v < kPanelVectors; ++v) acc[r][v] += q[r * ld + d] * key[v];
    }
    for (int r = 0; r < R; ++r)
      for (int v = 0; v < kPanelVectors; ++v) {
        Real* const at = s + r * kStride + v * kLanes;
        store(at, kAdd ? load(at) + acc[r][v] : acc[r][v]);
      }
  }
}

// o (n tiles of R rows, kColumns) = o * rescale (n * R,) + p (n * R, kStride floats a row) . v (keys,
// kColumns), tile t over the keys of seen[t] only.
template <int R, int kStride>
MH_LOOP void value_tiles(const Real* p, const Real* v, const Columns* seen, int n, const Real* rescale,
                         Real* o) {
  for (int t = 0; t < n; ++t, p += R * kStride, rescale += R, o += R * kColumns) {
    if (seen[t].from >= seen[t].to) continue;
    Reals acc[R][kPanelVectors] = {};
#pragma GCC unroll 8
    for (int64_t j = seen[t].from, end = seen[t].to; j < end; ++j) {
      Reals value[kPanelVectors];
      for (int u = 0; u < kPanelVectors; ++u) value[u] = load(v + j * kColumns + u * kLanes);
      for (int r = 0; r < R; ++r)
        for (int u = 0; u < kPanelVectors; ++u) acc[r][u] += p[r * kStride + j] * value[u];
    }
    for (int r = 0; r < R; ++r)
      for (int u = 0; u < kPanelVectors; ++u) {
        Real* const at = o + r * kColumns + u * kLanes;
        store(at, load(at) * rescale[r] + acc[r][u]);
      }
  }
}

// Calls f(row count, first row, tiles) for the whole tiles of n rows, then for what is left; the row
// count of a tile is a compile-time constant.
template <int R>
struct Rows {
  static constexpr int count = R;
};
template <typename F>
MH_INLINE void by_tiles(int n, F&& f) {
  const int whole = n / kTileRows, rest = whole * kTileRows;
  if (whole) f(Rows<kTileRows>{}, 0, whole);
  switch (n - rest) {
    case 1:
      return f(Rows<1>{}, rest, 1);
    case 2:
      return f(Rows<2>{}, rest, 1);
    case 3:
      return f(Rows<3>{}, rest, 1);
    case 4:
      return f(Rows<4>{}, rest, 1);
    case 5:
      return f(Rows<5>{}, rest, 1);
  }
}

}  // namespace MH_BUILD
}  // namespace multihead

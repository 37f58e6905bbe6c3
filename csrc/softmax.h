// From scores to weights, block of keys after block of keys, and the sums that the statistics are
// made of. Scores are in units of log 2: a weight is p = 2^(s - max).
//
// In each block a row's heaviest key is taken out of the vector sums and added in double: so a sum of
// nearly 1 keeps its small part, which an entropy near 0 is made of, and positions are relative to
// that key. Blocks are merged in double; mean and variance by Chan, Golub and LeVeque (1979).
#pragma once

#include "scores.h"

namespace multihead {
namespace MH_BUILD {

// What kRows query rows have gathered so far.
struct Gathered {
  alignas(64) Real max[kRows];        // of the scores
  alignas(64) Real rescale[kRows];    // what the newest block multiplies the output by
  alignas(64) double total[kRows];    // sum of p
  alignas(64) double moment[kRows];   // sum of p (s - max)
  alignas(64) double squares[kRows];  // sum of p^2
  alignas(64) double mean[kRows];     // of the key's position, by weight
  alignas(64) double spread[kRows];   // sum of p (position - mean)^2
  int64_t argmax[kRows];

  // One row of it.
  struct OfRow {
    Real max;
    double total, moment, squares, mean, spread;
    int64_t argmax;

    bool empty() const { return max == -kInfinity && total == 0; }
  };

  OfRow row(int r) const { return {max[r], total[r], moment[r], squares[r], mean[r], spread[r], argmax[r]}; }

  void set_row(int r, const OfRow& row) {
    max[r] = row.max, total[r] = row.total, moment[r] = row.moment, squares[r] = row.squares;
    mean[r] = row.mean, spread[r] = row.spread, argmax[r] = row.argmax;
  }

  // Takes in what another one, not empty, gathered from later keys. Answers what the outputs must be
  // multiplied by.
  struct Factors {
    Real mine, other;
  };
  Factors join(int r, const OfRow& other) {
    const Real both = std::max(max[r], other.max);
    const double base = both == -kInfinity ? 0.0 : double(both);
    const double mine_shift = max[r] == -kInfinity ? 0.0 : max[r] - base;
    const double other_shift = other.max == -kInfinity ? 0.0 : other.max - base;
    const double mine = max[r] == -kInfinity ? 0.0 : std::exp2(mine_shift);
    const double theirs = other.max == -kInfinity ? 0.0 : std::exp2(other_shift);
    moment[r] =
        mine * (moment[r] + mine_shift * total[r]) + theirs * (other.moment + other_shift * other.total);
    squares[r] = mine * mine * squares[r] + theirs * theirs * other.squares;
    const double before = mine * total[r], weight = theirs * other.total;
    const double distance = other.mean - mean[r], share = weight == 0 ? 0.0 : weight / (before + weight);
    mean[r] += distance * share;
    spread[r] = mine * spread[r] + theirs * other.spread + distance * distance * before * share;
    // As in merge: the first NaN is the largest, else the first of equals.
    if (total[r] == total[r] && (other.total != other.total || other.max > max[r])) argmax[r] = other.argmax;
    total[r] = before + weight, max[r] = both;
    return {static_cast<Real>(mine), static_cast<Real>(theirs)};
  }

  void clear() {
    std::fill_n(max, kRows, -kInfinity);
    for (double* sums : {total, moment, squares, mean, spread}) std::fill_n(sums, kRows, 0.0);
    std::fill_n(argmax, kRows, -1);
  }

  // Turns a block of scores into weights, in place, and adds them up: of row r the columns seen[r], in
  // whole panels. `first`: the position of column 0.
  template <bool kObserve>
  void add(Real* scores, int rows, const Columns* seen, int64_t first) {
    find_top(scores, rows, seen);
    for (int r = 0; r < rows; r += kLanes) {
      const Reals old = load(max + r), newest = load(top + r);
      const Reals both = newest > old ? newest : old;
      const Reals base = both == -kInfinity ? Reals{} : both;
      const Reals x = newest - base;
      store(old_max + r, old), store(max + r, both), store(zero + r, base), store(top_x + r, x);
      store(rescale + r, exp2(floored(old - base))), store(top_p + r, exp2(floored(x)));
    }
    weigh<kObserve>(scores, rows, seen);
    for (int r = 0; r < rows; r += kLanes)
      for (int k = 0; k < (kObserve ? kSums : 1); ++k) store(sum[k] + r, sum_each(sum_lanes[k] + r));
    add_weight(rows);
    if constexpr (kObserve) {
      merge(rows, first);
      find_argmax(scores, rows, seen, first);
    }
  }

 private:
  // Of the newest block: its largest score, where that is, and sums over its other keys.
  alignas(64) Real top[kRows], top_x[kRows], top_p[kRows], old_max[kRows], zero[kRows];
  int top_at[kRows];
  enum Sum { kWeight, kMoment, kSquares, kFirstOrder, kSecondOrder, kSums };
  Reals sum_lanes[kSums][kRows];
  alignas(64) Real sum[kSums][kRows];
  alignas(64) double before[kRows], weight[kRows];  // the old total, to the new maximum, and what comes to it

  MH_LOOP void find_top(Real* scores, int rows, const Columns* seen) {
    std::fill_n(top, kRows, -kInfinity);
    for (int r = 0; r < rows; ++r) {
      const Real* const s = scores + r * kScoreRow;
      Reals best = all(-kInfinity);
      Ints best_at{}, column = iota() + seen[r].from;
      for (int c = seen[r].from; c < seen[r].to; c += kLanes, column += kLanes) {
        const Reals x = load(s + c);
        const Ints better = x > best;
        best = better ? x : best;
        best_at = better ? column : best_at;
      }
      top[r] = lanes_max(best);
      // The lowest column of equals. With nothing above -inf, none is taken out.
      top_at[r] = static_cast<int>(lanes_min(best == top[r] ? best_at : all(Int{kKeys})));
    }
  }

  template <bool kObserve>
  MH_LOOP void weigh(Real* scores, int rows, const Columns* seen) {
    for (int r = 0; r < rows; ++r) {
      Real* const s = scores + r * kScoreRow;
      const bool any = top[r] > -kInfinity;
      if (any) s[top_at[r]] = -kInfinity;
      const Reals base = all(zero[r]);
      Reals weight{}, moment{}, squares{}, first_order{}, second_order{};
      Reals offset = __builtin_convertvector(iota() + (seen[r].from - top_at[r]), Reals);
      for (int c = seen[r].from; c < seen[r].to; c += kColumns) {
        Reals x[kPanelVectors], p[kPanelVectors], of_panel{};
        for (int v = 0; v < kPanelVectors; ++v) x[v] = floored(load(s + c + v * kLanes) - base);
        exp2(x, p);
        for (int v = 0; v < kPanelVectors; ++v) {
          store(s + c + v * kLanes, p[v]);
          of_panel += p[v];
          if constexpr (kObserve) {
            moment += p[v] * x[v];
            squares += p[v] * p[v];
            const Reals lever = p[v] * offset;
            first_order += lever;
            second_order += lever * offset;
            offset += Real(kLanes);
          }
        }
        weight += of_panel;
      }
      if (any) s[top_at[r]] = top_p[r];
      sum_lanes[kWeight][r] = weight;
      if constexpr (kObserve) {
        sum_lanes[kMoment][r] = moment, sum_lanes[kSquares][r] = squares;
        sum_lanes[kFirstOrder][r] = first_order, sum_lanes[kSecondOrder][r] = second_order;
      }
    }
  }

  // One function, whether it is observed or not: the compiler fuses products and sums as it likes.
  MH_LOOP void add_weight(int rows) {
    for (int r = 0; r < rows; r += kDoubles) {
      const Doubles old = load_doubles(total + r) * load_doubles(rescale + r);
      const Doubles newest = load_doubles(sum[kWeight] + r) + load_doubles(top_p + r);
      store_doubles(before + r, old), store_doubles(weight + r, newest),
          store_doubles(total + r, old + newest);
    }
  }

  MH_LOOP void merge(int rows, int64_t first) {
    for (int r = 0; r < rows; r += kDoubles) {
      const auto of = [&](const auto* numbers) { return load_doubles(numbers + r); };
      const Doubles scale = of(rescale), p = of(top_p), old = of(before), newest = of(weight), none{};
      const Doubles old_top = of(old_max), drop = old_top - of(max);
      const Doubles shift = old_top == -double(kInfinity) ? none : drop, top_moment = p * of(top_x);
      store_doubles(moment + r,
                    scale * of(moment) + shift * old + of(sum[kMoment]) + (p == 0 ? none : top_moment));
      store_doubles(squares + r, scale * scale * of(squares) + of(sum[kSquares]) + p * p);
      const Doubles lever = of(sum[kFirstOrder]), from_top = newest == 0 ? none : lever / newest;
      const Doubles share = newest == 0 ? none : newest / (old + newest);
      const Doubles inner = of(sum[kSecondOrder]) - from_top * lever;
      const Doubles distance = double(first) + of(top_at) + from_top - of(mean);
      store_doubles(mean + r, of(mean) + distance * share);
      store_doubles(spread + r,
                    scale * of(spread) + (inner < 0 ? none : inner) + distance * distance * old * share);
    }
  }

  MH_LOOP void find_argmax(const Real* scores, int rows, const Columns* seen, int64_t first) {
    for (int r = 0; r < rows; ++r) {
      if (before[r] != before[r]) continue;  // the first NaN is the largest, as PyTorch has it
      if (top[r] > old_max[r]) argmax[r] = first + top_at[r];
      if (weight[r] == weight[r]) continue;
      const Real* const p = scores + r * kScoreRow;
      argmax[r] = first + (std::find_if(p + seen[r].from, p + seen[r].to, [](Real x) { return x != x; }) - p);
    }
  }
};

}  // namespace MH_BUILD
}  // namespace multihead

// From a row's sums to its output and its statistics.
#pragma once

#include "softmax.h"

namespace multihead {
namespace MH_BUILD {

constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();

// log of the last count asked: rows of one mask often see as many keys.
struct LogOfCount {
  int64_t count = 0;
  double log = 0;

  double operator()(int64_t n) {
    if (n != count) count = n, log = std::log(double(n));
    return log;
  }
};

class Finish {
 public:
  Finish(const Forward<Real>& problem, const Scores& of) : f(problem), scores(of) {}

  // Row r of a block of sequence b; its output, unscaled, lies at `o` in panels `panel` numbers apart, the
  // classes' columns after the value's.
  void operator()(int64_t b, const Row& row, const Gathered& g, int r, const Real* o, int64_t panel,
                  LogOfCount& log_of) const {
    const int64_t at = (b * f.H + row.h) * f.L + row.i;
    const bool empty = row.visible == 0;
    // With a score of inf, or with none above -inf, the sums are not those of the definition: 0 / 0.
    const bool infinite = std::isinf(g.max[r]) && !(g.max[r] < 0 && std::isnan(g.total[r]));
    const double total = infinite && !empty ? kNaN : g.total[r];
    // kLowest stands for the type's lowest number, which has no like in units of log 2 (Scores::adjust).
    const double units = g.max[r] == kLowest ? 1.0 : kLn2;
    const double max = std::isnan(g.total[r]) && !infinite ? kNaN : double(g.max[r]) * units;
    const double log_total = f.lse || f.sinks || f.observe ? std::log(total) : 0.0;
    const double lse = empty ? -kInfinity : max + log_total;
    double share = 1;  // of the keys, beside the sink
    if (f.sinks) {
      const double sink = f.sinks[row.h], top = std::max(lse, sink);
      const double keys = std::exp(lse - top), both = keys + std::exp(sink - top);
      share = empty ? 0.0 : keys / both;
      if (f.sink_mass) f.sink_mass[at] = static_cast<Real>(empty ? 1.0 : std::exp(sink - top) / both);
    }
    const Real factor = static_cast<Real>(empty ? 0.0 : share / total);
    with_stored(f.stored, [&](const auto* type) {
      using T = std::remove_cv_t<std::remove_pointer_t<decltype(type)>>;
      T* const out =
          static_cast<T*>(f.output.data) + b * f.output.batch + row.h * f.output.head + row.i * f.output.row;
      for (int64_t e = 0; e < f.E; e += kColumns) {
        const int64_t width = std::min<int64_t>(f.E - e, kColumns), column = f.output.column;
        if (empty)
          for (int64_t c = 0; c < width; ++c) narrow(Real(0), out + (e + c) * column);
        else
          unpack_row(o + e / kColumns * panel, width, factor, out + e * column, column);
      }
    });

    if (f.lse) f.lse[at] = static_cast<Real>(lse);
    if (f.top) f.top[at] = g.max[r], f.inverse[at] = static_cast<Real>(empty ? 0.0 : 1.0 / total);
    const double weight = empty ? 1.0 : total;
    for (int64_t c = 0; c < f.C; ++c) {
      const int64_t column = f.E + c;
      f.class_mass[at * f.C + c] =
          static_cast<Real>(empty ? 0.0 : o[column / kColumns * panel + column % kColumns] / weight);
    }
    if (!f.observe) return;
    const double variance = g.spread[r] / weight;
    const double rounded = empty ? 0.0 : log_total - g.moment[r] * kLn2 / weight;
    const double entropy = rounded < 0 ? 0.0 : rounded;  // rounding
    if (f.max_logit) f.max_logit[at] = static_cast<Real>(max);
    if (f.max_weight) f.max_weight[at] = static_cast<Real>(empty ? 0.0 : 1.0 / weight);
    if (f.argmax) f.argmax[at] = empty || g.argmax[r] >= 0 ? g.argmax[r] : first_visible(row);
    if (f.entropy) f.entropy[at] = static_cast<Real>(entropy);
    if (f.evenness)
      f.evenness[at] = static_cast<Real>(row.visible < 2 ? kNaN : entropy / log_of(row.visible));
    if (f.effective_keys)
      f.effective_keys[at] = static_cast<Real>(empty ? 0.0 : weight * weight / g.squares[r]);
    if (f.key_mean) f.key_mean[at] = static_cast<Real>(empty ? kNaN : g.mean[r] + 0 * weight);
    if (f.key_variance) f.key_variance[at] = static_cast<Real>(empty ? kNaN : variance);
  }

 private:
  // The argmax of a row whose visible scores are all -inf.
  int64_t first_visible(const Row& row) const {
    int64_t j = row.span.begin;
    while (scores.hides && scores.hidden(row, j)) ++j;
    return j;
  }

  const Forward<Real>& f;
  const Scores& scores;
};

}  // namespace MH_BUILD
}  // namespace multihead

// From the sums of rows to their outputs and statistics.
#pragma once

#include "softmax.h"

namespace multihead {
namespace MH_BUILD {

constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();
constexpr int64_t kCaches = 16 << 20;  // bytes, of an output that no cache holds until it is read

// What a thread needs for the rows of a block.
struct FinishSpace {
  alignas(64) double visible[kRows], top[kRows], total[kRows], inverse[kRows], log_total[kRows],
      entropy[kRows];
  alignas(64) Real numbers[kRows], factor[kRows];  // of one statistic; of the outputs
};

class Finish {
 public:
  Finish(const Forward<Real>& problem, const Scores& of, int64_t first_class)
      : f(problem), scores(of), first_class(first_class), past_caches(goes_past_caches(problem)) {}

  // The rows of a block of sequence b, which lie beside each other in (B, H, L). Row r's output, unscaled,
  // is at output + r * step in panels `panel` numbers apart, the classes' columns from `first_class` on.
  void operator()(int64_t b, const Row* row, int rows, const Gathered& g, const Real* output, int64_t step,
                  int64_t panel, FinishSpace& s) const {
    const int64_t at = (b * f.H + row->h) * f.L + row->i;
    sum_up(row, rows, g, s);
    each(s, rows, s.factor, 0, [&](int r) { return unless_empty(s, r, 0, load_doubles(s.inverse + r)); });
    if (f.lse || f.sinks) {
      each(s, rows, f.lse, at, [&](int r) { return lse_of(s, r); });
      if (f.sinks) share_with_sinks(row, rows, at, s);
    }
    with_stored(f.stored, [&](const auto* type) {
      for (int r = 0; r < rows; ++r) write(type, b, row[r], output + r * step, panel, s.factor[r]);
    });
    if (past_caches) stored_past();

    if (f.top) {
      std::copy_n(g.max, rows, f.top + at);
      each(s, rows, f.inverse, at, [&](int r) { return unless_empty(s, r, 0, load_doubles(s.inverse + r)); });
    }
    for (int r = 0; f.C && r < rows; ++r)
      for (int64_t c = 0; c < f.C; ++c) {
        const int64_t column = first_class + c;
        const Real weight = output[r * step + column / kColumns * panel + column % kColumns];
        f.class_mass[(at + r) * f.C + c] = static_cast<Real>(s.visible[r] == 0 ? 0.0 : weight * s.inverse[r]);
      }
    if (f.observe) describe(row, rows, g, at, s);
  }

 private:
  void sum_up(const Row* row, int rows, const Gathered& g, FinishSpace& s) const {
    for (int r = 0; r < rows; ++r) s.visible[r] = static_cast<double>(row[r].visible);
    for (int r = 0; r < rows; r += kDoubles) {
      const Doubles max = load_doubles(g.max + r), total = load_doubles(g.total + r), nan = all_double(kNaN);
      // With a score of inf, or with none above -inf, the sums are not those of the definition: 0 / 0.
      const auto infinite =
          (load_doubles(s.visible + r) != 0) & (max - max != 0) & ~((max < 0) & (total != total));
      // kLowest stands for the type's lowest number, which has no like in units of log 2 (Scores::adjust).
      const Doubles top = max * (max == double(kLowest) ? all_double(1) : all_double(kLn2));
      const Doubles sum = infinite ? nan : total;
      store_doubles(s.top + r, (total != total) & ~infinite ? nan : top);
      store_doubles(s.total + r, sum), store_doubles(s.inverse + r, 1 / sum);
      if (f.lse || f.sinks || f.observe) store_doubles(s.log_total + r, log(sum));
    }
  }

  static Doubles unless_empty(const FinishSpace& s, int r, double otherwise, Doubles x) {
    return load_doubles(s.visible + r) == 0 ? all_double(otherwise) : x;
  }

  static Doubles lse_of(const FinishSpace& s, int r) {
    return unless_empty(s, r, -double(kInfinity), load_doubles(s.top + r) + load_doubles(s.log_total + r));
  }

  // Fills in a statistic, if it is wanted, of rows from `at` on.
  template <typename F>
  MH_INLINE static void each(FinishSpace& s, int rows, Real* to, int64_t at, F&& value) {
    if (!to) return;
    for (int r = 0; r < rows; r += kDoubles) narrow_doubles(s.numbers + r, value(r));
    std::copy_n(s.numbers, rows, to + at);
  }

  void share_with_sinks(const Row* row, int rows, int64_t at, FinishSpace& s) const {
    for (int r = 0; r < rows; ++r) {
      const bool empty = row[r].visible == 0;
      const double lse = empty ? -kInfinity : s.top[r] + s.log_total[r];
      const double sink = f.sinks[row[r].h], top = std::max(lse, sink);
      const double keys = std::exp(lse - top), of_sink = std::exp(sink - top), both = keys + of_sink;
      s.factor[r] = static_cast<Real>(empty ? 0.0 : keys / both * s.inverse[r]);
      if (f.sink_mass) f.sink_mass[at + r] = static_cast<Real>(empty ? 1.0 : of_sink / both);
    }
  }

  void describe(const Row* row, int rows, const Gathered& g, int64_t at, FinishSpace& s) const {
    const auto of = [](const double* numbers) { return load_doubles(numbers); };
    const auto put = [&](Real* to, auto&& value) { each(s, rows, to, at, value); };
    for (int r = 0; r < rows; r += kDoubles) {
      const Doubles entropy = of(s.log_total + r) - of(g.moment + r) * kLn2 * of(s.inverse + r);
      store_doubles(s.entropy + r, unless_empty(s, r, 0, entropy < 0 ? Doubles{} : entropy));  // rounding
    }
    put(f.max_logit, [&](int r) { return of(s.top + r); });
    put(f.max_weight, [&](int r) { return unless_empty(s, r, 0, of(s.inverse + r)); });
    put(f.entropy, [&](int r) { return of(s.entropy + r); });
    put(f.evenness, [&](int r) {
      const Doubles n = of(s.visible + r);
      return n < 2 ? all_double(kNaN) : of(s.entropy + r) / log(n);
    });
    put(f.effective_keys,
        [&](int r) { return unless_empty(s, r, 0, of(s.total + r) * of(s.total + r) / of(g.squares + r)); });
    put(f.key_mean, [&](int r) { return unless_empty(s, r, kNaN, of(g.mean + r) + 0 * of(s.total + r)); });
    put(f.key_variance,
        [&](int r) { return unless_empty(s, r, kNaN, of(g.spread + r) * of(s.inverse + r)); });
    for (int r = 0; f.argmax && r < rows; ++r)
      f.argmax[at + r] = row[r].visible == 0 || g.argmax[r] >= 0 ? g.argmax[r] : first_visible(row[r]);
  }

  template <typename T>
  void write(const T*, int64_t b, const Row& row, const Real* o, int64_t panel, Real factor) const {
    T* const out =
        static_cast<T*>(f.output.data) + b * f.output.batch + row.h * f.output.head + row.i * f.output.row;
    const int64_t column = f.output.column;
    for (int64_t e = 0; e < f.E; e += kColumns, o += panel) {
      const int64_t width = std::min<int64_t>(f.E - e, kColumns);
      if (row.visible == 0)  // whatever the factor would be multiplied by
        for (int64_t c = 0; c < width; ++c) narrow(Real(0), out + (e + c) * column);
      else if (past_caches)
        for (int64_t c = 0; c < width; c += kLanes)
          store_past(reinterpret_cast<Real*>(out + e + c), load(o + c) * factor);
      else
        unpack_row(o, width, factor, out + e * column, column);
    }
  }

  // The argmax of a row whose visible scores are all -inf.
  int64_t first_visible(const Row& row) const {
    int64_t j = row.span.begin;
    while (scores.hides && scores.hidden(row, j)) ++j;
    return j;
  }

  // Whether the output is larger than the caches and can be written a whole vector at a time: a line that is
  // written to a cache is read first.
  static bool goes_past_caches(const Forward<Real>& f) {
    const auto whole = [](int64_t n) { return n % kLanes == 0; };
    return f.stored == (kSingle ? Stored::kFloat : Stored::kDouble) &&
           f.B * f.H * f.L * f.E * int64_t{sizeof(Real)} >= kCaches && f.output.column == 1 && whole(f.E) &&
           whole(f.output.batch) && whole(f.output.head) && whole(f.output.row) &&
           reinterpret_cast<uintptr_t>(f.output.data) % sizeof(Reals) == 0;
  }

  const Forward<Real>& f;
  const Scores& scores;
  const int64_t first_class;
  const bool past_caches;
};

}  // namespace MH_BUILD
}  // namespace multihead

// Few queries over many keys: the keys are cut into parts of fixed size, spread over the threads. What the
// parts of a stream of rows gathered is joined from left to right, so that the bits depend on neither the
// threads nor the batch.
#pragma once

#include <atomic>

#include "softmax.h"

namespace multihead {
namespace MH_BUILD {

constexpr int64_t kPart = 4 * kKeys;  // keys of a part

class Parts {
 public:
  // Of one row's output: `panels` panels of kColumns numbers, `panel` apart; those of the next row `step` on.
  struct Layout {
    int64_t step, panel, panels;
  };

  Parts(int64_t keys, int64_t rows, Layout layout)
      : count(std::max<int64_t>(1, ceil_div(keys, kPart))), layout(layout), rows(rows) {}

  const int64_t count;  // of a stream
  const Layout layout;

  void prepare(int64_t streams) {
    sums = allocate<Sums>(streams * count * rows);
    outputs = allocate<Real>(streams * count * numbers());
    left = allocate<std::atomic<int64_t>>(streams);
    for (int64_t s = 0; s < streams; ++s) new (&left[s]) std::atomic<int64_t>(count);
  }

  // A part's keys among those that a stream's rows see.
  static Span within(Span seen, int64_t part) {
    return {std::max(seen.begin, part * kPart), std::min(seen.end, (part + 1) * kPart)};
  }

  // Where a part's output (rows, numbers of a row) is summed up.
  Real* output(int64_t stream, int64_t part) const {
    return outputs.get() + (stream * count + part) * numbers();
  }
  int64_t numbers() const { return rows * layout.panels * kColumns; }

  // Takes in what a part gathered; answers whether it was the stream's last one.
  bool leave(int64_t stream, int64_t part, const Gathered& gathered, const Row* row) {
    Sums* const to = sums.get() + (stream * count + part) * rows;
    for (int64_t r = 0; r < rows; ++r) to[r] = {gathered.row(static_cast<int>(r)), row[r].visible};
    return left[stream].fetch_sub(1, std::memory_order_acq_rel) == 1;
  }

  // Joins the parts: `gathered` and the output of the first one become those of the stream, and where keys
  // may be hidden the rows' visible keys are counted.
  const Real* join(int64_t stream, bool hides, Row* row, Gathered& gathered) {
    const Sums* const of = sums.get() + stream * count * rows;
    for (int r = 0; r < rows; ++r) {
      gathered.set_row(r, of[r].gathered);
      if (hides) row[r].visible = of[r].visible;
      for (int64_t part = 1; part < count; ++part) {
        const Sums& next = of[part * rows + r];
        if (hides) row[r].visible += next.visible;
        if (next.gathered.empty()) continue;
        const auto [mine, other] = gathered.join(r, next.gathered);
        Real* const o = output(stream, 0) + r * layout.step;
        const Real* const from = output(stream, part) + r * layout.step;
        for (int64_t e = 0; e < layout.panels; ++e)
          for (int64_t c = e * layout.panel; c < e * layout.panel + kColumns; c += kLanes)
            store(o + c, load(o + c) * mine + load(from + c) * other);
      }
    }
    return output(stream, 0);
  }

 private:
  struct Sums {
    Gathered::OfRow gathered;
    int64_t visible;
  };

  const int64_t rows;
  Buffer<Sums> sums;
  Buffer<Real> outputs;
  Buffer<std::atomic<int64_t>> left;
};

}  // namespace MH_BUILD
}  // namespace multihead

// Matrices as the tiles want them: in panels of kColumns, filled up with zeros, in the type of the
// arithmetic.
#pragma once

#include <cmath>

#include "memory.h"
#include "stored.h"
#include "tiles.h"

namespace multihead {
namespace MH_BUILD {

// A matrix where it lies; strides in elements.
template <typename T>
struct Matrix {
  const T* data;
  int64_t row, column;

  Matrix from_row(int64_t i) const { return {data + i * row, row, column}; }
};

// One head of a tensor, from a row on; `type` is what with_stored gives.
template <typename T>
MH_INLINE Matrix<T> head_of(const T* type, const Tensor& tensor, int64_t b, int64_t head, int64_t first_row) {
  const T* const data = static_cast<decltype(type)>(tensor.data);
  return {data + b * tensor.batch + head * tensor.head + first_row * tensor.row, tensor.row, tensor.column};
}

// Calls f(row, key, scales' index) for the keys [from, to) of a head of key or value, `row` where key's
// numbers lie.
template <typename T, typename F>
MH_INLINE void each_key(const T* type, const Problem<Real>& p, const Tensor& tensor, int64_t b, int64_t g,
                        int64_t from, int64_t to, F&& f) {
  const T* const data = static_cast<decltype(type)>(tensor.data) + g * tensor.head;
  if (!p.pages)
    for (int64_t j = from; j < to; ++j) f(data + b * tensor.batch + j * tensor.row, j, int64_t{0});
  else
    for (int64_t j = from; j < to;) {
      const int64_t page = p.pages[b * p.page_batch + j / p.page_size];
      const int64_t end = std::min(to, (j / p.page_size + 1) * p.page_size);
      for (; j < end; ++j) f(data + page * tensor.batch + j % p.page_size * tensor.row, j, page * p.G + g);
    }
}

// Rows (count, width) to panels of kColumns rows, turned: (width, kColumns) each. `out` holds whole panels.
template <typename T>
void pack_turned(Matrix<T> from, int64_t count, int64_t width, Real* out) {
  for (int64_t j = 0; j < ceil_div(count, kColumns) * kColumns; j += kLanes) {
    Real* const panel = out + j / kColumns * kColumns * width + j % kColumns;
    const int64_t there = std::clamp<int64_t>(count - j, 0, kLanes);
    const Matrix<T> m = from.from_row(there ? j : 0);
    int64_t d = 0;
    if (there == kLanes && m.column == 1)
      for (; d + kLanes <= width; d += kLanes) {
        Reals r[kLanes];
        for (int i = 0; i < kLanes; ++i) r[i] = load(m.data + i * m.row + d);
        transpose(r);
        for (int i = 0; i < kLanes; ++i) store(panel + (d + i) * kColumns, r[i]);
      }
    for (; d < width; ++d)
      for (int i = 0; i < kLanes; ++i)
        panel[d * kColumns + i] = i < there ? widen(m.data[i * m.row + d * m.column]) : Real(0);
  }
}

// Rows (count, width) to `panels` panels of kColumns columns: (padded, kColumns) each. Answers whether some
// number is not finite.
template <typename T>
bool pack_columns(Matrix<T> from, int64_t count, int64_t width, int64_t padded, int64_t panels, Real* out) {
  Reals odd{};  // x - x is 0 for a finite x, NaN otherwise
  Real odd_one = 0;
  for (int64_t e = 0; e < panels * kColumns; e += kColumns, out += padded * kColumns) {
    const int64_t columns = std::clamp<int64_t>(width - e, 0, kColumns);
    const bool whole = columns == kColumns && from.column == 1;
    for (int64_t j = 0; j < padded; ++j) {
      Real* const to = out + j * kColumns;
      const T* const at = from.data + j * from.row + e * from.column;
      if (whole && j < count) {
        for (int v = 0; v < kPanelVectors; ++v) {
          const Reals x = load(at + v * kLanes);
          odd += x - x;
          store(to + v * kLanes, x);
        }
      } else {
        for (int c = 0; c < kColumns; ++c) {
          const Real x = j < count && c < columns ? widen(at[c * from.column]) : Real(0);
          odd_one += x - x;
          to[c] = x;
        }
      }
    }
  }
  for (int lane = 0; lane < kLanes; ++lane) odd_one += odd[lane];
  return std::isnan(odd_one);
}

// One row (width,) times a factor.
template <typename T>
void pack_row(Matrix<T> from, int64_t width, Real factor, Real* out) {
  int64_t d = 0;
  if (from.column == 1)
    for (; d + kLanes <= width; d += kLanes) store(out + d, load(from.data + d) * factor);
  for (; d < width; ++d) out[d] = widen(from.data[d * from.column]) * factor;
}

// One row (width,), times a factor, to where it is stored.
template <typename T>
void unpack_row(const Real* from, int64_t width, Real factor, T* out, int64_t column) {
  int64_t d = 0;
  if (column == 1)
    for (; d + kLanes <= width; d += kLanes) store(out + d, load(from + d) * factor);
  for (; d < width; ++d) narrow(from[d] * factor, out + d * column);
}

}  // namespace MH_BUILD
}  // namespace multihead

// Work space.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <new>

#include "vectors.h"

namespace multihead {
namespace MH_BUILD {

MH_INLINE int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

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

}  // namespace MH_BUILD
}  // namespace multihead

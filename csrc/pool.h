// A pool of threads that park when idle.
#pragma once

#include <cstdint>

#include "attention.h"

namespace multihead {

// A piece of work: called with each item 0..n-1 exactly once, from some thread 0..threads-1.
struct Task {
  void (*call)(void* self, int64_t item, int thread);
  void* self;
};

// Runs the items on up to `threads` threads, the caller among them, lowest item first. Which thread
// takes which item is not fixed: a task must not let its result depend on it. When another caller
// has the pool, this one works alone. False when interrupted; then some items were not run.
bool run(int64_t items, int threads, Task task, Interrupted interrupted);

// The same with a function of (item, thread).
template <typename F>
bool for_each(int64_t items, int threads, Interrupted interrupted, F&& body) {
  const Task task{[](void* self, int64_t item, int thread) { (*static_cast<F*>(self))(item, thread); },
                  &body};
  return run(items, threads, task, interrupted);
}

}  // namespace multihead

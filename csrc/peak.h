// What this machine can do at best: the two ceilings that a kernel's speed is held against.
#pragma once

namespace multihead {

// The most float32 GFLOP/s of independent multiply-adds, on the best vectors that the processor
// has, over rounds of some milliseconds for about `seconds`.
double fma_gflops(int threads, double seconds);

// The most GB/s of reads from memory, over an array that no cache holds, for about `seconds`.
// Throws std::bad_alloc when there is no room for the array (at least 256 MiB).
double read_gbs(int threads, double seconds);

}  // namespace multihead

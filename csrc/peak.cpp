// The ceilings: loops that do nothing but multiply-adds, or nothing but reads. A round is cut into
// more pieces than there are threads, so that a thread that wakes late or is taken away for a while
// costs little; the best round is the answer.
#include "peak.h"

#if defined(__linux__)
#include <unistd.h>
#endif

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>

#include "pool.h"

namespace multihead {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int64_t kSteps = 1 << 15;           // multiply-adds of each accumulator in a piece
constexpr int64_t kPieces = 16;               // pieces a thread and round
constexpr int64_t kChunk = int64_t(4) << 20;  // bytes read in a piece
constexpr int64_t kLeast = int64_t(256) << 20;

#if defined(__clang__)
#define MH_UNROLL _Pragma("clang loop unroll(full)")
#else
#define MH_UNROLL _Pragma("GCC unroll 16")
#endif

// The loops for one kind of vector, and the operations in a piece of multiply-adds. The accumulators
// are as many as registers hold beside two constants, to have enough under way: two to four start
// each cycle and take four. Each starts elsewhere, and none at 2, which the loop would leave as it
// is. The asm statements are a use of the sums, without which the loops would go.
#define MH_LOOPS(name, attributes, bytes, accumulators)                                     \
  namespace name {                                                                          \
  typedef float Vector __attribute__((vector_size(bytes)));                                 \
  typedef int64_t Words __attribute__((vector_size(bytes)));                                \
  constexpr double kFlops = 2.0 * kSteps * (accumulators) * (bytes) / sizeof(float);        \
  attributes void multiply_adds() {                                                         \
    Vector sum[accumulators], factor, term;                                                 \
    for (size_t i = 0; i < (bytes) / sizeof(float); ++i) factor[i] = 0.5f, term[i] = 1.0f;  \
    for (int i = 0; i < (accumulators); ++i) sum[i] = term * float(3 * i);                  \
    for (int64_t step = 0; step < kSteps; ++step) {                                         \
      MH_UNROLL for (int i = 0; i < (accumulators); ++i) sum[i] = sum[i] * factor + term;   \
    }                                                                                       \
    for (int i = 0; i < (accumulators); ++i) __asm__ volatile("" : MH_IN_REGISTER(sum[i])); \
  }                                                                                         \
  attributes void reads(const char* from) {                                                 \
    Words sum[4] = {};                                                                      \
    const Words* words = reinterpret_cast<const Words*>(from);                              \
    for (int64_t i = 0; i < kChunk / (bytes); i += 4) {                                     \
      MH_UNROLL for (int k = 0; k < 4; ++k) sum[k] ^= words[i + k];                         \
    }                                                                                       \
    for (int k = 0; k < 4; ++k) __asm__ volatile("" : MH_IN_REGISTER(sum[k]));              \
  }                                                                                         \
  }

struct Loops {
  double flops;
  void (*multiply_adds)();
  void (*reads)(const char*);
};

#if defined(__x86_64__)
#define MH_IN_REGISTER(x) "+v"(x)
MH_LOOPS(avx512, __attribute__((target("avx512f"))), 64, 16)
MH_LOOPS(avx2, __attribute__((target("avx2,fma"))), 32, 12)
MH_LOOPS(plain, , 16, 12)
#elif defined(__aarch64__)
#define MH_IN_REGISTER(x) "+w"(x)
MH_LOOPS(plain, , 16, 16)
#else
#define MH_IN_REGISTER(x) "+m"(x)
MH_LOOPS(plain, , 16, 8)
#endif

Loops loops() {
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx512f")) return {avx512::kFlops, avx512::multiply_adds, avx512::reads};
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"))
    return {avx2::kFlops, avx2::multiply_adds, avx2::reads};
#endif
  return {plain::kFlops, plain::multiply_adds, plain::reads};
}

// The best rate of `amount` a round, in 1e9 a second: rounds for about `seconds`, at least three.
template <typename F>
double best_rate(double amount, double seconds, F&& round) {
  round();  // wakes the threads and the clock
  double best = 0;
  const auto begin = Clock::now();
  for (int rounds = 0; rounds < 3 || std::chrono::duration<double>(Clock::now() - begin).count() < seconds;
       ++rounds) {
    const auto start = Clock::now();
    round();
    best = std::max(best, amount / std::chrono::duration<double>(Clock::now() - start).count());
  }
  return best / 1e9;
}

// Four times the largest cache, if the system says how large it is.
int64_t array_bytes() {
  int64_t bytes = kLeast;
#if defined(_SC_LEVEL3_CACHE_SIZE)
  bytes = std::max(bytes, 4 * static_cast<int64_t>(sysconf(_SC_LEVEL3_CACHE_SIZE)));
#endif
  return std::min(bytes, 8 * kLeast) / kChunk * kChunk;
}

}  // namespace

double fma_gflops(int threads, double seconds) {
  const Loops best = loops();
  const int64_t pieces = kPieces * threads;
  return best_rate(best.flops * pieces, seconds,
                   [&] { for_each(pieces, threads, nullptr, [&](int64_t, int) { best.multiply_adds(); }); });
}

double read_gbs(int threads, double seconds) {
  const Loops best = loops();
  const int64_t bytes = array_bytes(), pieces = bytes / kChunk;
  constexpr int64_t kAlign = 64;
  const std::unique_ptr<char[]> array(new char[bytes + kAlign]);
  char* start = array.get() + (kAlign - reinterpret_cast<uintptr_t>(array.get()) % kAlign) % kAlign;
  // Written once: pages that nobody wrote to are all the same page of zeros.
  for_each(pieces, threads, nullptr,
           [&](int64_t i, int) { std::fill_n(start + i * kChunk, kChunk, char(1)); });
  return best_rate(double(bytes), seconds, [&] {
    for_each(pieces, threads, nullptr, [&](int64_t i, int) { best.reads(start + i * kChunk); });
  });
}

}  // namespace multihead

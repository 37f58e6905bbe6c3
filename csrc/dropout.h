// Which weights dropout keeps: Philox4x32-10 of Salmon et al., "Parallel random numbers: as easy as 1, 2, 3"
// (SC 2011), as core/dropout.py lays it down. Cell (b, h, i, j) takes word j % 4 of the counter
// (j / 4, i, h, b), so the mask depends on neither blocks, threads, levels nor types.
//
// A counter is worked on in lanes of 64 bits, several side by side: their lower halves are the four words,
// and one multiplication gives the 64 bits that Philox takes apart.
#pragma once

#include "scores.h"
#if defined(__SSE2__)
#include <immintrin.h>
#endif

namespace multihead {
namespace MH_BUILD {

// Counters of a vector: as many as the processor multiplies at once, whatever MH_LANES is.
#if defined(__AVX512F__)
constexpr int kCounters = 8;
#elif defined(__AVX2__)
constexpr int kCounters = 4;
#else
constexpr int kCounters = 2;
#endif
typedef uint64_t Counters __attribute__((vector_size(8 * kCounters)));

class Dropout {
 public:
  explicit Dropout(const Problem<Real>& p)
      : on(p.kept_factor != 0),
        // With a threshold beyond 32 bits nothing is kept: what would be counts nothing.
        threshold(static_cast<uint32_t>(p.dropped_below)),
        factor(p.dropped_below >> 32 ? Real(0) : static_cast<Real>(p.kept_factor)) {
    if (!on) return;
    uint32_t first = p.dropout_key[0], second = p.dropout_key[1];
    for (auto& round : key) {
      round[0] = Counters{} + first, round[1] = Counters{} + second;
      first += 0x9E3779B9u, second += 0xBB67AE85u;
    }
  }

  const bool on;

  // Multiplies the cells of a row, whole panels of a block that begins at key `first`, by their factors:
  // 0, or 1 / (1 - p) where they are kept. NaN stays NaN.
  MH_LOOP void operator()(int64_t b, const Row& row, int64_t first, Columns columns, Real* cells) const {
    uint32_t words[kWords];
    fill(b, row, first, columns, words);
    for (int c = columns.from; c < columns.to; c += kLanes)
      store(cells + c, load(cells + c) * of_words(words + c - columns.from));
  }

  // Those factors themselves.
  MH_LOOP void factors(int64_t b, const Row& row, int64_t first, Columns columns, Real* out) const {
    uint32_t words[kWords];
    fill(b, row, first, columns, words);
    for (int c = columns.from; c < columns.to; c += kLanes)
      store(out + c, of_words(words + c - columns.from));
  }

 private:
  static constexpr int kChains = 2;  // vectors of counters that do not wait for each other
  static constexpr int kStep = 4 * kCounters * kChains;  // cells of a step
  static constexpr int kWords = kKeys + kStep;
  static_assert(kColumns % 4 == 0, "a panel begins with a counter's first word");

  // The lower halves' products with a constant, 64 bits each.
  static MH_INLINE Counters product(Counters a, uint32_t by) {
#if defined(__AVX512F__)
    return (Counters)_mm512_mul_epu32((__m512i)a, _mm512_set1_epi64(by));
#elif defined(__AVX2__)
    return (Counters)_mm256_mul_epu32((__m256i)a, _mm256_set1_epi64x(by));
#elif defined(__SSE2__)
    return (Counters)_mm_mul_epu32((__m128i)a, _mm_set1_epi64x(by));
#else
    return (a & 0xFFFFFFFFu) * uint64_t{by};
#endif
  }

  // Lanes of a and b in turns, the first half of them or the second.
  template <int kFrom, int... I>
  static MH_INLINE Counters in_turns(Counters a, Counters b, Indices<I...>) {
#if defined(__clang__)
    return __builtin_shufflevector(a, b, ((kFrom + I) / 2 + I % 2 * kCounters)...);
#else
    return __builtin_shuffle(a, b, Counters{((kFrom + I) / 2 + I % 2 * kCounters)...});
#endif
  }

  template <int... I>
  static MH_INLINE Counters one_after_another(Indices<I...>) {
    return Counters{I...};
  }

  // The words of a row's cells, from column `columns.from` on. Up to a step more are written.
  MH_INLINE void fill(int64_t b, const Row& row, int64_t first, Columns columns, uint32_t* words) const {
    using All = typename MakeIndices<kCounters>::type;
    Counters next = one_after_another(All{}) + static_cast<uint64_t>(first + columns.from) / 4;
    for (int c = columns.from; c < columns.to; c += kStep, words += kStep) {
      Counters w[kChains][4];
      for (auto& of : w) {
        of[0] = next, of[1] = Counters{} + static_cast<uint64_t>(row.i);
        of[2] = Counters{} + static_cast<uint64_t>(row.h), of[3] = Counters{} + static_cast<uint64_t>(b);
        next += kCounters;
      }
#pragma GCC unroll 10
      for (int round = 0; round < 10; ++round)
        for (auto& of : w) {  // what is in the upper halves is never looked at
          const Counters even = product(of[0], 0xD2511F53u), odd = product(of[2], 0xCD9E8D57u);
          of[0] = odd >> 32 ^ of[1] ^ key[round][0], of[1] = odd;
          of[2] = even >> 32 ^ of[3] ^ key[round][1], of[3] = even;
        }
      for (int chain = 0; chain < kChains; ++chain) {
        const auto& of = w[chain];
        const Counters low = (of[0] & 0xFFFFFFFFu) | of[1] << 32, high = (of[2] & 0xFFFFFFFFu) | of[3] << 32;
        const Counters cells[2] = {in_turns<0>(low, high, All{}), in_turns<kCounters>(low, high, All{})};
        std::memcpy(words + chain * 4 * kCounters, cells, sizeof cells);
      }
    }
  }

  MH_INLINE Reals of_words(const uint32_t* words) const {
    typedef uint32_t Words __attribute__((vector_size(4 * MH_LANES)));
    Words w;
    std::memcpy(&w, words, sizeof w);
    const Ints kept = __builtin_convertvector(w >= threshold, Ints);
    return (Reals)((Ints)all(factor) & kept);
  }

  const uint32_t threshold;
  const Real factor;
  Counters key[10][2];
};

}  // namespace MH_BUILD
}  // namespace multihead

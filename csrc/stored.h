// Numbers as they are stored, and as the core computes with them: half types become floats on the way into
// registers and are rounded to nearest even on the way out.
#pragma once

#include "attention.h"
#include "vectors.h"
#if MH_SINGLE && defined(__AVX2__)
#include <immintrin.h>
#endif

namespace multihead {
namespace MH_BUILD {

MH_INLINE Real widen(Real x) { return x; }
MH_INLINE void narrow(Real x, Real* to) { *to = x; }

MH_INLINE Real widen(int8_t x) { return static_cast<Real>(x); }

MH_INLINE Reals load(const int8_t* from) {
#if MH_SINGLE && defined(__AVX512F__) && MH_LANES == 16
  return (Reals)_mm512_cvtepi32_ps(
      _mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))));
#elif MH_SINGLE && defined(__AVX2__) && MH_LANES == 8
  return (Reals)_mm256_cvtepi32_ps(
      _mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from))));
#else
  typedef int8_t Bytes __attribute__((vector_size(MH_LANES)));
  Bytes bytes;
  std::memcpy(&bytes, from, sizeof bytes);
  return __builtin_convertvector(__builtin_convertvector(bytes, Ints), Reals);
#endif
}

#if MH_SINGLE
struct Bfloat16 {
  uint16_t bits;
};
struct Float16 {
  uint16_t bits;
};

MH_INLINE float from_bits(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}

MH_INLINE uint32_t bits_of(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  return bits;
}

MH_INLINE float widen(Bfloat16 x) { return from_bits(uint32_t{x.bits} << 16); }
// The exponent's bias goes from 15 to 127 by a product, which is exact and makes normal numbers of denormal
// ones.
MH_INLINE float widen(Float16 x) {
  const uint32_t rest = x.bits & 0x7fffu;
  const uint32_t bits =
      rest >= 0x7c00u ? rest << 13 | 0x7f800000u : bits_of(from_bits(rest << 13) * 0x1p112f);
  return from_bits(bits | uint32_t{x.bits & 0x8000u} << 16);
}

MH_INLINE void narrow(float x, Bfloat16* to) {
  const uint32_t bits = bits_of(x);
  to->bits = static_cast<uint16_t>(x != x ? bits >> 16 | 0x40 : (bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
MH_INLINE void narrow(float x, Float16* to) {
  const uint32_t sign = bits_of(x) >> 16 & 0x8000u, a = bits_of(x) & 0x7fffffffu;
  uint32_t bits;
  if (a > 0x7f800000u)
    bits = 0x7e00;  // NaN
  else if (a >= 0x477ff000u)
    bits = 0x7c00;  // 65,520 and more round to infinity
  else if (a < 0x38800000u)
    bits = bits_of(from_bits(a) + 0.5f) - bits_of(0.5f);  // denormal: a sum near 1/2 rounds at 2^-24
  else
    bits = (a - (112u << 23) + 0xfff + (a >> 13 & 1)) >> 13;
  to->bits = static_cast<uint16_t>(bits | sign);
}

typedef uint16_t Shorts __attribute__((vector_size(2 * MH_LANES)));

MH_INLINE Reals load(const Bfloat16* from) {
#if defined(__AVX512F__) && MH_LANES == 16
  const __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
  return (Reals)_mm512_slli_epi32(wide, 16);
#elif defined(__AVX2__) && MH_LANES == 8
  const __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
  return (Reals)_mm256_slli_epi32(wide, 16);
#else
  Shorts bits;
  std::memcpy(&bits, from, sizeof bits);
  return (Reals)(__builtin_convertvector(bits, Ints) << 16);
#endif
}

MH_INLINE Reals load(const Float16* from) {
#if defined(__F16C__) && MH_LANES == 8
  return (Reals)_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
#elif defined(__AVX512F__) && MH_LANES == 16
  return (Reals)_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
#else
  Shorts bits;
  std::memcpy(&bits, from, sizeof bits);
  const Ints wide = __builtin_convertvector(bits, Ints), rest = wide & 0x7fff;
  const Ints finite = (Ints)((Reals)(rest << 13) * Real(0x1p112));
  return (Reals)((rest >= 0x7c00 ? rest << 13 | 0x7f800000 : finite) | (wide & 0x8000) << 16);
#endif
}

MH_INLINE void store(Bfloat16* to, Reals x) {
  const Ints bits = (Ints)x;
  const Ints rounded = bits + 0x7fff + (bits >> 16 & 1);
  const Shorts shorts = __builtin_convertvector((x != x ? bits | 0x400000 : rounded) >> 16, Shorts);
  std::memcpy(to, &shorts, sizeof shorts);
}

MH_INLINE void store(Float16* to, Reals x) {
  for (int lane = 0; lane < kLanes; ++lane) narrow(x[lane], to + lane);
}
#endif

// Calls f with a null pointer of the type that numbers are stored in.
template <typename F>
MH_INLINE auto with_stored(Stored stored, F&& f) {
#if MH_SINGLE
  if (stored == Stored::kBfloat16) return f(static_cast<const Bfloat16*>(nullptr));
  if (stored == Stored::kFloat16) return f(static_cast<const Float16*>(nullptr));
#endif
  (void)stored;
  return f(static_cast<const Real*>(nullptr));
}

// The same for the keys and values of a problem.
template <typename F>
MH_INLINE auto with_cached(const Problem<Real>& problem, F&& f) {
  if (problem.key_scales) return f(static_cast<const int8_t*>(nullptr));
  return with_stored(problem.stored, f);
}

}  // namespace MH_BUILD
}  // namespace multihead

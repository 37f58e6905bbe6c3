// Vectors of a width given by the build: MH_LANES floats. Everything here is GCC/Clang vector
// extensions, so one source serves every instruction set.
#pragma once

#include <cstdint>
#include <cstring>

#ifndef MH_LANES
#error "MH_LANES: the number of floats in a vector (4, 8 or 16)"
#endif

#define MH_INLINE inline __attribute__((always_inline))

namespace multihead {
namespace MH_LEVEL {

constexpr int kLanes = MH_LANES;

typedef float Floats __attribute__((vector_size(4 * MH_LANES)));
typedef int32_t Ints __attribute__((vector_size(4 * MH_LANES)));

constexpr float kInfinity = __builtin_inff();
constexpr float kLog2E = 1.44269504088896340736f;
constexpr double kLn2 = 0.69314718055994530942;

MH_INLINE Floats load(const float* from) {
  Floats v;
  std::memcpy(&v, from, sizeof v);
  return v;
}

MH_INLINE void store(float* to, Floats v) { std::memcpy(to, &v, sizeof v); }

MH_INLINE Floats all(float x) { return x - Floats{}; }
MH_INLINE Ints all(int32_t x) { return x - Ints{}; }

MH_INLINE Ints load_bytes(const uint8_t* from) {
  typedef uint8_t Bytes __attribute__((vector_size(MH_LANES)));
  Bytes v;
  std::memcpy(&v, from, sizeof v);
  return __builtin_convertvector(v, Ints);
}

template <int... I>
struct Indices {};
template <int N, int... I>
struct MakeIndices : MakeIndices<N - 1, N - 1, I...> {};
template <int... I>
struct MakeIndices<0, I...> {
  using type = Indices<I...>;
};
using Lanes = typename MakeIndices<kLanes>::type;

template <int... I>
MH_INLINE Ints iota(Indices<I...>) {
  return Ints{I...};
}
MH_INLINE Ints iota() { return iota(Lanes{}); }

// Lane i of the result is lane kSource(i) of (a, b) put end to end.
template <typename Source, int... I>
MH_INLINE Floats shuffle(Floats a, Floats b, Source, Indices<I...>) {
#if defined(__clang__)
  return __builtin_shufflevector(a, b, Source::lane(I)...);
#else
  return __builtin_shuffle(a, b, Ints{Source::lane(I)...});
#endif
}

struct Even {
  static constexpr int lane(int i) { return 2 * i; }
};
struct Odd {
  static constexpr int lane(int i) { return 2 * i + 1; }
};
struct InterleaveLow {
  static constexpr int lane(int i) { return i / 2 + (i % 2) * kLanes; }
};
struct InterleaveHigh {
  static constexpr int lane(int i) { return kLanes / 2 + i / 2 + (i % 2) * kLanes; }
};

template <typename Source>
MH_INLINE Floats shuffle(Floats a, Floats b) {
  return shuffle(a, b, Source{}, Lanes{});
}

// Sums of neighbours: those of a, then those of b.
MH_INLINE Floats add_neighbours(Floats a, Floats b) { return shuffle<Even>(a, b) + shuffle<Odd>(a, b); }

// Lane i of the result is the sum of v[i]'s lanes.
MH_INLINE Floats sum_each(const Floats* v) {
  Floats t[kLanes];
  for (int i = 0; i < kLanes; ++i) t[i] = v[i];
  for (int n = kLanes; n > 1; n /= 2)
    for (int i = 0; i < n / 2; ++i) t[i] = add_neighbours(t[2 * i], t[2 * i + 1]);
  return t[0];
}

template <int kDistance>
struct Across {
  static constexpr int lane(int i) { return i ^ kDistance; }
};

template <int kDistance = kLanes / 2>
MH_INLINE float lanes_max(Floats v) {
  const Floats other = shuffle<Across<kDistance>>(v, v);
  v = other > v ? other : v;
  if constexpr (kDistance > 1)
    return lanes_max<kDistance / 2>(v);
  else
    return v[0];
}

template <int kDistance = kLanes / 2>
MH_INLINE int32_t lanes_min(Ints v) {
  const Ints other = (Ints)shuffle<Across<kDistance>>((Floats)v, (Floats)v);
  v = other < v ? other : v;
  if constexpr (kDistance > 1)
    return lanes_min<kDistance / 2>(v);
  else
    return v[0];
}

// Turns W rows of W floats into its W columns.
MH_INLINE void transpose(Floats (&r)[kLanes]) {
  for (int round = 1; round < kLanes; round *= 2) {
    Floats t[kLanes];
    for (int i = 0; i < kLanes / 2; ++i) {
      t[2 * i] = shuffle<InterleaveLow>(r[i], r[i + kLanes / 2]);
      t[2 * i + 1] = shuffle<InterleaveHigh>(r[i], r[i + kLanes / 2]);
    }
    for (int i = 0; i < kLanes; ++i) r[i] = t[i];
  }
}

// x with a floor of -127, below which exp2 has nothing to tell apart; NaN stays.
MH_INLINE Floats floored(Floats x) { return x < -127.0f ? all(-127.0f) : x; }

// 2^x for x in [-127, 0]. 2^x = 2^n 2^f with n = round(x), |f| <= 1/2; 2^f by a minimax polynomial
// with value 1 at 0 (relative error 9.1e-8 before rounding), 2^n by adding n to its exponent. So
// 2^-127 is exactly 0, and between there and -126 a number too small to count; NaN is NaN.
MH_INLINE Floats exp2(Floats x) {
  const Floats magic = all(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer, kept in the low bits
  const Floats shifted = x + magic;
  const Floats f = x - (shifted - magic);
  Floats p = all(1.3264727e-3f);
  p = p * f + 9.671513e-3f;
  p = p * f + 5.5507336e-2f;
  p = p * f + 0.24022242f;
  p = p * f + 0.693147f;
  p = p * f + 1.0f;
  return (Floats)((Ints)p + ((Ints)shifted << 23));
}

// tanh as in Cephes' tanhf (Moshier): an odd polynomial under 0.625, 1 - 2 / (e^2|x| + 1) above.
MH_INLINE Floats tanh(Floats x) {
  const Ints sign = (Ints)x & INT32_MIN;
  const Floats a = (Floats)((Ints)x & INT32_MAX);
  const Floats e = exp2(floored(-2 * kLog2E * a));  // e^-2|x|, in (0, 1]
  const Floats large = (1.0f - e) / (1.0f + e);
  const Floats z = x * x;
  Floats p = all(-5.70498872745e-3f);
  p = p * z + 2.06390887954e-2f;
  p = p * z - 5.37397155531e-2f;
  p = p * z + 1.33314422036e-1f;
  p = p * z - 3.33332819422e-1f;
  p = p * z * a + a;
  const Floats magnitude = a < 0.625f ? p : large;
  return (Floats)((Ints)magnitude | sign);
}

}  // namespace MH_LEVEL
}  // namespace multihead

// Vectors of a type and a width given by the build: MH_LANES of MH_REAL, float or double. Everything here
// is GCC/Clang vector extensions, so one source serves every instruction set.
#pragma once

#include <cstdint>
#include <cstring>
#include <iterator>
#include <limits>
#include <type_traits>

#if !defined(MH_LANES) || !defined(MH_REAL) || !defined(MH_BUILD)
#error \
    "MH_REAL: float or double; MH_LANES: how many of them a vector has; MH_BUILD: the namespace of this build"
#endif

#define MH_INLINE inline __attribute__((always_inline))

namespace multihead {
namespace MH_BUILD {

constexpr int kLanes = MH_LANES;

using Real = MH_REAL;
using Int = std::conditional_t<sizeof(Real) == 4, int32_t, int64_t>;
typedef Real Reals __attribute__((vector_size(sizeof(Real) * MH_LANES)));
typedef Int Ints __attribute__((vector_size(sizeof(Real) * MH_LANES)));

constexpr bool kSingle = sizeof(Real) == 4;
constexpr Real kInfinity = std::numeric_limits<Real>::infinity();
constexpr Int kSignBit = std::numeric_limits<Int>::min(), kOtherBits = std::numeric_limits<Int>::max();
constexpr double kLog2E = 1.44269504088896340736;
constexpr double kLn2 = 0.69314718055994530942;

// As many doubles as fill a vector: sums over all keys, and what is made of them.
typedef double Doubles __attribute__((vector_size(sizeof(Real) * MH_LANES)));
typedef uint64_t Longs __attribute__((vector_size(sizeof(Real) * MH_LANES)));
constexpr int kDoubles = kLanes * sizeof(Real) / sizeof(double);

MH_INLINE Doubles all_double(double x) { return x - Doubles{}; }

MH_INLINE Doubles load_doubles(const double* from) {
  Doubles v;
  std::memcpy(&v, from, sizeof v);
  return v;
}

template <typename T>
MH_INLINE Doubles load_doubles(const T* from) {
  typedef T Fewer __attribute__((vector_size(sizeof(T) * kDoubles)));
  Fewer v;
  std::memcpy(&v, from, sizeof v);
  return __builtin_convertvector(v, Doubles);
}

MH_INLINE void store_doubles(double* to, Doubles v) { std::memcpy(to, &v, sizeof v); }

MH_INLINE void narrow_doubles(Real* to, Doubles v) {
  typedef Real Fewer __attribute__((vector_size(sizeof(Real) * kDoubles)));
  const Fewer narrow = __builtin_convertvector(v, Fewer);
  std::memcpy(to, &narrow, sizeof narrow);
}

MH_INLINE Reals load(const Real* from) {
  Reals v;
  std::memcpy(&v, from, sizeof v);
  return v;
}

MH_INLINE void store(Real* to, Reals v) { std::memcpy(to, &v, sizeof v); }

// A store that leaves the caches alone, to a vector's border; `stored_past` comes before another thread
// reads.
#if MH_SINGLE && MH_LANES == 8 && defined(__AVX2__)
MH_INLINE void store_past(Real* to, Reals v) { __builtin_ia32_movntps256(to, v); }
MH_INLINE void stored_past() { __builtin_ia32_sfence(); }
#else
MH_INLINE void store_past(Real* to, Reals v) { store(to, v); }
MH_INLINE void stored_past() {}
#endif

MH_INLINE Reals all(Real x) { return x - Reals{}; }
MH_INLINE Ints all(Int x) { return x - Ints{}; }

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
MH_INLINE Reals shuffle(Reals a, Reals b, Source, Indices<I...>) {
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
MH_INLINE Reals shuffle(Reals a, Reals b) {
  return shuffle(a, b, Source{}, Lanes{});
}

// Sums of neighbours: those of a, then those of b.
MH_INLINE Reals add_neighbours(Reals a, Reals b) { return shuffle<Even>(a, b) + shuffle<Odd>(a, b); }

// Lane i of the result is the sum of v[i]'s lanes.
MH_INLINE Reals sum_each(const Reals* v) {
  Reals t[kLanes];
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
MH_INLINE Real lanes_max(Reals v) {
  const Reals other = shuffle<Across<kDistance>>(v, v);
  v = other > v ? other : v;
  if constexpr (kDistance > 1)
    return lanes_max<kDistance / 2>(v);
  else
    return v[0];
}

template <int kDistance = kLanes / 2>
MH_INLINE Int lanes_min(Ints v) {
  const Ints other = (Ints)shuffle<Across<kDistance>>((Reals)v, (Reals)v);
  v = other < v ? other : v;
  if constexpr (kDistance > 1)
    return lanes_min<kDistance / 2>(v);
  else
    return v[0];
}

// Turns W rows of W numbers into its W columns.
MH_INLINE void transpose(Reals (&r)[kLanes]) {
  for (int round = 1; round < kLanes; round *= 2) {
    Reals t[kLanes];
    for (int i = 0; i < kLanes / 2; ++i) {
      t[2 * i] = shuffle<InterleaveLow>(r[i], r[i + kLanes / 2]);
      t[2 * i + 1] = shuffle<InterleaveHigh>(r[i], r[i + kLanes / 2]);
    }
    for (int i = 0; i < kLanes; ++i) r[i] = t[i];
  }
}

// x with a floor below which exp2 has nothing to tell apart; NaN stays.
constexpr Real kFloor = kSingle ? -127 : -1023;
MH_INLINE Reals floored(Reals x) {
#if MH_SINGLE && MH_LANES == 8 && defined(__AVX2__)
  return __builtin_ia32_maxps256(all(kFloor), x);  // the compiler makes two instructions of the line below
#else
  return x < kFloor ? all(kFloor) : x;
#endif
}

// Coefficients of polynomials, the highest power first.
template <typename T>
struct Series;
template <>
struct Series<float> {
  // 2^f for |f| <= 1/2, exactly 1 at 0: minimax, relative error 1.6e-8 before rounding. A degree less
  // has 9.1e-8, which shows in gradients.
  static constexpr float kExp2[] = {1.5353362e-4f, 1.3398875e-3f, 9.618437e-3f, 5.5503324e-2f,
                                    0.24022648f,   0.69314718f,   1.0f};
  // tanh(x) / x - 1 over x^2, of x^2, for |x| < 0.625: Cephes' tanhf (Moshier).
  static constexpr float kTanh[] = {-5.70498872745e-3f, 2.06390887954e-2f, -5.37397155531e-2f,
                                    1.33314422036e-1f, -3.33332819422e-1f};
  static constexpr float kTanhBelow[] = {1.0f};  // none
};
template <>
struct Series<double> {
  // The series of e^(f ln 2): the first term left out is 4e-18.
  static constexpr double kExp2[] = {1.36914888539041289e-12, 2.56784359934882051e-11,
                                     4.4455382718708115e-10,  7.05491162080112333e-9,
                                     1.01780860092396997e-7,  1.32154867901443095e-6,
                                     1.52527338040598403e-5,  1.540353039338161e-4,
                                     1.33335581464284434e-3,  9.61812910762847716e-3,
                                     5.550410866482158e-2,    2.40226506959100712e-1,
                                     6.93147180559945309e-1,  1.0};
  // The same, as the quotient of Cephes' tanh.
  static constexpr double kTanh[] = {-9.64399179425052238628e-1, -9.92877231001918586564e1,
                                     -1.61468768441708447952e3};
  static constexpr double kTanhBelow[] = {1.0, 1.12811678491632931402e2, 2.23548839060100448583e3,
                                          4.84406305325125486048e3};
};

template <size_t N>
MH_INLINE Reals polynomial(const Real (&terms)[N], Reals x) {
  Reals p = all(terms[0]);
  for (size_t i = 1; i < N; ++i) p = p * x + terms[i];
  return p;
}

// 2^x for x in [kFloor, 0]. 2^x = 2^n 2^f with n = round(x), |f| <= 1/2; 2^n by adding n to the exponent of
// 2^f. So 2^kFloor is exactly 0, and between there and one more a number too small to count; NaN is NaN.
// Several at once, step by step: one alone is a chain of steps that wait for each other.
template <size_t N>
MH_INLINE void exp2(const Reals (&x)[N], Reals (&p)[N]) {
  constexpr int kMantissa = kSingle ? 23 : 52;
  // 1.5 * 2^kMantissa: adding it rounds to an integer, kept in the low bits.
  const Reals magic = all(Real(Int{3} << (kMantissa - 1)));
  Reals shifted[N], f[N];
  for (size_t i = 0; i < N; ++i) shifted[i] = x[i] + magic;
  for (size_t i = 0; i < N; ++i) f[i] = x[i] - (shifted[i] - magic);
  for (size_t i = 0; i < N; ++i) p[i] = all(Series<Real>::kExp2[0]);
  for (size_t k = 1; k < std::size(Series<Real>::kExp2); ++k)
    for (size_t i = 0; i < N; ++i) p[i] = p[i] * f[i] + Series<Real>::kExp2[k];
  for (size_t i = 0; i < N; ++i) p[i] = (Reals)((Ints)p[i] + ((Ints)shifted[i] << kMantissa));
}

MH_INLINE Reals exp2(Reals x) {
  const Reals one[1] = {x};
  Reals p[1];
  exp2(one, p);
  return p[0];
}

// The natural logarithm of x from 1 up, NaN of NaN. With x = 2^k m, m near 1, log x = k log 2 + 2 atanh s, s
// = (m - 1) / (m + 1): the series of atanh, whose first term left out is 2e-17 of it. Near 1 nothing cancels.
MH_INLINE Doubles log(Doubles x) {
  constexpr uint64_t kRoot = 0x3fe6a09e667f3bcd;  // the bits of the root of 1/2
  const Longs k = ((Longs)x - kRoot) >> 52;
  const Doubles m = (Doubles)((Longs)x - (k << 52));
  const Doubles exponent = (Doubles)(k | 0x4330000000000000) - 0x1p52;
  const Doubles s = (m - 1) / (m + 1), z = s * s;
  Doubles series = all_double(1.0 / 19);
  for (int n = 17; n > 1; n -= 2) series = series * z + 1.0 / n;
  return exponent * kLn2 + (2 * s + 2 * s * z * series) + (x - x);
}

MH_INLINE Reals magnitude_of(Reals x) { return (Reals)((Ints)x & kOtherBits); }

MH_INLINE Reals tanh(Reals x) {
  const Reals a = magnitude_of(x);
  const Reals e = exp2(floored(Real(-2 * kLog2E) * a));  // e^-2|x|, in (0, 1]
  const Reals z = x * x;
  Reals small = polynomial(Series<Real>::kTanh, z) * z * a;
  if constexpr (!kSingle) small /= polynomial(Series<Real>::kTanhBelow, z);
  const Reals magnitude = a < Real(0.625) ? small + a : (1 - e) / (1 + e);
  return (Reals)((Ints)magnitude | ((Ints)x & kSignBit));
}

}  // namespace MH_BUILD
}  // namespace multihead

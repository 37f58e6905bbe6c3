// Chooses the instruction-set level once, at load, from what the processor has.
#include <atomic>
#include <cstring>
#include <string>

#include "attention.h"

namespace multihead {

#define MH_DECLARE_OF(build, Real)                   \
  namespace build {                                  \
  bool forward(const Forward<Real>& problem);        \
  bool backward(const Backward<Real>& problem);      \
  bool second_pass(const SecondPass<Real>& problem); \
  }
#define MH_DECLARE(level)             \
  MH_DECLARE_OF(level##_float, float) \
  MH_DECLARE_OF(level##_double, double)
#if MH_HAVE_AVX512
MH_DECLARE(avx512)
#endif
#if MH_HAVE_WIDE
MH_DECLARE(wide)
#endif
#if MH_HAVE_AVX2
MH_DECLARE(avx2)
#endif
#if MH_HAVE_NEON
MH_DECLARE(neon)
#endif
#if MH_HAVE_BASELINE
MH_DECLARE(baseline)
#endif

namespace {

template <typename Real>
struct Entries {
  bool (*forward)(const Forward<Real>&);
  bool (*backward)(const Backward<Real>&);
  bool (*second_pass)(const SecondPass<Real>&);
};

struct Level {
  const char* name;
  bool (*supported)();
  Entries<float> of_float;
  Entries<double> of_double;
};

#define MH_ENTRIES_OF(build) {build::forward, build::backward, build::second_pass}
#define MH_ENTRIES(level) MH_ENTRIES_OF(level##_float), MH_ENTRIES_OF(level##_double)

bool always() { return true; }
#if defined(__x86_64__)
bool has_avx512() {
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
         __builtin_cpu_supports("fma");
}
bool has_avx2() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
}
#endif

// Best first. `wide` (a test build: AVX-512's width in AVX2 instructions) is never chosen by itself.
const Level kLevels[] = {
#if MH_HAVE_AVX512
    {"avx512", has_avx512, MH_ENTRIES(avx512)},
#endif
#if MH_HAVE_AVX2
    {"avx2", has_avx2, MH_ENTRIES(avx2)},
#endif
#if MH_HAVE_NEON
    {"neon", always, MH_ENTRIES(neon)},
#endif
#if MH_HAVE_BASELINE
    {"baseline", always, MH_ENTRIES(baseline)},
#endif
#if MH_HAVE_WIDE
    {"wide", has_avx2, MH_ENTRIES(wide)},
#endif
};

const Level* best() {
  for (const Level& level : kLevels)
    if (level.supported()) return &level;
  return nullptr;  // not reached: baseline or neon always is
}

std::atomic<const Level*>& chosen() {
  static std::atomic<const Level*> level{best()};
  return level;
}

}  // namespace

bool forward(const Forward<float>& problem) { return chosen().load()->of_float.forward(problem); }
bool forward(const Forward<double>& problem) { return chosen().load()->of_double.forward(problem); }
bool backward(const Backward<float>& problem) { return chosen().load()->of_float.backward(problem); }
bool backward(const Backward<double>& problem) { return chosen().load()->of_double.backward(problem); }
bool second_pass(const SecondPass<float>& problem) { return chosen().load()->of_float.second_pass(problem); }
bool second_pass(const SecondPass<double>& problem) {
  return chosen().load()->of_double.second_pass(problem);
}

const char* level() { return chosen().load()->name; }

bool set_level(const char* name) {
  for (const Level& level : kLevels)
    if (level.supported() && std::strcmp(level.name, name) == 0) {
      chosen().store(&level);
      return true;
    }
  return false;
}

std::string levels() {
  std::string names;
  for (const Level& level : kLevels)
    if (level.supported()) names += (names.empty() ? "" : " ") + std::string(level.name);
  return names;
}

}  // namespace multihead

// The core against a plain loop in double, on odd shapes drawn from a fixed seed, at every level, by
// several threads and from several callers at once. Built with sanitizers by `make test-cpp`: they
// see what leaves an array, what is undefined and what races.
#include "attention.h"

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <limits>
#include <random>
#include <sstream>
#include <thread>
#include <vector>

#include "philox.h"

namespace {

using multihead::Forward;

struct Case {
  int64_t B, H, G, L, S, D, E;
  bool causal, masked, biased, sloped, observed;
  double softcap, dropout;
};

template <typename Real>
std::vector<Real> normal(std::mt19937& random, int64_t n) {
  std::normal_distribution<Real> draw;
  std::vector<Real> values(static_cast<size_t>(n));
  for (Real& x : values) x = draw(random);
  return values;
}

// The largest difference from the definition.
template <typename Real>
double error_of(const Case& c, int threads, unsigned seed) {
  std::mt19937 random(seed);
  // Exactly as long as they must be: the sanitizer sees a read beyond.
  auto slopes = normal<Real>(random, c.H);
  for (Real& x : slopes) x = std::abs(x);  // scores stay small, so that 1e-5 is far above their rounding
  const auto q = normal<Real>(random, c.B * c.H * c.L * c.D), k = normal<Real>(random, c.B * c.G * c.S * c.D),
             v = normal<Real>(random, c.B * c.G * c.S * c.E), bias = normal<Real>(random, c.H * c.L * c.S);
  std::vector<uint8_t> mask(static_cast<size_t>(c.L * c.S));
  for (uint8_t& x : mask) x = random() % 3 != 0;
  std::vector<int64_t> positions(static_cast<size_t>(c.B), c.S - c.L),
      argmax(static_cast<size_t>(c.B * c.H * c.L));
  const int64_t rows = c.B * c.H * c.L;
  std::vector<Real> out(static_cast<size_t>(rows * c.E), NAN), row_sums(static_cast<size_t>(9 * rows), NAN);

  Forward<Real> f{};
  f.stored = f.bias_stored = sizeof(Real) == 4 ? multihead::Stored::kFloat : multihead::Stored::kDouble;
  f.B = c.B, f.H = c.H, f.G = c.G, f.L = c.L, f.S = c.S, f.D = c.D, f.E = c.E;
  const auto place = [](const std::vector<Real>& data, int64_t heads, int64_t n, int64_t width) {
    return multihead::Tensor{const_cast<Real*>(data.data()), heads * n * width, n * width, width, 1};
  };
  f.query = place(q, c.H, c.L, c.D), f.key = place(k, c.G, c.S, c.D), f.value = place(v, c.G, c.S, c.E);
  f.output = place(out, c.H, c.L, c.E);
  f.causal = c.causal, f.query_start = c.S - c.L;
  f.scale = 0.3, f.softcap = c.softcap, f.threads = threads;
  set_dropout(c.dropout, f);
  if (c.masked) f.mask = {mask.data(), 0, 0, c.S, 1};
  if (c.biased) f.bias = {bias.data(), 0, c.L * c.S, c.S, 1};
  if (c.sloped) f.slopes = slopes.data(), f.positions = positions.data();
  Real* const sums = row_sums.data();
  f.lse = sums, f.observe = c.observed;
  if (c.observed) {
    f.max_logit = sums + rows, f.max_weight = sums + 2 * rows, f.entropy = sums + 3 * rows;
    f.evenness = sums + 4 * rows, f.effective_keys = sums + 5 * rows, f.key_mean = sums + 6 * rows;
    f.key_variance = sums + 7 * rows, f.argmax = argmax.data();
  }
  if (!multihead::forward(f)) return INFINITY;

  double worst = 0;
  for (int64_t b = 0; b < c.B; ++b)
    for (int64_t h = 0; h < c.H; ++h)
      for (int64_t i = 0; i < c.L; ++i) {
        const int64_t g = h / (c.H / c.G), p = c.S - c.L + i, row = (b * c.H + h) * c.L + i;
        std::vector<double> s(static_cast<size_t>(c.S), -INFINITY);
        double top = -INFINITY, total = 0, moment = 0;
        for (int64_t j = 0; j < c.S; ++j) {
          if ((c.causal && j > p) || (c.masked && !mask[i * c.S + j])) continue;
          double dot = 0;
          for (int64_t d = 0; d < c.D; ++d)
            dot += double(q[row * c.D + d]) * k[((b * c.G + g) * c.S + j) * c.D + d];
          s[j] = dot * 0.3;
          if (c.softcap != 0) s[j] = c.softcap * std::tanh(s[j] / c.softcap);
          if (c.biased) s[j] += bias[(h * c.L + i) * c.S + j];
          if (c.sloped) s[j] -= slopes[h] * std::abs(double(p - j));
          top = std::max(top, s[j]);
        }
        for (double x : s)
          if (x > -INFINITY) total += std::exp(x - top), moment += std::exp(x - top) * (x - top);
        for (int64_t e = 0; e < c.E; ++e) {
          double sum = 0;
          for (int64_t j = 0; j < c.S; ++j)
            if (s[j] > -INFINITY)
              sum += std::exp(s[j] - top) / total * kept_factor(c.dropout, kDropoutKey, b, h, i, j) *
                     v[((b * c.G + g) * c.S + j) * c.E + e];
          worst = std::max(worst, std::abs(sum - out[row * c.E + e]));
        }
        if (top == -INFINITY) {
          if (sums[row] != -INFINITY) return INFINITY;
          continue;
        }
        worst = std::max(worst, std::abs(top + std::log(total) - sums[row]) / 10);
        if (c.observed)
          worst = std::max(worst, std::abs(std::log(total) - moment / total - f.entropy[row]) / 10);
      }
  return worst;
}

int failures = 0;

void expect(bool holds, const char* what, const std::string& where) {
  if (holds) return;
  ++failures;
  std::printf("FAILED %s: %s\n", what, where.c_str());
}

Case draw(std::mt19937& random) {
  const auto pick = [&](std::initializer_list<int64_t> from) { return from.begin()[random() % from.size()]; };
  Case c{};
  c.B = pick({1, 2}), c.G = pick({1, 2}), c.H = c.G * pick({1, 3});
  c.L = pick({1, 5, 7, 31, 145, 289}), c.S = pick({1, 3, 17, 64, 257, 300, 1100});
  c.D = pick({1, 3, 8, 33, 64}), c.E = pick({1, 5, 16, 40});
  c.causal = random() % 2, c.masked = random() % 2, c.biased = random() % 3 == 0,
  c.sloped = random() % 3 == 0;
  c.observed = random() % 2, c.softcap = random() % 4 == 0 ? 1.5 : 0.0;
  return c;
}

}  // namespace

int main() {
  expect(philox_gives_its_published_answers(), "Philox", "of this test");
  std::istringstream names(multihead::levels());
  for (std::string name; names >> name;) {
    expect(multihead::set_level(name.c_str()), "set_level", name);
    std::mt19937 random(7);
    for (unsigned n = 0; n < 40; ++n) {
      Case c = draw(random);
      constexpr double shares[] = {0, 0.125, 0, 0.5, 1};
      c.dropout = shares[n % 5];
      const double error = error_of<float>(c, 1 + n % 4, n), wide = error_of<double>(c, 1 + n % 4, n);
      std::ostringstream where;
      where << name << " case " << n << ": error " << error << ", of double " << wide;
      expect(error < 1e-5 && wide < 1e-13, "definition", where.str());
    }
    std::vector<std::thread> callers;
    std::vector<double> errors(4);
    const Case c{2, 6, 2, 145, 300, 33, 40, true, true, false, false, true, 0, 0.5};
    for (unsigned t = 0; t < 4; ++t) callers.emplace_back([&, t] { errors[t] = error_of<float>(c, 3, t); });
    for (auto& caller : callers) caller.join();
    for (double error : errors) expect(error < 1e-5, "callers at once", name);
  }
  expect(!multihead::set_level("no such level"), "set_level", "of an unknown name");
  std::printf("%d failures at levels %s\n", failures, multihead::levels().c_str());
  return failures != 0;
}

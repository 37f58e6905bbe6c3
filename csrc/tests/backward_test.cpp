// The gradients of the core against a plain loop in double, at every level, by several threads and from
// several callers at once: the same bits each time. Built with sanitizers by `make test-cpp`, as
// attention_test.cpp is.
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <sstream>
#include <thread>
#include <vector>

#include "attention.h"
#include "philox.h"

namespace {

using multihead::Backward;
using multihead::Forward;

struct Case {
  int64_t B, H, G, L, S, D, E;
  bool causal, masked, biased, sloped, observed, sunk;
  double softcap, dropout;
};

template <typename Real>
std::vector<Real> normal(std::mt19937& random, int64_t n) {
  std::normal_distribution<Real> draw;
  std::vector<Real> values(static_cast<size_t>(n));
  for (Real& x : values) x = draw(random);
  return values;
}

template <typename Real>
multihead::Tensor place(std::vector<Real>& data, int64_t heads, int64_t n, int64_t width) {
  return {data.data(), heads * n * width, n * width, width, 1};
}

// What goes in, and the gradients of each in its own shape.
template <typename Real>
struct Inputs {
  std::vector<Real> query, key, value, bias, slopes, sinks;
};

// One problem, exactly as long as it must be: the sanitizer sees a read or a write beyond.
template <typename Real>
struct Run {
  const Case c;
  Inputs<Real> in, made;
  std::vector<uint8_t> mask;
  std::vector<int64_t> positions, argmax;
  std::vector<Real> output, lse, max_logit, entropy, top, inverse;
  std::vector<Real> d_output, d_lse, d_max_logit, d_entropy;

  Run(const Case& c, unsigned seed) : c(c) {
    std::mt19937 random(seed);
    const int64_t rows = c.B * c.H * c.L;
    in = {normal<Real>(random, rows * c.D),
          normal<Real>(random, c.B * c.G * c.S * c.D),
          normal<Real>(random, c.B * c.G * c.S * c.E),
          normal<Real>(random, c.H * c.L * c.S),
          normal<Real>(random, c.H),
          normal<Real>(random, c.H)};
    for (Real& x : in.slopes) x = std::abs(x) / 8;
    mask.resize(static_cast<size_t>(c.L * c.S));
    for (uint8_t& x : mask) x = random() % 3 != 0;
    positions.assign(static_cast<size_t>(c.B), c.S - c.L);
    d_output = normal<Real>(random, rows * c.E), d_lse = normal<Real>(random, rows);
    d_max_logit = normal<Real>(random, rows), d_entropy = normal<Real>(random, rows);
    const auto unwritten = [](const std::vector<Real>& like) { return std::vector<Real>(like.size(), NAN); };
    output = unwritten(d_output);
    for (auto* x : {&lse, &max_logit, &entropy, &top, &inverse}) *x = unwritten(d_lse);
    argmax.resize(static_cast<size_t>(rows));
    made = {unwritten(in.query),  unwritten(in.key),  unwritten(in.value), std::vector<Real>(in.bias.size()),
            unwritten(in.slopes), unwritten(in.sinks)};
  }

  template <typename Problem>
  void fill(Problem& f, int threads) {
    f.stored = f.bias_stored = sizeof(Real) == 4 ? multihead::Stored::kFloat : multihead::Stored::kDouble;
    f.B = c.B, f.H = c.H, f.G = c.G, f.L = c.L, f.S = c.S, f.D = c.D, f.E = c.E;
    f.query = place(in.query, c.H, c.L, c.D), f.key = place(in.key, c.G, c.S, c.D);
    f.value = place(in.value, c.G, c.S, c.E);
    f.causal = c.causal, f.query_start = c.S - c.L;
    f.scale = 0.3, f.softcap = c.softcap, f.threads = threads;
    set_dropout(c.dropout, f);
    if (c.masked) f.mask = {mask.data(), 0, 0, c.S, 1};
    if (c.biased) f.bias = {in.bias.data(), 0, c.L * c.S, c.S, 1};
    if (c.sloped) f.slopes = in.slopes.data(), f.positions = positions.data();
  }

  bool run(int threads) {
    Forward<Real> f{};
    fill(f, threads);
    f.output = place(output, c.H, c.L, c.E), f.observe = true;
    if (c.sunk) f.sinks = in.sinks.data();
    f.lse = lse.data(), f.max_logit = max_logit.data(), f.entropy = entropy.data(), f.argmax = argmax.data();
    f.top = top.data(), f.inverse = inverse.data();
    if (!multihead::forward(f)) return false;
    Backward<Real> g{};
    fill(g, threads);
    g.output = f.output, g.d_output = place(d_output, c.H, c.L, c.E);
    g.top = top.data(), g.inverse = inverse.data();
    if (c.sunk) g.sinks = in.sinks.data(), g.d_sinks = made.sinks.data();
    if (c.observed) {
      g.d_lse = d_lse.data(), g.d_max_logit = d_max_logit.data(), g.d_entropy = d_entropy.data();
      g.entropy = entropy.data(), g.argmax = argmax.data();
    }
    g.d_query = place(made.query, c.H, c.L, c.D), g.d_key = place(made.key, c.G, c.S, c.D);
    g.d_value = place(made.value, c.G, c.S, c.E);
    if (c.biased) g.d_bias = {made.bias.data(), 0, c.L * c.S, c.S, 1};
    if (c.sloped) g.d_slopes = made.slopes.data();
    return multihead::backward(g);
  }

  // The same by the definition, a row at a time.
  Inputs<double> expected() const {
    const auto zeros = [](const std::vector<Real>& like) { return std::vector<double>(like.size()); };
    Inputs<double> d{zeros(in.query), zeros(in.key),    zeros(in.value),
                     zeros(in.bias),  zeros(in.slopes), zeros(in.sinks)};
    for (int64_t b = 0; b < c.B; ++b)
      for (int64_t h = 0; h < c.H; ++h)
        for (int64_t i = 0; i < c.L; ++i) row(b, h, i, d);
    return d;
  }

  void row(int64_t b, int64_t h, int64_t i, Inputs<double>& d) const {
    const int64_t g = h / (c.H / c.G), n = (b * c.H + h) * c.L + i, p = c.S - c.L + i;
    std::vector<double> s(static_cast<size_t>(c.S), -INFINITY), slope(s.size()), change(s.size());
    double top = -INFINITY, keys = 0, moment = 0;
    int64_t at_top = -1;
    for (int64_t j = 0; j < c.S; ++j) {
      if ((c.causal && j > p) || (c.masked && !mask[i * c.S + j])) continue;
      double dot = 0;
      for (int64_t e = 0; e < c.D; ++e)
        dot += double(in.query[n * c.D + e]) * in.key[((b * c.G + g) * c.S + j) * c.D + e];
      s[j] = dot * 0.3, slope[j] = 1;
      if (c.softcap != 0) {
        const double t = std::tanh(s[j] / c.softcap);
        s[j] = c.softcap * t, slope[j] = 1 - t * t;
      }
      if (c.biased) s[j] += in.bias[(h * c.L + i) * c.S + j];
      if (c.sloped) s[j] -= in.slopes[h] * std::abs(double(p - j));
      if (s[j] > top) top = s[j], at_top = j;
    }
    const double sink = c.sunk ? double(in.sinks[h]) : -INFINITY;
    if (at_top < 0) {
      if (c.sunk && c.observed) d.sinks[h] += d_lse[n];
      return;
    }
    for (double x : s)
      if (x > -INFINITY) keys += std::exp(x - top), moment += std::exp(x - top) * (x - top);
    const double own = top + std::log(keys), entropy = std::log(keys) - moment / keys;
    const double taken = 1 / (1 + std::exp(own - sink));  // by the sink
    double inner = 0;  // sum of the weights' gradients by their weights, the sink's gradient 0 among them
    for (int64_t j = 0; j < c.S; ++j) {
      if (s[j] == -INFINITY) continue;
      const double kept = kept_factor(c.dropout, kDropoutKey, b, h, i, j);
      const double used = std::exp(s[j] - own) * (1 - taken);
      for (int64_t e = 0; e < c.E; ++e) {
        const int64_t cell = ((b * c.G + g) * c.S + j) * c.E + e;
        change[j] += kept * d_output[n * c.E + e] * in.value[cell];
        d.value[cell] += kept * used * d_output[n * c.E + e];
      }
      inner += used * change[j];
    }
    if (c.sunk) d.sinks[h] += taken * ((c.observed ? double(d_lse[n]) : 0.0) - inner);
    for (int64_t j = 0; j < c.S; ++j) {
      if (s[j] == -INFINITY) continue;
      const double a = std::exp(s[j] - own), used = a * (1 - taken);
      double ds = used * (change[j] - inner);
      if (c.observed)
        ds += used * d_lse[n] - a * d_entropy[n] * (s[j] - own + entropy) +
              (j == at_top ? double(d_max_logit[n]) : 0.0);
      if (c.biased) d.bias[(h * c.L + i) * c.S + j] += ds;
      if (c.sloped) d.slopes[h] -= ds * std::abs(double(p - j));
      for (int64_t e = 0; e < c.D; ++e) {
        const int64_t cell = ((b * c.G + g) * c.S + j) * c.D + e;
        d.query[n * c.D + e] += ds * slope[j] * 0.3 * in.key[cell];
        d.key[cell] += ds * slope[j] * 0.3 * in.query[n * c.D + e];
      }
    }
  }
};

double difference(const std::vector<double>& want, const double* got) {
  double worst = 0, size = 1;
  for (size_t i = 0; i < want.size(); ++i) {
    size = std::max(size, std::abs(want[i]));
    worst = std::max(worst, std::isnan(got[i]) ? INFINITY : std::abs(want[i] - got[i]));
  }
  return worst / size;
}

template <typename Real>
double error_of(const Case& c, int threads, unsigned seed) {
  Run<Real> run(c, seed);
  if (!run.run(threads)) return INFINITY;
  const Inputs<double> want = run.expected();
  double worst = 0;
  const auto hold = [&](bool there, const std::vector<double>& x, const std::vector<Real>& got) {
    if (there) worst = std::max(worst, difference(x, std::vector<double>(got.begin(), got.end()).data()));
  };
  hold(true, want.query, run.made.query), hold(true, want.key, run.made.key);
  hold(true, want.value, run.made.value), hold(c.biased, want.bias, run.made.bias);
  hold(c.sloped, want.slopes, run.made.slopes), hold(c.sunk, want.sinks, run.made.sinks);
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
  c.L = pick({1, 5, 7, 31, 97, 193}), c.S = pick({1, 3, 17, 64, 193, 300});
  c.D = pick({1, 3, 8, 33, 64}), c.E = pick({1, 5, 16, 40});
  c.causal = random() % 2, c.masked = random() % 2, c.biased = random() % 3 == 0;
  c.sloped = random() % 3 == 0, c.observed = random() % 2, c.sunk = random() % 3 == 0;
  c.softcap = random() % 4 == 0 ? 1.5 : 0.0;
  return c;
}

}  // namespace

int main() {
  expect(philox_gives_its_published_answers(), "Philox", "of this test");
  std::istringstream names(multihead::levels());
  for (std::string name; names >> name;) {
    expect(multihead::set_level(name.c_str()), "set_level", name);
    std::mt19937 random(11);
    for (unsigned n = 0; n < 40; ++n) {
      Case c = draw(random);
      constexpr double shares[] = {0, 0.125, 0, 0.5, 1};
      c.dropout = shares[n % 5];
      const double error = error_of<float>(c, 1 + n % 4, n), wide = error_of<double>(c, 1 + n % 4, n);
      std::ostringstream where;
      where << name << " case " << n << ": error " << error << ", of double " << wide;
      expect(error < 1e-5 && wide < 1e-13, "definition", where.str());
    }
    // Blocks of keys that wait for each other, whoever else works.
    const Case c{1, 3, 1, 97, 800, 16, 8, true, true, true, true, true, true, 0, 0.5};
    Run<float> alone(c, 3);
    expect(alone.run(1), "runs", name);
    std::vector<std::thread> callers;
    std::vector<uint8_t> same(4);
    for (unsigned t = 0; t < 4; ++t)
      callers.emplace_back([&, t] {
        Run<float> own(c, 3);
        same[t] = own.run(4) && own.made.query == alone.made.query && own.made.key == alone.made.key &&
                  own.made.value == alone.made.value && own.made.slopes == alone.made.slopes;
      });
    for (auto& caller : callers) caller.join();
    for (bool one : same) expect(one, "the same bits for callers at once", name);
  }
  std::printf("%d failures at levels %s\n", failures, multihead::levels().c_str());
  return failures != 0;
}

// Arrays of Python (by DLPack) to raw pointers, sizes and strides. Checks nothing but types and
// shapes that would read out of bounds: the checks that people meet are in Python.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>

#include <optional>
#include <stdexcept>

#include "attention.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace {

using Input = nb::ndarray<const float, nb::ndim<4>, nb::device::cpu>;
using Output = nb::ndarray<float, nb::ndim<4>, nb::device::cpu>;
template <typename T, int N>
using Array = std::optional<nb::ndarray<T, nb::ndim<N>, nb::device::cpu, nb::c_contig>>;

template <typename T>
multihead::Tensor tensor(const T& array) {
  return {const_cast<float*>(array.data()), array.stride(0), array.stride(1), array.stride(2),
          array.stride(3)};
}

void require(bool holds, const char* message) {
  if (!holds) throw std::invalid_argument(message);
}

// Runs Python's signal handlers: true when one of them raised (Ctrl-C).
bool interrupted() {
  nb::gil_scoped_acquire gil;
  return PyErr_CheckSignals() != 0;
}

void forward(const Input& query, const Input& key, const Input& value, const Output& output,
             const Array<const int32_t, 2>& span_begin, const Array<const int32_t, 2>& span_end, bool causal,
             int64_t query_start, float scale, float softcap, const Array<const float, 1>& sinks,
             const Array<const int32_t, 2>& classes, const Array<float, 4>& class_mass,
             const Array<float, 3>& lse, const Array<float, 3>& max_logit, const Array<float, 3>& max_weight,
             const Array<int64_t, 3>& argmax, const Array<float, 3>& entropy, const Array<float, 3>& evenness,
             const Array<float, 3>& effective_keys, const Array<float, 3>& key_mean,
             const Array<float, 3>& key_variance, const Array<float, 3>& sink_mass, int threads) {
  multihead::Forward f{};
  f.B = query.shape(0), f.H = query.shape(1), f.L = query.shape(2), f.D = query.shape(3);
  f.G = key.shape(1), f.S = key.shape(2), f.E = value.shape(3);
  const auto is = [](const auto& array, std::initializer_list<int64_t> shape) {
    size_t axis = 0;
    for (int64_t size : shape)
      if (static_cast<int64_t>(array.shape(axis++)) != size) return false;
    return true;
  };
  require(is(key, {f.B, f.G, f.S, f.D}) && is(value, {f.B, f.G, f.S, f.E}) &&
              is(output, {f.B, f.H, f.L, f.E}) && (f.G == 0 ? f.H == 0 : f.H % f.G == 0),
          "query, key, value and output do not fit each other");
  f.query = tensor(query), f.key = tensor(key), f.value = tensor(value), f.output = tensor(output);
  f.causal = causal, f.query_start = query_start, f.scale = scale, f.softcap = softcap, f.threads = threads;
  if (span_begin || span_end) {
    require(span_begin && span_end && span_begin->shape(0) == span_end->shape(0), "spans come in pairs");
    const int64_t n = static_cast<int64_t>(span_begin->shape(0));
    require((n == 1 || n == f.B) && is(*span_begin, {n, f.L}) && is(*span_end, {n, f.L}),
            "spans are (B or 1, L)");
    f.span_begin = span_begin->data(), f.span_end = span_end->data(), f.span_batch = n == 1 ? 0 : f.L;
    for (int64_t i = 0; i < n * f.L; ++i)
      require(f.span_begin[i] >= 0 && f.span_end[i] <= f.S, "a span leaves the keys");
  }
  if (sinks) require(is(*sinks, {f.H}), "sinks are (H,)"), f.sinks = sinks->data();
  if (classes) {
    const int64_t n = static_cast<int64_t>(classes->shape(0));
    require((n == 1 || n == f.B) && is(*classes, {n, f.S}) && class_mass, "classes are (B or 1, S)");
    f.classes = classes->data(), f.class_batch = n == 1 ? 0 : f.S;
    f.C = static_cast<int64_t>(class_mass->shape(3));
    require(is(*class_mass, {f.B, f.H, f.L, f.C}), "class_mass is (B, H, L, C)");
    f.class_mass = class_mass->data();
  }
  const auto statistic = [&](const auto& array, auto& pointer, bool past_lse = true) {
    if (!array) return;
    require(is(*array, {f.B, f.H, f.L}), "a statistic is (B, H, L)");
    pointer = array->data();
    f.observe |= past_lse;
  };
  statistic(lse, f.lse, false), statistic(sink_mass, f.sink_mass, false);
  statistic(max_logit, f.max_logit), statistic(max_weight, f.max_weight), statistic(argmax, f.argmax);
  statistic(entropy, f.entropy), statistic(evenness, f.evenness);
  statistic(effective_keys, f.effective_keys);
  statistic(key_mean, f.key_mean), statistic(key_variance, f.key_variance);
  f.interrupted = interrupted;
  bool complete;
  {
    nb::gil_scoped_release release;
    complete = multihead::forward(f);
  }
  if (!complete) throw nb::python_error();
}

}  // namespace

NB_MODULE(_native, m) {
  m.def("forward", &forward, "query"_a, "key"_a, "value"_a, "output"_a, "span_begin"_a.none(),
        "span_end"_a.none(), "causal"_a, "query_start"_a, "scale"_a, "softcap"_a, "sinks"_a.none(),
        "classes"_a.none(), "class_mass"_a.none(), "lse"_a.none(), "max_logit"_a.none(),
        "max_weight"_a.none(), "argmax"_a.none(), "entropy"_a.none(), "evenness"_a.none(),
        "effective_keys"_a.none(), "key_mean"_a.none(), "key_variance"_a.none(), "sink_mass"_a.none(),
        "threads"_a);
  m.def("level", &multihead::level);
  m.def("set_level", &multihead::set_level, "name"_a);
  m.def("levels", &multihead::levels);
}

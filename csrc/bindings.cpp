// From Python to raw pointers, sizes and strides. Arrays come as addresses and strides, which
// PyTorch tells in a fraction of the time that an exchange by DLPack takes; native.py, the one
// caller, has checked every shape and type, and keeps the tensors alive during the call.
#include <nanobind/nanobind.h>
#include <nanobind/stl/array.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>

#include <array>
#include <optional>

#include "attention.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace {

using Address = uintptr_t;              // 0: no array
using Layout = std::array<int64_t, 4>;  // strides in elements

template <typename T>
T* pointer(Address address) {
  return reinterpret_cast<T*>(address);
}

// Runs Python's signal handlers: true when one of them raised (Ctrl-C).
bool interrupted() {
  nb::gil_scoped_acquire gil;
  return PyErr_CheckSignals() != 0;
}

void forward(std::array<int64_t, 7> sizes, std::array<Address, 4> tensors, std::array<Layout, 4> layouts,
             std::array<Address, 2> spans, int64_t span_batch, bool causal, int64_t query_start,
             std::array<Address, 2> cells, std::array<Layout, 2> cell_layouts,
             std::array<Address, 2> documents, std::array<Address, 2> alibi, float scale, float softcap,
             Address sinks, Address classes, int64_t class_batch, int64_t n_classes, bool observe,
             std::array<Address, 11> statistics, int threads) {
  multihead::Forward f{};
  f.B = sizes[0], f.H = sizes[1], f.G = sizes[2], f.L = sizes[3], f.S = sizes[4], f.D = sizes[5],
  f.E = sizes[6];
  multihead::Tensor* const placed[] = {&f.query, &f.key, &f.value, &f.output};
  for (int i = 0; i < 4; ++i)
    *placed[i] = {pointer<float>(tensors[i]), layouts[i][0], layouts[i][1], layouts[i][2], layouts[i][3]};
  f.span_begin = pointer<int32_t>(spans[0]), f.span_end = pointer<int32_t>(spans[1]),
  f.span_batch = span_batch;
  f.causal = causal, f.query_start = query_start;
  const auto& [mask, bias] = cell_layouts;
  f.mask = {pointer<uint8_t>(cells[0]), mask[0], mask[1], mask[2], mask[3]};
  f.bias = {pointer<float>(cells[1]), bias[0], bias[1], bias[2], bias[3]};
  f.key_documents = pointer<int64_t>(documents[0]), f.query_documents = pointer<int64_t>(documents[1]);
  f.slopes = pointer<float>(alibi[0]), f.positions = pointer<int64_t>(alibi[1]);
  f.scale = scale, f.softcap = softcap, f.sinks = pointer<float>(sinks);
  f.classes = pointer<int32_t>(classes), f.class_batch = class_batch, f.C = n_classes;
  f.observe = observe;
  float** const rows[] = {&f.lse,          &f.max_logit, &f.max_weight,     nullptr,
                          &f.entropy,      &f.evenness,  &f.effective_keys, &f.key_mean,
                          &f.key_variance, &f.sink_mass, &f.class_mass};
  for (int i = 0; i < 11; ++i)
    if (rows[i]) *rows[i] = pointer<float>(statistics[i]);
  f.argmax = pointer<int64_t>(statistics[3]);
  f.threads = threads, f.interrupted = interrupted;
  bool complete;
  {
    nb::gil_scoped_release release;
    complete = multihead::forward(f);
  }
  if (!complete) throw nb::python_error();
}

}  // namespace

NB_MODULE(_native, m) {
  m.def("forward", &forward, "sizes"_a, "tensors"_a, "layouts"_a, "spans"_a, "span_batch"_a, "causal"_a,
        "query_start"_a, "cells"_a, "cell_layouts"_a, "documents"_a, "alibi"_a, "scale"_a, "softcap"_a,
        "sinks"_a, "classes"_a, "class_batch"_a, "n_classes"_a, "observe"_a, "statistics"_a, "threads"_a,
        "Attention into the arrays at the given addresses; see attention.h.");
  m.def("share_threads", &multihead::share_threads, "folder"_a,
        "Run on the threads of the OpenMP runtime loaded from under a folder; False when there is none.");
  m.def("level", &multihead::level, "The instruction-set level in use.");
  m.def("set_level", &multihead::set_level, "name"_a, "Choose a level; False when it is not here.");
  m.def("levels", &multihead::levels, "The levels that can be chosen here, best first.");
}

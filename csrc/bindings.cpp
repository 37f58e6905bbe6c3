// From Python to raw pointers, sizes and strides. Arrays come as addresses and strides, which
// PyTorch tells in a fraction of the time that an exchange by DLPack takes; native.py, the one
// caller, has checked every shape and type, and keeps the tensors alive during the call.
#include <nanobind/nanobind.h>
#include <nanobind/stl/array.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>

#include <array>
#include <new>
#include <optional>

#include "attention.h"
#include "peak.h"

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

// The thread that runs signal handlers. Others are not to ask: the interpreter ends a thread that wants its
// lock while it shuts down, in the middle of our frames.
unsigned long main_thread;

multihead::Interrupted how_to_stop() {
  return PyThread_get_thread_ident() == main_thread ? interrupted : nullptr;
}

// The problem as native.py writes it down.
struct Arguments {
  std::array<int64_t, 7> sizes;
  std::array<int, 2> stored;  // of the tensors, of the bias
  std::array<Address, 3> tensors;
  std::array<Layout, 3> layouts;
  std::array<Address, 2> spans;
  int64_t span_batch;
  bool causal;
  int64_t query_start;
  std::array<Address, 2> cells;
  std::array<Layout, 2> cell_layouts;
  std::array<Address, 2> documents, alibi;
  double scale, softcap;
  double kept_factor;  // dropout
  uint64_t dropped_below;
  std::array<uint32_t, 2> dropout_key;
  std::array<Address, 3> pages;  // the table, the scales of keys and of values
  int64_t page_batch, page_size;
};

multihead::Tensor tensor(Address address, const Layout& layout) {
  return {pointer<void>(address), layout[0], layout[1], layout[2], layout[3]};
}

multihead::Cells cells(Address address, const Layout& layout) {
  return {pointer<void>(address), layout[0], layout[1], layout[2], layout[3]};
}

template <typename Real>
void fill(multihead::Problem<Real>& p, const Arguments& a, int threads) {
  p.B = a.sizes[0], p.H = a.sizes[1], p.G = a.sizes[2], p.L = a.sizes[3], p.S = a.sizes[4], p.D = a.sizes[5],
  p.E = a.sizes[6];
  p.stored = static_cast<multihead::Stored>(a.stored[0]);
  p.query = tensor(a.tensors[0], a.layouts[0]), p.key = tensor(a.tensors[1], a.layouts[1]);
  p.value = tensor(a.tensors[2], a.layouts[2]);
  p.span_begin = pointer<int32_t>(a.spans[0]), p.span_end = pointer<int32_t>(a.spans[1]);
  p.span_batch = a.span_batch, p.causal = a.causal, p.query_start = a.query_start;
  p.mask = cells(a.cells[0], a.cell_layouts[0]), p.bias = cells(a.cells[1], a.cell_layouts[1]);
  p.bias_stored = static_cast<multihead::Stored>(a.stored[1]);
  p.key_documents = pointer<int64_t>(a.documents[0]), p.query_documents = pointer<int64_t>(a.documents[1]);
  p.slopes = pointer<Real>(a.alibi[0]), p.positions = pointer<int64_t>(a.alibi[1]);
  p.scale = a.scale, p.softcap = a.softcap;
  p.kept_factor = a.kept_factor, p.dropped_below = a.dropped_below;
  p.dropout_key[0] = a.dropout_key[0], p.dropout_key[1] = a.dropout_key[1];
  p.pages = pointer<int32_t>(a.pages[0]), p.page_batch = a.page_batch, p.page_size = a.page_size;
  p.key_scales = pointer<float>(a.pages[1]), p.value_scales = pointer<float>(a.pages[2]);
  p.threads = threads, p.interrupted = how_to_stop();
}

// Runs without the interpreter's lock; raises what a signal handler raised, and MemoryError.
template <typename F>
void release(F&& body) {
  bool complete = false, memory = true;
  {
    nb::gil_scoped_release gil;
    try {
      complete = body();
    } catch (const std::bad_alloc&) {
      memory = false;
    }
  }
  if (!memory) {
    PyErr_SetString(
        PyExc_MemoryError,
        "attention: no memory for the work space, which grows as L + S times the number of heads");
    throw nb::python_error();
  }
  if (!complete) throw nb::python_error();
}

template <typename Real>
void forward_as(const Arguments& arguments, Address output, const Layout& layout, Address sinks,
                Address classes, int64_t class_batch, int64_t n_classes, bool observe,
                const std::array<Address, 11>& statistics, const std::array<Address, 2>& saved, int threads) {
  multihead::Forward<Real> f{};
  fill(f, arguments, threads);
  f.output = tensor(output, layout), f.sinks = pointer<Real>(sinks);
  f.classes = pointer<int32_t>(classes), f.class_batch = class_batch, f.C = n_classes;
  f.observe = observe;
  Real** const rows[] = {&f.lse,          &f.max_logit, &f.max_weight,     nullptr,
                         &f.entropy,      &f.evenness,  &f.effective_keys, &f.key_mean,
                         &f.key_variance, &f.sink_mass, &f.class_mass};
  for (int i = 0; i < 11; ++i)
    if (rows[i]) *rows[i] = pointer<Real>(statistics[i]);
  f.argmax = pointer<int64_t>(statistics[3]);
  f.top = pointer<Real>(saved[0]), f.inverse = pointer<Real>(saved[1]);
  release([&] { return multihead::forward(f); });
}

void forward(const Arguments& arguments, Address output, const Layout& layout, Address sinks, Address classes,
             int64_t class_batch, int64_t n_classes, bool observe, const std::array<Address, 11>& statistics,
             const std::array<Address, 2>& saved, int threads) {
  const bool wide = arguments.stored[0] == static_cast<int>(multihead::Stored::kDouble);
  (wide ? forward_as<double> : forward_as<float>)(arguments, output, layout, sinks, classes, class_batch,
                                                  n_classes, observe, statistics, saved, threads);
}

// What backward reads and fills beside the problem, as native.py writes it down.
struct Gradients {
  Address sinks;
  std::array<Address, 5> saved;    // top, inverse, entropy, argmax, class_mass
  std::array<Address, 2> outputs;  // the output and its gradient
  std::array<Layout, 2> output_layouts;
  std::array<Address, 5> incoming;  // of lse, max_logit, entropy, sink_mass, class_mass
  Address classes;
  int64_t class_batch, n_classes;
  std::array<Address, 4> made;  // of query, key, value, bias
  std::array<Layout, 4> made_layouts;
  std::array<Address, 2> of_heads;  // of slopes, sinks
};

template <typename Real>
void backward_as(const Arguments& arguments, const Gradients& g, int threads) {
  multihead::Backward<Real> f{};
  fill(f, arguments, threads);
  f.sinks = pointer<Real>(g.sinks);
  f.top = pointer<Real>(g.saved[0]), f.inverse = pointer<Real>(g.saved[1]),
  f.entropy = pointer<Real>(g.saved[2]);
  f.argmax = pointer<int64_t>(g.saved[3]), f.class_mass = pointer<Real>(g.saved[4]);
  f.output = tensor(g.outputs[0], g.output_layouts[0]),
  f.d_output = tensor(g.outputs[1], g.output_layouts[1]);
  f.d_lse = pointer<Real>(g.incoming[0]), f.d_max_logit = pointer<Real>(g.incoming[1]);
  f.d_entropy = pointer<Real>(g.incoming[2]), f.d_sink_mass = pointer<Real>(g.incoming[3]);
  f.d_class_mass = pointer<Real>(g.incoming[4]);
  f.classes = pointer<int32_t>(g.classes), f.class_batch = g.class_batch, f.C = g.n_classes;
  f.d_query = tensor(g.made[0], g.made_layouts[0]), f.d_key = tensor(g.made[1], g.made_layouts[1]);
  f.d_value = tensor(g.made[2], g.made_layouts[2]), f.d_bias = tensor(g.made[3], g.made_layouts[3]);
  f.d_slopes = pointer<Real>(g.of_heads[0]), f.d_sinks = pointer<Real>(g.of_heads[1]);
  release([&] { return multihead::backward(f); });
}

void backward(const Arguments& arguments, const Gradients& gradients, int threads) {
  const bool wide = arguments.stored[0] == static_cast<int>(multihead::Stored::kDouble);
  (wide ? backward_as<double> : backward_as<float>)(arguments, gradients, threads);
}

// A problem without options, from numbers alone: the conversions of a small call cost more than its
// arithmetic.
void plain(int stored, int64_t B, int64_t H, int64_t G, int64_t L, int64_t S, int64_t D, int64_t E,
           Address query, const Layout& query_layout, Address key, const Layout& key_layout, Address value,
           const Layout& value_layout, Address output, const Layout& output_layout, bool causal, double scale,
           int threads) {
  Arguments a{};
  a.sizes = {B, H, G, L, S, D, E}, a.stored = {stored, 0};
  a.tensors = {query, key, value}, a.layouts = {query_layout, key_layout, value_layout};
  a.causal = causal, a.query_start = S - L, a.scale = scale;
  forward(a, output, output_layout, 0, 0, 0, 0, false, {}, {}, threads);
}

template <typename Real>
void second_pass_as(const Arguments& arguments, const std::array<Address, 2>& rows,
                    const std::array<Address, 7>& filled, const std::array<int64_t, 3>& counts, int threads) {
  multihead::SecondPass<Real> f{};
  fill(f, arguments, threads);
  f.top = pointer<Real>(rows[0]), f.inverse = pointer<Real>(rows[1]);
  f.received = pointer<Real>(filled[0]), f.received_max = pointer<Real>(filled[1]);
  f.distances = pointer<Real>(filled[2]), f.sides = counts[0];
  f.map = pointer<Real>(filled[3]), f.map_max = pointer<Real>(filled[4]), f.cells = counts[1];
  f.top_keys = pointer<int64_t>(filled[5]), f.top_weights = pointer<Real>(filled[6]), f.k = counts[2];
  release([&] { return multihead::second_pass(f); });
}

void second_pass(const Arguments& arguments, const std::array<Address, 2>& rows,
                 const std::array<Address, 7>& filled, const std::array<int64_t, 3>& counts, int threads) {
  const bool wide = arguments.stored[0] == static_cast<int>(multihead::Stored::kDouble);
  (wide ? second_pass_as<double> : second_pass_as<float>)(arguments, rows, filled, counts, threads);
}

}  // namespace

NB_MODULE(_native, m) {
  main_thread =
      nb::cast<unsigned long>(nb::module_::import_("threading").attr("main_thread")().attr("ident"));
  nb::class_<Arguments>(m, "Problem", "An attention problem: addresses and strides; see attention.h.")
      .def(nb::init<std::array<int64_t, 7>, std::array<int, 2>, std::array<Address, 3>, std::array<Layout, 3>,
                    std::array<Address, 2>, int64_t, bool, int64_t, std::array<Address, 2>,
                    std::array<Layout, 2>, std::array<Address, 2>, std::array<Address, 2>, double, double,
                    double, uint64_t, std::array<uint32_t, 2>, std::array<Address, 3>, int64_t, int64_t>(),
           "sizes"_a, "stored"_a, "tensors"_a, "layouts"_a, "spans"_a, "span_batch"_a, "causal"_a,
           "query_start"_a, "cells"_a, "cell_layouts"_a, "documents"_a, "alibi"_a, "scale"_a, "softcap"_a,
           "kept_factor"_a, "dropped_below"_a, "dropout_key"_a, "pages"_a, "page_batch"_a, "page_size"_a);
  m.def("forward", &forward, "problem"_a, "output"_a, "layout"_a, "sinks"_a, "classes"_a, "class_batch"_a,
        "n_classes"_a, "observe"_a, "statistics"_a, "saved"_a, "threads"_a,
        "Attention into the arrays at the given addresses.");
  nb::class_<Gradients>(m, "Gradients", "What backward reads and fills; see attention.h.")
      .def(nb::init<Address, std::array<Address, 5>, std::array<Address, 2>, std::array<Layout, 2>,
                    std::array<Address, 5>, Address, int64_t, int64_t, std::array<Address, 4>,
                    std::array<Layout, 4>, std::array<Address, 2>>(),
           "sinks"_a, "saved"_a, "outputs"_a, "output_layouts"_a, "incoming"_a, "classes"_a, "class_batch"_a,
           "n_classes"_a, "made"_a, "made_layouts"_a, "of_heads"_a);
  m.def("backward", &backward, "problem"_a, "gradients"_a, "threads"_a,
        "The gradients of attention into the arrays at the given addresses.");
  m.def("plain", &plain, "stored"_a, "B"_a, "H"_a, "G"_a, "L"_a, "S"_a, "D"_a, "E"_a, "query"_a,
        "query_layout"_a, "key"_a, "key_layout"_a, "value"_a, "value_layout"_a, "output"_a, "output_layout"_a,
        "causal"_a, "scale"_a, "threads"_a,
        "Attention without options, full or causal with the last query at the last key.");
  m.def("second_pass", &second_pass, "problem"_a, "rows"_a, "filled"_a, "counts"_a, "threads"_a,
        "What keys, distances and cells of a map gather over rows, into the arrays at the given addresses.");
  m.def("share_threads", &multihead::share_threads, "folder"_a,
        "Run on the threads of the OpenMP runtime loaded from under a folder; False when there is none.");
  m.def("level", &multihead::level, "The instruction-set level in use.");
  m.def("set_level", &multihead::set_level, "name"_a, "Choose a level; False when it is not here.");
  m.def("levels", &multihead::levels, "The levels that can be chosen here, best first.");
  m.def("fma_gflops", &multihead::fma_gflops, "threads"_a, "seconds"_a,
        nb::call_guard<nb::gil_scoped_release>(), "The most GFLOP/s of float32 multiply-adds here.");
  m.def("read_gbs", &multihead::read_gbs, "threads"_a, "seconds"_a, nb::call_guard<nb::gil_scoped_release>(),
        "The most GB/s of reads from memory here.");
}

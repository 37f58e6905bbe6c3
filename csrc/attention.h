// What the compiled core computes: one struct in, arrays filled. No PyTorch, no Python.
#pragma once

#include <cstdint>
#include <string>

namespace multihead {

// How numbers are stored. The core computes in float, and in double where they are doubles.
enum class Stored : int32_t { kFloat, kDouble, kBfloat16, kFloat16, kInt8 };

// A tensor (B, heads, rows, columns): strides in elements, any sign, zero for an expanded axis.
struct Tensor {
  void* data;
  int64_t batch, head, row, column;
};

// A tensor that broadcasts to (B, H, L, S): a stride of 0 for each axis that it lacks.
struct Cells {
  const void* data;  // null: none
  int64_t batch, head, row, column;
};

// Answers true when the caller wants to stop (Ctrl-C). Called on the calling thread only.
using Interrupted = bool (*)();

// One attention problem: which scores there are. Optional arrays are null when not asked for.
template <typename Real>
struct Problem {
  int64_t B, H, G, L, S, D, E;
  Stored stored;             // query and output, and key and value unless those are kInt8
  Tensor query, key, value;  // (B, H, L, D), (B, G, S, D), (B, G, S, E)

  // A cache in pages, or null: key j of sequence b is row j % page_size of page pages[b * page_batch + j /
  // page_size], and the tensors key and value are (pages, G, page_size, D or E). Pages that no row sees are
  // not looked at. With scales, (pages, G), they are int8 and a number is its integer times its page's and
  // head's scale.
  const int32_t* pages;
  int64_t page_batch, page_size;
  const float *key_scales, *value_scales;

  // Which keys row i of a sequence sees: [begin, end), from arrays of L a sequence; without them
  // [0, S), or [0, query_start + i + 1) when causal.
  const int32_t* span_begin;
  const int32_t* span_end;
  int64_t span_batch;  // elements from one sequence's spans to the next, 0 when all share them
  bool causal;
  int64_t query_start;
  // Of those, a row sees the keys where the mask is not 0, the bias not -inf, and the document its own.
  Cells mask;  // bytes
  Cells bias;  // added to the scores
  Stored bias_stored;
  const int64_t* key_documents;    // (B, S)
  const int64_t* query_documents;  // (B, L)

  // ALiBi: -slope * |p - j| is added to the scores, with row i at p = positions[b] + i.
  const Real* slopes;        // (H,)
  const int64_t* positions;  // (B,)

  double scale;
  double softcap;  // 0: none

  // Dropout, on the weights' way into the output alone: a weight whose word of 32 random bits (dropout.h says
  // which) is below a threshold, the share to drop times 2^32, is dropped, and the others are multiplied by
  // kept_factor.
  double kept_factor;  // 0: no dropout
  uint64_t dropped_below;
  uint32_t dropout_key[2];

  int threads;
  Interrupted interrupted;
};

template <typename Real>
struct Forward : Problem<Real> {
  Tensor output;      // (B, H, L, E)
  const Real* sinks;  // (H,): take weight from the output and nothing else; lse is of the keys alone

  // Classes of keys, as extra columns of the value: class_mass (B, H, L, C) sums the weights by class.
  const int32_t* classes;  // (B, S), below 0: in no class
  int64_t class_batch;     // as span_batch
  int64_t C;

  // Statistics, each (B, H, L) contiguous.
  bool observe;  // any of those past lse is wanted
  Real *lse, *max_logit, *max_weight, *entropy, *evenness, *effective_keys, *key_mean, *key_variance,
      *sink_mass;
  Real* class_mass;
  int64_t* argmax;

  // For backward: each row's largest score in units of log 2, and 1 over the sum of 2^(score - top), which is
  // 0 for a row without keys alone and NaN where its weights are. Both or none.
  Real *top, *inverse;
};

// The gradients of a problem; d_x stands for the gradient of x. What is null is not there, or not wanted.
template <typename Real>
struct Backward : Problem<Real> {
  const Real* sinks;

  // What forward gave. The statistics are read where they have a gradient.
  const Real *top, *inverse;
  Tensor output;
  const Real *entropy, *class_mass;
  const int64_t* argmax;

  // What comes in. Statistics (B, H, L), contiguous. In rows without keys only that of the lse is read, which
  // is the sink's there.
  Tensor d_output;
  const Real *d_lse, *d_max_logit, *d_entropy, *d_sink_mass;
  const Real* d_class_mass;  // (B, H, L, C)
  const int32_t* classes;    // as in Forward
  int64_t class_batch, C;

  // What goes out.
  Tensor d_query, d_key, d_value;  // as stored
  Tensor d_bias;                   // of Real, zeros before; a stride of 0 for each axis that is summed
  Real *d_slopes, *d_sinks;        // (H,)
};

// What keys, distances and cells of a map gather over rows: the weights are made again, from each row's
// largest score `top` (B, H, L) in units of log 2 and 1 over its sum of 2^(score - top), `inverse`, 0 in a
// row without keys.
template <typename Real>
struct SecondPass : Problem<Real> {
  const Real *top, *inverse;

  Real *received, *received_max;  // (B, H, S): the sum and the largest of a key's weights
  // (B, H, 2 sides + 1): weight by distance p - j. The middle is 0; k from it are 2^(k-1) <= |p - j| < 2^k,
  // the past on the right, and what is further than the ends is in them.
  Real* distances;
  int64_t sides;
  Real *map, *map_max;  // (B, H, cells, cells): the sum and the largest of cell (i cells / L, j cells / S)
  int64_t cells;
  int64_t*
      top_keys;  // (B, H, L, k): the heaviest keys of a row, the lower of equals first, -1 past those it sees
  Real* top_weights;
  int64_t k;
};

// Fill the arrays that are asked for; false when interrupted. Throw std::bad_alloc.
bool forward(const Forward<float>& problem);
bool forward(const Forward<double>& problem);
bool second_pass(const SecondPass<float>& problem);
bool second_pass(const SecondPass<double>& problem);
bool backward(const Backward<float>& problem);
bool backward(const Backward<double>& problem);

// Runs on the threads of an OpenMP runtime that is loaded from a file under `folder` (PyTorch's own),
// rather than on a pool beside it that would fight it for the cores. False when there is none; then,
// and in a child of fork(), where OpenMP's threads are gone, the core's own pool serves.
bool share_threads(const char* folder);

// The instruction-set level that the core uses, and how to choose another (tests do). set_level
// answers false for a level that this build or this processor lacks.
const char* level();
bool set_level(const char* name);
// The names of the levels that can be chosen here, best first, separated by spaces.
std::string levels();

}  // namespace multihead

"""Attention as operators of torch.library, `multihead::attention` and `multihead::attention_backward`: for graphs.

torch.compile, torch.export, AOT autograd and whatever else traces PyTorch's operators meet one call of these where
eager code goes to `paths`: no graph breaks, any number of queries and keys, the same numbers. What has to look at
values (which blocks of keys are visible, whether lengths fit) happens when the operator runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from . import autograd, paths, tiled
from .masking import Visibility, check_lengths
from .problem import Problem
from .statistics import Observation, Statistics

_PLAIN = (Tensor, torch.nn.Parameter)
_TENSORS = (
    "Tensor query, Tensor key, Tensor value, Tensor? bias, Tensor? slopes, Tensor? starts, Tensor? key_lengths, "
    "Tensor? mask, Tensor? document_ids, Tensor? query_mask, Tensor? runs, Tensor? classes, Tensor[] pairs, "
    "Tensor? seed"
)
_RULES = (
    "SymInt start, bool causal, SymInt? left, SymInt? right, float scale, float? softcap, float dropout_p, "
    "str[]? names, int n_classes, int[] offsets, str impl"
)
_N_TENSORS = _TENSORS.count("Tensor")


def is_traced(query: Tensor) -> bool:
    """Whether a call becomes part of a graph, or meets a mode or a kind of tensor that handles operators itself."""
    return (
        torch.compiler.is_compiling()
        or type(query) not in _PLAIN
        or query.is_meta
        or torch._C._len_torch_dispatch_stack() > 0
    )


# Who sees the calls of a layer when a graph runs: (layer, problem, key_padding) -> the output, or None if nobody looks.
observer: Callable[[int, Problem, Tensor | None], Tensor | None] | None = None


def run(
    problem: Problem,
    statistics: Statistics | None,
    impl: str,
    layer: int = 0,
    key_padding: Tensor | None = None,
) -> Observation:
    """Compute a problem as an operator of the graph that is being traced.

    Args:
        layer: what `observer` knows the layer by when the graph runs, 0 = it is not to be told.
        key_padding: (B, S), False at padding keys; for the observer.

    Raises:
        ValueError: `impl` is "reference", which is not made for graphs, or unknown.
        NotImplementedError: in forward mode, or under a transform of torch.func.
    """
    if impl not in ("auto", "native", "tiled"):
        raise ValueError(f"impl: expected 'auto', 'native' or 'tiled' in a graph, got {impl!r}")
    if autograd.is_transformed():
        raise NotImplementedError(
            "attention in a graph has no rule for forward mode and for torch.func's grad, vmap, jvp and the like; "
            "outside of graphs it has"
        )
    p = problem
    arguments = _arguments(p, statistics, impl)
    if p.needs_gradients:
        # The sinks take their share outside, where autograd sees them.
        found = torch.ops.multihead.attention(*arguments, p.sinks, True, layer, key_padding)
        return tiled.observation(p, statistics, dict(zip(paths.row_names(statistics), found)))
    output, *found = torch.ops.multihead.attention(*arguments, p.sinks, False, layer, key_padding)
    return Observation(output, dict(zip(_asked(statistics, p.sinks is not None), found)))


def _arguments(p: Problem, statistics: Statistics | None, impl: str) -> list[Any]:
    """The arguments that both operators share."""
    *tensors, classes = autograd.tensors_of(p, None)
    visibility, start = p.visibility, p.visibility.query_start
    names, n_classes, offsets, pairs = None, 0, (), ()
    if statistics is not None:
        names, classes, n_classes = list(statistics.names), statistics.classes, statistics.n_classes
        offsets, pairs = statistics.offsets, statistics.pairs
    return [
        *tensors, classes, list(pairs), _seed(p),
        0 if isinstance(start, Tensor) else start, visibility.causal, *visibility.window, p.scale, p.softcap,
        p.dropout_p, names, n_classes, list(offsets), impl,
    ]  # fmt: skip


def _seed(p: Problem) -> Tensor | None:
    if p.dropout_p == 0 or isinstance(p.dropout_seed, Tensor) or p.dropout_seed is None:
        return p.dropout_seed if p.dropout_p else None  # type: ignore[return-value]
    # As 64 bits with a sign: only the bits count.
    return torch.full((), (p.dropout_seed + 2**63) % 2**64 - 2**63, dtype=torch.int64)


def _asked(statistics: Statistics | None, has_sinks: bool) -> tuple[str, ...]:
    if statistics is None:
        return ()
    return (*statistics.asked, "sink_mass") if has_sinks else statistics.asked


def _read(arguments: Sequence[Any]) -> tuple[Problem, Statistics | None, str]:
    """A problem without sinks, the statistics, and `impl`, from the operators' arguments; the seed is a tensor."""
    query, key, value, bias, slopes, *rules, classes, pairs, seed = arguments[:_N_TENSORS]
    start, causal, left, right, scale, softcap, dropout_p, names, n_classes, offsets, impl = arguments[_N_TENSORS:]
    B, H, L, S = *query.shape[:3], key.shape[2]
    visibility = Visibility(B, H, L, S, start, causal, (left, right), device=query.device).with_tensors(rules, B)
    statistics = None if names is None else Statistics.unchecked(names, classes, n_classes, offsets, pairs)
    return Problem(query, key, value, visibility, scale, softcap, bias, slopes, None, dropout_p, seed), statistics, impl


def _with_values(p: Problem) -> Problem:
    """The problem once there are numbers in its tensors."""
    if p.visibility.key_lengths is not None:
        check_lengths(p.visibility.key_lengths, p.S)
    return p if p.dropout_seed is None else replace(p, dropout_seed=int(p.dropout_seed))


def _attention(*arguments: Any) -> list[Tensor]:
    *shared, sinks, saved, layer, key_padding = arguments
    p, statistics, impl = _read(shared)
    p = _with_values(p)
    whole = p if sinks is None else replace(p, sinks=sinks)
    seen = None if layer == 0 or observer is None else observer(layer, whole, key_padding)
    path = paths.choose(p, statistics, impl, saved)
    if saved:
        output, *found = paths.rows(path, p, statistics).values()
    elif seen is not None and statistics is None:
        output, found = seen, []
    else:
        seen = paths.forward(path, whole, statistics)
        output, found = seen.output, [seen.statistics[name] for name in _asked(statistics, sinks is not None)]
    return [_laid_out(output.to(p.query.dtype), _like(p.query, p.E)), *(x.contiguous() for x in found)]


def _attention_shapes(*arguments: Any) -> list[Tensor]:
    *shared, sinks, saved, _layer, _key_padding = arguments
    p, statistics, _ = _read(shared)
    names = paths.row_names(statistics)[1:] if saved else _asked(statistics, sinks is not None)
    widths = {}
    if statistics is not None:
        widths = {"class_mass": statistics.n_classes, "offset_mass": len(statistics.offsets)}
        widths["pair_mass"] = len(statistics.pairs)
    found = []
    for name in names:
        shape = (p.B, p.H, p.L, *([widths[name]] if name in widths else ()))
        found.append(p.query.new_empty(shape, dtype=torch.int64 if name == "argmax" else p.sums_dtype))
    return [_like(p.query, p.E), *found]


def _backward(*arguments: Any) -> list[Tensor]:
    *shared, found, incoming, needs = arguments
    p, statistics, impl = _read(shared)
    p, names = _with_values(p), paths.row_names(statistics)
    path = paths.choose(p, statistics, impl, True)
    arrived = {name: x for name, x in zip(names, incoming, strict=True) if x is not None}
    wanted: dict[str, bool] = dict(zip(autograd.INPUTS, needs, strict=True))
    made = paths.gradients(path, p, statistics, dict(zip(names, found, strict=True)), arrived, wanted)
    inputs = {name: x for name, x in zip(wanted, arguments) if wanted[name]}
    return [_laid_out(made[name], _like_input(x)) for name, x in inputs.items()]


def _backward_shapes(*arguments: Any) -> list[Tensor]:
    return [_like_input(x) for x, need in zip(arguments, arguments[-1]) if need]


def _like(tensor: Tensor, width: int) -> Tensor:
    """An empty (B, H, L, width), with the heads beside each other in memory where those of a tensor are."""
    B, H, L, _ = tensor.shape
    if tensor.stride(1) < tensor.stride(2):
        return tensor.new_empty(B, L, H, width).transpose(1, 2)
    return tensor.new_empty(B, H, L, width)


def _like_input(tensor: Tensor) -> Tensor:
    return _like(tensor, tensor.shape[3]) if tensor.ndim == 4 else tensor.new_empty(tensor.shape)


def _laid_out(tensor: Tensor, like: Tensor) -> Tensor:
    """A tensor in the memory layout that the graph was told."""
    return tensor if tensor.stride() == like.stride() else like.copy_(tensor)


def _save(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    """What `_differentiate` needs: the tensors, what was found, and the rest as it came."""
    tensors, pairs = inputs[: _N_TENSORS - 2], inputs[_N_TENSORS - 2]
    ctx.set_materialize_grads(False)
    ctx.rules, ctx.n_pairs = inputs[_N_TENSORS:-4], len(pairs)
    ctx.save_for_backward(*tensors, inputs[_N_TENSORS - 1], *pairs, *output)


def _differentiate(ctx: Any, grads: list[Tensor | None]) -> tuple[Any, ...]:
    n = _N_TENSORS - 2
    tensors, (seed, *rest) = ctx.saved_tensors[:n], ctx.saved_tensors[n:]
    pairs, found = rest[: ctx.n_pairs], rest[ctx.n_pairs :]
    needs = list(ctx.needs_input_grad[: len(autograd.INPUTS)])
    made = iter(
        torch.ops.multihead.attention_backward(*tensors, pairs, seed, *ctx.rules, found, list(grads), needs)
    )  # fmt: skip
    first = [next(made) if need else None for need in needs]
    middle = [None] * (n - len(first))
    # PyTorch takes an empty list for one of tensors.
    rules = ([] if x == [] else None for x in ctx.rules)
    return (*first, *middle, [None] * ctx.n_pairs, None, *rules, None, None, None, None)


_attention_op = torch.library.custom_op(
    "multihead::attention", _attention, mutates_args=(),
    schema=f"({_TENSORS}, {_RULES}, Tensor? sinks, bool saved, int layer, Tensor? key_padding) -> Tensor[]",
)  # fmt: skip
_attention_op.register_fake(_attention_shapes)
_attention_op.register_autograd(_differentiate, setup_context=_save)

_backward_op = torch.library.custom_op(
    "multihead::attention_backward", _backward, mutates_args=(),
    schema=f"({_TENSORS}, {_RULES}, Tensor[] found, Tensor?[] incoming, bool[] needs) -> Tensor[]",
)  # fmt: skip
_backward_op.register_fake(_backward_shapes)

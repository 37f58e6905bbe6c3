"""Attention as an operation of autograd: its gradients, their gradients, tangents and vmap.

First derivatives are those of the path that served the call, in linear memory. Second derivatives and tangents
(forward mode) are made through the definition in `reference`, whose memory is quadratic; any further order as well.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from . import paths, reference, tiled
from .masking import TENSORS, Visibility
from .problem import Problem
from .statistics import ROW_STATISTICS, TABLE, Observation, Statistics

Tensors = Sequence[Tensor | None]
_functorch: Any = torch._C._functorch  # pyright: ignore[reportAttributeAccessIssue]

INPUTS = ("query", "key", "value", "bias", "slopes")
_N_INPUTS = len(INPUTS)
_CLASSES = _N_INPUTS + len(TENSORS)


def is_recorded(problem: Problem) -> bool:
    """Whether autograd, forward mode or a transform of torch.func sees this call."""
    return problem.needs_gradients or is_transformed()


def is_transformed() -> bool:
    """Whether forward mode or a transform of torch.func is at work."""
    return forward_ad._current_level >= 0 or torch._C._are_functorch_transforms_active()


def forward(path: str, problem: Problem, statistics: Statistics | None) -> Observation:
    """A problem on a path, with every derivative."""
    call = Call.of(path, problem, statistics)
    found = _Attention.apply(call, *tensors_of(problem, statistics))
    return tiled.observation(problem, statistics, dict(zip(call.names, found, strict=True)))


def tensors_of(problem: Problem, statistics: Statistics | None) -> tuple[Tensor | None, ...]:
    """The tensors of a call in one order: INPUTS, those of the visibility, the classes, each list of pairs."""
    p = problem
    classes, pairs = (None, ()) if statistics is None else (statistics.classes, statistics.pairs)
    return (p.query, p.key, p.value, p.bias, p.alibi_slopes, *p.visibility.tensors(), classes, *pairs)


@dataclass(frozen=True, eq=False)
class Call:
    """What a call says beside its tensors. The visibility and the statistics hold theirs as a template.

    Args:
        names: what the call finds, in order (`paths.row_names`).
    """

    path: str
    visibility: Visibility
    scale: float
    softcap: float | None
    dropout_p: float
    dropout_seed: int | None
    statistics: Statistics | None
    names: tuple[str, ...]

    @staticmethod
    def of(path: str, problem: Problem, statistics: Statistics | None) -> Call:
        p, names = problem, paths.row_names(statistics)
        return Call(path, p.visibility, p.scale, p.softcap, p.dropout_p, p.dropout_seed, statistics, names)

    @property
    def n_tensors(self) -> int:
        return _CLASSES + 1 + (0 if self.statistics is None else len(self.statistics.pairs))

    def problem(self, tensors: Tensors) -> Problem:
        """The problem without sinks that these tensors make."""
        query, key, value, bias, slopes = tensors[:_N_INPUTS]
        assert query is not None and key is not None and value is not None
        visibility, rules = self.visibility, tensors[_N_INPUTS:_CLASSES]
        if len(query) != visibility.B or any(x is not y for x, y in zip(rules, visibility.tensors(), strict=True)):
            visibility = visibility.with_tensors(rules, len(query))
        dropout = self.dropout_p, self.dropout_seed
        return Problem(query, key, value, visibility, self.scale, self.softcap, bias, slopes, None, *dropout)

    def request(self, tensors: Tensors) -> Statistics | None:
        """The statistics, of the classes and pairs among these tensors."""
        asked, (classes, *pairs) = self.statistics, tensors[_CLASSES : self.n_tensors]
        if asked is None or (classes is asked.classes and all(x is y for x, y in zip(pairs, asked.pairs))):
            return asked
        return asked.with_tensors(classes, pairs)  # type: ignore[arg-type]

    def differentiable(self, tensors: Tensors, names: Sequence[str]) -> Callable[..., tuple[Tensor, ...]]:
        """What the call finds under some names, by the definition, as a function of the INPUTS that are there."""

        def by_definition(*inputs: Tensor) -> tuple[Tensor, ...]:
            given = iter(inputs)
            inner = [None if x is None else next(given) for x in tensors[:_N_INPUTS]]
            seen = reference.forward(self.problem([*inner, *tensors[_N_INPUTS:]]), asked)
            return tuple(seen.output if name == "output" else seen.statistics[name] for name in names)

        rows = [name for name in names if name in ROW_STATISTICS]
        has_classes = "class_mass" in names
        asked = Statistics(*(rows or ["lse"]))
        if has_classes and self.statistics is not None:
            asked = self.statistics.with_tensors(tensors[_CLASSES], ()).with_names(*rows)
        return by_definition


def _takes_batched_grads(backward: Callable) -> Callable:
    """A backward that serves `torch.autograd.grad(..., is_grads_batched=True)` too, which has a vmap of its own."""

    @wraps(backward)
    def taking(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        batched = [n for n, g in enumerate(grads) if g is not None and _functorch.is_legacy_batchedtensor(g)]
        if not batched:
            return backward(ctx, *grads)
        level = torch._C._vmapmode_increment_nesting() - 1
        torch._C._vmapmode_decrement_nesting()
        places: list[int] = []

        def sample(*given: Tensor) -> tuple[Tensor, ...]:
            whole = list(grads)
            for n, grad in zip(batched, given, strict=True):
                whole[n] = grad
            made = backward(ctx, *whole)
            places[:] = [n for n, x in enumerate(made) if x is not None]
            return tuple(x for x in made if x is not None)

        made = torch.func.vmap(sample)(*(torch._remove_batch_dim(grads[n], level, 1, 0) for n in batched))  # type: ignore
        result: list[Tensor | None] = [None] * len(ctx.needs_input_grad)
        for place, x in zip(places, made, strict=True):
            result[place] = torch._add_batch_dim(x, 0, level)  # pyright: ignore[reportPrivateImportUsage]
        return tuple(result)

    return taking


class _Attention(torch.autograd.Function):
    """(call, tensors) -> what `paths.rows` finds, in the order of `call.names`."""

    @staticmethod
    def forward(call: Call, *tensors: Tensor | None) -> tuple[Tensor, ...]:  # pyright: ignore
        found = paths.rows(call.path, call.problem(tensors), call.request(tensors))
        return tuple(found.values())

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        call, *tensors = inputs
        ctx.call, ctx.output_dtype = call, output[0].dtype
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*(x for name, x in zip(call.names, output, strict=True) if not _carries(name)))
        ctx.save_for_backward(*tensors, *output)
        ctx.save_for_forward(*tensors)

    @staticmethod
    @_takes_batched_grads
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        needs = ctx.needs_input_grad[1 : _N_INPUTS + 1]
        if not any(needs):
            return (None,) * len(ctx.needs_input_grad)
        made = iter(_Gradients.apply(ctx.call, needs, *ctx.saved_tensors, *grads))
        inputs = (next(made) if need else None for need in needs)
        return None, *inputs, *(None,) * (len(ctx.needs_input_grad) - 1 - _N_INPUTS)

    @staticmethod
    def jvp(ctx: Any, _call: None, *tangents: Tensor | None) -> tuple[Tensor | None, ...]:
        call, tensors = ctx.call, ctx.saved_tensors
        names = tuple(name for name in call.names if _carries(name))
        inputs = [x for x in tensors[:_N_INPUTS] if x is not None]
        along = [_or_zeros(t, x) for t, x in zip(tangents, tensors[:_N_INPUTS]) if x is not None]
        made = dict(zip(names, _tangents(call.differentiable(tensors, names), inputs, along), strict=True))
        made["output"] = made["output"].to(ctx.output_dtype)
        return tuple(made.get(name) for name in call.names)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], call: Call, *tensors: Tensor | None) -> tuple[Any, Any]:
        N, dims = info.batch_size, in_dims[1:]
        if call.dropout_p or dims[INPUTS.index("slopes")] is not None:
            return _one_by_one(N, dims, tensors, lambda one: _Attention.apply(call, *one))
        B = _batch(tensors[0], dims[0])
        folded = _fold(call, N, B, tensors, dims)
        return tuple(x.unflatten(0, (N, B)) for x in _Attention.apply(call, *folded)), (0,) * len(call.names)


class _Gradients(torch.autograd.Function):
    """(call, needs, tensors, found, incoming) -> the gradients that are needed, in the order of INPUTS."""

    @staticmethod
    def forward(call: Call, needs: tuple[bool, ...], *saved: Tensor | None) -> tuple[Tensor, ...]:  # pyright: ignore
        tensors, found, incoming = _parts(call, saved)
        wanted: dict[str, bool] = dict(zip(INPUTS, needs, strict=True))
        named = {name: x for name, x in zip(call.names, incoming, strict=True) if x is not None}
        made = paths.gradients(
            call.path, call.problem(tensors), call.request(tensors),
            dict(zip(call.names, map(_there, found), strict=True)), named, wanted,
        )  # fmt: skip
        return tuple(made[name] for name in INPUTS if wanted[name])

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.call, ctx.needs, *saved = inputs
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*saved)
        ctx.save_for_forward(*saved)

    @staticmethod
    @_takes_batched_grads
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        # What was found is a function of the inputs: the whole derivative goes to them, none to it.
        function, inputs, places = _gradient_function(ctx.call, ctx.needs, ctx.saved_tensors)
        made, pull, *_ = torch.func.vjp(function, *inputs)
        result: list[Tensor | None] = [None] * len(ctx.needs_input_grad)
        for place, grad in zip(places, pull(tuple(_or_zeros(g, x) for g, x in zip(grads, made, strict=True)))):
            result[2 + place] = grad
        return tuple(result)

    @staticmethod
    def jvp(ctx: Any, _call: None, _needs: None, *tangents: Tensor | None) -> tuple[Tensor, ...]:
        function, inputs, places = _gradient_function(ctx.call, ctx.needs, ctx.saved_tensors)
        along = [_or_zeros(tangents[place], x) for place, x in zip(places, inputs, strict=True)]
        return _tangents(function, inputs, along)

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[Any, ...], call: Call, needs: tuple[bool, ...], *saved: Tensor | None
    ) -> tuple[Any, Any]:
        N, dims = info.batch_size, in_dims[2:]
        slopes, bias = INPUTS.index("slopes"), INPUTS.index("bias")
        if call.dropout_p or needs[slopes] or dims[slopes] is not None:
            return _one_by_one(N, dims, saved, lambda one: _Gradients.apply(call, needs, *one))
        B = _batch(saved[0], dims[0])
        folded = _fold(call, N, B, saved, dims)
        if needs[bias]:  # each sample has a gradient of its own, also of a bias that all share
            folded[bias] = _there(folded[bias]).expand(N * B, -1, -1, -1)
        made = [x.unflatten(0, (N, B)) for x in _Gradients.apply(call, needs, *folded)]
        if needs[bias] and _batch(saved[bias], dims[bias]) != B:
            place = sum(needs[:bias])
            made[place] = made[place].sum(1, keepdim=True)
        return tuple(made), (0,) * len(made)


def _gradient_function(
    call: Call, needs: tuple[bool, ...], saved: Tensors
) -> tuple[Callable[..., tuple[Tensor, ...]], list[Tensor], list[int]]:
    """The gradients by the definition, as a function of the inputs and of the incoming gradients that are there.

    Returns:
        The function, what it takes, and where that stands among `saved`.
    """
    tensors, found, incoming = _parts(call, saved)
    first = call.n_tensors + len(found)
    there = [n for n in range(_N_INPUTS) if tensors[n] is not None]
    arrived = [n for n, x in enumerate(incoming) if x is not None]
    names = [call.names[n] for n in arrived]
    whole = call.differentiable(tensors, names)

    def function(*values: Tensor) -> tuple[Tensor, ...]:
        inputs, grads = values[: len(there)], values[len(there) :]
        outputs, pull, *_ = torch.func.vjp(whole, *inputs)
        made = pull(tuple(g.to(x.dtype) for g, x in zip(grads, outputs, strict=True)))
        return tuple(grad for n, grad in zip(there, made, strict=True) if needs[n])

    places = [*there, *(first + n for n in arrived)]
    return function, [saved[n] for n in places], places  # type: ignore[misc]


def _tangents(function: Callable[..., tuple[Tensor, ...]], inputs: list[Tensor], along: list[Tensor]) -> Any:
    """The derivative of a function along a direction, by two reverse passes.

    vjp is linear in its argument, so its own vjp there is the jvp. Nested forward mode would raise in PyTorch.
    """
    outputs, pull, *_ = torch.func.vjp(function, *inputs)
    _, push, *_ = torch.func.vjp(lambda *w: pull(w), *(torch.zeros_like(x) for x in outputs))
    return push(tuple(along))


def _parts(call: Call, saved: Tensors) -> tuple[Tensors, Tensors, Tensors]:
    """The tensors of a call, what it found, and the incoming gradients."""
    a, b = call.n_tensors, call.n_tensors + len(call.names)
    return saved[:a], saved[a:b], saved[b:]


def _or_zeros(tensor: Tensor | None, like: Tensor) -> Tensor:
    return torch.zeros_like(like) if tensor is None else tensor


def _carries(name: str) -> bool:
    return name == "output" or (name in TABLE and TABLE[name].carries_gradient)


def _there(tensor: Tensor | None) -> Tensor:
    assert tensor is not None
    return tensor


def _batch(tensor: Tensor | None, dim: int | None) -> int:
    """The size of the axis of sequences, the first beside the mapped one."""
    return _there(tensor).shape[1 if dim == 0 else 0]


def _fold(call: Call, N: int, B: int, tensors: Tensors, dims: Sequence[int | None]) -> list[Tensor | None]:
    """Tensors with a mapped axis of size N as those of N * B sequences."""
    slopes = INPUTS.index("slopes")
    folded: list[Tensor | None] = []
    for n, (x, dim) in enumerate(zip(tensors, dims, strict=True)):
        # Classes (S,) and pairs (L, K) of all sequences lack the axis of sequences.
        plain = x is not None and _CLASSES <= n < call.n_tensors and x.ndim - (dim is not None) == 1 + (n > _CLASSES)
        if x is None or n == slopes or (dim is None and (plain or (len(x) == 1 and B != 1) or _is_shared(n, x))):
            folded.append(x)
            continue
        x = x.expand(N, *x.shape) if dim is None else x.movedim(dim, 0)
        x = x[:, None] if plain else x
        folded.append(x.expand(N, B, *x.shape[2:]).reshape(N * B, *x.shape[2:]))
    return folded


def _is_shared(place: int, x: Tensor) -> bool:
    """Whether a tensor that no transform maps may keep one row for all sequences."""
    names = (*INPUTS, *TENSORS)
    return place < len(names) and names[place] in ("bias", "mask", "runs") and len(x) == 1


def _one_by_one(N: int, dims: Sequence[int | None], tensors: Tensors, call: Callable) -> tuple[Any, Any]:
    """Each sample for itself: dropout counts by the sequence, and slopes belong to all sequences of a call."""
    made = []
    for n in range(N):
        one = [x if x is None or d is None else x.select(d, n) for x, d in zip(tensors, dims, strict=True)]
        made.append(call(one))
    stacked = tuple(torch.stack(parts) for parts in zip(*made, strict=True))
    return stacked, (0,) * len(stacked)

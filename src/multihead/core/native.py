"""The way into the compiled core: what it serves, and its arrays."""

from __future__ import annotations

import torch
from torch import Tensor

from . import tiled
from .problem import Problem
from .statistics import ROW_STATISTICS, Observation, Statistics, finish

try:
    from . import _native as core
except ImportError:  # a source tree that was never built
    core = None

# Statistics (B, H, L) that the core fills, in the order of its arguments.
_FILLED = tuple(name for name in ROW_STATISTICS if name != "lse") + ("sink_mass",)


def can_use(problem: Problem, statistics: Statistics | None) -> str | None:
    """Say why the compiled core cannot serve a problem, or None when it can."""
    p = problem
    if core is None:
        return "the compiled core is not built (pip install multihead builds it; it needs a C++17 compiler)"
    if p.query.device.type != "cpu":
        return f"the compiled core runs on the CPU, and query is on {p.query.device}"
    if p.query.dtype is not torch.float32:
        return f"the compiled core is for float32 so far, and query is {p.query.dtype}"
    for name in ("bias", "alibi_slopes"):
        if getattr(p, name) is not None:
            return f"{name} is not in the compiled core yet"
    if p.dropout_p:
        return "dropout is not in the compiled core yet"
    visibility = p.visibility
    if not (visibility.is_full or visibility.is_plain_causal) and visibility.spans() is None:
        return "some row sees keys with a gap between them, or heads see different keys: the core takes one run a row"
    return None


def forward(problem: Problem, statistics: Statistics | None) -> Observation:
    """Compute a problem in the compiled core; `can_use` has said that it can.

    Returns:
        the output (B, H, L, E) float32, laid out in memory as the query is, and the statistics asked.
    """
    assert core is not None
    p, visibility = problem, problem.visibility
    output = _empty_as(p.query, p.E)
    spans = None if visibility.is_full or visibility.is_plain_causal else visibility.spans()
    begin, end = (None, None) if spans is None else (spans[0].contiguous(), spans[1].contiguous())
    sinks = None if p.sinks is None else _plain(p.sinks.float()).contiguous()
    found: dict[str, Tensor] = {}
    classes = None
    if statistics is not None:
        found = _empty_statistics(p, statistics)
        if statistics.classes is not None:
            classes = statistics.classes.to(torch.int32)
            classes = (classes if classes.ndim == 2 else classes[None]).contiguous()
    start = visibility.query_start if spans is None else 0
    core.forward(
        _plain(p.query), _plain(p.key), _plain(p.value), output, begin, end, visibility.causal, start, p.scale,
        p.softcap or 0.0, sinks, classes, found.get("class_mass"), found.get("lse"),
        *(found.get(name) for name in _FILLED), torch.get_num_threads(),
    )  # fmt: skip
    if statistics is None:
        return Observation(output)
    return Observation(output, finish(_complete(p, statistics, found), visibility.query_mask))


def _complete(p: Problem, statistics: Statistics, found: dict[str, Tensor]) -> dict[str, Tensor]:
    """What the core filled, and what is made from that, in the order asked."""
    lse = found["lse"]
    found |= tiled.gathered(p, statistics, lse)
    if p.sinks is not None:
        found["lse"] = torch.logaddexp(lse, p.sinks.detach().to(lse.dtype)[:, None])
    names = (*statistics.asked, "sink_mass") if p.sinks is not None else statistics.asked
    return {name: found[name] for name in names}


def _empty_statistics(p: Problem, statistics: Statistics) -> dict[str, Tensor]:
    names = [name for name in statistics.names if name != "argmax"]
    if p.sinks is not None:
        names.append("sink_mass")
    found = dict(zip(names, torch.empty(len(names), p.B, p.H, p.L).unbind(), strict=True))
    if "argmax" in statistics.names:
        found["argmax"] = torch.empty(p.B, p.H, p.L, dtype=torch.int64)
    if statistics.classes is not None:
        found["class_mass"] = torch.empty(p.B, p.H, p.L, statistics.n_classes)
    return found


def _empty_as(query: Tensor, width: int) -> Tensor:
    """An empty (B, H, L, width): heads beside each other in memory where those of the query are."""
    B, H, L, _ = query.shape
    if query.stride(1) < query.stride(2):
        return torch.empty(B, L, H, width).transpose(1, 2)
    return torch.empty(B, H, L, width)


def _plain(tensor: Tensor) -> Tensor:
    """The same numbers as a tensor that can be handed over: without autograd's and a lazy negation's marks."""
    if tensor.requires_grad:
        tensor = tensor.detach()
    return tensor.resolve_neg() if tensor.is_neg() else tensor

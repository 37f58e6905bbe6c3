"""The way into the compiled core: what it serves, and its arrays as addresses and strides."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from . import dropout, tiled
from .cells import distance_sides, second_pass_shapes
from .problem import Problem
from .statistics import ROW_STATISTICS, Observation, Statistics, finish

try:
    from . import _native as core
except ImportError:  # a source tree that was never built
    core = None
else:
    # One team of threads for PyTorch's operators and ours: two would fight for the cores.
    core.share_threads(str(Path(torch.__file__).parent))

# Statistics that the core fills, in the order of its argument.
_FILLED = (*ROW_STATISTICS, "sink_mass", "class_mass")
# What backward needs of each row, and the statistics whose gradients it takes, in the order of its arguments.
_SAVED = ("top", "inverse")
_INCOMING = ("lse", "max_logit", "entropy", "sink_mass", "class_mass")
_NOWHERE = (0, 0, 0, 0)
# As csrc/attention.h numbers them.
_STORED = {torch.float32: 0, torch.float64: 1, torch.bfloat16: 2, torch.float16: 3}


def can_use(problem: Problem, statistics: Statistics | None) -> str | None:
    """Say why the compiled core cannot serve a problem, or None when it can."""
    p = problem
    if core is None:
        return "the compiled core is not built (pip install multihead builds it; it needs a C++17 compiler)"
    if p.query.device.type != "cpu":
        return f"the compiled core runs on the CPU, and query is on {p.query.device}"
    if p.query.dtype not in _STORED:
        return f"the compiled core is for float64, float32, bfloat16 and float16, and query is {p.query.dtype}"
    if p.pages is not None:
        key, value = p.pages
        if key.table is not value.table or key.data.shape[:3] != value.data.shape[:3]:
            return "key and value do not have the same pages"
        if key.data.dtype is not value.data.dtype:
            return f"key pages are {key.data.dtype} and value pages {value.data.dtype}"
    return None


def machine() -> tuple[str, int, float, float]:
    """The level, the threads, and the peaks of this moment: GFLOP/s of multiply-adds, GB/s of reads."""
    assert core is not None
    threads = torch.get_num_threads()
    return core.level(), threads, core.fma_gflops(threads, 0.1), core.read_gbs(threads, 0.1)


def stored(problem: Problem) -> tuple[Tensor, Tensor]:
    """Keys and values as they are stored."""
    return (problem.key, problem.value) if problem.pages is None else tuple(x.data for x in problem.pages)  # type: ignore[return-value]


def plain(query: Tensor, key: Any, value: Any, causal: bool, scale: float | None) -> Tensor | None:
    """Attention without options and without a `Problem`, which costs more to make than a small call computes.

    The caller has seen that nobody traces or records the call.

    Returns:
        the output as `forward` gives it, or None where these tensors need the longer way (or are wrong).
    """
    if core is None:
        return None
    dtype, q, k, v = query.dtype, query.shape, key.shape, value.shape
    if not (
        key.dtype is dtype is value.dtype
        and dtype in _STORED
        and query.is_cpu
        and key.is_cpu
        and value.is_cpu
        and len(q) == len(k) == len(v) == 4
        and q[0] == k[0] == v[0]
        and k[1] == v[1] != 0
        and q[1] % k[1] == 0
        and k[2] == v[2]
        and q[3] == k[3] != 0
        and not (query.is_neg() or key.is_neg() or value.is_neg())
    ):
        return None
    output = _empty_as(query, v[3])
    core.plain(
        _STORED[dtype], q[0], q[1], k[1], q[2], k[2], q[3], v[3],
        query.data_ptr(), query.stride(), key.data_ptr(), key.stride(), value.data_ptr(), value.stride(),
        output.data_ptr(), output.stride(), causal, 1 / math.sqrt(q[3]) if scale is None else scale,
        torch.get_num_threads(),
    )  # fmt: skip
    return output


def forward(problem: Problem, statistics: Statistics | None) -> Observation:
    """Compute a problem in the compiled core; `can_use` has said that it can.

    Returns:
        the output (B, H, L, E) in the query's type, laid out in memory as the query is, and the statistics asked.
    """
    later = () if statistics is None else statistics.later
    output, found = _forward(problem, statistics, _SAVED if later else ())
    if statistics is None:
        return Observation(output)
    named = _named(problem, statistics, found)
    if later:
        named |= _second_pass(problem.plain(), statistics, found)
    return Observation(output, finish(named, problem.visibility.query_mask))


def _second_pass(p: Problem, statistics: Statistics, rows: dict[str, Tensor]) -> dict[str, Tensor]:
    """What keys, distances and cells of a map gather over rows, from the rows' `top` and `inverse`."""
    assert core is not None
    later, shapes = statistics.later, second_pass_shapes(p, statistics)
    found = {
        name: torch.empty(p.B, p.H, *shapes[name], dtype=torch.int64 if name == "top_keys" else p.sums_dtype)
        for name in later
    }
    written = _Written(p, positions="distance_histogram" in later)
    core.second_pass(
        written.problem,
        tuple(_address(rows[name]) for name in _SAVED),
        tuple(_address(found.get(name)) for name in shapes),
        (distance_sides(p), statistics.map, statistics.top_keys),
        torch.get_num_threads(),
    )
    return found


def forward_saving(problem: Problem, statistics: Statistics | None) -> dict[str, Tensor]:
    """Compute a problem, and what `backward` needs of it.

    Returns:
        the output and the statistics asked, by name, before padding is taken out (`statistics.finish`); `argmax` too
        where max_logit is asked; and (B, H, L) of each row's scores in units of log 2: `top`, the largest, and
        `inverse`, 1 / sum 2^(score - top), which is 0 for rows without keys alone.
    """
    wanted = statistics
    if statistics is not None and "max_logit" in statistics.names:
        n_classes = None if statistics.classes is None else statistics.n_classes
        wanted = Statistics(*statistics.names, "argmax", classes=statistics.classes, n_classes=n_classes)
    output, found = _forward(problem, wanted, _SAVED)
    saved = {"output": output} | {name: found[name] for name in (*_SAVED, "argmax") if name in found}
    return saved if statistics is None else saved | _named(problem, statistics, found)


def _forward(p: Problem, statistics: Statistics | None, saved: tuple[str, ...]) -> tuple[Tensor, dict[str, Tensor]]:
    """The output, and the arrays that the core filled."""
    assert core is not None
    written = _Written(p)
    output = _empty_as(p.query, p.E)
    sinks = None if p.sinks is None else _plain(p.sinks.detach().to(p.sums_dtype)).contiguous()
    found = {} if statistics is None else _empty_statistics(p, statistics)
    found |= {name: torch.empty(p.B, p.H, p.L, dtype=p.sums_dtype) for name in saved}
    classes = None if statistics is None else _classes(statistics)
    core.forward(
        written.problem,
        output.data_ptr(),
        output.stride(),
        _address(sinks),
        _address(classes),
        _class_batch(p, classes),
        0 if classes is None or statistics is None else statistics.n_classes,
        statistics is not None and statistics.names != ("lse",),
        tuple(_address(found.get(name)) for name in _FILLED),
        tuple(_address(found.get(name)) for name in _SAVED),
        torch.get_num_threads(),
    )
    return output, found


def can_use_backward(problem: Problem, statistics: Statistics | None) -> str | None:
    """Say why the compiled core cannot give a problem's gradients, or None when it can."""
    return can_use(problem, statistics)


def backward(
    problem: Problem,
    statistics: Statistics | None,
    found: dict[str, Tensor],
    incoming: dict[str, Tensor],
    needs: dict[str, bool],
) -> dict[str, Tensor]:
    """Gradients in the compiled core; `can_use_backward` has said that it can.

    Args:
        found: what `forward_saving` gave.
        incoming: gradients by name of the output (B, H, L, E), and of lse (the sink's share included), max_logit,
            entropy, sink_mass (B, H, L) and class_mass (B, H, L, C); those that are absent are 0.
        needs: whether the gradients of query, key, value, bias, slopes and sinks are wanted, by name.

    Returns:
        the gradients wanted, by name, in the shapes and types of their inputs.
    """
    assert core is not None
    p = problem
    written = _Written(p)
    statistic_gradients = {
        name: _plain(incoming[name].to(p.sums_dtype)).contiguous() for name in _INCOMING if name in incoming
    }
    outputs = (None, None)
    if "output" in incoming:
        outputs = (found["output"], _plain(incoming["output"].to(p.query.dtype)))
    classed = statistics if "class_mass" in incoming else None
    classes = None if classed is None else _classes(classed)
    sinks = None if p.sinks is None else _plain(p.sinks.to(p.sums_dtype)).contiguous()
    inputs = {
        "query": p.query,
        "key": p.key,
        "value": p.value,
        "bias": p.bias,
        "slopes": p.alibi_slopes,
        "sinks": p.sinks,
    }
    made: dict[str, Tensor] = {}
    for name, x in inputs.items():
        if x is None or not needs.get(name):
            continue
        if name in ("query", "key", "value"):
            made[name] = _empty_as(x, x.shape[-1])
        elif name == "bias":
            made[name] = torch.zeros(x.shape, dtype=p.sums_dtype)
        else:
            made[name] = torch.empty(p.H, dtype=p.sums_dtype)
    tensors = [made.get(name) for name in ("query", "key", "value", "bias")]
    core.backward(
        written.problem,
        core.Gradients(
            _address(sinks),
            tuple(_address(found.get(name)) for name in (*_SAVED, "entropy", "argmax", "class_mass")),
            tuple(map(_address, outputs)),
            tuple(_NOWHERE if x is None else x.stride() for x in outputs),
            tuple(_address(statistic_gradients.get(name)) for name in _INCOMING),
            _address(classes),
            _class_batch(p, classes),
            0 if classed is None else classed.n_classes,
            tuple(map(_address, tensors)),
            (*(_NOWHERE if x is None else x.stride() for x in tensors[:3]), _strides(tensors[3])),
            (_address(made.get("slopes")), _address(made.get("sinks"))),
        ),
        torch.get_num_threads(),
    )
    return {name: x.to(inputs[name].dtype) for name, x in made.items()}  # type: ignore[union-attr]


class _Written:
    """A problem as the core reads it, and the tensors whose addresses it holds: they live as long as this does."""

    def __init__(self, problem: Problem, positions: bool = False) -> None:
        assert core is not None
        p, visibility = problem, problem.visibility
        table = key_scales = value_scales = None
        key, value, page = p.key, p.value, 0
        if p.pages is not None:
            table, page = p.pages[0].table.to(torch.int32).contiguous(), p.pages[0].page
            key_scales, value_scales = (None if x.scales is None else x.scales.contiguous() for x in p.pages)
            key, value = (x.data for x in p.pages)
        self.pages = (table, key_scales, value_scales)
        self.tensors = [_plain(x) for x in (p.query, key, value)]
        self.begin = self.end = self.mask = self.bias = self.slopes = self.positions = None
        self.documents: tuple[Tensor | None, Tensor | None] = (None, None)
        causal, start = False, 0
        if visibility.is_full:
            pass
        elif visibility.is_plain_causal:
            causal, start = True, visibility.query_start
        else:
            spans = visibility.spans()
            if spans is None:  # keys with a gap between them: a run that holds them all, and what is hidden in it
                spans = visibility.bounds()
                self.mask, self.documents = visibility.mask, _documents(p)
            self.begin, self.end = (x.to(torch.int32).contiguous() for x in spans)
        if p.bias is not None:
            readable = p.bias.dtype is p.sums_dtype or (p.sums_dtype is torch.float32 and p.bias.element_size() == 2)
            self.bias = _plain(p.bias if readable else p.bias.to(p.sums_dtype))
        if p.alibi_slopes is not None:
            self.slopes = _plain(p.alibi_slopes.to(p.sums_dtype)).contiguous()
        if p.alibi_slopes is not None or positions:
            self.positions = torch.as_tensor(visibility.query_start).expand(p.B).contiguous()
        self.problem = core.Problem(
            (p.B, p.H, p.G, p.L, p.S, p.D, p.E),
            (_STORED[p.query.dtype], 0 if self.bias is None else _STORED[self.bias.dtype]),
            tuple(x.data_ptr() for x in self.tensors),
            tuple(x.stride() for x in self.tensors),
            (_address(self.begin), _address(self.end)),
            0 if self.begin is None or len(self.begin) == 1 else p.L,
            causal,
            start,
            (_address(self.mask), _address(self.bias)),
            (_strides(self.mask), _strides(self.bias)),
            tuple(map(_address, self.documents)),
            (_address(self.slopes), _address(self.positions)),
            p.scale,
            p.softcap or 0.0,
            *_dropout(p),
            tuple(map(_address, self.pages)),
            0 if table is None else table.shape[1],
            page,
        )


def _dropout(p: Problem) -> tuple[float, int, tuple[int, int]]:
    """What a kept weight is multiplied by, 0 without dropout; below which word one is dropped; the key of two words."""
    if not p.dropout_p:
        return 0.0, 0, (0, 0)
    assert p.dropout_seed is not None
    return dropout.factor(p.dropout_p), dropout.threshold(p.dropout_p), dropout.key(int(p.dropout_seed))


def _classes(statistics: Statistics) -> Tensor | None:
    return None if statistics.classes is None else statistics.classes.to(torch.int32).contiguous()


def _class_batch(p: Problem, classes: Tensor | None) -> int:
    """Elements from one sequence's classes to the next, 0 when all share them."""
    return 0 if classes is None or classes.ndim == 1 or len(classes) == 1 else p.S


def _named(p: Problem, statistics: Statistics, found: dict[str, Tensor]) -> dict[str, Tensor]:
    """What the core filled, and what is made from that, in the order asked."""
    lse = found["lse"]
    if statistics.offsets or statistics.pairs:
        found |= tiled.gathered(p.plain(), statistics, lse)
    if p.sinks is not None:
        found["lse"] = torch.logaddexp(lse, p.sinks.detach().to(lse.dtype)[:, None])
    names = (*statistics.asked, "sink_mass") if p.sinks is not None else statistics.asked
    return {name: found[name] for name in names}


def _empty_statistics(p: Problem, statistics: Statistics) -> dict[str, Tensor]:
    # Each on its own: small ones then come from memory that the last call gave back, not fresh from the system.
    names = (*statistics.names, "sink_mass") if p.sinks is not None else statistics.names
    found = {
        name: torch.empty(p.B, p.H, p.L, dtype=torch.int64 if name == "argmax" else p.sums_dtype) for name in names
    }
    if statistics.classes is not None:
        found["class_mass"] = torch.empty(p.B, p.H, p.L, statistics.n_classes, dtype=p.sums_dtype)
    return found


def _empty_as(query: Tensor, width: int) -> Tensor:
    """An empty (B, H, L, width): heads beside each other in memory where those of the query are."""
    B, H, L, _ = query.shape
    if query.stride(1) < query.stride(2):
        return torch.empty(B, L, H, width, dtype=query.dtype).transpose(1, 2)
    return torch.empty(B, H, L, width, dtype=query.dtype)


def _documents(p: Problem) -> tuple[Tensor | None, Tensor | None]:
    """The document of each key (B, S) and of each query (B, L); rows of no document have no span."""
    ids = p.visibility.document_ids
    if ids is None or p.S == 0:
        return None, None
    ids = ids.to(torch.int64).contiguous()
    at = p.visibility.positions().clamp(0, p.S - 1).expand(p.B, -1)
    return ids, ids.gather(1, at)


def _plain(tensor: Tensor) -> Tensor:
    """The same numbers where they lie in memory: a lazy negation is carried out."""
    return tensor.resolve_neg() if tensor.is_neg() else tensor


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def _strides(cells: Tensor | None) -> tuple[int, ...]:
    """Strides of a tensor that broadcasts to (B, H, L, S): 0 along an axis that it lacks."""
    if cells is None:
        return _NOWHERE
    return tuple(0 if size == 1 else stride for size, stride in zip(cells.shape, cells.stride(), strict=True))

"""attention, observe, explain: check the arguments, choose a path, call it."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from . import autograd, native, ops, paths, tiled
from .axes import check_broadcast, check_integers, check_shape
from .masking import Visibility, check_lengths
from .pages import Pages
from .paths import choose, why_not_native
from .problem import Problem
from .statistics import Observation, Statistics

Window = tuple[int | None, int | None]
_OPEN: Window = (None, None)
_EVERY_ROW = Statistics()


def attention(
    query: Tensor,
    key: Tensor | Pages,
    value: Tensor | Pages,
    *,
    causal: bool = False,
    window: Window | None = None,
    mask: Tensor | None = None,
    bias: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    key_lengths: Tensor | Sequence[int] | None = None,
    query_mask: Tensor | None = None,
    document_ids: Tensor | None = None,
    query_start: int | Tensor | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    dropout_p: float = 0.0,
    dropout_seed: int | None = None,
    impl: str = "auto",
) -> Tensor:
    """Multi-head attention: softmax over visible keys of softcap(scale * q.k) + bias + ALiBi, times v.

    Args:
        query: (B, H, L, D), float.
        key: (B, G, S, D); G divides H, and query head h reads key/value head h // (H // G).
        value: (B, G, S, E). Key and value may be `Pages` of a cache too.
        causal: query i sees keys j <= p, where p = query_start + i is its position among the keys.
        window: (left, right), a query sees p - left <= j <= p + right; None is an open side.
        mask: bool, broadcasts to (B, H, L, S); True = may attend.
        bias: float, broadcasts to (B, H, L, S), added to the scores; a cell of -inf is invisible.
        alibi_slopes: (H,); adds -slope * |p - j|.
        key_lengths: (B,), sequence b has keys j < key_lengths[b].
        query_mask: (B, L), False = a row of padding: zeros out, in no statistic.
        document_ids: (B, S), -1 = padding; a query sees the keys of the document at its p.
        query_start: int or (B,), by default S - L, or max(0, key_lengths - L) with lengths; 0 is PyTorch's
            is_causal.
        scale: by default 1 / sqrt(D).
        softcap: c in c * tanh(x / c).
        sinks: (H,), one more logit a head, that takes weight and gives no value.
        dropout_p: share of the weights dropped; the others are divided by 1 - dropout_p.
        dropout_seed: which ones; by default drawn from PyTorch's generator.
        impl: "auto", "native", "tiled" or "reference".

    Returns:
        (B, H, L, E) in the query's type. A row that sees no key is zeros.

    Raises:
        ValueError, TypeError: an argument does not fit, or a forced `impl` cannot serve.

    Example:
        >>> query, key, value = torch.randn(1, 8, 5, 16), torch.randn(1, 2, 7, 16), torch.randn(1, 2, 7, 16)
        >>> attention(query, key, value, causal=True).shape
        torch.Size([1, 8, 5, 16])
    """
    no_options = (
        window is mask is bias is alibi_slopes is key_lengths is query_mask is document_ids is query_start is softcap
        is sinks is None and not dropout_p and impl == "auto"
    )  # fmt: skip
    if no_options and not ops.is_traced(query) and not autograd.is_seen(query, key, value):
        output = native.plain(query, key, value, bool(causal), scale)
        if output is not None:
            return output
    problem = build_problem(
        query, key, value, causal=causal, window=window, mask=mask, bias=bias, alibi_slopes=alibi_slopes,
        key_lengths=key_lengths, query_mask=query_mask, document_ids=document_ids, query_start=query_start,
        scale=scale, softcap=softcap, sinks=sinks, dropout_p=dropout_p, dropout_seed=dropout_seed,
    )  # fmt: skip
    return run(problem, None, impl).output


def observe(
    query: Tensor,
    key: Tensor | Pages,
    value: Tensor | Pages,
    *,
    statistics: Statistics | None = None,
    impl: str = "auto",
    **options,
) -> Observation:
    """Attention and what its heads did: the output of `attention` and the statistics asked.

    Args:
        statistics: what to observe, by default every row statistic (`statistics.TABLE` defines them).
        options: the keyword arguments of `attention`.

    Returns:
        .output, .statistics and each statistic as an attribute. entropy, lse, max_logit (to its argmax key),
        class_mass and sink_mass carry gradients, the others are detached.

    Example:
        >>> query, key, value = torch.randn(1, 8, 5, 16), torch.randn(1, 2, 7, 16), torch.randn(1, 2, 7, 16)
        >>> observe(query, key, value, causal=True).entropy.shape
        torch.Size([1, 8, 5])
    """
    problem = build_problem(query, key, value, **options)
    statistics = Statistics() if statistics is None else statistics
    statistics.check({"B": problem.B, "L": problem.L, "S": problem.S})
    return run(problem, statistics, impl)


def explain(
    query: Tensor,
    key: Tensor | Pages,
    value: Tensor | Pages,
    *,
    statistics: Statistics | None = None,
    impl: str = "auto",
    **options,
) -> str:
    """Tell which path `attention` (`observe`, given statistics) would take, why, its memory and its FLOPs.

    Where the compiled core serves, the machine's peaks and the call itself are measured (a few tenths of a second,
    and three calls), to say how far it is from the limit.
    """
    problem = build_problem(query, key, value, **options)
    path = choose(problem, statistics, impl)
    reason = why_not_native(problem, statistics)
    p = problem
    cells = int(p.visibility.counts().expand(p.B, p.H, p.L).sum()) if p.B * p.H else 0
    flops = 2 * cells * (p.D + p.E)
    size = p.query.element_size()
    outputs = p.B * p.H * p.L * p.E * size
    kind = "MHA" if p.G == p.H else "MQA" if p.G == 1 else "GQA"
    lines = [
        f"path: {path}" + (" (forced)" if impl != "auto" else ""),
        "native: " + ("can serve this" if reason is None else f"no, {reason}"),
        f"problem: {kind}, B={p.B} H={p.H} G={p.G} L={p.L} S={p.S} D={p.D} E={p.E}, {p.query.dtype}, {p.query.device}",
        f"visible cells: {cells:,} of {p.B * p.H * p.L * p.S:,}",
        f"work: {flops:,} FLOPs, 2 * visible cells * (D + E)",
    ]
    if path == "tiled":
        rows, keys = tiled.block_sizes(p)
        lines.append(f"tile: {rows} queries x {keys} keys, {tiled.working_bytes(p):,} bytes of work space")
    if path == "reference":
        lines.append(f"memory: {p.B * p.H * p.L * p.S * 8:,} bytes and more: L x S, for tests only")
    else:
        lines.append(f"output: {outputs:,} bytes; memory grows as L + S")
    if path == "native":
        lines += _limit(problem, statistics, flops, outputs)
    return "\n".join(lines)


def _limit(problem: Problem, statistics: Statistics | None, flops: int, outputs: int) -> list[str]:
    """What the compiled core runs on, and how far a call is from the machine's peaks."""
    level, threads, gflops, gbs = native.machine()
    inputs = sum(x.numel() * x.element_size() for x in (problem.query, *native.stored(problem)))
    least = max(flops / gflops, (inputs + outputs) / gbs) / 1e9
    seconds = []
    for _ in range(3):
        begun = time.perf_counter()
        paths.forward("native", problem, statistics)
        seconds.append(time.perf_counter() - begun)
    taken = min(seconds)
    bound = "compute" if flops / gflops > (inputs + outputs) / gbs else "memory"
    shortest = f"at the peaks {least * 1e3:.3g} ms, bound by {bound}"
    return [
        f"core: {level}, {threads} threads; peaks now: {gflops:.0f} GFLOP/s of multiply-adds, {gbs:.0f} GB/s of reads",
        f"bytes: {inputs + outputs:,}, inputs and outputs once",
        f"time: {taken * 1e3:.3g} ms; {shortest}: {least / taken:.0%} of the limit",
    ]


def run(problem: Problem, statistics: Statistics | None, impl: str = "auto") -> Observation:
    """Compute a problem on the path that `choose` says; while a graph is traced, as one operator of it."""
    if ops.is_traced(problem.query):
        if statistics is not None and statistics.later:
            raise NotImplementedError(f"statistics: {statistics.later[0]!r} is not made in a graph; ask outside of it")
        return ops.run(problem.plain(), statistics, impl)
    recorded = autograd.is_recorded(problem)
    path = choose(problem, statistics, impl, recorded)
    if recorded or path != "native":
        problem = problem.plain()
    if recorded and path != "reference":
        seen = autograd.forward(path, problem, statistics)
        if statistics is None or not statistics.later:
            return seen
        with torch.no_grad():
            later = paths.forward(path, problem, statistics.only_later()).statistics
        return Observation(seen.output, seen.statistics | {name: later[name] for name in statistics.later})
    return paths.forward(path, problem, statistics)


def build_problem(
    query: Tensor,
    key: Tensor | Pages,
    value: Tensor | Pages,
    *,
    causal: bool = False,
    window: Window | None = None,
    mask: Tensor | None = None,
    bias: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    key_lengths: Tensor | Sequence[int] | None = None,
    query_mask: Tensor | None = None,
    document_ids: Tensor | None = None,
    query_start: int | Tensor | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    dropout_p: float = 0.0,
    dropout_seed: int | None = None,
) -> Problem:
    """Check the arguments of `attention` and put them together; nothing is copied or expanded.

    Raises:
        ValueError, TypeError: naming the argument, what was expected and what came.
    """
    pages = None
    if isinstance(key, Pages) or isinstance(value, Pages):
        pages = _check_pages(query, key, value)
        key, value = (x.shaped(query) for x in pages)
    else:
        query, key, value = _cast_by_autocast(query, key, value)
    sizes = _check_inputs(query, key, value)
    B, H, L, S = sizes["B"], sizes["H"], sizes["L"], sizes["S"]
    device = query.device
    if mask is not None:
        if mask.dtype is not torch.bool:
            raise TypeError(f"mask: expected bool, True = may attend, got {mask.dtype}; scores are added with bias=")
        mask = check_broadcast("mask", mask, "BHLS", sizes)
        _check_device("mask", mask, device)
    if bias is not None:
        if not bias.dtype.is_floating_point:
            raise TypeError(f"bias: expected floats, got {bias.dtype}; what may be attended is said with mask=")
        bias = check_broadcast("bias", bias, "BHLS", sizes)
        _check_device("bias", bias, device)
    if alibi_slopes is not None:
        _check_per_head("alibi_slopes", alibi_slopes, device, sizes)
    if sinks is not None:
        _check_per_head("sinks", sinks, device, sizes)
    if query_mask is not None:
        check_shape("query_mask", query_mask, "BL", sizes)
        if query_mask.dtype is not torch.bool:
            raise TypeError(f"query_mask: expected bool, False = padding, got {query_mask.dtype}")
        _check_device("query_mask", query_mask, device)
    if document_ids is not None:
        check_shape("document_ids", document_ids, "BS", sizes)
        check_integers("document_ids", document_ids)
        _check_device("document_ids", document_ids, device)
    lengths = None if key_lengths is None else _check_lengths(key_lengths, device, sizes)
    if softcap is not None and not 0 < softcap < math.inf:
        raise ValueError(f"softcap: expected a positive number, got {softcap}")
    if dropout_p:
        if not 0 <= dropout_p <= 1:
            raise ValueError(f"dropout_p: expected a share from 0 to 1, got {dropout_p}")
        if dropout_seed is None:
            drawn = torch.randint(0, 2**63 - 1, ())
            dropout_seed = drawn if ops.is_traced(query) else int(drawn)  # type: ignore[assignment]
    start = S - L if query_start is None and lengths is None else _check_start(query_start, lengths, device, sizes)
    window = _OPEN if window is None else _check_window(window)
    has_tensors = not (mask is document_ids is query_mask is lengths is None and isinstance(start, int))
    if not has_tensors and not ops.is_traced(query):
        visibility = _visibility_of_sizes(B, H, L, S, start, bool(causal), window, device)
    else:
        visibility = Visibility(
            B, H, L, S, start, bool(causal), window, lengths, mask, document_ids, query_mask, device
        )  # fmt: skip
    if scale is None:
        scale = 1 / math.sqrt(sizes["D"]) if sizes["D"] else 1.0
    if pages is not None and device.type == "cpu" and L:
        begin, end = visibility.bounds()
        first, last = torch.where(begin < end, begin, S).amin(1), end.amax(1)
        for name, x in zip(("key", "value"), pages, strict=True):
            x.check_table(name, first, last)
    return Problem(
        query, key, value, visibility, scale, softcap, bias, alibi_slopes, sinks, dropout_p, dropout_seed, pages
    )  # fmt: skip


@lru_cache(maxsize=64)
def _visibility_of_sizes(
    B: int, H: int, L: int, S: int, start: int, causal: bool, window: Window, device: torch.device
) -> Visibility:
    """Rules without tensors, made once for the calls of one size, its spans too."""
    return Visibility(B, H, L, S, start, causal, window, device=device)


def _check_pages(query: Tensor, key: Tensor | Pages, value: Tensor | Pages) -> tuple[Pages, Pages]:
    """Check that both are in pages, of numbers that go with the query's."""
    for name, x in (("key", key), ("value", value)):
        if not isinstance(x, Pages):
            raise TypeError(f"{name}: expected Pages, as the other of key and value is, got {type(x).__name__}")
        if x.scales is None and x.data.dtype is not query.dtype:
            raise TypeError(f"{name}: expected pages of {query.dtype}, as query is, or of int8, got {x.data.dtype}")
    assert isinstance(key, Pages) and isinstance(value, Pages)
    return key, value


def _cast_by_autocast(*tensors: Tensor) -> Sequence[Tensor]:
    """Inside torch.autocast, queries, keys and values in its type, as PyTorch casts those of its own attention."""
    if not isinstance(tensors[0], Tensor) or tensors[0].is_meta:
        return tensors
    kind = tensors[0].device.type
    if not torch.is_autocast_enabled(kind):
        return tensors
    narrow = torch.get_autocast_dtype(kind)
    return [x.to(narrow) if x.is_floating_point() and x.dtype is not torch.float64 else x for x in tensors]


def _check_inputs(query: Tensor, key: Tensor, value: Tensor) -> dict[str, int]:
    """Check the three tensors against each other, and give the size of each axis."""
    sizes = _sizes(query, key, value)
    H, G = sizes["H"], sizes["G"]
    if (H % G if G else H) != 0:
        raise ValueError(f"key: expected a number of heads G that divides the H={H} heads of query, got G={G}")
    dtype, device = query.dtype, query.device
    if not dtype.is_floating_point:
        raise TypeError(f"query: expected floats, got {dtype}")
    if key.dtype is not dtype or value.dtype is not dtype:
        name, wrong = ("key", key) if key.dtype is not dtype else ("value", value)
        raise TypeError(f"{name}: expected {dtype}, as query is, got {wrong.dtype}")
    _check_device("key", key, device)
    _check_device("value", value, device)
    return sizes


def _sizes(query: Tensor, key: Tensor, value: Tensor) -> dict[str, int]:
    try:
        (B, H, L, D), (b, G, S, d), (b2, g, s, E) = query.shape, key.shape, value.shape
        if b == b2 == B and (g, s, d) == (G, S, D):
            return {"B": B, "H": H, "G": G, "L": L, "S": S, "D": D, "E": E}
    except (AttributeError, ValueError):
        pass
    # Something is wrong, and the checker of shapes says what.
    sizes: dict[str, int] = {}
    check_shape("query", query, "BHLD", sizes)
    check_shape("key", key, "BGSD", sizes)
    check_shape("value", value, "BGSE", sizes)
    return sizes


def _check_device(name: str, tensor: Tensor, device: torch.device) -> None:
    if tensor.device != device:
        raise ValueError(f"{name}: expected a tensor on {device}, as query is, got one on {tensor.device}")


def _check_per_head(name: str, tensor: Tensor, device: torch.device, sizes: dict[str, int]) -> None:
    check_shape(name, tensor, "H", sizes)
    if not tensor.dtype.is_floating_point:
        raise TypeError(f"{name}: expected floats, got {tensor.dtype}")
    _check_device(name, tensor, device)


def _check_window(window: Window) -> Window:
    if not isinstance(window, tuple | list) or len(window) != 2:
        raise ValueError(f"window: expected (left, right), got {window!r}")
    for side in window:
        if side is not None and (not isinstance(side, int) or side < 0):
            raise ValueError(f"window: expected sides of 0 or more, None for an open side, got {tuple(window)}")
    return (window[0], window[1])


def _check_lengths(lengths: Tensor | Sequence[int], device: torch.device, sizes: dict[str, int]) -> Tensor:
    tensor = torch.as_tensor(lengths, device=device)
    check_shape("key_lengths", tensor, "B", sizes)
    if tensor.numel():
        check_integers("key_lengths", tensor)
    # In a graph and in a transform there are no values yet: whoever computes the problem looks at them.
    if not ops.is_traced(tensor) and not autograd.is_transformed():
        check_lengths(tensor, sizes["S"])
    return tensor.to(torch.int64)


def _check_start(
    start: int | Tensor | None, lengths: Tensor | None, device: torch.device, sizes: dict[str, int]
) -> int | Tensor:
    if isinstance(start, Tensor):
        if start.ndim == 0:
            if not ops.is_traced(start) and not autograd.is_transformed():
                return int(start)
            start = start.expand(sizes["B"])
        check_shape("query_start", start, "B", sizes)
        check_integers("query_start", start)
        return start.to(device, torch.int64)
    if start is not None:
        if not isinstance(start, int):
            raise TypeError(f"query_start: expected an int or a tensor (B,), got {start!r}")
        return start
    if lengths is not None:
        return (lengths - sizes["L"]).clamp(min=0)
    return sizes["S"] - sizes["L"]

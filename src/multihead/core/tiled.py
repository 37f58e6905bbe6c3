"""Attention over tiles of queries x keys in plain PyTorch: any device, every form and statistic, linear memory.

The forward pass keeps a running softmax (Milakov and Gimelshein, arXiv:1805.02867); the backward pass makes the
weights again from each row's maximum and sum (Dao et al., arXiv:2205.14135, section 3).
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from .backward import gradients
from .cells import gather_weights, pooled_map, top_keys, weights
from .problem import Problem
from .running import Running
from .statistics import TABLE, Observation, Statistics, finish
from .tiles import Tiling, block_sizes, kept, parts, scaled_queries, scores

__all__ = ["block_sizes", "forward", "gather_weights", "pooled_map", "top_keys", "weights", "working_bytes"]

# What backward needs of each row, kept beside the statistics.
_SAVED = ("top", "inverse")


def forward(problem: Problem, statistics: Statistics | None = None) -> Observation:
    """Compute a problem over tiles.

    Returns:
        the output (B, H, L, E) in the query's type, and the statistics asked, in `problem.sums_dtype`.
    """
    p = problem
    if p.needs_gradients:
        inputs = (p.query, p.key, p.value, p.bias, p.alibi_slopes)
        names, *tensors = _Attention.apply(*inputs, p, statistics)  # type: ignore[misc]
        found = dict(zip(names, tensors, strict=True))
    else:
        with torch.no_grad():
            found = _over_tiles(p, statistics)
    output, lse = found["output"], found["lse"]
    asked = {} if statistics is None else {name: found[name] for name in statistics.asked if name in found}
    if statistics is not None:
        asked |= gathered(p, statistics, lse.detach())
    if p.sinks is not None:
        output, with_sink = _give_to_sinks(output, lse, p.sinks)
        asked |= with_sink if statistics is not None else {}
    return Observation(output.to(p.query.dtype), finish(asked, p.visibility.query_mask))


def working_bytes(problem: Problem) -> int:
    """Bytes of work space beside inputs and outputs: copies of a tile, and the sums of a block of rows."""
    rows, keys = block_sizes(problem)
    rows, keys = min(rows, max(problem.L, 1)), min(keys, max(problem.S, 1))
    together = 1 if problem.query.device.type == "cpu" else problem.B
    size = 8 if problem.sums_dtype is torch.float64 else 4
    return together * problem.H * rows * (5 * keys + 3 * problem.E + 64) * size


def _over_tiles(p: Problem, statistics: Statistics | None) -> dict[str, Tensor]:
    """Output and statistics as if there were no sinks, and what backward needs: (B, H, L, ...) by name."""
    names = ("lse",) if statistics is None else statistics.names
    device, dtype = p.query.device, p.sums_dtype
    n_classes = 0 if statistics is None else statistics.n_classes
    columns = None if statistics is None else statistics.class_columns(dtype, device)
    found = {"output": torch.zeros(p.B, p.H, p.L, p.E, dtype=dtype, device=device)}
    for name in dict.fromkeys((*names, *_SAVED)):
        kind = torch.int64 if name == "argmax" else dtype
        found[name] = torch.zeros(p.B, p.H, p.L, dtype=kind, device=device)
    if columns is not None:
        found["class_mass"] = torch.zeros(p.B, p.H, p.L, n_classes, dtype=dtype, device=device)

    for batch, part in parts(p):
        tiling = Tiling(part)
        part_columns = None if columns is None else columns[batch] if len(columns) > 1 else columns
        for rows in tiling.row_blocks():
            queries = scaled_queries(part, rows)
            shape = (part.B, p.G, p.group, rows.stop - rows.start)
            running = Running(shape, (p.E, n_classes), names, queries)
            for tile in tiling.tiles(rows):
                running.add(
                    scores(part, queries, rows, tile.keys, tile.visible)[0],
                    part.value[:, :, tile.keys].to(dtype),
                    tile.visible,
                    tile.keys.start,
                    kept(p, batch, tile, dtype),
                    None if part_columns is None else part_columns[:, tile.keys],
                )
            done = running.finish()
            for name, whole in found.items():
                whole[batch, :, rows] = done[name]
    return found


def gathered(p: Problem, statistics: Statistics, lse: Tensor) -> dict[str, Tensor]:
    """The statistics of listed keys, from the lse of the keys alone."""
    found = {}
    if statistics.offsets:
        keys = p.visibility.positions()[:, :, None] + torch.tensor(statistics.offsets, device=p.query.device)
        found["offset_mass"] = gather_weights(p, lse, keys)
    if statistics.pairs:
        masses = [gather_weights(p, lse, keys).sum(-1) for keys in statistics.pair_keys(p.query.device)]
        found["pair_mass"] = torch.stack(masses, -1)
    return found


def _give_to_sinks(output: Tensor, lse: Tensor, sinks: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Take from the output (B, H, L, E) the share of the sinks; a row without keys goes to its sink whole."""
    sink = sinks.to(lse.dtype)[:, None]
    no_key = lse == -torch.inf
    above = torch.where(no_key, 0, lse) - sink
    output = output * torch.where(no_key, 0, torch.sigmoid(above))[..., None]
    return output, {
        "lse": torch.logaddexp(lse, sink),
        "sink_mass": torch.where(no_key, 1, torch.sigmoid(-above)),
    }


class _Attention(torch.autograd.Function):
    """`_over_tiles` with a backward pass; second derivatives raise."""

    @staticmethod
    def forward(ctx, query, key, value, bias, slopes, problem: Problem, statistics: Statistics | None):
        plain = replace(
            problem, query=query, key=key, value=value, bias=bias, alibi_slopes=slopes, sinks=None
        )  # fmt: skip
        names = () if statistics is None else statistics.asked
        # The gradients of max_logit and of the entropy are made from the argmax and the entropy.
        also = ("argmax",) if "max_logit" in names else ()
        wanted = None if statistics is None else _with_names(statistics, also)
        found = _over_tiles(plain, wanted)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*(x for name, x in found.items() if name != "output" and not _carries(name)))
        ctx.visibility, ctx.constants = problem.visibility, (problem.scale, problem.softcap)
        ctx.dropout, ctx.statistics, ctx.names = (
            (problem.dropout_p, problem.dropout_seed),
            wanted,
            tuple(found),
        )
        ctx.save_for_backward(query, key, value, bias, slopes, *found.values())
        return ctx.names, *found.values()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, _names, *grads):
        query, key, value, bias, slopes, *found = ctx.saved_tensors
        scale, softcap = ctx.constants
        problem = Problem(
            query, key, value, ctx.visibility, scale, softcap, bias, slopes, None, *ctx.dropout
        )  # fmt: skip
        named = dict(zip(ctx.names, found, strict=True))
        incoming = {name: g for name, g in zip(ctx.names, grads, strict=True) if g is not None}
        inputs = ("query", "key", "value", "bias", "slopes")
        needs: dict[str, bool] = dict(zip(inputs, ctx.needs_input_grad[:5], strict=True))
        made = gradients(problem, ctx.statistics, named, incoming, needs)
        return *(made.get(name) for name in needs), None, None


def _carries(name: str) -> bool:
    return name in TABLE and TABLE[name].carries_gradient


def _with_names(statistics: Statistics, names: tuple[str, ...]) -> Statistics:
    """The same request with more row statistics, without what is gathered later."""
    return Statistics(
        *statistics.names,
        *names,
        classes=statistics.classes,
        n_classes=None if statistics.classes is None else statistics.n_classes,
    )

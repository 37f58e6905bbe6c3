"""Attention over tiles of queries x keys in plain PyTorch: any device, every form and statistic, linear memory.

The forward pass keeps a running softmax (Milakov and Gimelshein, arXiv:1805.02867); the backward pass makes the
weights again from each row's maximum and sum (Dao et al., arXiv:2205.14135, section 3).
"""

from __future__ import annotations

import torch
from torch import Tensor

from .cells import gather_weights, second_pass, weights
from .problem import Problem
from .running import Running
from .statistics import Observation, Statistics, finish
from .tiles import Tiling, block_sizes, kept, parts, scaled_queries, scores

__all__ = [
    "block_sizes",
    "forward",
    "gather_weights",
    "gathered",
    "observation",
    "over_tiles",
    "second_pass",
    "weights",
    "working_bytes",
]

# What backward needs of each row, kept beside the statistics.
_SAVED = ("top", "inverse")


@torch.no_grad()
def forward(problem: Problem, statistics: Statistics | None = None) -> Observation:
    """Compute a problem over tiles.

    Returns:
        the output (B, H, L, E) in the query's type, and the statistics asked, in `problem.sums_dtype`.
    """
    found = over_tiles(problem, statistics)
    if statistics is not None:
        found |= gathered(problem, statistics, found["lse"])
        if statistics.later:
            found |= second_pass(problem, statistics, found["lse"])
    return observation(problem, statistics, found)


def observation(problem: Problem, statistics: Statistics | None, found: dict[str, Tensor]) -> Observation:
    """What was found as if there were no sinks, as the result of a call: sinks take their share here."""
    p = problem
    output = found["output"]
    names = () if statistics is None else (*statistics.asked, *(x for x in statistics.later if x in found))
    asked = {name: found[name] for name in names}
    if p.sinks is not None:
        output, with_sink = _give_to_sinks(output, found["lse"], p.sinks)
        asked |= with_sink if statistics is not None else {}
    return Observation(output.to(p.query.dtype), finish(asked, p.visibility.query_mask))


def working_bytes(problem: Problem) -> int:
    """Bytes of work space beside inputs and outputs: copies of a tile, and the sums of a block of rows."""
    rows, keys = block_sizes(problem)
    rows, keys = min(rows, max(problem.L, 1)), min(keys, max(problem.S, 1))
    together = 1 if problem.query.device.type == "cpu" else problem.B
    size = 8 if problem.sums_dtype is torch.float64 else 4
    return together * problem.H * rows * (5 * keys + 3 * problem.E + 64) * size


def over_tiles(problem: Problem, statistics: Statistics | None) -> dict[str, Tensor]:
    """Output and statistics as if there were no sinks, and what backward needs: (B, H, L, ...) by name."""
    p = problem
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
    keys = torch.where(no_key, 0, lse)  # -inf would be NaN in second derivatives
    above = keys - sink
    output = output * torch.where(no_key, 0, torch.sigmoid(above))[..., None]
    return output, {
        "lse": torch.where(no_key, sink, torch.logaddexp(keys, sink)),
        "sink_mass": torch.where(no_key, 1, torch.sigmoid(-above)),
    }

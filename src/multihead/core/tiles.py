"""A problem cut into tiles of queries x keys: which tiles there are, and the scores inside one.

A tile's cells are laid out (b, G, H/G, l, s), so that keys and values are read once for the heads of a group.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from . import dropout
from .axes import Index, positions_of, take
from .problem import Problem


def block_sizes(problem: Problem) -> tuple[int, int]:
    """Queries and keys of a tile. They depend on L only: a sequence's bits do not depend on its neighbours."""
    rows, keys = (128, 512) if problem.query.device.type == "cpu" else (1024, 1024)
    rows = min(rows, max(problem.L, 1))
    return rows, keys if rows > 32 else 4 * keys


def parts(problem: Problem) -> Iterator[tuple[slice, Problem]]:
    """The sequences to be worked on together: one at a time on a CPU, all at once elsewhere."""
    step = 1 if problem.query.device.type == "cpu" else max(1, problem.B)
    if step == problem.B:
        yield slice(0, step), problem
        return
    for b in range(0, problem.B, step):
        yield slice(b, b + step), narrow(problem, slice(b, b + step))


def narrow(problem: Problem, batch: slice) -> Problem:
    """The same problem for some of the sequences."""
    p = problem
    return replace(
        p,
        query=p.query[batch],
        key=p.key[batch],
        value=p.value[batch],
        bias=None if p.bias is None else take(p.bias, 0, batch),
        visibility=p.visibility.sequence(batch),
    )


@dataclass(frozen=True)
class Tile:
    """One block of keys against one block of rows.

    Args:
        visible: bool, broadcasts to (b, G, H/G, l, s); None = every cell.
    """

    rows: slice
    keys: slice
    visible: Tensor | None


class Tiling:
    """The tiles of a problem that hold a visible cell."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.rows, self.keys = block_sizes(problem)
        visibility = problem.visibility
        self.exact, self.bounds = True, None
        if not visibility.is_full:
            spans = None if visibility.is_plain_causal else visibility.spans()
            self.exact = visibility.is_plain_causal or spans is not None
            self.bounds = visibility.bounds() if spans is None else spans

    def row_blocks(self) -> Iterator[slice]:
        for i in range(0, self.problem.L, self.rows):
            yield slice(i, min(i + self.rows, self.problem.L))

    def tiles(self, rows: slice) -> Iterator[Tile]:
        """The tiles of a block of rows, from left to right."""
        p = self.problem
        if self.bounds is None:
            for j in range(0, p.S, self.keys):
                yield from self._with_bias(Tile(rows, slice(j, min(j + self.keys, p.S)), None))
            return
        begin, end = (x[:, rows] for x in self.bounds)
        if begin.numel() == 0:
            return
        first = torch.where(begin < end, begin, p.S).amin()
        low, high, inner_low, inner_high = torch.stack([first, end.amax(), begin.amax(), end.amin()]).tolist()
        for j in range(low, high, self.keys):
            keys = slice(j, min(j + self.keys, high))
            if self.exact and inner_low <= keys.start and inner_high >= keys.stop:
                yield from self._with_bias(Tile(rows, keys, None))
                continue
            if self.exact:
                position = torch.arange(keys.start, keys.stop, device=begin.device)
                visible = ((position >= begin[..., None]) & (position < end[..., None]))[:, None]
            else:
                visible = p.visibility.dense(rows, keys)
                if not visible.any():
                    continue
            yield from self._with_bias(Tile(rows, keys, by_group(visible, p)))

    def _with_bias(self, tile: Tile) -> Iterator[Tile]:
        p = self.problem
        if p.bias is None:
            yield tile
            return
        shown = by_group(take(take(p.bias, 2, tile.rows), 3, tile.keys) != -torch.inf, p)
        if not shown.all():
            shape = (
                len(shown),
                *shown.shape[1:3],
                tile.rows.stop - tile.rows.start,
                tile.keys.stop - tile.keys.start,
            )
            visible = shown.expand(shape) if tile.visible is None else tile.visible & shown
            tile = replace(tile, visible=visible)
        yield tile


def by_group(cells: Tensor, problem: Problem) -> Tensor:
    """View cells (b, H|1, ...) as (b, G|1, H/G|1, ...)."""
    if cells.shape[1] == 1 and problem.H != 1:
        return cells[:, None]
    return cells.unflatten(1, (problem.G, problem.group))


def scaled_queries(problem: Problem, rows: Index) -> Tensor:
    """scale * query of some rows, the heads of a group one after another: (b, G, H/G * l, D)."""
    p = problem
    query = p.query[:, :, rows].to(p.sums_dtype) * p.scale
    return query.reshape(query.shape[0], p.G, p.group * query.shape[2], p.D)


def scores(
    problem: Problem, queries: Tensor, rows: Index, keys: Index, visible: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Scores of a tile (b, G, H/G, l, s), -inf where invisible, and the softcap's tanh (scores without one)."""
    p = problem
    key = p.key[:, :, keys].to(queries.dtype)
    cells = (queries @ key.mT).unflatten(2, (p.group, queries.shape[2] // p.group if p.group else 0))
    capped = cells
    if p.softcap is not None:
        capped = torch.tanh(cells / p.softcap)
        cells = capped * p.softcap
    if p.bias is not None:
        cells = cells + by_group(take(take(p.bias, 2, rows), 3, keys), p).to(cells.dtype)
    if p.alibi_slopes is not None:
        slopes = p.alibi_slopes.to(cells.dtype).view(p.G, p.group, 1, 1)
        cells = cells - slopes * distances(p, rows, keys).to(cells.dtype)
    if visible is not None:
        cells = cells.masked_fill(~visible, -torch.inf)
    return cells, capped


def distances(problem: Problem, rows: Index, keys: Index) -> Tensor:
    """|p - j| of a tile: int64 (b|1, 1, 1, l, s)."""
    visibility = problem.visibility
    j = positions_of(keys, problem.S, visibility.device)
    return (visibility.positions(rows)[:, None, None, :, None] - j).abs()


def kept(problem: Problem, batch: slice, tile: Tile, dtype: torch.dtype) -> Tensor | None:
    """Dropout's factor of each cell of a tile, 0 or 1 / (1 - p); None without dropout."""
    p = problem
    if p.dropout_p == 0:
        return None
    device = p.query.device
    index = (torch.arange(s.start, s.stop, device=device) for s in (batch, slice(0, p.H), tile.rows, tile.keys))
    return by_group(dropout.factors(p, dtype, *index), p)

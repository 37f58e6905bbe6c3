"""Exact weights of any cells, made again from q, k and a row's lse, and what a second pass makes of them.

A weight is exp(s - lse): with the lse of an observation that has sinks, a row sums to 1 - sink_mass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from .axes import Index, take
from .masking import ALL, gather_cells
from .problem import Problem
from .statistics import Statistics
from .tiles import by_group, parts, scaled_queries, scores

_CELLS_AT_ONCE = 1 << 22


@torch.no_grad()
def weights(problem: Problem, lse: Tensor, rows: Index = ALL, keys: Index = ALL) -> Tensor:
    """Exact weights of rows and keys, each a slice or a tensor of indices: (B, H, l, s), 0 where invisible."""
    p = problem
    visible = by_group(p.visible(rows, keys), p)
    cells, _ = scores(p, scaled_queries(p, rows), rows, keys, visible)
    cells = (cells - by_group(lse[:, :, rows, None].to(cells.dtype), p)).exp()
    return cells.masked_fill(~visible, 0).flatten(1, 2)


@torch.no_grad()
def gather_weights(problem: Problem, lse: Tensor, keys: Tensor) -> Tensor:
    """Weights at listed keys of each row.

    Args:
        lse: (B, H, L).
        keys: integers (B|1, L, K).

    Returns:
        (B, H, L, K), 0 where a key is invisible or outside 0..S-1.
    """
    found = torch.zeros(*lse.shape, keys.shape[-1], dtype=problem.sums_dtype, device=problem.query.device)
    if found.numel() == 0 or problem.S == 0:
        return found
    for batch, part in parts(problem):
        listed = keys[batch] if len(keys) > 1 else keys
        step = max(1, _CELLS_AT_ONCE // max(1, part.B * part.G * keys.shape[-1] * max(part.D, 1)))
        for i in range(0, part.L, step):
            rows = slice(i, min(i + step, part.L))
            found[batch, :, rows] = _gather_rows(part, lse[batch, :, rows], rows, listed[:, rows])
    return found


def _gather_rows(p: Problem, lse: Tensor, rows: slice, keys: Tensor) -> Tensor:
    visible = p.visibility.at(rows, keys)
    inside = keys.clamp(0, p.S - 1)
    key = p.key[torch.arange(p.B, device=keys.device)[:, None, None], :, inside]  # (b, l, K, G, D)
    # In double: a score and its row's lse may both be large, and only their difference counts.
    queries = scaled_queries(p, rows).double().unflatten(2, (p.group, -1))
    cells = torch.einsum("bgrld,blkgd->bgrlk", queries, key.double()).flatten(1, 2)
    if p.softcap is not None:
        cells = p.softcap * torch.tanh(cells / p.softcap)
    if p.bias is not None:
        bias = gather_cells(p.bias, rows, inside, p.S)
        visible = visible & (bias != -torch.inf)
        cells = cells + bias.to(cells.dtype)
    if p.alibi_slopes is not None:
        distance = (p.visibility.positions(rows)[:, None, :, None] - keys[:, None]).abs()
        cells = cells - p.alibi_slopes.to(cells.dtype)[:, None, None] * distance
    return torch.where(visible, (cells - lse[..., None].to(cells.dtype)).exp(), 0)


@torch.no_grad()
def second_pass(problem: Problem, statistics: Statistics, lse: Tensor) -> dict[str, Tensor]:
    """What `statistics.later` asks, from the weights made once more, a block of rows at a time.

    Args:
        lse: (B, H, L), of the keys alone.

    Returns:
        by name, in `problem.sums_dtype` (`statistics.TABLE` has the layouts).
    """
    p, m, k = problem, statistics.map, statistics.top_keys
    device, sides = p.query.device, distance_sides(p)
    found = {
        name: torch.zeros(p.B, p.H, *shape, dtype=p.sums_dtype, device=device)
        for name, shape in second_pass_shapes(p, statistics).items()
        if name in statistics.later and name != "top_keys"
    }
    if k:
        found["top_keys"] = torch.full((p.B, p.H, p.L, k), -1, dtype=torch.int64, device=device)
    if p.S == 0 or p.L == 0:
        return {name: found[name] for name in statistics.later}
    row_cell, key_cell = (_cell_of_each(n, m, device) for n in (p.L, p.S)) if m else (None, None)
    for batch, rows, block in _row_blocks(p, lse):
        if "received" in found:
            found["received"][batch] += block.sum(2)
        if "received_max" in found:
            found["received_max"][batch] = torch.maximum(found["received_max"][batch], block.amax(2))
        if "distance_histogram" in found:
            bins = distance_bins(p.visibility.sequence(batch).positions(rows)[:, :, None] - _positions(p), sides)
            bins = bins[:, None].expand(block.shape).flatten(2)
            found["distance_histogram"][batch].scatter_add_(2, bins, block.flatten(2))
        if row_cell is not None and key_cell is not None:
            # Columns first: the sums and maxima of each line of the map.
            lines, line = row_cell[rows].unique_consecutive(return_inverse=True)
            pooled = block.new_zeros(*block.shape[:2], len(lines), p.S)
            place = line[:, None].expand(block.shape)
            cells = lines[:, None] * m + key_cell
            for name, add in (("map", pooled.scatter_add), ("map_max", _maxima(pooled))):
                of_lines = add(2, place, block).flatten(2)
                own, where = found[name][batch].flatten(2), cells.flatten().expand(of_lines.shape)
                whole = own.scatter_add(2, where, of_lines) if name == "map" else _maxima(own)(2, where, of_lines)
                found[name][batch] = whole.unflatten(2, (m, m))
        if k:
            n = min(k, p.S)
            visible = narrow_visible(p, batch, rows).expand(block.shape)
            ordered, keys = torch.sort(block.masked_fill(~visible, -1), stable=True, dim=-1, descending=True)
            there = ordered[..., :n] != -1
            found["top_keys"][batch, :, rows, :n] = torch.where(there, keys[..., :n], -1)
            found["top_weights"][batch, :, rows, :n] = torch.where(there, ordered[..., :n], 0)
    return {name: found[name] for name in statistics.later}


def second_pass_shapes(problem: Problem, statistics: Statistics) -> dict[str, tuple[int, ...]]:
    """The axes after (B, H) of every statistic of the second pass, in the order of the table."""
    p, m, k = problem, statistics.map, statistics.top_keys
    return {
        "received": (p.S,),
        "received_max": (p.S,),
        "distance_histogram": (2 * distance_sides(p) + 1,),
        "map": (m, m),
        "map_max": (m, m),
        "top_keys": (p.L, k),
        "top_weights": (p.L, k),
    }


def _maxima(tensor: Tensor) -> Callable[[int, Tensor, Tensor], Tensor]:
    return lambda axis, index, source: tensor.scatter_reduce(axis, index, source, "amax")


def _positions(p: Problem) -> Tensor:
    return torch.arange(p.S, device=p.query.device)


def distance_sides(problem: Problem) -> int:
    """Bins of `distance_histogram` on either side of 0; what is further than the last is in it."""
    return max(problem.L, problem.S).bit_length()


def distance_bins(distance: Tensor, sides: int) -> Tensor:
    """Which bin of 2 * sides + 1 each distance p - j is in (`statistics.distance_ranges`)."""
    bits = torch.frexp(distance.abs().double()).exponent.long().clamp(max=sides)  # 1 for 1, 2 for 2 and 3, ...
    return sides + torch.where(distance < 0, -bits, bits)


def narrow_visible(problem: Problem, batch: slice, rows: slice) -> Tensor:
    """Visible cells of some sequences and rows over all keys: bool (b|1, H|1, l, S)."""
    visible = problem.visibility.sequence(batch).dense(rows)
    if problem.bias is None:
        return visible
    return visible & (take(take(problem.bias, 0, batch), 2, rows) != -torch.inf)


def _row_blocks(p: Problem, lse: Tensor) -> Iterator[tuple[slice, slice, Tensor]]:
    """Weights of blocks of rows over all keys, in bounded memory: (sequences, rows, (b, H, l, S))."""
    for batch, part in parts(p):
        step = max(1, _CELLS_AT_ONCE // max(1, part.B * part.H * part.S))
        for i in range(0, part.L, step):
            rows = slice(i, min(i + step, part.L))
            yield batch, rows, weights(part, lse[batch], rows)


def _cell_of_each(size: int, m: int, device: torch.device) -> Tensor:
    """Which of m cells each of `size` positions is in: int64 (size,)."""
    return torch.arange(size, device=device) * m // size

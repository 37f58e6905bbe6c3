"""Exact weights of any cells, made again from q, k and a row's lse, and what a second pass makes of them.

A weight is exp(s - lse): with the lse of an observation that has sinks, a row sums to 1 - sink_mass.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from .axes import Index, take
from .masking import ALL, gather_cells
from .problem import Problem
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
def pooled_map(problem: Problem, lse: Tensor, m: int) -> tuple[Tensor, Tensor]:
    """The weights pooled to m x m cells: the sum and the largest of each, two (B, H, m, m).

    Cell (a, c) holds rows a*L//m .. (a+1)*L//m - 1 and keys c*S//m .. (c+1)*S//m - 1; a cell of nothing is 0.
    """
    p = problem
    total = torch.zeros(p.B, p.H, m, m, dtype=p.sums_dtype, device=p.query.device)
    largest = torch.zeros_like(total)
    if p.S == 0:
        return total, largest
    keys, there = _cells_of(p.S, m, p.query.device)
    row_cell = _cell_of_each(p.L, m, p.query.device)
    for batch, rows, block in _row_blocks(p, lse):
        gathered = block.index_select(-1, keys.flatten()).unflatten(-1, keys.shape)
        gathered = torch.where(there, gathered, 0)
        total[batch].index_add_(2, row_cell[rows], gathered.sum(-1))
        place = row_cell[rows, None].expand(*block.shape[:2], -1, m)
        largest[batch].scatter_reduce_(2, place, gathered.amax(-1), "amax")
    return total, largest


@torch.no_grad()
def top_keys(problem: Problem, lse: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k heaviest keys of each row and their weights, heaviest first: two (B, H, L, k).

    Where a row sees fewer keys, the rest are key -1 with weight 0.
    """
    p = problem
    shape = (p.B, p.H, p.L, k)
    keys = torch.full(shape, -1, dtype=torch.int64, device=p.query.device)
    heaviest = torch.zeros(shape, dtype=p.sums_dtype, device=p.query.device)
    n = min(k, p.S)
    for batch, rows, block in _row_blocks(p, lse):
        visible = narrow_visible(p, batch, rows).expand(block.shape)
        values, indices = block.masked_fill(~visible, -1).topk(n, dim=-1)
        keys[batch, :, rows, :n] = torch.where(values < 0, -1, indices)
        heaviest[batch, :, rows, :n] = torch.where(values < 0, 0, values)
    return keys, heaviest


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
    edges = torch.tensor([i * size // m for i in range(1, m + 1)], device=device)
    return torch.searchsorted(edges, torch.arange(size, device=device), right=True)


def _cells_of(size: int, m: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """The positions of each of m cells (m, width), and which are there: narrow cells are filled up."""
    edges = torch.tensor([i * size // m for i in range(m + 1)], device=device)
    width = -(-size // m)
    positions = edges[:-1, None] + torch.arange(width, device=device)
    return positions.clamp(max=size - 1), positions < edges[1:, None]

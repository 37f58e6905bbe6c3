"""A map small enough to draw: L x S weights pooled to m x m cells, without ever holding all of them."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import torch
from torch import Tensor

CELLS = 96


def cell_edges(length: int, most: int = CELLS) -> list[int]:
    """Return where each of at most `most` cells begins, and where the last ends; sizes as even as can be."""
    count = min(most, length)
    return [length * cell // count for cell in range(count + 1)] if count else [0]


def pooled_max(weights: Callable[[slice, slice], Tensor], edges: list[int], causal: bool) -> Tensor:
    """Return the largest weight in each cell (H, m, m).

    `weights(rows, keys)` gives exact weights (H, l, s); it is asked for one row of cells at a time, and in
    a causal model only up to the last key that these rows see.
    """
    sizes = torch.tensor(edges).diff()
    cell_of_key = torch.arange(len(sizes)).repeat_interleave(sizes)
    bands = []
    for cell, (begin, end) in enumerate(pairwise(edges)):
        last = edges[cell + 1] if causal else edges[-1]
        best = weights(slice(begin, end), slice(0, last)).amax(-2)  # (H, s)
        band = torch.zeros(len(best), len(sizes))
        bands.append(band.scatter_reduce_(1, cell_of_key[:last].expand_as(best), best.to(band.dtype), "amax"))
    return torch.stack(bands, dim=1)

"""The numbers that every candidate of a shape computes with."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..core.pages import Pages
from .shapes import PAGE, Shape


@dataclass(frozen=True)
class Inputs:
    """Queries (B, H, L, D), keys (B, G, S, D), values (B, G, S, E), the gradient (B, H, L, E) into the output.

    Args:
        pages: where the shape has a cache, what it holds; `key` and `value` are the same numbers, exactly.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    gradient: Tensor
    pages: tuple[Pages, Pages] | None = None

    @property
    def stored(self) -> tuple[Tensor, Tensor] | tuple[Pages, Pages]:
        """Keys and values as the shape has them stored."""
        return (self.key, self.value) if self.pages is None else self.pages

    @classmethod
    def of(cls, shape: Shape, seed: int = 0) -> Inputs:
        """Normally distributed numbers, rounded to the shape's type; the same for the same seed."""
        s, random = shape, torch.Generator().manual_seed(seed)

        def normal(*size: int) -> Tensor:
            return torch.randn(*size, generator=random).to(s.torch_dtype)

        query = normal(s.B, s.H, s.L, s.D)
        if s.cache is None:
            key, value = normal(s.B, s.G, s.S, s.D), normal(s.B, s.G, s.S, s.E)
            return cls(query, key, value, normal(s.B, s.H, s.L, s.E) if s.training else query)
        n = s.B * s.S // PAGE
        table = torch.randperm(n, generator=random).view(s.B, -1).int()
        keys, values = (_pages(normal(n, s.G, PAGE, width), table, s.cache) for width in (s.D, s.E))
        return cls(query, keys.dense(s.torch_dtype), values.dense(s.torch_dtype), query, (keys, values))


def _pages(data: Tensor, table: Tensor, cache: str) -> Pages:
    if cache == "pages":
        return Pages(data, table)
    pages = Pages.int8(data, table)
    assert pages.scales is not None
    # Scales of eight bits: their products with integers are float32 numbers, so all candidates have the same ones.
    return replace(pages, scales=pages.scales.bfloat16().float())


def visible(shape: Shape, rows: Tensor | None = None) -> Tensor | None:
    """Which keys these queries see, bool (rows, S); by default all queries; None where every query sees every key."""
    if not shape.causal:
        return None
    at = (torch.arange(shape.L) if rows is None else rows)[:, None]
    keys = torch.arange(shape.S)
    found = keys <= at
    return found if shape.window is None else found & (keys > at - shape.window)

"""The numbers that every candidate of a shape computes with."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .shapes import Shape


@dataclass(frozen=True)
class Inputs:
    """Queries (B, H, L, D), keys and values (B, G, S, D), and the gradient (B, H, L, D) that comes into the output."""

    query: Tensor
    key: Tensor
    value: Tensor
    gradient: Tensor

    @classmethod
    def of(cls, shape: Shape, seed: int = 0) -> Inputs:
        """Normally distributed numbers, rounded to the shape's type; the same for the same seed."""
        s, random = shape, torch.Generator().manual_seed(seed)

        def normal(*size: int) -> Tensor:
            return torch.randn(*size, generator=random).to(s.torch_dtype)

        query, key, value = normal(s.B, s.H, s.L, s.D), normal(s.B, s.G, s.S, s.D), normal(s.B, s.G, s.S, s.D)
        return cls(query, key, value, normal(s.B, s.H, s.L, s.D) if s.training else query)


def visible(shape: Shape, rows: Tensor | None = None) -> Tensor | None:
    """Which keys these queries see, bool (rows, S); by default all queries; None where every query sees every key."""
    if not shape.causal:
        return None
    at = (torch.arange(shape.L) if rows is None else rows)[:, None]
    keys = torch.arange(shape.S)
    found = keys <= at
    return found if shape.window is None else found & (keys > at - shape.window)

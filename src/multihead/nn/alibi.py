"""Slopes of attention with linear biases."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def alibi_slopes(n_heads: int) -> Tensor:
    """The slope of each head: float32 (H,).

    For a power of two they are 2 ** (-8 / H), its square, its cube, ...; for another number those of the power of
    two below, and then every other one of the power of two above (Press et al. 2021, Train Short, Test Long,
    section 3 and its code).

    Raises:
        ValueError: fewer than one head.

    Example:
        >>> alibi_slopes(4).tolist()
        [0.25, 0.0625, 0.015625, 0.00390625]
    """
    if n_heads < 1:
        raise ValueError(f"n_heads: expected 1 or more, got {n_heads}")
    power = 2 ** math.floor(math.log2(n_heads))
    slopes = [2 ** (-8 * (i + 1) / power) for i in range(power)]
    between = [2 ** (-8 * (i + 1) / (2 * power)) for i in range(0, 2 * (n_heads - power), 2)]
    return torch.tensor(slopes + between, dtype=torch.float64).float()

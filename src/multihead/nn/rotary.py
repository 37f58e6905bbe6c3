"""Rotary positions: a query or key is turned by angles that grow with its position (Su et al. 2021, RoFormer).

A pair of components (a, b) with frequency f at position p becomes (a cos pf - b sin pf, b cos pf + a sin pf), so
that the product of a query and a key depends on the distance of their positions alone.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

PAIRINGS = ("half", "interleaved")
Tables = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class LinearScaling:
    """Positions divided by a factor, so that a longer text spans the trained positions (Chen et al. 2023).

    Args:
        factor: how many times longer.
    """

    factor: float

    def __post_init__(self) -> None:
        _check_positive("factor", self.factor)

    def __call__(self, frequencies: Tensor) -> Tensor:
        return frequencies / self.factor


@dataclass(frozen=True)
class Llama3Scaling:
    """Slow frequencies divided by a factor, fast ones kept, a ramp between (Llama 3.1, Dubey et al. 2024).

    A frequency counts as slow when it turns fewer than `low` times over the trained context, as fast when it turns
    more than `high` times.

    Args:
        factor: `factor` of a published `rope_scaling`.
        low, high: its `low_freq_factor` and `high_freq_factor`.
        trained_context: its `original_max_position_embeddings`.
    """

    factor: float = 8.0
    low: float = 1.0
    high: float = 4.0
    trained_context: int = 8192

    def __post_init__(self) -> None:
        for name in ("factor", "low", "high", "trained_context"):
            _check_positive(name, getattr(self, name))
        if not self.low < self.high:
            raise ValueError(f"high: expected a number over low={self.low}, got {self.high}")

    def __call__(self, frequencies: Tensor) -> Tensor:
        turns = frequencies * self.trained_context / (2 * math.pi)
        kept = ((turns - self.low) / (self.high - self.low)).clamp(0, 1)
        return frequencies * (kept + (1 - kept) / self.factor)


@dataclass(frozen=True)
class Rotary:
    """Which components turn together, and how fast.

    Args:
        theta: the base; pair i of n turns by theta ** (-i / n) a position.
        pairing: "half" pairs component i with i + n (GPT-NeoX, Llama as Hugging Face publishes it), "interleaved"
            pairs 2i with 2i + 1 (the paper, GPT-J, Cohere).
        dims: how many components turn, from the first; the others stay. An even number.
        fraction: the same as a share of D (GPT-NeoX's `rotary_pct`); at most one of the two is given.
        scaling: `Llama3Scaling`, `LinearScaling`, or None.

    Raises:
        ValueError: an argument does not fit.

    Example:
        >>> Rotary(theta=500000.0, scaling=Llama3Scaling(factor=8.0)).turning(128)
        128
    """

    theta: float = 10000.0
    pairing: str = "half"
    dims: int | None = None
    fraction: float | None = None
    scaling: LinearScaling | Llama3Scaling | None = None

    def __post_init__(self) -> None:
        _check_positive("theta", self.theta)
        if self.pairing not in PAIRINGS:
            raise ValueError(f"pairing: expected 'half' or 'interleaved', got {self.pairing!r}")
        if self.dims is not None and self.fraction is not None:
            raise ValueError(f"dims: expected it without fraction, got dims={self.dims} and fraction={self.fraction}")
        if self.dims is not None and (self.dims < 0 or self.dims % 2):
            raise ValueError(f"dims: expected an even number of components, got {self.dims}")
        if self.fraction is not None and not 0 <= self.fraction <= 1:
            raise ValueError(f"fraction: expected a share from 0 to 1, got {self.fraction}")

    def turning(self, d_head: int) -> int:
        """How many of D components turn.

        Raises:
            ValueError: an odd number, or more than there are.
        """
        turning = self.dims
        if turning is None:
            turning = d_head if self.fraction is None else int(d_head * self.fraction)
        if turning > d_head or turning % 2:
            raise ValueError(f"rotary: expected an even number of at most D={d_head} turning components, got {turning}")
        return turning

    def frequencies(self, d_head: int) -> Tensor:
        """Radians a position of each pair: float64 (n,), n half of the components that turn."""
        turning = self.turning(d_head)
        found = self.theta ** -(torch.arange(0, turning, 2, dtype=torch.float64) / max(turning, 1))
        return found if self.scaling is None else self.scaling(found)

    def tables(self, positions: Tensor, d_head: int, like: Tensor) -> Tables:
        """Cosine and sine of every angle: two (L, n), or (B, 1, L, n) for positions (B, L).

        They are formed in float64 and kept in float32, or in the type of `like` where that is wider, on its device.
        """
        angles = positions.to("cpu", torch.float64)[..., None] * self.frequencies(d_head)
        angles = angles if angles.ndim == 2 else angles[:, None]
        dtype = torch.promote_types(like.dtype, torch.float32)
        return angles.cos().to(like.device, dtype), angles.sin().to(like.device, dtype)

    def turn(self, x: Tensor, tables: Tables) -> Tensor:
        """Queries or keys (B, H, L, D) turned by the tables of their positions, in their own type."""
        cos, sin = tables
        turning = 2 * cos.shape[-1]
        moved = x[..., :turning].to(cos.dtype)
        if self.pairing == "half":
            a, b = moved.chunk(2, -1)
            moved = torch.cat([a * cos - b * sin, b * cos + a * sin], -1)
        else:
            a, b = moved[..., ::2], moved[..., 1::2]
            moved = torch.stack([a * cos - b * sin, b * cos + a * sin], -1).flatten(-2)
        moved = moved.to(x.dtype)
        return moved if turning == x.shape[-1] else torch.cat([moved, x[..., turning:]], -1)

    def __call__(self, x: Tensor, positions: Tensor) -> Tensor:
        """Turn queries or keys.

        Args:
            x: (B, H, L, D).
            positions: integers (L,) or (B, L).

        Returns:
            (B, H, L, D) in the type of x.
        """
        return self.turn(x, self.tables(positions, x.shape[-1], x))


def _check_positive(name: str, value: float) -> None:
    if not 0 < value < math.inf:
        raise ValueError(f"{name}: expected a positive number, got {value}")

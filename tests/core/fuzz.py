"""Random attention problems over every option, each made from one number: what fuzzed tests draw from.

drawn = draw(seed)                            # print(drawn) tells what it is
drawn.observe("native")                       # on a path
drawn.to(torch.float64).observe("reference")  # the same numbers in a wider type
leaves = drawn.leaves()                       # for gradients: mh.attention(**drawn.tensors | drawn.options | leaves)
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import torch
from torch import Tensor

import multihead as mh

INF = float("inf")
# Primes and the borders of what the paths cut problems into: 6 rows, 16 or 32 columns, 96, 128, 144, 256, 512.
SIZES = (1, 2, 3, 5, 6, 7, 11, 15, 17, 23, 31, 33, 47, 61, 96, 97, 127, 131, 143, 145, 211, 255, 257, 293, 511, 521)
WIDTHS = (1, 2, 3, 5, 7, 8, 13, 16, 17, 31, 33, 48, 64, 67, 80, 96, 127, 128, 129, 192, 257, 320, 511, 512)
TYPES = (torch.float32, torch.float32, torch.float64, torch.bfloat16, torch.float16)
DIFFERENTIABLE = ("query", "key", "value", "bias", "alibi_slopes", "sinks")


@dataclass
class Drawn:
    """One problem.

    Args:
        tensors: query (B, H, L, D), key (B, G, S, D), value (B, G, S, E), in any memory layout.
        options: keyword arguments of `attention`.
        notes: choices that the options do not show.
    """

    seed: int
    tensors: dict[str, Tensor]
    options: dict
    notes: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        def text(x: object) -> str:
            return f"{tuple(x.shape)} {x.dtype}" if isinstance(x, Tensor) else repr(x)

        told = {**{k: f"{text(x)} {x.stride()}" for k, x in self.tensors.items()}, **self.options}
        return f"draw({self.seed}): " + ", ".join(
            [f"{k}={x if isinstance(x, str) else text(x)}" for k, x in told.items()] + self.notes
        )

    @property
    def dtype(self) -> torch.dtype:
        return self.tensors["query"].dtype

    @property
    def n_keys(self) -> int:
        return self.tensors["key"].shape[2]

    def to(self, dtype: torch.dtype) -> Drawn:
        """The same problem with floats of another type."""

        def turned(given: dict) -> dict:
            return {k: x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() else x for k, x in given.items()}

        return Drawn(self.seed, turned(self.tensors), turned(self.options), self.notes)

    def observe(self, impl: str, statistics: mh.Statistics | None = None) -> mh.Observation:
        return mh.observe(**self.tensors, **self.options, statistics=statistics, impl=impl)

    def leaves(self) -> dict[str, Tensor]:
        """The tensors that carry gradients, by name, as leaves that lie in memory as before."""
        given = self.tensors | self.options
        return {name: given[name].detach().requires_grad_() for name in DIFFERENTIABLE if name in given}


def draw(seed: int, *, most_cells: int = 1_000_000, most_width: int = 512, types: tuple = TYPES) -> Drawn:
    """The problem of a seed.

    Args:
        most_cells: bound on B * H * L * S.
        most_width: bound on D and E.
    """
    pick = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    dtype = pick.choice(types)
    B, G, group = pick.choice([1, 1, 2, 3]), pick.choice([1, 1, 2, 3]), pick.choice([1, 1, 2, 5])
    H = G * group
    L, S = pick.choice(SIZES), pick.choice(SIZES)
    while most_cells < B * H * L * S:
        L, S = pick.choice(SIZES), pick.choice(SIZES)
    D, E = (pick.choice([w for w in WIDTHS if w <= most_width]) for _ in "DE")

    def floats(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    def bools(*shape: int) -> Tensor:
        return torch.rand(shape, generator=generator) < pick.choice([0.05, 0.5, 0.95])

    def integers(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=generator)

    def broadcast(*shape: int) -> list[int]:
        kept = [n if pick.random() < 0.6 else 1 for n in shape]
        return kept[pick.randrange(4) :] if kept[:3] == [1, 1, 1] else kept

    sharpness = pick.choice([0.1, 1, 1, 4, 20])
    tensors = {
        name: _laid_out(x.to(dtype), pick)
        for name, x in (
            ("query", floats(B, H, L, D) * sharpness),
            ("key", floats(B, G, S, D)),
            ("value", floats(B, G, S, E)),
        )
    }

    def mask() -> Tensor:
        cells = bools(*broadcast(B, H, L, S))
        kind = pick.choice(["random", "random", "runs", "early block hidden", "rows hidden"])
        if kind == "runs":
            width = cells.shape[-1]
            ends = integers(0, width + 1, 2, *cells.shape[:-1], 1).sort(0).values
            cells = (torch.arange(width) >= ends[0]) & (torch.arange(width) < ends[1])
        elif kind == "early block hidden":
            cells[..., : cells.shape[-1] // 2] = False
        elif kind == "rows hidden" and cells.ndim > 1:
            cells[..., :: pick.choice([2, 3]), :] = False
        return _transposed(cells) if pick.random() < 0.3 else cells

    def bias() -> Tensor:
        cells = floats(*broadcast(B, H, L, S)) * pick.choice([0.5, 5])
        kind = pick.choice(["finite", "some -inf", "a mask of -inf", "a mask of the lowest number"])
        own = pick.choice([dtype, torch.float32 if dtype is not torch.float64 else dtype])
        hidden = bools(*cells.shape)
        if kind == "some -inf":
            cells[hidden] = -INF
        elif kind == "a mask of -inf":
            cells = torch.zeros_like(cells).masked_fill(hidden, -INF)
        elif kind == "a mask of the lowest number":
            cells = torch.zeros_like(cells).masked_fill(hidden, torch.finfo(own).min)
        cells = cells.to(own)
        return _transposed(cells) if pick.random() < 0.3 else cells

    def documents() -> Tensor:
        ids = integers(-1, pick.choice([1, 2, 5]), B, S)
        return ids.sort(1).values if pick.random() < 0.6 else ids

    makers = {
        "causal": lambda: True,
        "window": lambda: tuple(pick.choice([None, 0, 1, 7, 63, 300]) for _ in range(2)),
        "mask": mask,
        "bias": bias,
        "alibi_slopes": lambda: (floats(H) * 0.3).to(torch.promote_types(dtype, torch.float32)),
        "key_lengths": lambda: integers(0, S + 1, B),
        "query_mask": lambda: bools(B, L),
        "document_ids": documents,
        "query_start": lambda: pick.choice([0, -2, pick.randint(-L, S), integers(-L, S + 1, B)]),
        "scale": lambda: pick.choice([0.0, -0.4, 0.02, 1.0]),
        "softcap": lambda: pick.choice([0.5, 7.0, 50.0]),
        "sinks": lambda: (floats(H) * pick.choice([1, 10])).to(torch.promote_types(dtype, torch.float32)),
    }
    names = sorted(pick.sample(sorted(makers), pick.choice([0, 1, 1, 2, 2, 3, 4, 6, len(makers)])))
    return Drawn(seed, tensors, {name: makers[name]() for name in names}, [f"sharpness={sharpness}"])


def _transposed(cells: Tensor) -> Tensor:
    """The same cells with another order in memory."""
    order = list(range(cells.ndim))[::-1]
    return cells.permute(order).contiguous().permute(order)


def _laid_out(x: Tensor, pick: random.Random) -> Tensor:
    """The same numbers in some memory layout; what lies between them is poison."""
    how = pick.choice(["plain", "plain", "heads inside", "columns apart", "a slice", "every other", "expanded"])
    B, heads, n, width = x.shape
    if how == "heads inside":
        return x.transpose(1, 2).contiguous().transpose(1, 2)
    if how == "columns apart":
        return x.mT.contiguous().mT
    if how == "a slice":
        whole = torch.full((B, heads + 1, n + 3, width + 5), torch.finfo(x.dtype).max, dtype=x.dtype)
        whole[:, :, -1] = torch.nan
        part = whole[:, 1:, 2:-1, 3:-2]
        return part.copy_(x)
    if how == "every other":
        return torch.full((*x.shape[:3], 2 * width), torch.nan, dtype=x.dtype)[..., ::2].copy_(x)
    if how == "expanded":
        axis = pick.randrange(4)
        return x.narrow(axis, 0, 1).expand(x.shape)
    return x

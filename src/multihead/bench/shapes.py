"""What is measured: a registry of shapes in sections, and what each section aims at."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum

import torch

PAGE = 64  # positions of a page, where keys and values are in pages


class Limit(Enum):
    """What bounds a section, so which of the machine's peaks its speed is held against."""

    COMPUTE = "GFLOP/s"
    MEMORY = "GB/s"


@dataclass(frozen=True)
class Shape:
    """One attention problem, in the letters of the axes.

    Args:
        B, H, G, L, D: batch, query heads, key/value heads, queries, width of a head.
        S: keys; by default as many as queries.
        causal: query i sees the keys up to its own position; only where L = S, so that every library agrees on it.
        window: a causal query sees its own key and those before it, this many in all.
        E: width of a value head; by default D.
        dtype: "float32", "bfloat16" or "float16".
        training: forward and backward, for the gradients of query, key and value.
        cache: "pages" has keys and values in pages of 64 positions, "int8" has them so and rounded; others than ours
            get the same numbers in one piece, int8 multiplied out.
    """

    B: int
    H: int
    G: int
    L: int
    D: int
    S: int = 0
    E: int = 0
    causal: bool = False
    window: int | None = None
    dtype: str = "float32"
    training: bool = False
    cache: str | None = None

    def __post_init__(self) -> None:
        for name, default in (("S", self.L), ("E", self.D)):
            if not getattr(self, name):
                object.__setattr__(self, name, default)
        if self.G < 1 or self.H % self.G:
            raise ValueError(f"G must divide H, got G={self.G} and H={self.H}")
        if (self.causal or self.window) and self.L != self.S:
            raise ValueError(f"causal shapes need L = S, got L={self.L} and S={self.S}")
        if self.window is not None and not (self.causal and self.window > 0):
            raise ValueError(f"window needs causal and a positive width, got {self.window}")
        if self.cache not in (None, "pages", "int8"):
            raise ValueError(f"cache must be 'pages', 'int8' or None, got {self.cache!r}")
        if self.cache and (self.S % PAGE or self.training or self.dtype != "float32"):
            raise ValueError(f"a cache is of whole pages of {PAGE}, for forward passes in float32, got {self}")

    def __str__(self) -> str:
        length = str(self.L) if self.L == self.S else f"{self.L}:{self.S}"
        width = str(self.D) if self.D == self.E else f"{self.D}/{self.E}"
        words = [f"{self.B},{self.H},{self.G},{length},{width}"]
        words += [self.dtype.replace("bfloat", "bf").replace("float", "f")] if self.dtype != "float32" else []
        words += ["causal"] if self.causal and self.window is None else []
        words += [f"window {self.window}"] if self.window is not None else []
        words += [self.cache] if self.cache else []
        return f"({' '.join(words)})"

    @property
    def torch_dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype)

    @property
    def visible_cells(self) -> int:
        """Pairs of a query and a key that it sees, over all heads."""
        if not self.causal:
            return self.B * self.H * self.L * self.S
        width = min(self.window or self.L, self.L)
        return self.B * self.H * (width * (width + 1) // 2 + (self.L - width) * width)

    @property
    def flops(self) -> int:
        """2 * visible cells * (D + E); with the backward 2 * visible cells * (4 D + 3 E).

        The backward multiplies five times for a cell: the scores once more, and the gradients of weights, values,
        queries and keys. What a library computes beyond that, or skips, is not counted.
        """
        return 2 * self.visible_cells * (4 * self.D + 3 * self.E if self.training else self.D + self.E)

    @property
    def bytes_moved(self) -> int:
        """Inputs read and output written, once each, keys and values as they are stored."""
        rows, keys, size = self.B * self.H * self.L, self.B * self.G * self.S, self.torch_dtype.itemsize
        width = self.D + self.E
        scales = 2 * (keys // PAGE) * torch.float32.itemsize if self.cache == "int8" else 0
        return rows * width * size + keys * width * (1 if self.cache == "int8" else size) + scales

    @property
    def score_bytes(self) -> int:
        """What the L x S scores of every head would take."""
        return self.B * self.H * self.L * self.S * self.torch_dtype.itemsize


@dataclass(frozen=True)
class Section:
    """Shapes that one question is asked of.

    Args:
        about: the question, for the heading.
        towards: what the project aims at there, on two AVX2 cores.
    """

    name: str
    about: str
    limit: Limit
    shapes: tuple[Shape, ...]
    towards: str = ""
    variants: tuple[str, ...] = field(default=())


def _prefill(dtype: str = "float32") -> tuple[Shape, ...]:
    return (
        Shape(1, 12, 12, 512, 64, dtype=dtype),
        Shape(1, 12, 12, 2048, 64, dtype=dtype),
        Shape(1, 12, 12, 2048, 64, causal=True, dtype=dtype),
        Shape(1, 32, 8, 2048, 128, causal=True, dtype=dtype),
        Shape(1, 9, 3, 4096, 64, causal=True, dtype=dtype),
        Shape(8, 12, 12, 128, 32, dtype=dtype),
        Shape(32, 12, 12, 64, 64, dtype=dtype),
        Shape(1, 9, 3, 8192, 64, causal=True, dtype=dtype),
    )


def _decode(dtype: str = "float32") -> tuple[Shape, ...]:
    return (
        Shape(1, 32, 8, 1, 128, S=8192, dtype=dtype),
        Shape(8, 32, 8, 1, 128, S=4096, dtype=dtype),
        Shape(1, 32, 32, 1, 128, S=4096, dtype=dtype),
        Shape(8, 12, 12, 1, 64, S=2048, dtype=dtype),
        Shape(4, 32, 1, 1, 128, S=8192, dtype=dtype),
    )


def _cached(cache: str) -> tuple[Shape, ...]:
    return (
        Shape(1, 32, 8, 1, 128, S=8192, cache=cache),
        Shape(8, 32, 8, 1, 128, S=4096, cache=cache),
        Shape(8, 12, 12, 1, 64, S=2048, cache=cache),
    )


# d_model 768 cut into heads of every width, the work for a token the same.
_D_MODEL = 768
_WIDTHS = (16, 32, 48, 64, 96, 128, 192, 256)

SECTIONS = (
    Section(
        "prefill",
        "a whole text at once, float32",
        Limit.COMPUTE,
        _prefill(),
        "geometric mean 1.6x PyTorch, least 1.15x; 75% of peak from L = 2048",
        ("observing",),
    ),
    Section(
        "decode",
        "one new token over a long cache, float32",
        Limit.MEMORY,
        _decode(),
        "3x PyTorch on the first two, 1.3x where G = H; 80% of peak reads",
    ),
    Section(
        "window",
        "a causal window of 256 keys, PyTorch by the same mask",
        Limit.COMPUTE,
        (Shape(1, 9, 3, 8192, 64, causal=True, window=256), Shape(1, 12, 12, 8192, 64, causal=True, window=256)),
        "10x PyTorch",
    ),
    Section(
        "small",
        "calls so small that their overhead shows",
        Limit.COMPUTE,
        (Shape(1, 4, 4, 8, 16), Shape(1, 8, 8, 32, 64), Shape(4, 8, 8, 16, 32), Shape(1, 12, 12, 64, 64, causal=True)),
        "at most 15 microseconds more than PyTorch on the first",
    ),
    Section(
        "half",
        "bfloat16 and float16, a whole text at once",
        Limit.COMPUTE,
        (*(_prefill("bfloat16")[i] for i in (0, 2, 3, 6)), *(_prefill("float16")[i] for i in (2, 3))),
        "1.3x PyTorch's bfloat16",
        ("in float32",),
    ),
    Section(
        "half-decode",
        "bfloat16 and float16, one new token over a long cache",
        Limit.MEMORY,
        (*_decode("bfloat16")[:3], *_decode("float16")[:2]),
        "1.7x our own float32",
        ("in float32",),
    ),
    Section(
        "paged",
        f"one new token over a cache in pages of {PAGE}, float32; the others have it in one piece",
        Limit.MEMORY,
        _cached("pages"),
        variants=("in one piece",),
    ),
    Section(
        "int8",
        f"one new token over a cache in int8 pages of {PAGE}; the others have its numbers multiplied out to float32",
        Limit.MEMORY,
        _cached("int8"),
        variants=("in float32 pages", "in one piece"),
    ),
    Section(
        "mla",
        "keys wider than values, as DeepSeek's latent attention has them: a whole text, then its absorbed form",
        Limit.COMPUTE,
        (Shape(1, 16, 16, 2048, 192, E=128, causal=True), Shape(1, 16, 1, 512, 576, S=2048, E=512)),
    ),
    Section(
        "mla-decode",
        "one new token in the absorbed form",
        Limit.MEMORY,
        (Shape(4, 16, 1, 1, 576, S=4096, E=512),),
    ),
    Section(
        "width",
        "the width of a head at a constant d_model of 768; then eight heads of 64 against one of 512",
        Limit.COMPUTE,
        (
            *(Shape(1, _D_MODEL // D, _D_MODEL // D, 1024, D) for D in _WIDTHS),
            Shape(1, 8, 8, 1024, 64),
            Shape(1, 1, 1, 1024, 512),
        ),
    ),
    Section(
        "train",
        "forward and backward, float32",
        Limit.COMPUTE,
        (
            Shape(1, 12, 12, 512, 64, training=True),
            Shape(1, 12, 12, 2048, 64, causal=True, training=True),
            Shape(1, 9, 3, 2048, 64, causal=True, training=True),
            Shape(8, 12, 12, 256, 64, causal=True, training=True),
            Shape(32, 6, 6, 64, 32, training=True),
            Shape(1, 32, 8, 1024, 128, causal=True, training=True),
            Shape(1, 2, 2, 4096, 64, causal=True, training=True),
        ),
        "geometric mean 1.4x PyTorch, least 1.1x; an entropy loss at most 1.15x of the plain step",
        ("entropy loss",),
    ),
)


def sections(names: Iterable[str] | None = None) -> tuple[Section, ...]:
    """The sections of these names in the registry's order, by default all; "half" and "mla" bring "-decode" along.

    Raises:
        ValueError: a name that no section has; the message lists those that there are.
    """
    if names is None:
        return SECTIONS
    asked = list(names)
    known = [section.name for section in SECTIONS]
    for name in asked:
        if name not in known:
            raise ValueError(f"no section is called {name!r}: there are {', '.join(known)}")
    return tuple(s for s in SECTIONS if s.name in asked or s.name.removesuffix("-decode") in asked)

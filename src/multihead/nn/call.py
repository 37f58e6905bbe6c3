"""One forward of the layer: its arguments checked and put together, with the cache's lengths and positions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..core import ops
from ..core.pages import Pages
from .kv_cache import KVCache, PagedKVCache


@dataclass
class Call:
    """One forward: what is attended, by which rules, and with which cache."""

    x: Tensor
    source: Tensor
    fixed: dict[str, Any]
    by_head: dict[str, Tensor | None]  # each has an axis of heads, of size H or 1
    key_lengths: Tensor | Sequence[int] | None
    cache: KVCache | PagedKVCache | None

    @property
    def is_cross(self) -> bool:
        return self.source is not self.x

    @property
    def is_cached_context(self) -> bool:
        """The context's keys and values are in the cache already."""
        return self.is_cross and self.cache is not None and self.cache.length > 0

    def positions(self) -> Tensor:
        """Where the tokens of x stand: (L,), or (B, L) where the sequences of a cache differ."""
        new = torch.arange(self.x.shape[1])
        if self.cache is None or self.cache.length == 0:
            return new
        lengths = self.cache.lengths
        return new + (lengths[0] if bool((lengths == lengths[0]).all()) else lengths[:, None])

    def remember(self, key: Tensor, value: Tensor) -> Sequence[Tensor | Pages]:
        """Put new keys and values into the cache, and give all there are; without a cache they are all there are."""
        if self.cache is None:
            return key, value
        left = None if self.fixed["window"] is None else self.fixed["window"][0]
        if left is not None and not self.is_cross:
            self.cache.keep_last(left)
        self.cache.append(key, value, self.key_lengths)
        return self.read()

    def read(self) -> Sequence[Tensor | Pages]:
        """The keys and values of the cache; its lengths and positions join the rules of the call.

        Pages are handed over where they lie: the compiled core reads them there, and the other paths gather them. A
        graph and autocast take plain tensors.
        """
        assert self.cache is not None
        takes_pages = not (ops.is_traced(self.x) or torch.is_autocast_enabled(self.x.device.type))
        cached = (self.cache.pages() if takes_pages else None) or self.cache.read()
        self.fixed["key_lengths"] = cached.key_lengths
        if not self.is_cross:
            self.fixed["query_start"] = cached.query_start
        return cached.key, cached.value

    def options(self, heads: slice) -> dict[str, Any]:
        """The arguments of `attention` for some heads."""
        found = dict(self.fixed)
        for name, tensor in self.by_head.items():
            axis = 1 if name in ("mask", "bias") else 0
            if tensor is not None and (axis == 0 or tensor.shape[1] != 1):
                tensor = tensor[(slice(None),) * axis + (heads,)]
            found[name] = tensor
        return found


def of_key_head(tensor: Tensor | Pages, g: int) -> Tensor | Pages:
    """One head of keys or values."""
    heads = slice(g, g + 1)
    return tensor.heads(heads) if isinstance(tensor, Pages) else tensor[:, heads]


def four_axes(name: str, tensor: Tensor | None, n_heads: int) -> Tensor | None:
    """A view with all of (B, H, L, S) named, so that a head can be taken from it."""
    if tensor is None:
        return None
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name}: expected a tensor, got {type(tensor).__name__}")
    four = tensor[(None,) * (4 - tensor.ndim)] if tensor.ndim < 4 else tensor
    if four.ndim > 4 or four.shape[1] not in (1, n_heads):
        raise ValueError(
            f"{name}: expected a shape that broadcasts to (B, H={n_heads}, L, S), got {tuple(tensor.shape)}"
        )
    return four


def check_input(name: str, tensor: Any, letter: str, width: int, B: int | None = None) -> None:
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name}: expected a tensor, got {type(tensor).__name__}")
    wide = f"{'d_context' if name == 'context' else 'd_model'}={width}"
    batch = "B" if B is None else f"B={B}"
    if tensor.ndim != 3 or tensor.shape[2] != width or B not in (None, tensor.shape[0]):
        raise ValueError(f"{name}: expected shape ({batch}, {letter}, {wide}), got {tuple(tensor.shape)}")

"""Keys and values of the tokens so far, so that a decoded token projects itself only.

`KVCache` keeps each sequence in one piece, `PagedKVCache` in pages of a pool that all sequences share (Kwon et al.
2023, PagedAttention). Both keep the numbers as they come, or as int8 with a scale for each key/value head and block
of positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..core.axes import check_integers, check_shape


class Cached(NamedTuple):
    """What attention needs of a cache: the hand-over between the two.

    Args:
        key: (B, G, S, D), S the length of the longest sequence; beyond a sequence's length anything may stand.
        value: (B, G, S, E).
        key_lengths: (B,), or None where all sequences are S long.
        query_start: position of the first token that the last `append` brought, an int or (B,).
    """

    key: Tensor
    value: Tensor
    key_lengths: Tensor | None
    query_start: int | Tensor


class _Cache:
    """What both kinds share: lengths, checks, int8. A kind says where the positions of a sequence lie.

    Buffers are named "key" and "value" ("key_scale", "value_scale": one cell a block, with int8).
    """

    def __init__(self, max_length: int | None, dtype: torch.dtype | None, block: int) -> None:
        if max_length is not None and max_length < 0:
            raise ValueError(f"max_length: expected 0 or more, got {max_length}")
        if dtype is not None and dtype is not torch.int8 and not dtype.is_floating_point:
            raise TypeError(f"dtype: expected a float type, torch.int8, or None for that of the keys, got {dtype}")
        if block < 1:
            raise ValueError(f"page_size, block_size: expected 1 or more, got {block}")
        self.max_length = max_length
        self.dtype = dtype
        self.block = block
        self._lengths: list[int] = []
        self._started: list[int] = []  # lengths before the last append
        self._buffers: dict[str, Tensor] = {}
        self._tails: dict[str, Tensor] = {}  # int8: the unfinished block of each sequence, not rounded
        self._widths: dict[str, int] = {}
        self._like: Tensor | None = None  # an empty tensor in the type and on the device of the keys

    @property
    def is_quantized(self) -> bool:
        return self.dtype is torch.int8

    @property
    def length(self) -> int:
        """Length of the longest sequence."""
        return max(self._lengths, default=0)

    @property
    def lengths(self) -> Tensor:
        """Length of each sequence: int64 (B,); empty before the first append."""
        return torch.tensor(self._lengths, dtype=torch.int64)

    @property
    def nbytes(self) -> int:
        """Bytes held, room that is not used yet included."""
        return sum(tensor.nbytes for tensor in (*self._buffers.values(), *self._tails.values()))

    def reset(self) -> None:
        """Forget every sequence; the next append may be of another batch."""
        self._lengths, self._started = [], []
        self._buffers, self._tails, self._widths, self._like = {}, {}, {}, None

    def append(self, key: Tensor, value: Tensor, key_lengths: Tensor | Sequence[int] | None = None) -> None:
        """Take the keys and values of the next tokens of every sequence.

        Args:
            key: (B, G, L, D), turned to their positions already where the layer has rotary positions.
            value: (B, G, L, E).
            key_lengths: (B,), how many of the L tokens of each sequence are real, the first ones; all by default.

        Raises:
            ValueError: another batch, number of heads, width or device than the cache holds; or it would be longer
                than `max_length`. The cache is as before then.
            TypeError: another type than the cache holds.
            RuntimeError: the keys or values need gradients, which no cache passes on.
        """
        new = self._check(key, value, key_lengths)
        if not self._lengths:
            self._lengths = [0] * len(new)
            self._widths = {"key": key.shape[3], "value": value.shape[3]}
            self._like = key.new_empty(0)
        after = [old + n for old, n in zip(self._lengths, new)]
        self._make_room(after, key.shape[1])
        for name, tensor in (("key", key.detach()), ("value", value.detach())):
            if self.is_quantized:
                self._write_int8(name, tensor, new)
            else:
                self._put(name, tensor.to(self._buffers[name].dtype), self._lengths, new)
        self._started, self._lengths = self._lengths, after

    def read(self) -> Cached:
        """All keys and values so far, plain; int8 is multiplied out, pages are gathered.

        Raises:
            RuntimeError: nothing was appended.
        """
        if self._like is None:
            raise RuntimeError("cache: nothing was appended yet")
        key, value = (self._plain(name) for name in ("key", "value"))
        device = key.device
        even = len(set(self._lengths)) <= 1 and len(set(self._started)) <= 1
        if even:
            return Cached(key, value, None, self._started[0] if self._started else 0)
        return Cached(key, value, self.lengths.to(device), torch.tensor(self._started, device=device))

    def _check(self, key: Tensor, value: Tensor, key_lengths: Tensor | Sequence[int] | None) -> list[int]:
        """Check an append, and give the number of new tokens of each sequence."""
        sizes: dict[str, int] = {}
        if self._like is not None:
            G = self._heads
            sizes = {"B": len(self._lengths), "G": G, "D": self._widths["key"], "E": self._widths["value"]}
        check_shape("key", key, "BGLD", sizes)
        check_shape("value", value, "BGLE", sizes)
        dtype, device = (key.dtype, key.device) if self._like is None else (self._like.dtype, self._like.device)
        for name, tensor in (("key", key), ("value", value)):
            if tensor.dtype is not dtype:
                raise TypeError(f"{name}: expected {dtype}, as the cache holds, got {tensor.dtype}")
            if tensor.device != device:
                raise ValueError(f"{name}: expected a tensor on {device}, as the cache is, got one on {tensor.device}")
            if tensor.requires_grad and torch.is_grad_enabled():
                raise RuntimeError(f"{name}: no gradient passes through a cache; call under torch.no_grad()")
        B, L = sizes["B"], sizes["L"]
        new = [L] * B
        if key_lengths is not None:
            counts = torch.as_tensor(key_lengths)
            check_shape("key_lengths", counts, "B", {"B": B})
            check_integers("key_lengths", counts)
            new = [int(n) for n in counts.tolist()]
            if not all(0 <= n <= L for n in new):
                raise ValueError(f"key_lengths: expected 0 to L={L} new tokens a sequence, got {new}")
        old = self._lengths or [0] * B
        for b, (have, more) in enumerate(zip(old, new)):
            if self.max_length is not None and have + more > self.max_length:
                raise ValueError(
                    f"cache: full: max_length is {self.max_length}, sequence {b} has {have} and {more} more came"
                )
        self._check_room([have + more for have, more in zip(old, new)])
        return new

    def _write_int8(self, name: str, values: Tensor, new: list[int]) -> None:
        """Round whole blocks: those that new tokens fall in are made again from what was not rounded."""
        (B, G, _, width), block = values.shape, self.block
        inside = [old % block for old in self._lengths]  # tokens of the unfinished block, kept in the tail
        first = [old // block for old in self._lengths]
        blocks = [-(-(i + n) // block) for i, n in zip(inside, new)]
        length = max(1, *blocks) * block
        stage = values.new_zeros(B, G, length, width)
        tail = self._tails.setdefault(name, values.new_zeros(B, G, block, width))
        stage[:, :, :block] = tail
        b, t = _cells(new, values.device)
        stage[b, :, torch.tensor(inside, device=values.device)[b] + t] = values[b, :, t]
        cut = stage.unflatten(2, (-1, block))
        scale = cut.abs().amax((3, 4)).float() / 127  # (B, G, blocks)
        rounded = (cut.float() / scale.clamp(min=torch.finfo(torch.float32).tiny)[..., None, None]).round()
        self._put(name, rounded.to(torch.int8).flatten(2, 3), [i * block for i in first], [n * block for n in blocks])
        self._put(f"{name}_scale", scale[..., None], first, blocks)
        rest = [(i + n) // block for i, n in zip(inside, new)]  # the block that is unfinished now, empty if none is
        padded = torch.cat([cut, cut.new_zeros(B, G, 1, block, width)], 2)
        self._tails[name] = padded[torch.arange(B), :, torch.tensor(rest)]

    def _plain(self, name: str) -> Tensor:
        assert self._like is not None
        found = self._get(name, self.length)
        if not self.is_quantized:
            return found.to(self._like.dtype)
        scale = self._get(f"{name}_scale", -(-self.length // self.block))
        scale = scale.repeat_interleave(self.block, 2)[:, :, : self.length]
        return (found * scale).to(self._like.dtype)

    def _cells_of_buffers(self) -> dict[str, tuple[int, torch.dtype, int]]:
        """Each buffer's width, type, and how many positions share a cell."""
        assert self._like is not None
        kind = self.dtype or self._like.dtype
        cells = {name: (width, kind, 1) for name, width in self._widths.items()}
        if self.is_quantized:
            cells |= {f"{name}_scale": (1, torch.float32, self.block) for name in self._widths}
        return cells

    @property
    def _heads(self) -> int:
        return self._buffers["key"].shape[1]

    def _check_room(self, lengths: list[int]) -> None:
        """Raise if sequences of these lengths cannot be held."""

    def _make_room(self, lengths: list[int], heads: int) -> None:
        """Make buffers that hold sequences of these lengths."""
        raise NotImplementedError

    def _put(self, name: str, values: Tensor, begin: list[int], counts: list[int]) -> None:
        """Write the first counts[b] of values (B, G, n, width) at cell begin[b] of each sequence."""
        raise NotImplementedError

    def _get(self, name: str, cells: int) -> Tensor:
        """The first cells of every sequence: (B, G, cells, width)."""
        raise NotImplementedError

    def __repr__(self) -> str:
        kind = self.dtype or (self._like.dtype if self._like is not None else "the keys' type")
        most = "" if self.max_length is None else f" of {self.max_length}"
        return f"{type(self).__name__}(lengths {self._lengths}{most}, {kind}, {self.nbytes:,} bytes)"


class KVCache(_Cache):
    """Each sequence in one piece, (B, G, room, D).

    Room doubles when it is used up: most appends copy nothing but themselves, and a token is copied once on average.

    Args:
        max_length: positions a sequence may have; more raise. None has no limit.
        dtype: how numbers are kept, by default as they come; torch.int8 rounds each block of a head to
            127 steps of its own, by half a step at most.
        block_size: positions that share an int8 scale.

    Raises:
        ValueError, TypeError: an argument does not fit.

    Example:
        >>> layer, cache = MultiHeadAttention(32, 4, causal=True), KVCache()
        >>> with torch.no_grad():
        ...     prompt = layer(torch.randn(2, 7, 32), cache=cache)
        ...     token = layer(torch.randn(2, 1, 32), cache=cache)
        >>> cache.lengths.tolist()
        [8, 8]
    """

    def __init__(
        self, max_length: int | None = None, *, dtype: torch.dtype | None = None, block_size: int = 64
    ) -> None:
        # Only a shared scale makes blocks: without one a position is a block, and no room is lost to rounding up.
        super().__init__(max_length, dtype, block_size if dtype is torch.int8 else 1)

    def _make_room(self, lengths: list[int], heads: int) -> None:
        needed = -(-max(lengths, default=0) // self.block)  # in blocks
        room = self._buffers["key"].shape[2] // self.block if self._buffers else 0
        if self._buffers and needed <= room:
            return
        room = max(needed, 2 * room)
        if self.max_length is not None:
            room = min(room, -(-self.max_length // self.block))
        assert self._like is not None
        for name, (width, dtype, shared) in self._cells_of_buffers().items():
            larger = self._like.new_empty(len(lengths), heads, room * self.block // shared, width, dtype=dtype)
            if name in self._buffers:
                old = self._buffers[name]
                larger[:, :, : old.shape[2]] = old
            self._buffers[name] = larger

    def _put(self, name: str, values: Tensor, begin: list[int], counts: list[int]) -> None:
        buffer = self._buffers[name]
        if len(set(begin)) <= 1 and len(set(counts)) <= 1 and begin:
            buffer[:, :, begin[0] : begin[0] + counts[0]] = values[:, :, : counts[0]]
            return
        b, t = _cells(counts, values.device)
        buffer[b, :, torch.tensor(begin, device=values.device)[b] + t] = values[b, :, t]

    def _get(self, name: str, cells: int) -> Tensor:
        return self._buffers[name][:, :, :cells]


class PagedKVCache(_Cache):
    """Pages of `page_size` positions from one pool, given to sequences as they grow and taken back when they end.

    Sequences of very different lengths waste less than a page each, and a finished one makes room for the next.

    Args:
        page_size: positions a page; with int8 also those that share a scale.
        max_length: positions a sequence may have; more raise. None has no limit.
        n_pages: pages in the pool; when they are used up an append raises. None lets the pool double.
        dtype: as in `KVCache`.

    Raises:
        ValueError, TypeError: an argument does not fit.
    """

    def __init__(
        self,
        page_size: int = 16,
        max_length: int | None = None,
        *,
        n_pages: int | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(max_length, dtype, page_size)
        if n_pages is not None and n_pages < 0:
            raise ValueError(f"n_pages: expected 0 or more, got {n_pages}")
        self.n_pages = n_pages
        self._tables: list[list[int]] = []
        self._free: list[int] = []

    @property
    def page_size(self) -> int:
        return self.block

    @property
    def block_tables(self) -> Tensor:
        """The pages of each sequence in order: int64 (B, most pages), -1 where it has no more."""
        most = max((len(table) for table in self._tables), default=0)
        return torch.tensor([table + [-1] * (most - len(table)) for table in self._tables], dtype=torch.int64)

    def reset(self) -> None:
        super().reset()
        self._tables, self._free = [], []

    def release(self, sequence: int) -> None:
        """End one sequence: its pages go back to the pool, its length is 0, and the next append may begin another.

        Raises:
            IndexError: there is no such sequence.
        """
        if not 0 <= sequence < len(self._lengths):
            raise IndexError(f"sequence: expected a number under B={len(self._lengths)}, got {sequence}")
        self._free += self._tables[sequence]
        self._tables[sequence] = []
        self._lengths = [0 if b == sequence else n for b, n in enumerate(self._lengths)]
        for tail in self._tails.values():
            tail[sequence] = 0

    def _check_room(self, lengths: list[int]) -> None:
        pages = sum(self._pages(lengths))
        if self.n_pages is not None and pages > self.n_pages:
            raise ValueError(f"cache: full: n_pages is {self.n_pages}, and {pages} pages of {self.block} are needed")

    def _make_room(self, lengths: list[int], heads: int) -> None:
        self._tables = self._tables or [[] for _ in lengths]
        wanted = [pages - len(table) for pages, table in zip(self._pages(lengths), self._tables)]
        missing = sum(wanted) - len(self._free)
        if missing > 0 or not self._buffers:
            self._grow(missing, heads)
        for table, more in zip(self._tables, wanted):
            table += [self._free.pop() for _ in range(more)]

    def _pages(self, lengths: list[int]) -> list[int]:
        return [-(-n // self.block) for n in lengths]

    def _grow(self, missing: int, heads: int) -> None:
        assert self._like is not None
        held = self._buffers["key"].shape[0] if self._buffers else 0
        room = max(held + missing, 2 * held) if self.n_pages is None else self.n_pages
        for name, (width, dtype, shared) in self._cells_of_buffers().items():
            larger = self._like.new_empty(room, heads, self.block // shared, width, dtype=dtype)
            if name in self._buffers:
                larger[:held] = self._buffers[name]
            self._buffers[name] = larger
        self._free = [*range(room - 1, held - 1, -1), *self._free]

    def _put(self, name: str, values: Tensor, begin: list[int], counts: list[int]) -> None:
        buffer, device = self._buffers[name], values.device
        b, t = _cells(counts, device)
        at = torch.tensor(begin, device=device)[b] + t
        page = self.block_tables.to(device)[b, at // buffer.shape[2]]
        buffer[page, :, at % buffer.shape[2]] = values[b, :, t]

    def _get(self, name: str, cells: int) -> Tensor:
        buffer = self._buffers[name]
        # A table's -1 takes the last page: some numbers for positions beyond a sequence's length, which nobody reads.
        tables = self.block_tables.to(buffer.device)
        return buffer[tables].transpose(1, 2).flatten(2, 3)[:, :, :cells]


def _cells(counts: list[int], device: torch.device) -> tuple[Tensor, Tensor]:
    """Sequence and token of every new token: two int64 (sum of counts,)."""
    most = torch.arange(max(counts, default=0), device=device)
    b, t = torch.nonzero(most < torch.tensor(counts, device=device)[:, None], as_tuple=True)
    return b, t

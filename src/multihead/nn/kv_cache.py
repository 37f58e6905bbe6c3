"""Keys and values of the tokens so far, so that a decoded token projects itself only.

`KVCache` keeps each sequence in one piece, `PagedKVCache` in pages of a pool that all sequences share (Kwon et al.
2023, PagedAttention). Both keep the numbers as they come, or as int8 with a scale for each key/value head and block
of positions. What lies in pages is handed to attention as `Pages`, which the compiled core reads where they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..core.axes import check_integers, check_shape
from ..core.pages import Pages

_NO_PAGE = -1


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


class CachedPages(NamedTuple):
    """The same with keys and values in pages: nothing is gathered, and int8 is not multiplied out."""

    key: Pages
    value: Pages
    key_lengths: Tensor | None
    query_start: int | Tensor


class _OnePiece:
    """Where numbers lie: each sequence in one piece, a buffer (B, G, room, width) for keys and one for values."""

    def __init__(self, max_length: int | None) -> None:
        self.max_length = max_length
        self.buffers: dict[str, Tensor] = {}

    def emptied(self) -> _OnePiece:
        """Another of the same limits."""
        return _OnePiece(self.max_length)

    def check_room(self, lengths: list[int]) -> None:
        """Sequences of any length can be held."""

    def make_room(self, lengths: list[int], heads: int, widths: dict[str, int], empty: Tensor) -> None:
        """Make buffers that hold sequences of these lengths, of the type and on the device of `empty`."""
        needed, room = max(lengths, default=0), self.buffers["key"].shape[2] if self.buffers else 0
        if self.buffers and needed <= room:
            return
        room = max(needed, 2 * room)
        room = room if self.max_length is None else min(room, self.max_length)
        for name, width in widths.items():
            larger = empty.new_empty(len(lengths), heads, room, width)
            if name in self.buffers:
                larger[:, :, : self.buffers[name].shape[2]] = self.buffers[name]
            self.buffers[name] = larger

    def put(self, name: str, values: Tensor, begin: list[int], counts: list[int]) -> None:
        """Write the first counts[b] of values (B, G, n, width) from position begin[b] of each sequence on."""
        buffer = self.buffers[name]
        if len(set(begin)) <= 1 and len(set(counts)) <= 1 and begin:
            buffer[:, :, begin[0] : begin[0] + counts[0]] = values[:, :, : counts[0]]
            return
        b, t = _cells(counts, values.device)
        buffer[b, :, torch.tensor(begin, device=values.device)[b] + t] = values[b, :, t].to(buffer.dtype)

    def forget(self, before: list[int]) -> None:
        """A piece is kept whole."""

    def plain(self, name: str, length: int, dtype: torch.dtype) -> Tensor:
        """All numbers up to a length: (B, G, length, width)."""
        return self.buffers[name][:, :, :length].to(dtype)

    def pages(self, length: int) -> tuple[Pages, Pages] | None:
        """Keys and values as pages; there are none."""


class _Pool:
    """Where numbers lie: in pages of a pool, a buffer (P, G, page, width) for keys and one for values.

    With int8 there are a "key_scale" and a "value_scale" too, (P, G, 1, 1): their pages hold one number, of a whole
    page.
    """

    def __init__(self, page: int, max_length: int | None, n_pages: int | None = None) -> None:
        if page < 1:
            raise ValueError(f"page_size, block_size: expected 1 or more, got {page}")
        self.page, self.max_length, self.n_pages = page, max_length, n_pages
        self.buffers: dict[str, Tensor] = {}
        self._tables: list[list[int]] = []
        self._free: list[int] = []
        self._table: Tensor | None = None  # the tables as a tensor, until they change

    def emptied(self) -> _Pool:
        """Another of the same limits."""
        return _Pool(self.page, self.max_length, self.n_pages)

    @property
    def table(self) -> Tensor:
        """The pages of each sequence: int64 (B, most pages), -1 where it has none."""
        if self._table is None:
            most = max((len(table) for table in self._tables), default=0)
            rows = [table + [_NO_PAGE] * (most - len(table)) for table in self._tables]
            self._table = torch.tensor(rows, dtype=torch.int64)
        return self._table

    def check_room(self, lengths: list[int]) -> None:
        """Raise if sequences of these lengths cannot be held."""
        held = len(self.buffers["key"]) if self.buffers else 0
        pages = held - len(self._free) + sum(self._wanted(lengths))
        if self.n_pages is not None and pages > self.n_pages:
            raise ValueError(f"cache: full: n_pages is {self.n_pages}, and {pages} pages of {self.page} are needed")

    def make_room(self, lengths: list[int], heads: int, widths: dict[str, int], empty: Tensor) -> None:
        """Give pages to sequences of these lengths; new ones are of the type and on the device of `empty`."""
        wanted = self._wanted(lengths)
        self._tables = self._tables or [[] for _ in lengths]
        missing = sum(wanted) - len(self._free)
        if missing > 0 or not self.buffers:
            self._grow(missing, len(lengths), heads, widths, empty)
        for table, more in zip(self._tables, wanted):
            table += [self._free.pop() for _ in range(more)]
        self._table = None if any(wanted) else self._table

    def _wanted(self, lengths: list[int]) -> list[int]:
        """How many pages sequences of these lengths lack."""
        return [-(-n // self.page) - len(table) for n, table in zip(lengths, self._tables or [[]] * len(lengths))]

    def _grow(self, missing: int, n_sequences: int, heads: int, widths: dict[str, int], empty: Tensor) -> None:
        held = self.buffers["key"].shape[0] if self.buffers else 0
        room = max(held + missing, 2 * held) if self.n_pages is None else self.n_pages
        if self.n_pages is None and self.max_length is not None:
            room = min(room, n_sequences * -(-self.max_length // self.page))
        kinds = {name: (self.page, width, empty.dtype) for name, width in widths.items()}
        if empty.dtype is torch.int8:
            kinds |= {f"{name}_scale": (1, 1, torch.float32) for name in widths}
        for name, (cells, width, dtype) in kinds.items():
            larger = empty.new_empty(room, heads, cells, width, dtype=dtype)
            if name in self.buffers:
                larger[:held] = self.buffers[name]
            self.buffers[name] = larger
        self._free = [*range(room - 1, held - 1, -1), *self._free]

    def put(self, name: str, values: Tensor, begin: list[int], counts: list[int]) -> None:
        """Write the first counts[b] of values (B, G, n, width) from cell begin[b] of each sequence on."""
        buffer, device = self.buffers[name], values.device
        b, t = _cells(counts, device)
        at = torch.tensor(begin, device=device)[b] + t
        page = self.table.to(device)[b, at // buffer.shape[2]]
        buffer[page, :, at % buffer.shape[2]] = values[b, :, t].to(buffer.dtype)

    def forget(self, before: list[int]) -> None:
        """Take back the pages of each sequence that lie before a position, whole."""
        for table, position in zip(self._tables, before):
            i = position // self.page - 1
            while i >= 0 and table[i] != _NO_PAGE:  # before a page that is gone there is none
                self._free.append(table[i])
                table[i], self._table, i = _NO_PAGE, None, i - 1

    def release(self, sequence: int) -> None:
        """Take back all pages of a sequence."""
        self._free += [page for page in self._tables[sequence] if page != _NO_PAGE]
        self._tables[sequence], self._table = [], None

    def plain(self, name: str, length: int, dtype: torch.dtype) -> Tensor:
        """All numbers up to a length, gathered: (B, G, length, width)."""
        return self._of(name, self.table.to(self.buffers[name].device), length).dense(dtype)

    def pages(self, length: int) -> tuple[Pages, Pages] | None:
        """Keys and values where they lie, with one table."""
        table = self.table.to(self.buffers["key"].device)
        return self._of("key", table, length), self._of("value", table, length)

    def _of(self, name: str, table: Tensor, length: int) -> Pages:
        scale = self.buffers.get(f"{name}_scale")
        return Pages(self.buffers[name], table, None if scale is None else scale[:, :, 0, 0], length)


class _Cache:
    """What both kinds share: lengths, checks, int8. A store says where the positions of a sequence lie."""

    def __init__(self, max_length: int | None, dtype: torch.dtype | None, store: _OnePiece | _Pool) -> None:
        if max_length is not None and max_length < 0:
            raise ValueError(f"max_length: expected 0 or more, got {max_length}")
        if dtype is not None and dtype is not torch.int8 and not dtype.is_floating_point:
            raise TypeError(f"dtype: expected a float type, torch.int8, or None for that of the keys, got {dtype}")
        self.max_length = max_length
        self.dtype = dtype
        self._store = store
        self._lengths: list[int] = []
        self._started: list[int] = []  # lengths before the last append
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
        return sum(tensor.nbytes for tensor in (*self._store.buffers.values(), *self._tails.values()))

    def reset(self) -> None:
        """Forget every sequence; the next append may be of another batch."""
        self._lengths, self._started = [], []
        self._store = self._store.emptied()
        self._tails, self._widths, self._like = {}, {}, None

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
        assert self._like is not None
        empty = self._like if self.dtype is None else self._like.to(self.dtype)
        self._store.make_room(after, key.shape[1], self._widths, empty)
        for name, tensor in (("key", key.detach()), ("value", value.detach())):
            if self.is_quantized:
                self._write_int8(name, tensor, new)
            else:
                self._store.put(name, tensor, self._lengths, new)
        self._started, self._lengths = self._lengths, after

    def read(self) -> Cached:
        """All keys and values so far, plain; int8 is multiplied out, pages are gathered.

        Raises:
            RuntimeError: nothing was appended.
        """
        if self._like is None:
            raise RuntimeError("cache: nothing was appended yet")
        key, value = (self._store.plain(name, self.length, self._like.dtype) for name in ("key", "value"))
        return Cached(key, value, *self._places())

    def pages(self) -> CachedPages | None:
        """All keys and values so far where they lie, for attention to read.

        Returns:
            None where they do not lie in pages, or are kept in another float type than they came in.

        Raises:
            RuntimeError: nothing was appended.
        """
        if self._like is None:
            raise RuntimeError("cache: nothing was appended yet")
        readable = self.dtype in (None, torch.int8, self._like.dtype)
        found = self._store.pages(self.length) if readable else None
        return None if found is None else CachedPages(*found, *self._places())

    def keep_last(self, positions: int) -> None:
        """Say that no later token sees further back than this many positions.

        Pages that lie wholly before that go back to the pool; what `read` has at their positions has no meaning. A
        layer with a window calls it before each append.
        """
        self._store.forget([length - positions for length in self._lengths])

    def _places(self) -> tuple[Tensor | None, int | Tensor]:
        """`key_lengths` and `query_start`."""
        assert self._like is not None
        if len(set(self._lengths)) <= 1 and len(set(self._started)) <= 1:
            return None, self._started[0] if self._started else 0
        return self.lengths.to(self._like.device), torch.tensor(self._started, device=self._like.device)

    def _check(self, key: Tensor, value: Tensor, key_lengths: Tensor | Sequence[int] | None) -> list[int]:
        """Check an append, and give the number of new tokens of each sequence."""
        sizes: dict[str, int] = {}
        if self._like is not None:
            G = self._store.buffers["key"].shape[1]
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
        self._store.check_room([have + more for have, more in zip(old, new)])
        return new

    def _write_int8(self, name: str, values: Tensor, new: list[int]) -> None:
        """Round whole blocks: those that new tokens fall in are made again from what was not rounded."""
        assert isinstance(self._store, _Pool)
        (B, G, _, width), block = values.shape, self._store.page
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
        integers = rounded.to(torch.int8).flatten(2, 3)
        self._store.put(name, integers, [i * block for i in first], [n * block for n in blocks])
        self._store.put(f"{name}_scale", scale[..., None], first, blocks)
        rest = [(i + n) // block for i, n in zip(inside, new)]  # the block that is unfinished now, empty if none is
        padded = torch.cat([cut, cut.new_zeros(B, G, 1, block, width)], 2)
        self._tails[name] = padded[torch.arange(B), :, torch.tensor(rest)]

    def __repr__(self) -> str:
        kind = self.dtype or (self._like.dtype if self._like is not None else "the keys' type")
        most = "" if self.max_length is None else f" of {self.max_length}"
        return f"{type(self).__name__}(lengths {self._lengths}{most}, {kind}, {self.nbytes:,} bytes)"


class KVCache(_Cache):
    """Each sequence in one piece, (B, G, room, D); int8 in pages of `block_size`, as in `PagedKVCache`.

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
        store = _Pool(block_size, max_length) if dtype is torch.int8 else _OnePiece(max_length)
        super().__init__(max_length, dtype, store)


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

    _store: _Pool

    def __init__(
        self,
        page_size: int = 16,
        max_length: int | None = None,
        *,
        n_pages: int | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        if n_pages is not None and n_pages < 0:
            raise ValueError(f"n_pages: expected 0 or more, got {n_pages}")
        super().__init__(max_length, dtype, _Pool(page_size, max_length, n_pages))

    @property
    def page_size(self) -> int:
        return self._store.page

    @property
    def n_pages(self) -> int | None:
        return self._store.n_pages

    @property
    def block_tables(self) -> Tensor:
        """The pages of each sequence in order: int64 (B, most pages), -1 where it has none (`keep_last`) or no more."""
        return self._store.table

    def release(self, sequence: int) -> None:
        """End one sequence: its pages go back to the pool, its length is 0, and the next append may begin another.

        Raises:
            IndexError: there is no such sequence.
        """
        if not 0 <= sequence < len(self._lengths):
            raise IndexError(f"sequence: expected a number under B={len(self._lengths)}, got {sequence}")
        self._store.release(sequence)
        self._lengths = [0 if b == sequence else n for b, n in enumerate(self._lengths)]
        for tail in self._tails.values():
            tail[sequence] = 0


def _cells(counts: list[int], device: torch.device) -> tuple[Tensor, Tensor]:
    """Sequence and token of every new token: two int64 (sum of counts,)."""
    most = torch.arange(max(counts, default=0), device=device)
    b, t = torch.nonzero(most < torch.tensor(counts, device=device)[:, None], as_tuple=True)
    return b, t

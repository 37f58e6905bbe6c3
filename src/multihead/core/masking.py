"""Which keys each query sees, as spans for a kernel and as a dense view for the definition.

Query i stands at position p = query_start + i among the keys. A key j is visible to it when all of these hold
that were given: j <= p (causal), p - left <= j <= p + right (window), j < key_lengths, mask, document_ids[j] equal
to document_ids[p], query_mask[i].
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from .axes import Index, check_integers, positions_of, take

ALL = slice(None)
# The fields of a Visibility that may be tensors.
TENSORS = ("query_start", "key_lengths", "mask", "document_ids", "query_mask", "runs")
_ROWS_AT_ONCE = 1 << 22  # cells of a caller's mask looked at together


@dataclass(frozen=True)
class Visibility:
    """Which keys each query sees; never L x S unless the caller gave that.

    Args:
        query_start: where query 0 stands among the keys, an int or (B,).
        causal: keys after the query's position are hidden.
        window: how far to the left and to the right of its position a query sees; None is an open side.
        key_lengths: (B,), keys from there on are hidden.
        mask: bool, (B|1, H|1, L|1, S|1), True = may attend.
        document_ids: (B, S), -1 = padding; a query belongs to the document at its position.
        query_mask: (B, L), False = a row that sees nothing and enters no statistic.
        runs: (B|1, L, 2), a row sees the keys from its first number up to its second: for rules that no other
            field can say.
    """

    B: int
    H: int
    L: int
    S: int
    query_start: int | Tensor
    causal: bool = False
    window: tuple[int | None, int | None] = (None, None)
    key_lengths: Tensor | None = None
    mask: Tensor | None = None
    document_ids: Tensor | None = None
    query_mask: Tensor | None = None
    device: torch.device | str = "cpu"
    runs: Tensor | None = None

    @property
    def is_full(self) -> bool:
        """Every query sees every key."""
        return not self.causal and self._is_plain

    @property
    def is_plain_causal(self) -> bool:
        """Causal from one starting position, and nothing else."""
        return self.causal and self._is_plain and isinstance(self.query_start, int)

    @property
    def _is_plain(self) -> bool:
        return (
            self.mask is None
            and self.key_lengths is None
            and self.query_mask is None
            and self.document_ids is None
            and self.runs is None
            and self.window == (None, None)
        )

    def tensors(self) -> tuple[Tensor | None, ...]:
        """What the rules hold as tensors, the batch first in each, in the order of `TENSORS`."""
        start = self.query_start if isinstance(self.query_start, Tensor) else None
        return (start, self.key_lengths, self.mask, self.document_ids, self.query_mask, self.runs)

    def with_tensors(self, tensors: Sequence[Tensor | None], B: int) -> Visibility:
        """The same rules with other tensors, for B sequences."""
        given = dict(zip(TENSORS, tensors, strict=True))
        if given["query_start"] is None:
            del given["query_start"]
        return replace(self, B=B, **given)

    def sequence(self, batch: slice) -> Visibility:
        """The same for some of the sequences."""
        if self.B == 1 or (self._is_plain and isinstance(self.query_start, int)):
            return replace(self, B=len(range(*batch.indices(self.B))))
        return replace(
            self,
            B=len(range(*batch.indices(self.B))),
            query_start=self.query_start if isinstance(self.query_start, int) else self.query_start[batch],
            key_lengths=None if self.key_lengths is None else self.key_lengths[batch],
            mask=None if self.mask is None else take(self.mask, 0, batch),
            document_ids=None if self.document_ids is None else self.document_ids[batch],
            query_mask=None if self.query_mask is None else self.query_mask[batch],
            runs=None if self.runs is None else take(self.runs, 0, batch),
        )

    def positions(self, rows: Index = ALL) -> Tensor:
        """Position of each query among the keys: (B|1, l)."""
        i = positions_of(rows, self.L, self.device)[None]
        if isinstance(self.query_start, int):
            return i + self.query_start
        return i + self.query_start.to(self.device, torch.int64)[:, None]

    def dense(self, rows: Index = ALL, keys: Index = ALL) -> Tensor:
        """Visible cells of some rows and keys: bool (B|1, H|1, l, s)."""
        j = positions_of(keys, self.S, self.device)
        visible = self._dense_rules(rows, j[None, None])
        if self.mask is not None:
            visible = visible[:, None] & take(take(self.mask, 2, rows), 3, keys)
            return visible.expand(-1, -1, visible.shape[2], len(j))
        return visible[:, None]

    def at(self, rows: Index, keys: Tensor) -> Tensor:
        """Whether rows see listed keys (B|1, l, K): bool (B|1, H|1, l, K); False outside 0..S-1."""
        inside = (keys >= 0) & (keys < self.S)
        keys = keys.clamp(0, max(self.S - 1, 0))
        visible = (inside & self._dense_rules(rows, keys))[:, None]
        if self.mask is None or self.S == 0:
            return visible
        return visible & gather_cells(self.mask, rows, keys, self.S)

    def _dense_rules(self, rows: Index, j: Tensor) -> Tensor:
        """Every rule but the mask, for keys j (B|1, l|1, s): bool (B|1, l, s)."""
        p = self.positions(rows)[:, :, None]
        visible = torch.ones((), dtype=torch.bool, device=self.device).expand(*p.shape[:2], j.shape[-1])
        if self.causal:
            visible = visible & (j <= p)
        left, right = self.window
        if left is not None:
            visible = visible & (j >= p - left)
        if right is not None:
            visible = visible & (j <= p + right)
        if self.key_lengths is not None:
            visible = visible & (j < self.key_lengths.to(self.device)[:, None, None])
        if self.document_ids is not None:
            visible = visible & self._same_document(p, j)
        if self.query_mask is not None:
            visible = visible & take(self.query_mask, 1, rows)[:, :, None]
        if self.runs is not None:
            begin, end = take(self.runs, 1, rows)[:, :, None].unbind(-1)
            visible = visible & (j >= begin) & (j < end)
        return visible

    def _same_document(self, p: Tensor, j: Tensor) -> Tensor:
        ids = self.document_ids
        assert ids is not None
        if self.S == 0:
            return torch.zeros(1, 1, 1, dtype=torch.bool, device=self.device)
        at_p = ids.gather(1, p[:, :, 0].clamp(0, self.S - 1).expand(len(ids), -1))[:, :, None]
        at_j = ids.gather(1, j.reshape(j.shape[0], -1).expand(len(ids), -1)).unflatten(1, j.shape[1:])
        return (at_j == at_p) & (at_p != -1) & (p >= 0) & (p < self.S)

    def bounds(self) -> tuple[Tensor, Tensor]:
        """A run of keys [begin, end) that holds all that each row sees, in closed form: two int64 (B|1, L).

        The mask plays no part here, documents only by where they lie. A row that sees nothing is (0, 0).
        """
        p = self.positions()
        begin, end = torch.zeros_like(p), torch.full_like(p, self.S)
        left, right = self.window
        if self.causal:
            end = torch.minimum(end, p + 1)
        if left is not None:
            begin = torch.maximum(begin, p - left)
        if right is not None:
            end = torch.minimum(end, p + right + 1)
        if self.key_lengths is not None:
            end = torch.minimum(end, self.key_lengths.to(self.device)[:, None])
        if self.document_ids is not None:
            first, last = self._document_bounds(p)
            begin, end = torch.maximum(begin, first), torch.minimum(end, last)
        if self.query_mask is not None:
            end = torch.where(self.query_mask, end, 0)
        if self.runs is not None:
            begin, end = torch.maximum(begin, self.runs[:, :, 0]), torch.minimum(end, self.runs[:, :, 1])
        return _tidy(begin, end)

    def spans(self) -> tuple[Tensor, Tensor] | None:
        """The keys that each row sees as one run [begin, end), where that is exact: two int32 (B|1, L).

        A row that sees nothing is (0, 0). None when some row's keys have a gap, or heads differ. Memory is
        O(B(L + S)) beside what the caller gave.
        """
        return self._spans

    @cached_property
    def _spans(self) -> tuple[Tensor, Tensor] | None:
        if self.mask is not None and self.mask.shape[1] > 1:
            return None
        if self.document_ids is not None and not _in_runs(self.document_ids):
            return None
        begin, end = self.bounds()
        if self.mask is not None:
            runs = _mask_runs(self.mask[:, 0], self.S)
            if runs is None:
                return None
            begin, end = _tidy(torch.maximum(begin, runs[0]), torch.minimum(end, runs[1]))
        return begin.to(torch.int32), end.to(torch.int32)

    def counts(self) -> Tensor:
        """How many keys each row sees: int64 (B|1, H|1, L)."""
        spans = self.spans()
        if spans is not None:
            return (spans[1] - spans[0]).to(torch.int64)[:, None]
        step = max(1, _ROWS_AT_ONCE // max(1, self.B * self.S))
        blocks = [self.dense(slice(i, i + step)).sum(-1) for i in range(0, max(1, self.L), step)]
        return torch.cat(blocks, -1)

    def _document_bounds(self, p: Tensor) -> tuple[Tensor, Tensor]:
        """First and one past the last key of the document at each p (B|1, L): two (B, L), (0, 0) if none."""
        ids = self.document_ids
        assert ids is not None
        p = p.expand(len(ids), -1)
        if self.S == 0:
            return torch.zeros_like(p), torch.zeros_like(p)
        # A stable sort brings each document together, its keys in order; its ends are then the ends of a run.
        values, order = ids.sort(dim=1, stable=True)
        first, last = _run_ends(values)
        begin = torch.empty_like(order).scatter_(1, order, order.gather(1, first))
        end = torch.empty_like(order).scatter_(1, order, order.gather(1, last)) + 1
        inside = p.clamp(0, self.S - 1)
        some = (ids.gather(1, inside) != -1) & (p >= 0) & (p < self.S)
        return torch.where(some, begin.gather(1, inside), 0), torch.where(some, end.gather(1, inside), 0)


def gather_cells(cells: Tensor, rows: Index, keys: Tensor, S: int) -> Tensor:
    """Cells of a (B|1, H|1, L|1, S|1) tensor at rows and their listed keys (B|1, l, K): (B|1, H|1, l, K)."""
    cells = take(cells, 2, rows)
    batch, heads = max(len(cells), len(keys)), cells.shape[1]
    cells = cells.expand(batch, -1, keys.shape[1], S)
    return cells.gather(3, keys[:, None].expand(batch, heads, -1, -1))


def _tidy(begin: Tensor, end: Tensor) -> tuple[Tensor, Tensor]:
    some = begin < end
    return torch.where(some, begin, 0), torch.where(some, end, 0)


def _run_ends(values: Tensor) -> tuple[Tensor, Tensor]:
    """First and last index of the run of equal values around each cell of (B, S): two int64 (B, S)."""
    n = values.shape[1]
    index = torch.arange(n, device=values.device).expand_as(values)
    edge = values[:, 1:] != values[:, :-1]
    first = torch.zeros_like(index).index_copy(1, index[0, 1:], torch.where(edge, index[:, 1:], 0)).cummax(1).values
    last = torch.full_like(index, n - 1).index_copy(1, index[0, :-1], torch.where(edge, index[:, :-1], n - 1))
    return first, last.flip(1).cummin(1).values.flip(1)


def _in_runs(ids: Tensor) -> bool:
    """Whether the keys of each document (B, S) lie together; padding may lie anywhere."""
    if ids.shape[1] == 0:
        return True

    def runs(values: Tensor) -> Tensor:
        starts = torch.ones_like(values, dtype=torch.bool)
        starts[:, 1:] = values[:, 1:] != values[:, :-1]
        return (starts & (values != -1)).sum(1)

    return bool((runs(ids) == runs(ids.sort(dim=1).values)).all())


def _mask_runs(mask: Tensor, S: int) -> tuple[Tensor, Tensor] | None:
    """The run of True in each row of a mask (B|1, L|1, S|1), two int64 (B|1, L|1); None where one has a gap."""
    if mask.shape[-1] != S or S == 0:
        some = mask.any(-1)
        return torch.zeros_like(some, dtype=torch.int64), torch.where(some, S, 0)
    some_rows = max(1, mask.shape[1] // 8)
    if some_rows > 8 and _mask_runs(mask[:, ::some_rows], S) is None:  # most masks with gaps show one soon
        return None
    step = max(1, _ROWS_AT_ONCE // max(1, len(mask) * S))
    begins, ends = [], []
    for i in range(0, mask.shape[1], step):
        rows = mask[:, i : i + step].contiguous().view(torch.uint8)
        count = rows.sum(-1)
        begin = rows.argmax(-1)
        end = S - rows.flip(-1).argmax(-1)
        some = count > 0
        if not ((end - begin == count) | ~some).all():
            return None
        begins.append(torch.where(some, begin, 0))
        ends.append(torch.where(some, end, 0))
    if not begins:
        return None
    return torch.cat(begins, 1), torch.cat(ends, 1)


def check_lengths(lengths: Tensor, S: int) -> None:
    """Check lengths of keys (B,) by their values; only on a CPU, since elsewhere a look at them would stop the device.

    Raises:
        ValueError: one is not from 0 to S.
    """
    if lengths.device.type == "cpu" and ((lengths < 0) | (lengths > S)).any():
        raise ValueError(f"key_lengths: expected lengths from 0 to S={S}, got {lengths.tolist()}")


def documents_from(cu_seqlens: Tensor, total: int | None = None) -> Tensor:
    """Document ids (1, S) of sequences packed one after another.

    Args:
        cu_seqlens: (n + 1,) integers, running sums of the lengths from 0, as in FlashAttention's varlen calls.
        total: S, when the packed tensor is longer than the last sum; the rest is padding, -1.

    Raises:
        ValueError: the sums do not start at 0, fall somewhere, or end beyond `total`.

    Example:
        >>> documents_from(torch.tensor([0, 2, 5]), total=6)
        tensor([[ 0,  0,  1,  1,  1, -1]])
    """
    cu_seqlens = torch.as_tensor(cu_seqlens)
    check_integers("cu_seqlens", cu_seqlens)
    if cu_seqlens.ndim != 1 or len(cu_seqlens) == 0 or cu_seqlens[0] != 0:
        raise ValueError(f"cu_seqlens: expected (n + 1,) running sums that start at 0, got {cu_seqlens.tolist()}")
    lengths = cu_seqlens.diff()
    last = int(cu_seqlens[-1])
    total = last if total is None else total
    if (lengths < 0).any() or last > total:
        raise ValueError(f"cu_seqlens: expected sums that never fall, up to {total}, got {cu_seqlens.tolist()}")
    ids = torch.arange(len(lengths), device=cu_seqlens.device).repeat_interleave(lengths)
    return torch.nn.functional.pad(ids, (0, total - last), value=-1)[None]

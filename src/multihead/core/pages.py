"""Keys or values of a cache in pages, in place of a tensor: where each sequence's pages are, and int8 numbers."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .axes import check_integers, check_shape


@dataclass(frozen=True, eq=False)
class Pages:
    """Keys or values in pages of a pool that all sequences share (Kwon et al. 2023, arXiv:2309.06180).

    It goes where `mh.attention` and `mh.observe` take `key` and `value`. Pages that no query sees (past a
    sequence's `key_lengths`, before its window) are not looked at, whatever the table says there.

    Args:
        data: (P, G, page, D), P pages of `page` positions: floats of the query's type, or int8.
        table: int32 (B, n), the pages of each sequence in order; position j is at j % page of its page j // page.
        scales: float32 (P, G), with int8 alone: a number is its integer times the scale of its page and head.
        length: S, the positions that the longest sequence has; by default all the room of its pages.

    Raises:
        TypeError, ValueError: a shape or type does not fit.

    Example:
        >>> key = Pages(torch.randn(10, 2, 16, 64), torch.tensor([[3, 1, 4], [0, 9, 0]], dtype=torch.int32))
        >>> key.shape
        torch.Size([2, 2, 48, 64])
    """

    data: Tensor
    table: Tensor
    scales: Tensor | None = None
    length: int | None = None

    def __post_init__(self) -> None:
        sizes: dict[str, int] = {}
        check_shape("data", self.data, "PGSD", sizes)
        check_shape("table", self.table, "Bn", sizes)
        check_integers("table", self.table)
        if self.data.dtype is torch.int8:
            if self.scales is None:
                raise ValueError("scales: expected float32 (P, G) with int8 data, got None")
            check_shape("scales", self.scales, "PG", sizes)
            if self.scales.dtype is not torch.float32:
                raise TypeError(f"scales: expected torch.float32, got {self.scales.dtype}")
        elif not self.data.dtype.is_floating_point:
            raise TypeError(f"data: expected floats or torch.int8, got {self.data.dtype}")
        elif self.scales is not None:
            raise ValueError(f"scales: expected None with {self.data.dtype} data, got a tensor")
        if self.data.shape[2] == 0:
            raise ValueError("data: expected pages of at least one position")
        room = self.table.shape[1] * self.page
        if self.length is not None and not 0 <= self.length <= room:
            raise ValueError(f"length: expected 0 to {room}, the room of a sequence's pages, got {self.length}")
        for name, tensor in (("table", self.table), ("scales", self.scales)):
            if tensor is not None and tensor.device != self.data.device:
                raise ValueError(
                    f"{name}: expected a tensor on {self.data.device}, as data is, got one on {tensor.device}"
                )

    @classmethod
    def int8(cls, data: Tensor, table: Tensor) -> Pages:
        """Round the numbers of pages to int8: each page and head is scaled by its largest magnitude over 127.

        Args:
            data: (P, G, page, D), floats.
        """
        scales = data.abs().amax((2, 3)).float() / 127
        rounded = (data / torch.where(scales == 0, 1, scales)[:, :, None, None]).round().clamp(-127, 127)
        return cls(rounded.to(torch.int8), table, scales)

    @property
    def page(self) -> int:
        """Positions of a page."""
        return self.data.shape[2]

    @property
    def shape(self) -> torch.Size:
        """(B, G, S, D) as the tensor that it stands for."""
        B, n = self.table.shape
        _, G, page, D = self.data.shape
        return torch.Size((B, G, n * page if self.length is None else self.length, D))

    @property
    def device(self) -> torch.device:
        return self.data.device

    def shaped(self, query: Tensor) -> Tensor:
        """A tensor of this shape without memory, NaN wherever it is read, in the query's type."""
        return torch.full((), torch.nan, dtype=query.dtype, device=self.device).expand(self.shape)

    def dense(self, dtype: torch.dtype) -> Tensor:
        """Gather the pages into one tensor (B, G, S, D) of a float type."""
        pages = self.table.long().clamp(0, max(len(self.data) - 1, 0))
        gathered = self.data[pages]  # (B, n, G, page, D)
        if self.scales is not None:  # float32, so that a half type is rounded to once
            gathered = gathered * self.scales[pages].to(torch.promote_types(dtype, torch.float32))[..., None, None]
        return gathered.to(dtype).transpose(1, 2).flatten(2, 3)[:, :, : self.shape[2]]

    def heads(self, heads: slice) -> Pages:
        """Some of the key/value heads, in the same pages; nothing but their scales is copied."""
        scales = None if self.scales is None else self.scales[:, heads]
        return replace(self, data=self.data[:, heads], scales=scales)

    def check_table(self, name: str, begin: Tensor, end: Tensor) -> None:
        """Check the pages of the positions from `begin` to `end` (B,) of each sequence, on a CPU.

        Raises:
            ValueError: the table names a page that is not there.
        """
        first = torch.arange(self.table.shape[1]) * self.page
        used = (first < end[:, None]) & (first + self.page > begin[:, None])
        if bool((used & ((self.table < 0) | (self.table >= len(self.data)))).any()):
            raise ValueError(
                f"{name}: expected a table of pages from 0 to P-1={len(self.data) - 1} wherever a query looks"
            )

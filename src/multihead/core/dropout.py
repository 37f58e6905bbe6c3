"""Which weights dropout keeps: a counter-based generator, so that no path, tiling or thread changes the mask.

Philox4x32-10 of Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC 2011). Cell (b, h, i, j) takes
word j % 4 of the counter (j // 4, i, h, b) under the key (seed's low half, seed's high half), and is kept when that
word is at least p * 2^32.
"""

from __future__ import annotations

import torch
from torch import Tensor

_WORD = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)


def keep(seed: int, p: float, batch: Tensor, heads: Tensor, rows: Tensor, keys: Tensor) -> Tensor:
    """Which cells are kept: bool (b, h, l, s) for 1-D indices of sequences, query heads, queries and keys."""
    index = torch.broadcast_tensors(
        (keys // 4)[None, None, None, :], rows[:, None], heads[:, None, None], batch[:, None, None, None]
    )
    words = torch.stack(philox(index, seed))
    word = words.gather(0, (keys % 4).expand(words.shape[1:])[None])[0]
    return word >= round(p * 2**32)


def philox(counter: tuple[Tensor, ...], seed: int) -> tuple[Tensor, ...]:
    """Four words of 32 bits, held in int64, for four counter words alike and a seed of 64 bits."""
    a, b, c, d = counter
    low, high = seed & _WORD, (seed >> 32) & _WORD
    for step in range(10):
        first, second = a * _MULTIPLIERS[0], c * _MULTIPLIERS[1]  # the wrapped product has the right 64 bits
        a = ((second >> 32) & _WORD) ^ b ^ ((low + step * _WEYL[0]) & _WORD)
        c = ((first >> 32) & _WORD) ^ d ^ ((high + step * _WEYL[1]) & _WORD)
        b, d = second & _WORD, first & _WORD
    return a, b, c, d

"""Which weights dropout keeps: a counter-based generator, so that no path, tiling or thread changes the mask.

Philox4x32-10 of Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC 2011). All of it is in unsigned words
of 32 bits, and every path makes the same mask:

- key = (seed mod 2^32, (seed / 2^32) mod 2^32), of the seed as 64 bits (two's complement where it is negative);
- counter = (j / 4, i, h, b): four keys j .. j + 3 from a multiple of 4 share one call. i is the query's row from 0 (not
  its position among the keys), h the query head, b the sequence in the batch;
- cell (b, h, i, j) takes word j mod 4 of the four that come out;
- it is kept when word >= T, with T = p * 2^32 rounded to the nearest integer, to the even one of two (the product is
  exact in double, and `nearbyint` rounds so). For p = 1, T is 2^32 and nothing is kept: T needs 64 bits;
- a kept weight is multiplied by 1 / (1 - p), a dropped one by 0, which leaves a NaN what it is, as PyTorch does; the
  softmax's sum stays that of all weights.

`csrc/dropout.h` is the same for the compiled core.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .problem import Problem

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
    return word >= threshold(p)


def factors(p: Problem, dtype: torch.dtype, *index: Tensor) -> Tensor:
    """What the weights of a problem's cells are multiplied by, laid out as in `keep`."""
    assert p.dropout_seed is not None
    return keep(int(p.dropout_seed), p.dropout_p, *index).to(dtype) * factor(p.dropout_p)


def factor(p: float) -> float:
    """What a kept weight is multiplied by; where all are dropped it does not matter."""
    return 1 / (1 - p) if p < 1 else 1.0


def threshold(p: float) -> int:
    """The least word that is kept."""
    return round(p * 2**32)


def key(seed: int) -> tuple[int, int]:
    """The two words of Philox's key."""
    return seed & _WORD, (seed >> 32) & _WORD


def philox(counter: tuple[Tensor, ...], seed: int) -> tuple[Tensor, ...]:
    """Four words of 32 bits, held in int64, for four counter words alike and a seed of 64 bits."""
    a, b, c, d = counter
    low, high = key(seed)
    for step in range(10):
        first, second = a * _MULTIPLIERS[0], c * _MULTIPLIERS[1]  # the wrapped product has the right 64 bits
        a = ((second >> 32) & _WORD) ^ b ^ ((low + step * _WEYL[0]) & _WORD)
        c = ((first >> 32) & _WORD) ^ d ^ ((high + step * _WEYL[1]) & _WORD)
        b, d = second & _WORD, first & _WORD
    return a, b, c, d

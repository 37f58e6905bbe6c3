"""What a machine allows: the least time of a pass, whether compute or memory bounds it, and what fits.

The roofline model: a pass takes at least FLOPs / peak and at least bytes / bandwidth (Williams, Waterman and
Patterson 2009). Where FLOPs per byte lie under peak / bandwidth, the ridge, memory bounds it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Literal

from multihead.accounting.count import Types, Work, cache_bytes, weight_bytes
from multihead.accounting.fields import ConfigError
from multihead.accounting.model import Model

NO_LIMIT = 1 << 60


@dataclass(frozen=True)
class Device:
    """The published peaks of one machine.

    Attributes:
        flops: FLOP/s of dense 16-bit products, accumulated in float32.
        flops_f32: FLOP/s of float32 products, without TF32.
        bandwidth: bytes/s of its memory.
        memory: bytes; a GB is 10^9.
    """

    name: str
    flops: float
    flops_f32: float
    bandwidth: float
    memory: int

    def peak(self, types: Types) -> float:
        """FLOP/s for numbers of these types: fewer than 16 bits are widened before they are multiplied."""
        return self.flops_f32 if types.product_bits == 32 else self.flops


def _gb(size: int) -> int:
    return size * 10**9


DEVICES = {
    device.name: device
    for device in (
        Device("a100", 312e12, 19.5e12, 2.039e12, _gb(80)),  # SXM, 80 GB
        Device("h100", 989.4e12, 66.9e12, 3.35e12, _gb(80)),  # SXM
        Device("h200", 989.4e12, 66.9e12, 4.8e12, _gb(141)),  # SXM
        Device("l40s", 362.05e12, 91.6e12, 0.864e12, _gb(48)),
        Device("mi300x", 1307.4e12, 163.4e12, 5.3e12, _gb(192)),
        Device("rtx-4090", 165.2e12, 82.6e12, 1.008e12, _gb(24)),
    )
}
"""Makers' data sheets: dense peaks, without the sparsity that doubles them."""


def device(name: str) -> Device:
    """Return a known machine, or measure this one, under the name "here".

    Raises:
        ConfigError: the name is not known, or the compiled core, which measures, is not there.
    """
    if name == "here":
        return _here()
    if name not in DEVICES:
        raise ConfigError(f"device: expected one of {', '.join([*DEVICES, 'here'])}, got {name!r}")
    return DEVICES[name]


@cache
def _here(seconds: float = 0.3) -> Device:
    """Measure multiply-adds in float32 and reads of this machine's processor, once, for so long each."""
    import os

    import torch

    from multihead.core import native

    if native.core is None:
        raise ConfigError("device: 'here' measures with the compiled core, which is not built")
    threads = torch.get_num_threads()
    flops = 1e9 * native.core.fma_gflops(threads, seconds)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return Device("here", flops, flops, 1e9 * native.core.read_gbs(threads, seconds), memory)


@dataclass(frozen=True)
class Bound:
    """How long a pass takes at least, and why.

    Attributes:
        seconds: the larger of the two times.
        limit: "compute" or "memory".
        compute_seconds, memory_seconds: the two times.
        ridge: FLOPs per byte from which on compute bounds.
    """

    seconds: float
    limit: Literal["compute", "memory"]
    compute_seconds: float
    memory_seconds: float
    ridge: float


def bound(work: Work, on: Device, types: Types) -> Bound:
    """Return the roofline bound of a pass on a machine."""
    compute, memory = work.flops / on.peak(types), work.bytes / on.bandwidth
    limit = "compute" if compute > memory else "memory"
    return Bound(max(compute, memory), limit, compute, memory, on.peak(types) / on.bandwidth)


def largest_context(model: Model, batch: int, types: Types, memory: int) -> int | None:
    """Return the most tokens a text whose cache fits beside the weights; None where no number is too many.

    Activations and the workspace of the program that runs it are not counted.
    """
    return _largest(lambda tokens: weight_bytes(model, types) + cache_bytes(model, tokens, batch, types), memory)


def largest_batch(model: Model, context: int, types: Types, memory: int) -> int | None:
    """Return the most texts of `context` tokens whose cache fits beside the weights; None where none is too many."""
    return _largest(lambda texts: weight_bytes(model, types) + cache_bytes(model, context, texts, types), memory)


def _largest(taken: Callable[[int], int], memory: int) -> int | None:
    """Return the largest number whose bytes, which never fall, fit; 0 where one does not, None past all bounds."""
    if taken(NO_LIMIT) <= memory:
        return None
    least, most = 0, NO_LIMIT  # the answer is in [least, most)
    while most - least > 1:
        middle = (least + most) // 2
        least, most = (middle, most) if taken(middle) <= memory else (least, middle)
    return least

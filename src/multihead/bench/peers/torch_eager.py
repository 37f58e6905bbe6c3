"""Attention as one writes it in PyTorch: scores, softmax, product."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..inputs import Inputs, visible
from ..shapes import Shape
from .base import Peer, Prepared, first
from .ours import leaves_of

_MOST_BYTES = 1 << 30


class TorchEager(Peer):
    """softmax(q k^T + mask) v, the L x S weights in memory; what `output_attentions=True` runs."""

    name = "eager"
    about = "softmax(q k^T) v in plain PyTorch"

    def available(self) -> str | None:
        return None

    def refuses(self, shape: Shape) -> str | None:
        if shape.score_bytes > _MOST_BYTES:
            return f"the scores alone would take {shape.score_bytes / 1e9:.1f} GB"
        return None

    def prepare(self, shape: Shape, inputs: Inputs) -> Prepared:
        s, seen = shape, visible(shape)
        hidden = None if seen is None else ~seen

        def eager(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            # The query heads of a group side by side, so that keys need not be repeated.
            scores = query.reshape(s.B, s.G, -1, s.D) @ key.mT * (1 / math.sqrt(s.D))
            scores = scores.view(s.B, s.H, s.L, s.S)
            if hidden is not None:
                scores = scores.masked_fill(hidden, -math.inf)
            return (scores.softmax(-1).view(s.B, s.G, -1, s.S) @ value).view(s.B, s.H, s.L, s.E)

        if not s.training:
            return Prepared(lambda: eager(inputs.query, inputs.key, inputs.value), first)
        leaves = leaves_of(inputs)
        return Prepared(lambda: torch.autograd.grad(eager(*leaves), leaves, inputs.gradient), tuple)

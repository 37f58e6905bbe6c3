"""This library, and the forms of it that a section compares with its plain call."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ...core.functional import attention, observe
from ...core.pages import Pages
from ..inputs import Inputs
from ..shapes import Shape
from .base import Peer, Prepared, first


def _options(shape: Shape) -> dict[str, Any]:
    return {
        "causal": shape.causal and shape.window is None,
        "window": None if shape.window is None else (shape.window - 1, 0),
    }


class Multihead(Peer):
    """`mh.attention`, by whatever path it takes."""

    name = "multihead"
    about = "mh.attention"

    def available(self) -> str | None:
        return None

    def refuses(self, shape: Shape) -> str | None:
        return None

    def prepare(self, shape: Shape, inputs: Inputs) -> Prepared:
        options = _options(shape)
        if not shape.training:
            key, value = inputs.stored
            return Prepared(lambda: attention(inputs.query, key, value, **options), first)
        leaves = leaves_of(inputs)

        def step() -> tuple[Tensor, ...]:
            return torch.autograd.grad(attention(*leaves, **options), leaves, inputs.gradient)

        return Prepared(step, tuple)


class Observing(Multihead):
    """`mh.observe` with every row statistic."""

    name = "observing"
    about = "mh.observe, every row statistic"

    def refuses(self, shape: Shape) -> str | None:
        return "it is for forward passes" if shape.training else None

    def prepare(self, shape: Shape, inputs: Inputs) -> Prepared:
        options, (key, value) = _options(shape), inputs.stored
        return Prepared(lambda: observe(inputs.query, key, value, **options), lambda seen: (seen.output,))


class InFloat32(Multihead):
    """The same numbers in float32, which is what a half type is chosen over."""

    name = "in float32"
    about = "mh.attention on the same numbers in float32"

    def refuses(self, shape: Shape) -> str | None:
        return "the shape is in float32 already" if shape.dtype == "float32" else None

    def prepare(self, shape: Shape, inputs: Inputs) -> Prepared:
        names = ("query", "key", "value", "gradient")
        return super().prepare(shape, replace(inputs, **{name: getattr(inputs, name).float() for name in names}))


class InFloat32Pages(Multihead):
    """The numbers of an int8 cache in float32, in the same pages."""

    name = "in float32 pages"
    about = "mh.attention over the same pages in float32"

    def refuses(self, shape: Shape) -> str | None:
        return None if shape.cache == "int8" else "the shape has no int8 cache"

    def prepare(self, shape: Shape, inputs: Inputs) -> Prepared:
        assert inputs.pages is not None
        key, value = (Pages(x.data * x.scales[..., None, None], x.table) for x in inputs.pages if x.scales is not None)
        return super().prepare(shape, replace(inputs, pages=(key, value)))


class InOnePiece(Multihead):
    """The numbers of a cache in pages as one tensor."""

    name = "in one piece"
    about = "mh.attention over the same numbers in one piece"

    def refuses(self, shape: Shape) -> str | None:
        return None if shape.cache else "the shape is in one piece already"

    def prepare(self, shape: Shape, inputs: Inputs) -> Prepared:
        return super().prepare(shape, replace(inputs, pages=None))


class EntropyLoss(Multihead):
    """A step whose loss has the entropy of every row in it."""

    name = "entropy loss"
    about = "mh.observe, the entropies added to the loss"
    weight = 0.125

    def refuses(self, shape: Shape) -> str | None:
        return None if shape.training else "it is for training"

    def prepare(self, shape: Shape, inputs: Inputs) -> Prepared:
        from ...core.statistics import Statistics

        options, leaves, asked = _options(shape), leaves_of(inputs), Statistics("entropy")
        of_entropy = torch.full((shape.B, shape.H, shape.L), self.weight, dtype=torch.float32)

        def step() -> tuple[Tensor, ...]:
            seen = observe(*leaves, statistics=asked, **options)
            return torch.autograd.grad((seen.output, seen.entropy), leaves, (inputs.gradient, of_entropy))

        return Prepared(step, tuple, self.weight)


def leaves_of(inputs: Inputs) -> tuple[Tensor, Tensor, Tensor]:
    """Query, key and value as tensors that autograd follows."""
    query, key, value = (x.detach().requires_grad_() for x in (inputs.query, inputs.key, inputs.value))
    return query, key, value

"""The gate: a candidate whose numbers are wrong has no speed."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .inputs import Inputs, visible
from .peers.base import Peer
from .peers.ours import Multihead
from .shapes import Shape

# Ours must keep the contract. Others may round in their own way; a wrong mask or head is off by more, in bfloat16 too.
SLACK_OF_OURS, SLACK_OF_OTHERS = 1.0, 4.0
_ROWS = 61


def slack_of(peer: Peer) -> float:
    """Up to which quotient the gate is green for a candidate."""
    return SLACK_OF_OURS if isinstance(peer, Multihead) else SLACK_OF_OTHERS


class Gate:
    """The exact numbers of a shape, made once and held against those of every candidate.

    Allowed is twice the error of eager attention in the shape's own type, plus one ulp of the largest number. The
    output is checked on 61 query rows of every head, from the first to the last; gradients on whole heads of two
    key/value groups, the first of the first sequence and the last of the last. The largest error among a head's
    gradients is an outlier that varies by half from seed to seed, so theirs is held by its root mean square, and
    the largest to twice as much. A cache in int8 is held to the numbers that its integers and scales stand for: the
    gate is about the arithmetic, not about the rounding of the cache.
    """

    def __init__(self, shape: Shape, inputs: Inputs) -> None:
        self.shape, self.inputs = shape, inputs
        self.rows = torch.linspace(0, shape.L - 1, min(shape.L, _ROWS)).long()
        self.groups = sorted({(0, 0), (shape.B - 1, shape.G - 1)})
        self.expected: dict[float, list[_Expected]] = {}

    def check(self, found: Sequence[Tensor], entropy_weight: float = 0.0) -> float:
        """Error against float64 over the error that the contract allows; green up to the slack.

        Args:
            found: the output (B, H, L, E); for a training shape the gradients of query, key and value instead.
            entropy_weight: times the sum of the entropies, added to the loss that the gradients are of.

        Returns:
            the largest quotient, infinite where a size is wrong or a number is not finite.
        """
        s = self.shape
        i = self.inputs
        expected = [x.shape for x in (i.query, i.key, i.value)] if s.training else [(s.B, s.H, s.L, s.E)]
        if [tuple(x.shape) for x in found] != [tuple(shape) for shape in expected]:
            return math.inf
        if entropy_weight not in self.expected:
            self.expected[entropy_weight] = self._gradients(entropy_weight) if s.training else self._outputs()
        parts = self._parts_of_gradients(found) if s.training else [x[:, self.rows] for x in found[0]]
        pairs = zip(self.expected[entropy_weight], parts, strict=True)
        if not s.training:
            return max(x.quotient(part) for x, part in pairs)
        return max(max(x.quotient(part) / 2, x.mean_quotient(part)) for x, part in pairs)

    def _outputs(self) -> list[_Expected]:
        """The rows of each sequence, (H, rows, E): float64 copies of all at once would crowd a long cache out."""
        s, inputs = self.shape, self.inputs
        seen = visible(s, self.rows)

        def rows_of(dtype: torch.dtype, b: int) -> Tensor:
            # The query heads of a group side by side, so that keys need not be repeated.
            query = inputs.query[b][:, self.rows].to(dtype).reshape(s.G, -1, s.D)
            scores = (query @ inputs.key[b].to(dtype).mT / math.sqrt(s.D)).view(s.H, -1, s.S)
            weights = _weights(scores, seen).view(s.G, -1, s.S)
            return (weights @ inputs.value[b].to(dtype)).view(s.H, -1, s.E)

        return [_Expected(rows_of(s.torch_dtype, b), rows_of(torch.float64, b)) for b in range(s.B)]

    def _gradients(self, entropy_weight: float) -> list[_Expected]:
        s, inputs = self.shape, self.inputs
        seen, group = visible(s), s.H // s.G

        def gradients(dtype: torch.dtype, b: int, g: int) -> tuple[Tensor, ...]:
            heads = slice(g * group, (g + 1) * group)
            parts = inputs.query[b, heads], inputs.key[b, g], inputs.value[b, g]
            query, key, value = (x.to(dtype).detach().requires_grad_() for x in parts)
            weights = _weights(query @ key.mT / math.sqrt(s.D), seen)
            loss = (weights @ value * inputs.gradient[b, heads].to(dtype)).sum()
            if entropy_weight:
                loss = loss + entropy_weight * torch.special.entr(weights.clamp_min(torch.finfo(dtype).tiny)).sum()
            return torch.autograd.grad(loss, (query, key, value))

        return [
            _Expected(*pair)
            for b, g in self.groups
            for pair in zip(gradients(s.torch_dtype, b, g), gradients(torch.float64, b, g), strict=True)
        ]

    def _parts_of_gradients(self, found: Sequence[Tensor]) -> list[Tensor]:
        group, parts = self.shape.H // self.shape.G, []
        for b, g in self.groups:
            parts += [found[0][b, g * group : (g + 1) * group], found[1][b, g], found[2][b, g]]
        return parts


@dataclass(frozen=True)
class _Expected:
    """What eager attention gives in the shape's type and in float64."""

    eager: Tensor
    exact: Tensor

    def quotient(self, found: Tensor) -> float:
        """Error over what is allowed."""
        return self._over_allowed(found, lambda x: x.abs().max())

    def mean_quotient(self, found: Tensor) -> float:
        """The same of the root mean squares."""
        return self._over_allowed(found, lambda x: x.square().mean().sqrt())

    def _over_allowed(self, found: Tensor, size: Callable[[Tensor], Tensor]) -> float:
        ulp = torch.finfo(self.eager.dtype).eps * size(self.exact)
        allowed = 2 * size(self.eager.double() - self.exact) + ulp
        quotient = float(size(found.double() - self.exact) / allowed)
        return quotient if math.isfinite(quotient) else math.inf


def _weights(scores: Tensor, seen: Tensor | None) -> Tensor:
    return (scores if seen is None else scores.masked_fill(~seen, -math.inf)).softmax(-1)

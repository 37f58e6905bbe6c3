"""The gate: a candidate whose numbers are wrong has no speed."""

from __future__ import annotations

import math
from collections.abc import Sequence
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


def check(shape: Shape, inputs: Inputs, found: Sequence[Tensor], entropy_weight: float = 0.0) -> float:
    """Error against float64 over the error that the contract allows; green up to the slack.

    Allowed is twice the error of eager attention in the shape's own type, plus one ulp of the largest number. The
    output is checked on 61 query rows of every head, from the first to the last; gradients on whole heads of two
    key/value groups, the first of the first sequence and the last of the last.

    Args:
        found: the output (B, H, L, D); for a training shape the gradients of query, key and value instead.
        entropy_weight: times the sum of the entropies, added to the loss that the gradients are of.

    Returns:
        the largest quotient, infinite where a size is wrong or a number is not finite.
    """
    s = shape
    sizes = [(s.B, s.H, s.L, s.D), (s.B, s.G, s.S, s.D), (s.B, s.G, s.S, s.D)] if s.training else [(s.B, s.H, s.L, s.D)]
    if [tuple(x.shape) for x in found] != sizes:
        return math.inf
    pairs = _gradients(s, inputs, found, entropy_weight) if s.training else _outputs(s, inputs, found[0])
    return max(map(_quotient, pairs))


@dataclass(frozen=True)
class _Compared:
    found: Tensor
    eager: Tensor
    exact: Tensor


def _quotient(x: _Compared) -> float:
    ulp = torch.finfo(x.eager.dtype).eps * x.exact.abs().max()
    allowed = 2 * (x.eager.double() - x.exact).abs().max() + ulp
    quotient = float((x.found.double() - x.exact).abs().max() / allowed)
    return quotient if math.isfinite(quotient) else math.inf


def _weights(query: Tensor, key: Tensor, seen: Tensor | None) -> Tensor:
    scores = query @ key.mT / math.sqrt(query.shape[-1])
    return (scores if seen is None else scores.masked_fill(~seen, -math.inf)).softmax(-1)


def _outputs(shape: Shape, inputs: Inputs, found: Tensor) -> list[_Compared]:
    s = shape
    rows = torch.linspace(0, s.L - 1, min(s.L, _ROWS)).long()
    seen = visible(s, rows)

    def rows_of(dtype: torch.dtype, b: int) -> Tensor:
        key, value = (x[b].repeat_interleave(s.H // s.G, 0).to(dtype) for x in (inputs.key, inputs.value))
        return _weights(inputs.query[b][:, rows].to(dtype), key, seen) @ value

    # A sequence at a time: float64 copies of the whole would not fit beside the inputs of a long cache.
    return [_Compared(found[b][:, rows], rows_of(s.torch_dtype, b), rows_of(torch.float64, b)) for b in range(s.B)]


def _gradients(shape: Shape, inputs: Inputs, found: Sequence[Tensor], entropy_weight: float) -> list[_Compared]:
    s = shape
    seen, group = visible(s), s.H // s.G

    def gradients(dtype: torch.dtype, b: int, g: int) -> tuple[Tensor, ...]:
        heads = slice(g * group, (g + 1) * group)
        query, key, value = (
            x.to(dtype).detach().requires_grad_()
            for x in (inputs.query[b, heads], inputs.key[b, g], inputs.value[b, g])
        )
        weights = _weights(query, key, seen)
        loss = (weights @ value * inputs.gradient[b, heads].to(dtype)).sum()
        if entropy_weight:
            loss = loss + entropy_weight * torch.special.entr(weights.clamp_min(torch.finfo(dtype).tiny)).sum()
        return torch.autograd.grad(loss, (query, key, value))

    pairs = []
    for b, g in sorted({(0, 0), (s.B - 1, s.G - 1)}):
        of_group = found[0][b, g * group : (g + 1) * group], found[1][b, g], found[2][b, g]
        pairs += map(_Compared, of_group, gradients(s.torch_dtype, b, g), gradients(torch.float64, b, g))
    return pairs

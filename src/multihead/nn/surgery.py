"""Heads taken out of a layer for a while or for good, and key/value heads merged."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from . import projections

if TYPE_CHECKING:
    from .module import MultiHeadAttention

_METHODS = ("zero", "mean")
_POOLINGS = ("mean", "first")


@dataclass(frozen=True, eq=False)
class Ablation:
    """What is put in the place of heads' outputs.

    Args:
        heads: their numbers.
        method: "zero" or "mean".
        mean: (n, E), or None for the mean over the rows of each call.
    """

    heads: tuple[int, ...]
    method: str
    mean: Tensor | None = None

    @classmethod
    def of(cls, layer: MultiHeadAttention, heads: Iterable[int], method: str, mean: Tensor | None) -> Ablation:
        """Check the arguments of `MultiHeadAttention.ablate`."""
        numbers = _checked(layer, heads)
        if method not in _METHODS:
            raise ValueError(f"method: expected 'zero' or 'mean', got {method!r}")
        if mean is not None:
            if method != "mean":
                raise ValueError(f"mean: expected it with method='mean' only, got method={method!r}")
            if mean.shape != (len(numbers), layer.d_value):
                raise ValueError(f"mean: expected shape (n={len(numbers)}, E={layer.d_value}), got {tuple(mean.shape)}")
        return cls(numbers, method, mean)

    def __call__(self, output: Tensor, heads: slice, query_mask: Tensor | None) -> Tensor:
        """Outputs (B, h, L, E) of the heads `heads` with those that are meant replaced."""
        hit = [h for h in self.heads if heads.start <= h < heads.stop]
        if not hit:
            return output
        output = output.clone()
        for h in hit:
            own = output[:, h - heads.start]  # (B, L, E)
            if self.method == "zero":
                own.zero_()
            elif self.mean is not None:
                own.copy_(self.mean[self.heads.index(h)].expand_as(own))
            else:
                rows = own.flatten(0, 1) if query_mask is None else own[query_mask]
                own.copy_(rows.mean(0).expand_as(own))
        return output


def prune_heads(layer: MultiHeadAttention, heads: Iterable[int]) -> MultiHeadAttention:
    """See `MultiHeadAttention.prune_heads`."""
    gone = set(_checked(layer, heads))
    group = layer.n_heads // layer.n_kv_heads
    kept = [h for h in range(layer.n_heads) if h not in gone]
    if not kept:
        raise ValueError(f"heads: expected some of the H={layer.n_heads} heads to be left, got all of them")
    sizes = [sum(h // group == g for h in kept) for g in range(layer.n_kv_heads)]
    if len(set(sizes) - {0}) > 1:
        raise ValueError(
            f"heads: the G={layer.n_kv_heads} groups of {group} would be left with {', '.join(map(str, sizes))} heads; "
            "every group that stays needs as many: prune the same number from each, or whole groups"
        )
    kept_groups = [g for g, size in enumerate(sizes) if size]
    state = _separate(layer)
    for name, index in (("W_Q", kept), ("W_K", kept_groups), ("W_V", kept_groups)):
        width = layer.d_value if name == "W_V" else layer.d_head
        for kind in ("weight", "bias"):
            _replace(state, f"{name}.{kind}", lambda x, w=width, i=index: x.unflatten(0, (-1, w))[i].flatten(0, 1))
    _replace(state, "W_O.weight", lambda x: x.unflatten(1, (-1, layer.d_value))[:, kept].flatten(1))
    _replace(state, "W_G.weight", lambda x: x.unflatten(0, (layer.n_heads, -1))[kept].flatten(0, 1))
    _replace(state, "sinks", lambda x: x[kept])
    slopes = layer.alibi_slopes
    alibi = False if slopes is None else slopes[kept]
    return rebuilt(layer, state, n_heads=len(kept), n_kv_heads=len(kept_groups), alibi=alibi)


def group(layer: MultiHeadAttention, n_kv_heads: int, method: str = "mean") -> MultiHeadAttention:
    """See `MultiHeadAttention.group`."""
    G = layer.n_kv_heads
    if n_kv_heads < 1 or G % n_kv_heads:
        raise ValueError(f"n_kv_heads: expected a divisor of the G={G} key/value heads, got {n_kv_heads}")
    if method not in _POOLINGS:
        raise ValueError(f"method: expected 'mean' or 'first', got {method!r}")
    state = _separate(layer)
    for name in ("W_K", "W_V"):
        for kind in ("weight", "bias"):

            def pooled(x: Tensor) -> Tensor:
                parts = x.unflatten(0, (n_kv_heads, G // n_kv_heads, -1))
                return (parts.mean(1) if method == "mean" else parts[:, 0]).flatten(0, 1)

            _replace(state, f"{name}.{kind}", pooled)
    return rebuilt(layer, state, n_kv_heads=n_kv_heads)


def _checked(layer: MultiHeadAttention, heads: Iterable[int]) -> tuple[int, ...]:
    numbers = tuple(dict.fromkeys(heads))
    for h in numbers:
        if not isinstance(h, int) or not 0 <= h < layer.n_heads:
            raise IndexError(f"heads: expected numbers under H={layer.n_heads}, got {h!r}")
    return numbers


def _separate(layer: MultiHeadAttention) -> dict[str, Tensor]:
    """The state dict with a matrix each for Q, K and V."""
    state = dict(layer.state_dict())
    projections.adopt(state, "", ("Q", "K", "V"), layer.parts)
    return state


def _replace(state: dict[str, Tensor], name: str, change: Callable[[Tensor], Tensor]) -> None:
    if name in state:
        state[name] = change(state[name])


def rebuilt(layer: MultiHeadAttention, state: Mapping[str, Tensor], **changes) -> MultiHeadAttention:
    """A new layer with other options and these weights, in the layer's mode; frozen if all of the layer is."""
    made = type(layer)(**layer.options() | changes)
    made.load_state_dict(state)
    for name in ("q_norm", "k_norm"):
        if getattr(layer, name) is not None:
            getattr(made, name).eps = getattr(layer, name).eps
    made.requires_grad_(any(parameter.requires_grad for parameter in layer.parameters()))
    return made.train(layer.training)

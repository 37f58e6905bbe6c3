"""The costs of one layer of multi-head attention for several numbers of heads: what depends on it, what does not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from multihead.accounting.count import BITS
from multihead.accounting.fields import ConfigError


@dataclass(frozen=True)
class LayerCosts:
    """One layer with H heads of width D = d_model / H, as in Vaswani et al. 2017, section 3.2.2.

    W_Q, W_K and W_V are (H D, d_model), W_O is (d_model, H D): 4 d_model^2 in all, whatever H is.

    Attributes:
        d_model, heads, d_head: d_model, H, D.
        weights, biases: parameters of the four matrices, and of their biases.
        token_multiply_adds: of the four projections, a token.
        pair_multiply_adds: of the score and the weighted value of all heads, for a query and a key.
        pair_weights: weights of attention for a query and a key; the one figure that grows with H.
        bytes: of all parameters.
    """

    d_model: int
    heads: int
    d_head: int
    weights: int
    biases: int
    token_multiply_adds: int
    pair_multiply_adds: int
    pair_weights: int
    bytes: int

    @property
    def parameters(self) -> int:
        """All parameters."""
        return self.weights + self.biases


def layer_costs(d_model: int, heads: Sequence[int], *, bias: bool = False, dtype: str = "f32") -> list[LayerCosts]:
    """Return the costs of a layer for each number of heads.

    Args:
        d_model: width of the model.
        heads: numbers of heads (H), each a divisor of d_model.
        bias: whether the four projections have biases.
        dtype: how parameters are kept: f32, bf16, f16, fp8, int8, int4.

    Raises:
        ConfigError: d_model or a number of heads is not positive, or d_model is not divisible by one of them.
    """
    if d_model < 1:
        raise ConfigError(f"d_model: expected a whole number from 1 up, got {d_model}")
    if dtype not in BITS:
        raise ConfigError(f"dtype: expected one of {', '.join(BITS)}, got {dtype!r}")
    rows = []
    for count in heads:
        if count < 1 or d_model % count:
            raise ConfigError(f"heads: d_model {d_model} is not divisible by {count} heads (H)")
        d_head = d_model // count
        width = count * d_head
        weights, biases = 4 * d_model * width, (3 * width + d_model) * bias
        rows.append(
            LayerCosts(
                d_model=d_model,
                heads=count,
                d_head=d_head,
                weights=weights,
                biases=biases,
                token_multiply_adds=4 * d_model * width,
                pair_multiply_adds=2 * count * d_head,
                pair_weights=count,
                bytes=(weights + biases) * BITS[dtype] // 8,
            )
        )
    return rows

"""Products of weights and values in which a cell that is invisible is no term at all.

In IEEE arithmetic 0 * NaN is NaN, so a weight of 0 does not keep a NaN out of a matrix product.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_functorch: Any = torch._C._functorch  # pyright: ignore[reportAttributeAccessIssue]


def is_finite(x: Tensor | None) -> bool:
    """Whether every number is finite; what is absent is. Under a transform of torch.func, of every sample."""
    while x is not None and _functorch.is_functorch_wrapped_tensor(x):
        x = _functorch.get_unwrapped(x)
    # The sum of finite numbers may overflow, which costs a second look and nothing else.
    return x is None or bool(x.sum().isfinite()) or bool(x.isfinite().all())


def product(weights: Tensor, values: Tensor, visible: Tensor | None) -> Tensor:
    """weights @ values, leaving out cells that are not visible even where a value is NaN or Inf.

    Args:
        weights: (..., n, s), 0 where invisible.
        values: (..., s, e).
        visible: bool, broadcasts to (..., n, s); None = all.
    """
    if visible is None or is_finite(values):
        return weights @ values
    return _exact_product(weights, values, visible)


def _exact_product(weights: Tensor, values: Tensor, visible: Tensor) -> Tensor:
    """The finite part by one product; NaN, Inf and 0 * Inf by counting the visible terms that give them."""

    def count(cells: Tensor, marks: Tensor) -> Tensor:
        return cells.to(values.dtype) @ marks.to(values.dtype) > 0

    finite = weights @ torch.where(values.isfinite(), values, 0)
    visible = visible.expand(weights.shape)
    up, down = values == torch.inf, values == -torch.inf
    above, below = weights > 0, weights < 0
    plus = count(above, up) | count(below, down)
    minus = count(above, down) | count(below, up)
    undefined = count(visible, values.isnan()) | count(visible & (weights == 0), up | down) | (plus & minus)
    special = torch.where(plus, torch.inf, torch.where(minus, -torch.inf, 0))
    return finite + torch.where(undefined, torch.nan, special)

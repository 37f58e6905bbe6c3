"""One checked attention problem: what every implementation gets."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .axes import Index, take
from .masking import ALL, Visibility
from .pages import Pages


# Never changed once made; not frozen, which would take four times as long to make, in every call.
@dataclass(eq=False)
class Problem:
    """One attention problem whose arguments fit each other (`functional.build_problem` makes them).

    Args:
        query: (B, H, L, D).
        key: (B, G, S, D); query head h reads key/value head h // (H // G).
        value: (B, G, S, E).
        visibility: which keys each query sees.
        scale: factor of q.k.
        softcap: c in c*tanh(x/c), or None.
        bias: float (B|1, H|1, L|1, S|1), or None; a cell of -inf is invisible.
        alibi_slopes: (H,), or None; adds -slope * |p - j|.
        sinks: (H,), or None; one more logit a row that takes weight and gives no value.
        dropout_p, dropout_seed: the share of weights dropped and the seed that says which, a tensor () in a graph.
        pages: key and value as pages of a cache; `key` and `value` then only have the shapes (`plain` fills them).
    """

    query: Tensor
    key: Tensor
    value: Tensor
    visibility: Visibility
    scale: float
    softcap: float | None = None
    bias: Tensor | None = None
    alibi_slopes: Tensor | None = None
    sinks: Tensor | None = None
    dropout_p: float = 0.0
    dropout_seed: int | None = None
    pages: tuple[Pages, Pages] | None = None

    @property
    def B(self) -> int:
        return self.query.shape[0]

    @property
    def H(self) -> int:
        return self.query.shape[1]

    @property
    def G(self) -> int:
        return self.key.shape[1]

    @property
    def L(self) -> int:
        return self.query.shape[2]

    @property
    def S(self) -> int:
        return self.key.shape[2]

    @property
    def D(self) -> int:
        return self.query.shape[3]

    @property
    def E(self) -> int:
        return self.value.shape[3]

    def plain(self) -> Problem:
        """The same problem with its pages gathered."""
        if self.pages is None:
            return self
        key, value = (x.dense(self.query.dtype) for x in self.pages)
        return replace(self, key=key, value=value, pages=None)

    @property
    def group(self) -> int:
        """Query heads that share a key/value head."""
        return self.H // self.G if self.G else 1

    @property
    def sums_dtype(self) -> torch.dtype:
        """The type that sums and statistics are kept in: float64 for float64, else float32."""
        return torch.float64 if self.query.dtype is torch.float64 else torch.float32

    def visible(self, rows: Index = ALL, keys: Index = ALL) -> Tensor:
        """Cells that count in any sense, the bias's -inf taken out: bool (B|1, H|1, l, s)."""
        visible = self.visibility.dense(rows, keys)
        if self.bias is None:
            return visible
        return visible & (take(take(self.bias, 2, rows), 3, keys) != -torch.inf)

    @property
    def needs_gradients(self) -> bool:
        """Whether autograd will ask this problem for gradients."""
        if not torch.is_grad_enabled():
            return False
        if self.query.requires_grad or self.key.requires_grad or self.value.requires_grad:
            return True
        return any(x is not None and x.requires_grad for x in (self.bias, self.alibi_slopes, self.sinks))

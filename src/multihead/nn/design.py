"""Weights that give a wanted attention pattern: W_Q and W_K of one head, from a sequence and its weights.

A head's weights are A = softmax(s), s = scale * x W_Q^T W_K y^T, so log A_ij = s_ij - c_i with one constant a row.
Weights T are met where s_ij = log T_ij + c_i: a linear equation in the matrix W_Q^T W_K, whose rank is at most d_head,
with c free. Take y less its mean over the keys, which changes a row of s by a constant only, and c is gone: what is
left is the best approximation of a given rank, a truncated singular value decomposition (Eckart and Young 1936).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

_ROUNDED = 0.01  # how far a row's sum may be from 1: numbers of two decimals
_STEPS, _PATIENCE = 2000, 50
_NAMED = 4  # pairs of equal tokens that are named one by one


@dataclass(frozen=True, eq=False)
class HeadDesign:
    """A head made to have certain weights, and how close it came.

    Args:
        W_Q: (D, d_model).
        W_K: (D, d_context), or (D, d_model).
        weights: (L, S), what the head gives on the sequence that it was made for.
        error: the largest difference of a weight from the wanted one.
        log_error: root mean square of the differences of log weights, over the wanted cells.
        reach: `log_error` of the best head of any width.
        rank: the least D of a head as good as the best (up to rounding).
        limits: why it is not exact, a sentence each; none when it is.
    """

    W_Q: Tensor
    W_K: Tensor
    weights: Tensor
    error: float
    log_error: float
    reach: float
    rank: int
    limits: tuple[str, ...]

    @property
    def d_head(self) -> int:
        """D."""
        return self.W_Q.shape[0]

    @property
    def exact(self) -> bool:
        """Whether the weights are the wanted ones, up to rounding."""
        return not self.limits

    def __str__(self) -> str:
        kind = "exact" if self.exact else "not exact"
        lines = [f"head of d_head={self.d_head}, {kind}: the largest error of a weight is {self.error:.2g}"]
        return "\n".join([*lines, *(f"- {limit}" for limit in self.limits)])


@torch.no_grad()
def head_for(
    x: Tensor,
    target: Tensor,
    d_head: int | None = None,
    *,
    context: Tensor | None = None,
    causal: bool = False,
    scale: float | None = None,
) -> HeadDesign:
    """W_Q and W_K of a head whose weights on a sequence are the wanted ones, or as near as they can be.

    It minimises the sum of squares of log weights less wanted log weights, each row's constant left free. With every
    cell wanted that is solved in closed form; with free cells the solution is repeated, the free cells of a row
    sharing what its wanted ones leave as the head itself would share it.

    Args:
        x: (L, d_model), the tokens that ask.
        target: (L, S), the wanted weights, above 0; NaN is free. A row sums to 1, or to less where cells are free; sums
            off by rounding (0.01) are put right.
        d_head: D; by default the least that serves.
        context: (S, d_context), the tokens that are asked; x by default.
        causal: query i sees keys j <= S - L + i; cells beyond are out, whatever `target` holds there.
        scale: of the head's scores, by default 1 / sqrt(D).

    Raises:
        ValueError, TypeError: an argument does not fit.

    Example:
        >>> x = torch.eye(3)
        >>> design = head_for(x, torch.tensor([[0.1, 0.2, 0.7], [0.3, 0.3, 0.4], [float("nan"), 0.6, float("nan")]]))
        >>> design.weights[0]
        tensor([0.1000, 0.2000, 0.7000])
        >>> design.exact, design.d_head
        (True, 2)
    """
    context = x if context is None else context
    x, context, wanted, visible = _checked(x, target, context, causal)
    if d_head is not None and (isinstance(d_head, bool) or not isinstance(d_head, int) or d_head < 1):
        raise ValueError(f"d_head: expected an int of 1 or more, got {d_head!r}")
    if scale is not None and not 0 < scale < math.inf:
        raise ValueError(f"scale: expected a positive number, got {scale}")
    eps = torch.finfo(x.dtype).eps
    # Below this, log weights differ by rounding alone.
    close = max(1e-8, 100 * eps)
    fit = _Fit(x.double(), context.double(), wanted, visible, eps, close)
    reach, rank = fit.reach(close)
    D = d_head if d_head is not None else max(rank, 1)
    factor = math.sqrt(scale if scale is not None else 1 / math.sqrt(D))
    W_Q, W_K = ((part.T / factor).to(x.dtype).contiguous() for part in fit.solve(D))
    scores = (x.double() @ W_Q.double().T) @ (context.double() @ W_K.double().T).T * factor**2
    log_weights = scores.masked_fill(~visible, -torch.inf).log_softmax(-1)
    known = ~wanted.isnan()
    error = float((log_weights.exp() - wanted)[known].abs().max()) if known.any() else 0.0
    log_error = _rms((log_weights - wanted.log())[known])
    off = log_error > close
    limits = tuple(_limits(x, context, wanted, causal, fit, (reach, rank, D))) if off else ()
    return HeadDesign(W_Q, W_K, log_weights.exp().to(x.dtype), error, log_error, reach, rank, limits)


class _Fit:
    """The least squares problem of one sequence: spaces of the rows and of the keys, and the wanted cells."""

    def __init__(self, x: Tensor, context: Tensor, wanted: Tensor, visible: Tensor, eps: float, close: float) -> None:
        known = ~wanted.isnan()
        # A row that wants nothing, or that sees one key only, says nothing about the matrices.
        self.rows = known.any(-1) & (visible.sum(-1) > 1)
        self.wanted, self.known = wanted[self.rows], known[self.rows]
        self.free = visible[self.rows] & ~self.known
        self.out = ~visible[self.rows]
        left = 1 - self.wanted.nansum(-1, keepdim=True)
        self.log_left = left.clamp(min=torch.finfo(left.dtype).tiny).log()
        self.queries, self.from_queries = _orthonormal(x[self.rows], eps)
        self.keys, self.from_keys = _orthonormal(context - context.mean(0), eps)
        self.most = min(self.queries.shape[1], self.keys.shape[1])
        self.close, self.fits = close, dict[int, _Fitted]()

    def reach(self, close: float) -> tuple[float, int]:
        """The error of the best head of any width, and the least width of one as good."""
        best = self._fit(self.most).error
        low, high = 0, self.most
        while low < high:
            width = (low + high) // 2
            low, high = (low, width) if self._fit(width).error <= best + close else (width + 1, high)
        return best, low

    def solve(self, d_head: int) -> tuple[Tensor, Tensor]:
        """W_Q^T and W_K^T of a scale of 1: (d_model, D) and (d_context, D), balanced, with zeros beyond the rank."""
        self._fit(min(d_head, self.most))
        fit = min((fit for width, fit in self.fits.items() if width <= d_head), key=lambda fit: fit.error)
        to_query = self.from_queries @ (fit.u * fit.values.sqrt())
        to_key = self.from_keys @ (fit.v * fit.values.sqrt())
        if fit.values.any():
            balance = (to_key.norm() / to_query.norm()).sqrt()
            to_query, to_key = to_query * balance, to_key / balance
        missing = d_head - len(fit.values)
        return F.pad(to_query, (0, missing)), F.pad(to_key, (0, missing))

    def _fit(self, width: int) -> _Fitted:
        """The best product of a width, within the spaces of queries and keys.

        With free cells it alternates between the best product for all cells and the free cells that this gives, until
        it is close or gets no nearer; no step's result is kept that is worse than an earlier one's.
        """
        if width in self.fits:
            return self.fits[width]
        cells = self._first_cells()
        latest = best = self._truncated(cells, width)
        before = best.error
        for step in range(1, 1 if bool(self.known.all()) else _STEPS):
            cells = self._filled(cells, self._scores(latest))
            latest = self._truncated(cells, width)
            best = latest if latest.error < best.error else best
            if step % _PATIENCE == 0:
                if best.error < self.close / 100 or best.error > 0.999 * before:
                    break
                before = best.error
        self.fits[width] = best
        return best

    def _truncated(self, cells: Tensor, width: int) -> _Fitted:
        u, values, v = torch.linalg.svd(self.queries.T @ cells @ self.keys, full_matrices=False)
        fitted = _Fitted(u[:, :width], values[:width], v[:width].T, math.inf)
        log_weights = self._scores(fitted).masked_fill(self.out, -torch.inf).log_softmax(-1)
        return replace(fitted, error=_rms((log_weights - self.wanted.log())[self.known]))

    def _scores(self, fitted: _Fitted) -> Tensor:
        return (self.queries @ fitted.u * fitted.values) @ (self.keys @ fitted.v).T

    def _first_cells(self) -> Tensor:
        """Wanted log weights; free cells share evenly what is left, and what is invisible is as the row's mean."""
        counts = self.free.sum(-1, keepdim=True).clamp(min=1)
        cells = torch.where(self.free, self.log_left - counts.log(), self.wanted.log())
        return torch.where(self.out, self._level(cells), cells)

    def _filled(self, cells: Tensor, scores: Tensor) -> Tensor:
        """Free cells share what is left as the head has it, and what is invisible is as the head has it."""
        shares = scores.masked_fill(~self.free, -torch.inf)
        shares = shares - shares.logsumexp(-1, keepdim=True) + self.log_left
        return torch.where(self.free, shares, torch.where(self.out, scores + self._level(cells - scores), cells))

    def _level(self, cells: Tensor) -> Tensor:
        """Mean of the visible cells of each row."""
        return cells.masked_fill(self.out, 0).sum(-1, keepdim=True) / (~self.out).sum(-1, keepdim=True)


@dataclass(frozen=True)
class _Fitted:
    """A truncated singular value decomposition in the bases of queries and keys, and its error."""

    u: Tensor
    values: Tensor
    v: Tensor
    error: float


def _limits(
    x: Tensor, context: Tensor, wanted: Tensor, causal: bool, fit: _Fit, found: tuple[float, int, int]
) -> Iterator[str]:
    """Why a head is not exact, a sentence each."""
    reach, rank, D = found
    if reach > fit.close:
        pairs = [*_equal_rows(x, wanted, causal, fit.close), *_equal_keys(context, wanted, fit.close)]
        for side, i, j, apart in pairs[:_NAMED]:
            same = "rows of weights" if side == "x" else "columns of weights"
            yield (
                f"tokens {i} and {j} of {side} are equal, so their {same} are equal in any head,"
                f" and the wanted ones differ by up to {apart:.2g}"
            )
        if len(pairs) > _NAMED:
            yield f"and {len(pairs) - _NAMED} more pairs of equal tokens that want different weights"
        n, r, k = int(fit.rows.sum()), fit.queries.shape[1], fit.keys.shape[1]
        yield (
            f"no d_head reaches it: the {n} tokens that ask span {r} dimensions, the {wanted.shape[1]} that are asked,"
            f" less their mean, {k}; log weights stay {reach:.2g} off (root mean square)"
        )
    if rank > D:
        yield f"it takes rank {rank}, and d_head={D} has no more than {D}"
    elif reach <= fit.close:
        yield f"the matrices are rounded to {x.dtype}, and scores of this size feel it"


def _equal_rows(x: Tensor, wanted: Tensor, causal: bool, close: float) -> Iterator[tuple[str, int, int, float]]:
    for i, j in _equal_pairs(x):
        both = ~(wanted[i].isnan() | wanted[j].isnan())
        if not both.any():
            continue
        apart = (wanted[i].log() - wanted[j].log())[both]
        # Under a causal rule the later token sees more keys: its weights on common ones are the other's by a factor.
        apart = apart - apart.mean() if causal else apart
        if apart.abs().max() > close:
            yield "x", i, j, float((wanted[i] - wanted[j])[both].abs().max())


def _equal_keys(context: Tensor, wanted: Tensor, close: float) -> Iterator[tuple[str, int, int, float]]:
    for i, j in _equal_pairs(context):
        both = ~(wanted[:, i].isnan() | wanted[:, j].isnan())
        apart = (wanted[:, i].log() - wanted[:, j].log())[both]
        if both.any() and apart.abs().max() > close:
            yield "the keys", i, j, float((wanted[:, i] - wanted[:, j])[both].abs().max())


def _equal_pairs(tokens: Tensor) -> Iterator[tuple[int, int]]:
    """Pairs of equal rows."""
    _, group = tokens.unique(dim=0, return_inverse=True)
    same = (group[:, None] == group).triu(1)
    yield from ((int(i), int(j)) for i, j in same.nonzero())


def _orthonormal(rows: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """An orthonormal basis of the columns of (n, d), (n, r), and the (d, r) that makes it: rows @ that = basis."""
    u, values, v = torch.linalg.svd(rows, full_matrices=False)
    kept = values > eps * max(rows.shape) * values.max() if values.numel() else values > 0
    return u[:, kept], v[kept].T / values[kept]


def _rms(differences: Tensor) -> float:
    return float(differences.square().mean().sqrt()) if differences.numel() else 0.0


def _checked(x: Tensor, target: Tensor, context: Tensor, causal: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x, the context, the wanted weights in double with each row's sum put right, and the visible cells."""
    for name, tensor in (("x", x), ("target", target), ("context", context)):
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name}: expected a tensor, got {type(tensor).__name__}")
        if tensor.ndim != 2 or not tensor.dtype.is_floating_point:
            raise ValueError(f"{name}: expected floats with two axes, got {tuple(tensor.shape)} of {tensor.dtype}")
    for name, tensor in (("x", x), ("context", context)):
        if not tensor.isfinite().all():
            raise ValueError(f"{name}: expected finite numbers, got NaN or infinity")
    L, S = len(x), len(context)
    if target.shape != (L, S):
        raise ValueError(f"target: expected shape (L={L}, S={S}), got {tuple(target.shape)}")
    visible = torch.ones(L, S, dtype=torch.bool, device=target.device)
    visible = visible.tril(S - L) if causal else visible
    wanted = target.double().masked_fill(~visible, torch.nan)
    for i, (row, seen) in enumerate(zip(wanted, visible)):
        known = row[~row.isnan()]
        total, free = float(known.sum()), len(known) < int(seen.sum())
        if not (known > 0).all() or not known.isfinite().all():
            raise ValueError(
                f"target: expected weights above 0, NaN where free, got {float(known.min())} in row {i};"
                f" a softmax gives no 0, say a small number"
            )
        if free and total >= 1:
            raise ValueError(f"target: expected row {i} to leave weight for its free cells, got a sum of {total:.6g}")
        if not free and len(known) and abs(total - 1) > _ROUNDED:
            raise ValueError(f"target: expected rows that sum to 1, got {total:.6g} in row {i}")
        if not free and len(known):
            wanted[i] /= total
    return x, context, wanted, visible

"""The backward pass over tiles: the weights are made again, nothing of size L x S is kept.

With dA the gradient of the weights of a row and H its entropy, the gradient of the scores is
    ds = A * (dA - sum A dA + dlse - dH * (log A + H)) + dmax at the argmax.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .axes import take
from .finite import product
from .problem import Problem
from .statistics import Statistics
from .tiles import Tile, Tiling, by_group, distances, kept, parts, scaled_queries, scores

_FAR_BELOW = -1000.0


def gradients(
    problem: Problem,
    statistics: Statistics | None,
    found: dict[str, Tensor],
    incoming: dict[str, Tensor],
    needs: dict[str, bool],
) -> dict[str, Tensor]:
    """Gradients of query, key, value, bias and slopes, in their own shapes and types.

    Args:
        found: what the forward pass gave, by name, with each row's `top` and `inverse` sum.
        incoming: the gradients of those that have one.
        needs: which gradients are wanted.
    """
    p = problem
    dtype = p.sums_dtype
    inputs = {"query": p.query, "key": p.key, "value": p.value, "bias": p.bias, "slopes": p.alibi_slopes}
    made = {
        name: torch.zeros(x.shape, dtype=dtype, device=x.device)
        for name, x in inputs.items()
        if x is not None and (needs[name] or name in ("query", "key", "value"))
    }
    columns = None if statistics is None else statistics.class_columns(dtype, p.query.device)
    for batch, part in parts(p):
        rows_of = _RowGradients(
            part,
            {name: x[batch] for name, x in found.items()},
            {name: x[batch] for name, x in incoming.items()},
            None if columns is None else columns[batch] if len(columns) > 1 else columns,
        )
        own = {name: _own(made[name], name, batch) for name in made}
        for rows in Tiling(part).row_blocks():
            rows_of.add(p, batch, rows, own)
    return {name: x.to(inputs[name].dtype) for name, x in made.items() if needs[name]}  # type: ignore[union-attr]


def _own(whole: Tensor, name: str, batch: slice) -> Tensor:
    """The part of a gradient that belongs to some sequences, as a view."""
    if name == "slopes":
        return whole
    return take(whole, 0, batch) if name == "bias" else whole[batch]


class _RowGradients:
    """Adds up the gradients of one part of a problem, a block of rows at a time."""

    def __init__(
        self, part: Problem, found: dict[str, Tensor], incoming: dict[str, Tensor], columns: Tensor | None
    ) -> None:
        self.part, self.found, self.incoming, self.columns = part, found, incoming, columns
        self.tiling = Tiling(part)
        delta = torch.zeros_like(found["top"])
        for name in ("output", "class_mass"):
            if name in incoming:
                delta = delta + (incoming[name] * found[name]).sum(-1)
        self.delta = delta - incoming["lse"] if "lse" in incoming else delta

    def add(self, whole: Problem, batch: slice, rows: slice, made: dict[str, Tensor]) -> None:
        p = self.part
        queries = scaled_queries(p, rows)
        upstream = None
        if "output" in self.incoming:
            upstream = by_group(self.incoming["output"][:, :, rows].to(queries.dtype), p)
            upstream = upstream.reshape(p.B, p.G, queries.shape[2], p.E)
        back = torch.zeros_like(queries)
        for tile in self.tiling.tiles(rows):
            cells, capped = scores(p, queries, rows, tile.keys, tile.visible)
            log_weights = cells - self._row("top", rows)
            weights = log_weights.exp() * self._row("inverse", rows)
            if tile.visible is not None:
                weights = weights.masked_fill(~tile.visible, 0)  # also where the row's top is NaN
            visible = None if tile.visible is None else tile.visible.expand(cells.shape).flatten(2, 3)
            factor = kept(whole, batch, tile, queries.dtype)
            if upstream is not None:
                used = (weights if factor is None else weights * factor).flatten(2, 3)
                turned = None if visible is None else visible.mT
                made["value"][:, :, tile.keys] += product(used.mT, upstream, turned)
            change = self._change(tile, weights, log_weights, upstream, factor)
            if "bias" in made:
                _add_reduced(made["bias"], change.flatten(1, 2), rows, tile.keys)
            if "slopes" in made:
                away = distances(p, rows, tile.keys).to(change.dtype)
                made["slopes"] -= (change * away).sum((0, 3, 4)).flatten()
            if p.softcap is not None:
                change = change * (1 - capped * capped)
                if tile.visible is not None:
                    change = change.masked_fill(~tile.visible, 0)
            change = change.flatten(2, 3)
            back = back + product(change, p.key[:, :, tile.keys].to(change.dtype), visible)
            turned = None if visible is None else visible.mT
            made["key"][:, :, tile.keys] += product(change.mT, queries, turned)
        made["query"][:, :, rows] = (back * p.scale).view(p.B, p.H, rows.stop - rows.start, p.D)

    def _change(
        self, tile: Tile, weights: Tensor, log_weights: Tensor, upstream: Tensor | None, factor: Tensor | None
    ) -> Tensor:
        """Gradient of the scores of a tile (b, G, H/G, l, s), 0 where invisible."""
        p, rows = self.part, tile.rows
        inner = -self._row(self.delta, rows)
        if upstream is not None:
            value = p.value[:, :, tile.keys].to(weights.dtype)
            of_weights = (upstream @ value.mT).view(weights.shape)
            inner = inner + (of_weights if factor is None else of_weights * factor)
        if "class_mass" in self.incoming:
            assert self.columns is not None
            masses = by_group(self.incoming["class_mass"][:, :, rows], p)
            inner = inner + masses @ self.columns[:, None, None, tile.keys].mT
        if "entropy" in self.incoming:
            entropy, log_inverse = self._row("entropy", rows), self._row("inverse", rows).log()
            log_weights = log_weights.clamp(min=_FAR_BELOW) + log_inverse.clamp(min=_FAR_BELOW)
            inner = inner - self._row(self.incoming["entropy"], rows) * (log_weights + entropy)
        change = weights * inner
        if "max_logit" in self.incoming:
            keys = torch.arange(tile.keys.start, tile.keys.stop, device=weights.device)
            at_top = self._row("argmax", rows) == keys
            change = change + torch.where(at_top, self._row(self.incoming["max_logit"], rows), 0)
        return change if tile.visible is None else change.masked_fill(~tile.visible, 0)

    def _row(self, of: str | Tensor, rows: slice) -> Tensor:
        """A quantity of rows (b, H, L), as (b, G, H/G, l, 1)."""
        values = self.found[of] if isinstance(of, str) else of
        return by_group(values[:, :, rows, None], self.part)


def _add_reduced(whole: Tensor, cells: Tensor, rows: slice, keys: slice) -> None:
    """Add cells (b, H, l, s) to a gradient whose axes of size 1 stand for all."""
    place = take(take(whole, 2, rows), 3, keys)
    place += cells.sum_to_size(place.shape)

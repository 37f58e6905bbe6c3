"""The definition of attention in plain einsum: quadratic, any float type. Tests hold the rest against it.

s = softcap(scale * q.k) + bias - slope * |p - j|, A = softmax of s over the visible keys, output = A @ v.
"""

from __future__ import annotations

import torch
from torch import Tensor

from . import dropout
from .axes import positions_of
from .cells import distance_bins, distance_sides
from .finite import is_finite
from .masking import ALL
from .problem import Problem
from .statistics import Observation, Statistics, finish

_INF = torch.inf


def forward(problem: Problem, statistics: Statistics | None = None) -> Observation:
    """Compute a problem by its definition.

    Returns:
        the output (B, H, L, E) in the query's type, and the statistics asked, in `problem.sums_dtype`.
    """
    p = problem
    visible = p.visible().expand(p.B, p.H, p.L, p.S)
    scores = _scores(p, visible)
    any_key = visible.any(-1)

    # Softmax over the visible keys, from scores less the row's maximum; a row without keys has weights of 0.
    top = _row_max(scores)
    relative = scores - torch.where(any_key, top, 0).detach()[..., None]
    powers = torch.where(visible, relative, -_INF).exp()
    total = torch.where(any_key, powers.sum(-1), 1)
    weights = torch.where(visible, powers / total[..., None], 0)  # also where the total is NaN
    lse = torch.where(any_key, top.detach() + total.log(), -_INF)

    output_weights = weights
    sink_mass = None
    if p.sinks is not None:
        sink = p.sinks.to(scores.dtype)[:, None]
        above = torch.where(any_key, lse, 0) - sink
        sink_mass = torch.where(any_key, torch.sigmoid(-above), 1)
        output_weights = torch.where(visible, weights * torch.sigmoid(above)[..., None], 0)
    if p.dropout_p > 0:
        index = (torch.arange(n, device=weights.device) for n in weights.shape)
        output_weights = output_weights * dropout.factors(p, weights.dtype, *index)
    output = _weighted_sum(output_weights, _repeat(p.value, p), visible)
    output = torch.where(any_key[..., None], output, 0).to(p.query.dtype)
    if statistics is None:
        return Observation(output)

    # exp(-inf) = 0 takes no part in the entropy: 0 log 0 is 0.
    surprise = total.log() - (weights * torch.where(relative == -_INF, 0, relative)).sum(-1)
    entropy = torch.where(any_key, surprise, 0)
    count = visible.sum(-1)
    position = positions_of(ALL, p.S, scores.device).to(scores.dtype)
    mean = torch.where(any_key, weights @ position, torch.nan)
    variance = (weights * (position - mean[..., None]) ** 2).sum(-1)
    argmax = torch.where(any_key, _row_argmax(scores, visible), -1)
    found = {
        "lse": lse if p.sinks is None else torch.logaddexp(lse, p.sinks.to(lse.dtype)[:, None]),
        "max_logit": torch.where(any_key, top, -_INF),
        "max_weight": torch.where(any_key, 1 / total, 0),
        "argmax": argmax,
        "entropy": entropy,
        "evenness": torch.where(count > 1, entropy / count.to(entropy.dtype).log(), torch.nan),
        "effective_keys": torch.where(any_key, 1 / (weights**2).sum(-1), 0),
        "key_mean": mean,
        "key_variance": torch.where(any_key, variance, torch.nan),
    }
    asked = {name: found[name] for name in statistics.names}
    classes = statistics.class_columns(scores.dtype, scores.device)
    if classes is not None:
        asked["class_mass"] = torch.einsum("bhls,bsc->bhlc", weights, classes.expand(p.B, -1, -1))
    if statistics.offsets:
        keys = p.visibility.positions()[:, :, None] + torch.tensor(statistics.offsets, device=scores.device)
        asked["offset_mass"] = _at(weights, keys)
    if statistics.pairs:
        masses = [_at(weights, keys).sum(-1) for keys in statistics.pair_keys(scores.device)]
        asked["pair_mass"] = torch.stack(masses, -1)
    if sink_mass is not None:
        asked["sink_mass"] = sink_mass
    asked |= _over_rows(p, statistics, weights, visible)
    return Observation(output, finish(asked, p.visibility.query_mask))


def _scores(p: Problem, visible: Tensor) -> Tensor:
    """Masked scores (B, H, L, S), -inf where invisible."""
    scores = p.scale * _dot(p.query.to(p.sums_dtype), _repeat(p.key, p), visible)
    if p.softcap is not None:
        scores = p.softcap * torch.tanh(scores / p.softcap)
    if p.bias is not None:
        scores = scores + torch.where(visible, p.bias.to(scores.dtype), 0)
    if p.alibi_slopes is not None:
        distance = p.visibility.positions()[:, None, :, None] - positions_of(ALL, p.S, scores.device)
        scores = scores - p.alibi_slopes.to(scores.dtype)[:, None, None] * distance.abs()
    return torch.where(visible, scores, -_INF)


def _repeat(x: Tensor, p: Problem) -> Tensor:
    """Keys or values (B, G, S, ...) once for each query head (B, H, S, ...)."""
    return x.to(p.sums_dtype).repeat_interleave(p.group, 1)


def _dot(query: Tensor, key: Tensor, visible: Tensor) -> Tensor:
    if is_finite(query) and is_finite(key):
        return torch.einsum("bhld,bhsd->bhls", query, key)
    # 0 * NaN is NaN, so what is invisible is taken out cell by cell, before it is multiplied.
    cell = visible[..., None]
    return (torch.where(cell, query[:, :, :, None], 0) * torch.where(cell, key[:, :, None], 0)).sum(-1)


def _weighted_sum(weights: Tensor, value: Tensor, visible: Tensor) -> Tensor:
    if is_finite(value):
        return torch.einsum("bhls,bhse->bhle", weights, value)
    return (weights[..., None] * torch.where(visible[..., None], value[:, :, None], 0)).sum(-2)


def _over_rows(p: Problem, statistics: Statistics, weights: Tensor, visible: Tensor) -> dict[str, Tensor]:
    """What keys, distances and cells of a map gather from the weights (B, H, L, S), and each row's heaviest keys."""
    weights, device = weights.detach(), weights.device
    sides, m, k = distance_sides(p), statistics.map, statistics.top_keys
    found = {"received": weights.sum(2)}
    found["received_max"] = weights.amax(2) if p.L else found["received"]
    distance = p.visibility.positions()[:, :, None] - positions_of(ALL, p.S, device)
    bins = distance_bins(distance, sides)[:, None].expand(weights.shape)
    in_bin = [torch.where(bins == n, weights, 0).sum((2, 3)) for n in range(2 * sides + 1)]
    found["distance_histogram"] = torch.stack(in_bin, -1)
    if m:
        cells = weights.new_zeros(2, p.B, p.H, m, m)
        row, key = (torch.arange(n, device=device) * m // max(n, 1) for n in (p.L, p.S))
        for a in range(m):
            for c in range(m):
                cell = weights[:, :, row == a][..., key == c].flatten(2)
                if cell.shape[2]:
                    cells[0, :, :, a, c], cells[1, :, :, a, c] = cell.sum(-1), cell.amax(-1)
        found["map"], found["map_max"] = cells
    if k:
        ordered, keys = torch.sort(torch.where(visible, weights, -1), stable=True, dim=-1, descending=True)
        missing = max(0, k - p.S)
        ordered, keys = (torch.nn.functional.pad(x, (0, missing), value=-1)[..., :k] for x in (ordered, keys))
        found["top_keys"], found["top_weights"] = keys.where(ordered != -1, -1), ordered.where(ordered != -1, 0)
    return {name: found[name] for name in statistics.later}


def _at(weights: Tensor, keys: Tensor) -> Tensor:
    """Weights (B, H, L, S) at listed keys (B|1, L, K), 0 outside 0..S-1: (B, H, L, K)."""
    B, H, _L, S = weights.shape
    keys = keys[:, None].expand(B, H, -1, -1)
    if S == 0:
        return weights.new_zeros(keys.shape)
    return torch.where((keys >= 0) & (keys < S), weights.gather(-1, keys.clamp(0, S - 1)), 0)


def _row_max(scores: Tensor) -> Tensor:
    """Largest score of each row; its gradient goes to the lowest key that has it."""
    return scores.max(-1).values if scores.shape[-1] else scores.new_full(scores.shape[:-1], -_INF)


def _row_argmax(scores: Tensor, visible: Tensor) -> Tensor:
    """The key that has the largest score, the lowest of equals; hidden keys are none, visible ones of -inf are."""
    if not scores.shape[-1]:
        return torch.full(scores.shape[:-1], -1, device=scores.device)
    top, indices = scores.max(-1)
    return torch.where(top == -_INF, visible.to(torch.uint8).argmax(-1), indices)

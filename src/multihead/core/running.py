"""Running sums of a block of rows while blocks of keys pass by: softmax, output and statistics in one pass.

With m the largest score so far and e = exp(s - m): sum e, sum e v, sum e (s - m), sum e^2, and the mean and the
sum of squares of positions, merged by Chan, Golub and LeVeque, "Updating formulae and a pairwise algorithm for
computing sample variances" (1979). When m grows, what was summed shrinks by exp(m_old - m_new).
"""

from __future__ import annotations

import torch
from torch import Tensor

from .finite import product

# exp of it is 0 in float64 too: a stand-in for -inf that can be multiplied by 0.
_FAR_BELOW = -1000.0


class Running:
    """Sums over the keys seen so far, each (b, G, H/G, l).

    Args:
        shape: b, G, H/G, l.
        width: E, and C of the classes, or 0.
        names: the row statistics that are wanted.
    """

    def __init__(self, shape: tuple[int, ...], width: tuple[int, int], names: tuple[str, ...], like: Tensor) -> None:
        b, G, group, rows = shape
        # Per-row sums cost nothing beside the cells, so they are kept wide where the device can.
        wide = torch.float32 if like.device.type == "mps" else torch.float64
        zeros = like.new_zeros(shape, dtype=wide)
        self.names = set(names)
        self.top = torch.full_like(zeros, -torch.inf, dtype=like.dtype)
        self.argmax = torch.full_like(zeros, -1, dtype=torch.int64)
        self.count = torch.zeros_like(zeros, dtype=torch.int64)
        self.total, self.surprise, self.squares, self.mean, self.spread = zeros, zeros, zeros, zeros, zeros
        self.output = like.new_zeros(b, G, group * rows, width[0])
        self.classes = like.new_zeros(b, G, group * rows, width[1])

    def add(
        self,
        scores: Tensor,
        value: Tensor,
        visible: Tensor | None,
        first_key: int,
        kept: Tensor | None = None,
        columns: Tensor | None = None,
    ) -> None:
        """Take in a tile: scores (b, G, H/G, l, s), which are overwritten, and values (b, G, s, E)."""
        top, where = scores.max(-1)
        new_top = torch.maximum(self.top, top)
        base = torch.where(new_top == -torch.inf, 0, new_top)
        fall = self.top - base
        shrink = fall.exp()
        relative = scores.sub_(base[..., None])
        powers = relative.exp()
        total = powers.sum(-1)

        per_row = shrink.flatten(2, 3)[..., None]
        weights = powers if kept is None else powers * kept
        seen = None if visible is None else visible.expand(scores.shape).flatten(2, 3)
        self.output = self.output * per_row + product(weights.flatten(2, 3), value, seen)
        if columns is not None:
            self.classes = self.classes * per_row + powers.flatten(2, 3) @ columns[:, None]
        wide = shrink.to(self.total.dtype)
        if "entropy" in self.names or "evenness" in self.names:
            before = self.surprise + fall.clamp(min=_FAR_BELOW) * self.total
            self.surprise = wide * before + (powers * relative.clamp_(min=_FAR_BELOW)).sum(-1)
        if "effective_keys" in self.names:
            self.squares = wide * wide * self.squares + (powers * powers).sum(-1)
        if "key_mean" in self.names or "key_variance" in self.names:
            self._add_positions(powers, total, wide * self.total, wide, first_key)
        seen_here = scores.shape[-1] if visible is None else visible.sum(-1)
        if "argmax" in self.names:
            better = (top > self.top) | (top.isnan() & ~self.top.isnan())
            # A row whose visible scores are all -inf has its first visible key: hidden ones are -inf too.
            better |= (self.argmax < 0) & (seen_here > 0)
            if visible is not None:
                where = torch.where(top == -torch.inf, visible.view(torch.uint8).argmax(-1), where)
            self.argmax = torch.where(better, where + first_key, self.argmax)
        self.total = wide * self.total + total
        self.count = self.count + seen_here
        self.top = new_top

    def _add_positions(self, powers: Tensor, total: Tensor, before: Tensor, shrink: Tensor, first_key: int) -> None:
        some = torch.where(total == 0, 1, total)
        position = torch.arange(powers.shape[-1], dtype=powers.dtype, device=powers.device)
        mean = (powers @ position) / some
        away = position - mean[..., None]
        pull = powers * away
        # What rounding left in the mean is taken out of the mean and of the spread.
        rest = pull.sum(-1) / some
        spread = away.mul_(pull).sum(-1) - rest * rest * total
        total, some_all = total.to(before.dtype), torch.where(before + total == 0, 1, before + total)
        step = first_key + mean.to(before.dtype) + rest - self.mean
        self.mean = self.mean + step * (total / some_all)
        self.spread = shrink * self.spread + spread + step * step * (before * total / some_all)

    def finish(self) -> dict[str, Tensor]:
        """The output (b, H, l, E), class_mass (b, H, l, C), and every row statistic (b, H, l), by name."""
        empty = self.count == 0
        # Visible scores that are all -inf have no softmax: 0 / 0.
        total = torch.where(empty, 1, torch.where(self.total == 0, torch.nan, self.total))
        log_total = total.log()
        inverse = total.reciprocal()
        count = self.count.to(total.dtype)
        nothing = {
            "top": self.top.masked_fill(empty, 0),
            "inverse": inverse.masked_fill(empty, 0),
            "lse": (self.top + log_total).masked_fill(empty, -torch.inf),
            "max_logit": self.top,
            "max_weight": inverse.masked_fill(empty, 0),
            "argmax": self.argmax,
        }
        entropy = (log_total - self.surprise * inverse).masked_fill(empty, 0)
        positions = {"key_mean": self.mean + 0 * total, "key_variance": self.spread * inverse}
        found = nothing | {
            "entropy": entropy,
            "evenness": torch.where(count > 1, entropy / count.log(), torch.nan),
            "effective_keys": (total * total / self.squares).masked_fill(empty, 0),
            **{name: x.masked_fill(empty, torch.nan) for name, x in positions.items()},
        }
        per_row = inverse.masked_fill(empty, 0).to(self.output.dtype)[..., None]
        found = {name: x.flatten(1, 2) for name, x in found.items()}
        for name, sums in (("output", self.output), ("class_mass", self.classes)):
            found[name] = (sums.view(*per_row.shape[:-1], sums.shape[-1]) * per_row).flatten(1, 2)
        return found

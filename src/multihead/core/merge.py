"""Merging what was observed of the same queries over two disjoint sets of keys.

With x and y the lse of the two sides, d = |x - y| and w = sigmoid(x - y) the share of the first:
    lse = max(x, y) + log(1 + exp(-d)),   output = w * output_a + (1 - w) * output_b,
    entropy = w * entropy_a + (1 - w) * entropy_b + log(1 + exp(-d)) + d * sigmoid(-d),
the last two terms being the entropy of the choice between the sides. Mean and variance of positions merge by Chan,
Golub and LeVeque, "Updating formulae and a pairwise algorithm for computing sample variances" (1979).
"""

from __future__ import annotations

import torch
from torch import Tensor

from .statistics import Observation, finish

# sigmoid(-1000) is 0 in float64 too: a stand-in for inf that can be multiplied by 0.
_FAR = 1000.0
# What a statistic cannot be merged without.
_NEEDS = {"argmax": "max_logit", "key_variance": "key_mean"}


def merge(a: Observation, b: Observation, *, offset: int = 0) -> Observation:
    """What `observe` gives over the keys of both, from two observations of the same queries over disjoint keys.

    It is exact to rounding for any split of the keys, also in rows that see none of one side's or none at all. It
    can be repeated in any order and grouping, and carries gradients as `observe` does.

    Args:
        a, b: with the same statistics, `lse` among them. `class_mass`, `offset_mass` and `pair_mass` add up where both
            sides were asked the same: the same classes, the same distances (`query_start` shifts with the keys), the
            same sets of keys, of which each side lists its own.
        offset: what is added to b's positions in `argmax` and `key_mean`: the number of a's keys where b's follow them
            and are numbered from 0; 0 where both sides number the keys alike, as with two masks over one sequence.

    Returns:
        The merged output and statistics. What the sides do not tell is left out: `evenness`, which needs the number
        of visible keys; `argmax` without `max_logit` beside it; `key_variance` without `key_mean`.

    Raises:
        ValueError: shapes, types or statistics differ, `lse` is missing, or there are sinks, which would count twice.
            A sink merges as an observation of its own: an output of zeros, with the sink as `lse`.

    Example:
        >>> query, key, value = torch.randn(1, 8, 5, 16), torch.randn(1, 2, 7, 16), torch.randn(1, 2, 7, 16)
        >>> first = mh.observe(query, key[:, :, :3], value[:, :, :3])
        >>> second = mh.observe(query, key[:, :, 3:], value[:, :, 3:])
        >>> torch.allclose(merge(first, second, offset=3).entropy, mh.observe(query, key, value).entropy, atol=1e-5)
        True
    """
    _check(a, b)
    sides = _Sides(a.statistics, b.statistics, offset)
    statistics = finish({name: getattr(sides, name)() for name in _mergeable(a)}, None)
    return Observation(sides.output(a.output, b.output), statistics)


class _Sides:
    """Two sides, the share of the weight (B, H, L) of each, and a method for each statistic that can be merged."""

    def __init__(self, a: dict[str, Tensor], b: dict[str, Tensor], offset: int) -> None:
        self.a, self.b, self.offset = a, b, offset
        self.no_a, self.no_b = a["lse"] == -torch.inf, b["lse"] == -torch.inf
        self.nothing = self.no_a & self.no_b
        self.gap = torch.where(self.nothing, 0, a["lse"] - b["lse"]).clamp(-_FAR, _FAR)
        self.share_a, self.share_b = torch.sigmoid(self.gap), torch.sigmoid(-self.gap)

    def output(self, a: Tensor, b: Tensor) -> Tensor:
        # A side whose lse is NaN saw a NaN, which is in its output, or is padding, whose output is zeros.
        nan_a, nan_b = self.a["lse"].isnan(), self.b["lse"].isnan()
        share_a = torch.where(nan_a, 1, torch.where(nan_b, 0, self.share_a))[..., None]
        share_b = torch.where(nan_b, 1, torch.where(nan_a, 0, self.share_b))[..., None]
        return (share_a * a.to(share_a.dtype) + share_b * b.to(share_b.dtype)).to(a.dtype)

    def lse(self) -> Tensor:
        return torch.maximum(self.a["lse"], self.b["lse"]) + self._log_total()

    def max_logit(self) -> Tensor:
        return torch.where(self._top_is_in_b(), self.b["max_logit"], self.a["max_logit"])

    def max_weight(self) -> Tensor:
        return torch.maximum(self.share_a * self.a["max_weight"], self.share_b * self.b["max_weight"])

    def argmax(self) -> Tensor:
        a, b = self.a["argmax"], self._argmax_of_b()
        return torch.where(self._top_is_in_b(), b, a)

    def entropy(self) -> Tensor:
        apart = self.gap.abs()
        choice = self._log_total() + apart * torch.sigmoid(-apart)
        return torch.where(self.nothing, 0, self._averaged("entropy") + choice)

    def effective_keys(self) -> Tensor:
        squares = [
            torch.where(none, 0, share * share / side["effective_keys"])
            for none, share, side in ((self.no_a, self.share_a, self.a), (self.no_b, self.share_b, self.b))
        ]
        return torch.where(self.nothing, 0, 1 / (squares[0] + squares[1]))

    def key_mean(self) -> Tensor:
        a, b = self._means()
        return self.share_a * a + self.share_b * b

    def key_variance(self) -> Tensor:
        a, b = self._means()
        inside_a = torch.where(self.no_a, 0, self.share_a * self.a["key_variance"])
        inside_b = torch.where(self.no_b, 0, self.share_b * self.b["key_variance"])
        return inside_a + inside_b + self.share_a * self.share_b * (a - b) ** 2

    def class_mass(self) -> Tensor:
        return self._averaged("class_mass")

    def offset_mass(self) -> Tensor:
        return self._averaged("offset_mass")

    def pair_mass(self) -> Tensor:
        return self._averaged("pair_mass")

    def _averaged(self, name: str) -> Tensor:
        a, b = self.a[name], self.b[name]
        axes = (..., *(None,) * (a.ndim - self.gap.ndim))
        return self.share_a[axes] * a + self.share_b[axes] * b

    def _log_total(self) -> Tensor:
        """Log of the sum of both sides' exp(s), over the larger of them."""
        return torch.log1p(torch.exp(-self.gap.abs()))

    def _argmax_of_b(self) -> Tensor:
        return torch.where(self.b["argmax"] < 0, self.b["argmax"], self.b["argmax"] + self.offset)

    def _top_is_in_b(self) -> Tensor:
        """Whether the largest score is b's; of equals that of the lowest key, of NaN any."""
        a, b = self.a["max_logit"], self.b["max_logit"]
        larger = (b > a) | (b.isnan() & ~a.isnan())
        if "argmax" not in self.a:
            return larger
        return larger | ((a == b) & (self._argmax_of_b() < self.a["argmax"]))

    def _means(self) -> tuple[Tensor, Tensor]:
        """The mean position of each side; of a side without keys, the other's."""
        a, b = self.a["key_mean"], self.b["key_mean"] + self.offset
        return torch.where(self.no_a, b, a), torch.where(self.no_b, a, b)


def _mergeable(side: Observation) -> list[str]:
    return [x for x in side.statistics if hasattr(_Sides, x) and _NEEDS.get(x, x) in side.statistics]


def _check(a: Observation, b: Observation) -> None:
    for name, side in (("a", a), ("b", b)):
        if "lse" not in side.statistics:
            raise ValueError(f"{name}: expected an observation with lse, which says how much each side weighs")
        if "sink_mass" in side.statistics:
            raise ValueError(
                f"{name}: expected an observation without sinks, which would count twice; it has sink_mass"
            )
    in_a, in_b = _mergeable(a), _mergeable(b)
    only_a, only_b = [x for x in in_a if x not in in_b], [x for x in in_b if x not in in_a]
    if only_a or only_b:
        alone = [", ".join(x) or "nothing" for x in (only_a, only_b)]
        raise ValueError(f"b: expected the statistics of a; a alone has {alone[0]}, b alone has {alone[1]}")
    pairs = {"output": (a.output, b.output)} | {x: (a.statistics[x], b.statistics[x]) for x in in_a}
    for name, (x, y) in pairs.items():
        if x.shape != y.shape or x.dtype is not y.dtype or x.device != y.device:
            raise ValueError(
                f"b: expected {name} as in a, {tuple(x.shape)} {x.dtype} on {x.device}, "
                f"got {tuple(y.shape)} {y.dtype} on {y.device}"
            )

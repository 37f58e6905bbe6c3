"""What can be observed: the table of statistics, the request and the result."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from copy import copy
from dataclasses import dataclass, field

import torch
from torch import Tensor

from .axes import check_integers, check_shape


@dataclass(frozen=True)
class Statistic:
    """One row of the table.

    Args:
        axes: layout of the tensor, in the letters of `axes.LETTERS`; k and N count what was asked.
        meaning: one line; A are a row's weights on its keys before dropout, s its scores, p its position.
        without_keys: the value in a row that sees no key.
        carries_gradient: whether autograd passes through it.
    """

    name: str
    axes: str
    meaning: str
    without_keys: float
    carries_gradient: bool = False


_NAN, _INF = float("nan"), float("inf")

TABLE: dict[str, Statistic] = {
    row.name: row
    for row in (
        Statistic("lse", "BHL", "log of the sum of exp(s), the sink's logit included", -_INF, True),
        Statistic("max_logit", "BHL", "the largest s", -_INF, True),
        Statistic("max_weight", "BHL", "the largest A", 0),
        Statistic("argmax", "BHL", "the key that has the largest s, the lowest of equals", -1),
        Statistic("entropy", "BHL", "-sum of A log A, in nats", 0, True),
        Statistic("evenness", "BHL", "entropy over log(visible keys), NaN under two keys", _NAN),
        Statistic("effective_keys", "BHL", "1 over the sum of A^2", 0),
        Statistic("key_mean", "BHL", "mean of the attended position j", _NAN),
        Statistic("key_variance", "BHL", "variance of the attended position j", _NAN),
        Statistic("class_mass", "BHLC", "weight on the keys of each class", 0, True),
        Statistic("offset_mass", "BHLk", "weight at the key j = p + offset, for each offset", 0),
        Statistic("pair_mass", "BHLN", "weight on a listed set of keys a row, for each list", 0),
        Statistic("sink_mass", "BHL", "weight that the sink took; there when the problem has sinks", 1, True),
        Statistic("received", "BHS", "sum of the A that a key receives from the rows that see it", 0),
        Statistic("received_max", "BHS", "the largest of them", 0),
        Statistic("distance_histogram", "BHd", "sum of A by the distance p - j; `distance_ranges` says which", 0),
        Statistic("map", "BHmm", "A pooled to m x m cells: the sum of each", 0),
        Statistic("map_max", "BHmm", "the largest A of each cell", 0),
        Statistic("top_keys", "BHLk", "the k keys of the largest A, the lower of equals first; -1 = sees no more", -1),
        Statistic("top_weights", "BHLk", "their A", 0),
    )
}

ROW_STATISTICS = (
    "lse",
    "max_logit",
    "max_weight",
    "argmax",
    "entropy",
    "evenness",
    "effective_keys",
    "key_mean",
    "key_variance",
)
# Gathered over rows, from the weights made once more: asked by name.
KEY_STATISTICS = ("received", "received_max", "distance_histogram")
_NEEDS = {
    "class_mass": "classes",
    "offset_mass": "offsets",
    "pair_mass": "pairs",
    "map": "map",
    "map_max": "map",
    "top_keys": "top_keys",
    "top_weights": "top_keys",
}


def distance_ranges(n_bins: int) -> list[tuple[int, int]]:
    """The distances p - j of each bin of `distance_histogram`, first and last.

    The middle bin is 0; k bins to its right, the past, are 2^(k-1) to 2^k - 1, and as many to its left, the future.

    Example:
        >>> distance_ranges(5)
        [(-3, -2), (-1, -1), (0, 0), (1, 1), (2, 3)]
    """
    past = [(1 << (k - 1), (1 << k) - 1) for k in range(1, n_bins // 2 + 1)]
    return [(-last, -first) for first, last in reversed(past)] + [(0, 0), *past]


@dataclass(frozen=True, init=False, eq=False)
class Statistics:
    """Which statistics to observe.

    Args:
        names: names of row statistics, none meaning every one, and of `received`, `received_max` and
            `distance_histogram`, which a second pass over the weights gathers. `lse` comes always.
        classes: integers (S,) or (B, S), the class of each key, -1 = in no class; gives `class_mass`.
        n_classes: C, by default one more than the highest class.
        offsets: integers k; gives `offset_mass`, the weight at j = p + k.
        pairs: integers (L, K) or (B, L, K), each the set of keys of a row, -1 = none; gives `pair_mass`.
        map: m; gives `map` and `map_max`, of cell (i * m // L, j * m // S), by the second pass.
        top_keys: k; gives `top_keys` and `top_weights`, by the second pass.

    Raises:
        ValueError: an unknown name, or a name whose argument is missing.

    Example:
        >>> Statistics("entropy", "argmax", offsets=(-1,)).asked
        ('lse', 'argmax', 'entropy', 'offset_mass')
    """

    names: tuple[str, ...]
    classes: Tensor | None
    n_classes: int
    offsets: tuple[int, ...]
    pairs: tuple[Tensor, ...] = field(repr=False)
    of_keys: tuple[str, ...]
    map: int
    top_keys: int

    def __init__(
        self,
        *names: str,
        classes: Tensor | Sequence[int] | None = None,
        n_classes: int | None = None,
        offsets: Iterable[int] = (),
        pairs: Sequence[Tensor] = (),
        map: int = 0,
        top_keys: int = 0,
    ) -> None:
        offsets = tuple(int(k) for k in offsets)
        for name, count in (("map", map), ("top_keys", top_keys)):
            if not isinstance(count, int) or isinstance(count, bool) or count < 0:
                raise ValueError(f"{name}: expected how many, 0 or more, got {count!r}")
        given = {"classes": classes is not None, "offsets": bool(offsets), "pairs": len(pairs) > 0}
        given |= {"map": map > 0, "top_keys": top_keys > 0}
        for name in names:
            if name in _NEEDS and not given[_NEEDS[name]]:
                raise ValueError(f"statistics: {name!r} needs the argument {_NEEDS[name]}=")
            if name not in (*ROW_STATISTICS, *KEY_STATISTICS, *_NEEDS):
                known = ", ".join((*ROW_STATISTICS, *KEY_STATISTICS, *_NEEDS))
                raise ValueError(f"statistics: unknown name {name!r}; known are {known}")
        if isinstance(pairs, Tensor):
            raise TypeError("pairs: expected a sequence of tensors, one a list, got one tensor; write [pairs]")
        rows = {"lse", *names} if names else set(ROW_STATISTICS)
        put = object.__setattr__
        put(self, "names", tuple(name for name in ROW_STATISTICS if name in rows))
        put(self, "classes", None if classes is None else _integers("classes", classes))
        put(self, "n_classes", _number_of_classes(self.classes, n_classes))
        put(self, "offsets", offsets)
        put(self, "pairs", tuple(_integers("pairs", keys) for keys in pairs))
        put(self, "of_keys", tuple(name for name in KEY_STATISTICS if name in names))
        put(self, "map", map)
        put(self, "top_keys", top_keys)

    @staticmethod
    def unchecked(
        names: Sequence[str], classes: Tensor | None, n_classes: int, offsets: Sequence[int], pairs: Sequence[Tensor]
    ) -> Statistics:
        """A request from the parts of another one."""
        asked, parts = object.__new__(Statistics), (tuple(names), classes, n_classes, tuple(offsets), tuple(pairs))
        parts = (*parts, (), 0, 0)
        names_of = ("names", "classes", "n_classes", "offsets", "pairs", "of_keys", "map", "top_keys")
        for field_name, part in zip(names_of, parts, strict=True):
            object.__setattr__(asked, field_name, part)
        return asked

    @property
    def asked(self) -> tuple[str, ...]:
        """Every name that the first pass gives, in the order of the table."""
        extra = (
            ("class_mass", self.classes is not None),
            ("offset_mass", self.offsets),
            ("pair_mass", self.pairs),
        )
        return self.names + tuple(name for name, there in extra if there)

    @property
    def later(self) -> tuple[str, ...]:
        """Every name that the second pass gives, in the order of the table."""
        maps = ("map", "map_max") if self.map else ()
        return (*self.of_keys, *maps, *(("top_keys", "top_weights") if self.top_keys else ()))

    def only_later(self) -> Statistics:
        """The request of the second pass alone."""
        return Statistics("lse", *self.of_keys, map=self.map, top_keys=self.top_keys)

    def with_names(self, *names: str) -> Statistics:
        """The same request with more row statistics."""
        more = copy(self)
        wanted = {*self.names, *names}
        object.__setattr__(more, "names", tuple(name for name in ROW_STATISTICS if name in wanted))
        return more

    def with_tensors(self, classes: Tensor | None, pairs: Sequence[Tensor]) -> Statistics:
        """The same request of other keys, with as many classes and lists."""
        other = copy(self)
        object.__setattr__(other, "classes", classes)
        object.__setattr__(other, "pairs", tuple(pairs))
        return other

    def __contains__(self, name: str) -> bool:
        return name in self.asked or name in self.later

    def check(self, sizes: dict[str, int]) -> None:
        """Check classes and pairs against a problem's sizes B, L, S.

        Raises:
            ValueError: a shape does not fit.
        """
        if self.classes is not None:
            check_shape("classes", self.classes, "S" if self.classes.ndim == 1 else "BS", sizes)
        for n, keys in enumerate(self.pairs):
            check_shape(f"pairs[{n}]", keys, "LK" if keys.ndim == 2 else "BLK", {x: sizes[x] for x in "BL"})

    def class_columns(self, dtype: torch.dtype, device: torch.device) -> Tensor | None:
        """The classes as columns of a value: one-hot (B|1, S, C), or None."""
        if self.classes is None:
            return None
        classes = self.classes.to(device)
        classes = classes[None] if classes.ndim == 1 else classes
        return (classes[:, :, None] == torch.arange(self.n_classes, device=device)).to(dtype)

    def pair_keys(self, device: torch.device) -> list[Tensor]:
        """Lists of keys as sets (B|1, L, K): a key named twice in a row counts once, -1 = no key."""
        return [_as_sets(keys.to(device) if keys.ndim == 3 else keys.to(device)[None]) for keys in self.pairs]


def _as_sets(keys: Tensor) -> Tensor:
    keys = keys.sort(-1).values
    twice = torch.zeros_like(keys, dtype=torch.bool)
    twice[..., 1:] = keys[..., 1:] == keys[..., :-1]
    return keys.masked_fill(twice, -1)


def _integers(name: str, values: Tensor | Sequence[int]) -> Tensor:
    tensor = torch.as_tensor(values)
    if tensor.numel():
        check_integers(name, tensor)
    return tensor.to(torch.int64)


def _number_of_classes(classes: Tensor | None, n_classes: int | None) -> int:
    if classes is None:
        if n_classes is not None:
            raise ValueError("statistics: n_classes= needs the argument classes=")
        return 0
    highest = int(classes.max()) + 1 if classes.numel() else 0
    if n_classes is not None and n_classes < highest:
        raise ValueError(f"n_classes: expected at least {highest}, the highest class is {highest - 1}; got {n_classes}")
    return highest if n_classes is None else n_classes


@dataclass(frozen=True, eq=False)
class Observation:
    """What an attention call gave: the output (B, H, L, E), and each statistic asked, also as an attribute."""

    output: Tensor
    statistics: dict[str, Tensor] = field(default_factory=dict)

    def __getattr__(self, name: str) -> Tensor:
        if name.startswith("__") or name == "statistics":
            raise AttributeError(name)
        try:
            return self.statistics[name]
        except KeyError:
            there = ", ".join(self.statistics) or "none"
            raise AttributeError(f"no statistic {name!r} was observed here; there are: {there}") from None


def finish(statistics: dict[str, Tensor], query_mask: Tensor | None) -> dict[str, Tensor]:
    """Detach what carries no gradient, and take rows that are padding out: NaN, or -1 for argmax."""
    done = {}
    for name, value in statistics.items():
        value = value if TABLE[name].carries_gradient else value.detach()
        if query_mask is not None and TABLE[name].axes[2] == "L":
            keep = query_mask[:, None, :, None] if value.ndim == 4 else query_mask[:, None]
            value = torch.where(keep, value, -1 if name in ("argmax", "top_keys") else _NAN)
        done[name] = value
    return done

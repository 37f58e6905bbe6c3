"""Templates: which keys a head with a given habit would attend to, for every row of one tokenised text.

A template turns `Tokens` into an `Expected`, and says it in the cheapest form that the core can measure:
fixed `Offsets`, a set of `Keys` that is the same for every row, or `Pairs` that differ from row to row.
`Request` packs many of them into one `Statistics` and takes each one's weight out of the result. Nothing
here is L x S.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from multihead.core.statistics import ROW_STATISTICS, Statistics

NEAREST_COPIES = 64  # a longer list would only grow with the commonest words of a very long text


@dataclass(frozen=True)
class Tokens:
    """What templates may know of a text: its L tokens, each both query and key.

    `ids` (L,) int64, `strings` as a reader would see them, `special` and `punctuation` (L,) bool, and
    whether the model is `causal` (a row sees only keys up to itself).
    """

    ids: Tensor
    strings: list[str]
    special: Tensor
    punctuation: Tensor
    causal: bool

    def __len__(self) -> int:
        return len(self.ids)

    @classmethod
    def of(cls, ids: Iterable[int], strings: list[str], special_ids: Iterable[int], causal: bool) -> Tokens:
        """Build the view from ids and strings."""
        id_tensor = torch.as_tensor(list(ids), dtype=torch.int64)
        special_list = torch.as_tensor(sorted(special_ids), dtype=torch.int64)
        special = torch.isin(id_tensor, special_list)
        punctuation = torch.tensor([is_punctuation(s) for s in strings], dtype=torch.bool)
        return cls(id_tensor, strings, special, punctuation & ~special, causal)


def is_punctuation(token: str) -> bool:
    """Return whether a token is punctuation or symbols only, spaces and WordPiece's `##` aside."""
    token = token.strip()
    if token.startswith("##") and len(token) > 2:
        token = token[2:]
    # U+FFFD is a symbol too, but here it stands for part of a character.
    return bool(token) and all(unicodedata.category(c)[0] in "PS" and c != "\ufffd" for c in token)


class Expected:
    """Keys that a template expects, and what even attention would give them."""

    def count(self, begin: Tensor, end: Tensor) -> Tensor:
        """Return how many expected keys (L,) lie in the rows' visible runs."""
        raise NotImplementedError

    def rows(self, begin: Tensor, end: Tensor) -> tuple[Tensor, Tensor]:
        """Return the rows that count (L,) bool, and what even attention puts on expected keys there (L,).

        A row counts if it sees an expected key and also sees some other key.
        """
        expected, seen = self.count(begin, end), end - begin
        return (expected > 0) & (seen > expected), expected.double() / seen.clamp(min=1)


@dataclass(frozen=True)
class Offsets(Expected):
    """Keys at fixed distances: j = p + k for each k in `at`."""

    at: tuple[int, ...]

    def count(self, begin: Tensor, end: Tensor) -> Tensor:
        position = torch.arange(len(begin))
        return sum(((position + k >= begin) & (position + k < end)).long() for k in self.at)  # type: ignore[return-value]


@dataclass(frozen=True, eq=False)
class Keys(Expected):
    """The same keys for every row: `mask` (S,) bool."""

    mask: Tensor

    def count(self, begin: Tensor, end: Tensor) -> Tensor:
        before = torch.cat([torch.zeros(1, dtype=torch.int64), self.mask.long().cumsum(0)])
        return before[end] - before[begin]


@dataclass(frozen=True, eq=False)
class Pairs(Expected):
    """Keys listed row by row: `keys` (L, K) int64, none twice in a row, -1 where the list is shorter."""

    keys: Tensor

    def count(self, begin: Tensor, end: Tensor) -> Tensor:
        return ((self.keys >= begin[:, None]) & (self.keys < end[:, None])).sum(-1)


class Evenness(Expected):
    """No key in particular: the row's entropy over its largest possible value. The lowest possible is 0."""

    def rows(self, begin: Tensor, end: Tensor) -> tuple[Tensor, Tensor]:
        return end - begin >= 2, torch.zeros(len(begin))


class Request:
    """Several templates of one text as a single request to the core.

    Keys of class templates may overlap, classes may not: the classes asked for are the distinct
    combinations of templates that keys belong to.
    """

    def __init__(self, expected: Mapping[str, Expected]):
        self.expected = dict(expected)
        self._offsets = sorted({k for e in self._of(Offsets).values() for k in e.at})
        self._pairs = list(self._of(Pairs))
        self._keys = list(self._of(Keys))

    def _of(self, form: type) -> dict:
        return {name: e for name, e in self.expected.items() if isinstance(e, form)}

    @cached_property
    def _classes(self) -> tuple[Tensor, Tensor]:
        """The class (S,) of each key, -1 for none, and which templates hold each class (C, templates)."""
        member = torch.stack([self.expected[name].mask for name in self._keys], dim=-1)  # type: ignore[attr-defined]
        groups, index = torch.unique(member, dim=0, return_inverse=True)
        held = groups.any(-1)
        renumbered = torch.where(held, held.long().cumsum(0) - 1, -1)
        return renumbered[index], groups[held]

    def statistics(self, *rows: str) -> Statistics:
        """Return the request to the core, with these row statistics beside (none = all)."""
        classes, n_classes = None, None
        if self._keys and len(self._classes[1]):
            classes, n_classes = self._classes[0], len(self._classes[1])
        return Statistics(
            *(rows or ROW_STATISTICS),
            classes=classes,
            n_classes=n_classes,
            offsets=tuple(self._offsets),
            pairs=tuple(self.expected[name].keys for name in self._pairs),  # type: ignore[attr-defined]
        )

    def weight(self, name: str, statistics: Mapping[str, Tensor]) -> Tensor:
        """Return the weight (..., L) on the keys that template `name` expects.

        `statistics` holds what the core gave for this request, each with L (and the list's axis) last.
        """
        expected = self.expected[name]
        if isinstance(expected, Offsets):
            return statistics["offset_mass"][..., [self._offsets.index(k) for k in expected.at]].sum(-1)
        if isinstance(expected, Pairs):
            return statistics["pair_mass"][..., self._pairs.index(name)]
        if isinstance(expected, Keys):
            held = self._classes[1][:, self._keys.index(name)]
            if not len(held):
                return torch.zeros_like(statistics["lse"])
            return statistics["class_mass"][..., held].sum(-1)
        return statistics["evenness"]


def previous(tokens: Tokens) -> Expected:
    """The token before this one."""
    return Offsets((-1,))


def following(tokens: Tokens) -> Expected:
    """The token after this one; a causal model sees none."""
    return Offsets((1,))


def itself(tokens: Tokens) -> Expected:
    """This token."""
    return Offsets((0,))


def offset(k: int):
    """Return the template of the token k places back."""

    def template(tokens: Tokens) -> Expected:
        return Offsets((-k,))

    return template


def local(tokens: Tokens) -> Expected:
    """Everything at most four places away, this token included."""
    return Offsets(tuple(range(-4, 1 if tokens.causal else 5)))


def first(tokens: Tokens) -> Expected:
    """The first token of the text, whatever it is."""
    mask = torch.zeros(len(tokens), dtype=torch.bool)
    mask[:1] = True
    return Keys(mask)


def special(tokens: Tokens) -> Expected:
    """Tokens that are no text: CLS, SEP, BOS and their like."""
    return Keys(tokens.special)


def punctuation(tokens: Tokens) -> Expected:
    """Tokens of punctuation and symbols; not the first token, which draws weight whatever it is."""
    mask = tokens.punctuation.clone()
    mask[:1] = False
    return Keys(mask)


def same_token(tokens: Tokens) -> Expected:
    """Other copies of this token: the nearest 64 on either side that the row sees."""
    before = copies(tokens.ids, back=True)
    return Pairs(before if tokens.causal else torch.cat([before, copies(tokens.ids, back=False)], dim=-1))


def induction(tokens: Tokens) -> Expected:
    """The token after an earlier copy of this one, for the nearest 64 copies.

    Earlier is meant in both kinds of model. In "the the" the token after the earlier copy is the row
    itself; that is not counted.
    """
    earlier = copies(tokens.ids, back=True)
    after = torch.where(earlier >= 0, earlier + 1, -1)
    position = torch.arange(len(tokens))[:, None]
    return Pairs(torch.where(after == position, -1, after))


def broad(tokens: Tokens) -> Expected:
    """Attention spread over everything."""
    return Evenness()


def copies(ids: Tensor, back: bool, most: int = NEAREST_COPIES) -> Tensor:
    """Return where the nearest copies of each token before (`back`) or after it are: (L, K), -1 = no more.

    K is the most that any row has, at most `most` and at least 1.
    """
    length = len(ids)
    order = torch.argsort(ids, stable=True)  # equal ids side by side, each run in text order
    _, sizes = torch.unique_consecutive(ids[order], return_counts=True)
    start = torch.repeat_interleave(sizes.cumsum(0) - sizes, sizes)
    rank = torch.arange(length) - start
    size = torch.repeat_interleave(sizes, sizes)
    available = rank if back else size - 1 - rank
    width = max(1, min(most, int(available.max()) if length else 0))
    step = torch.arange(1, width + 1)
    place = torch.arange(length)[:, None] + (-step if back else step)
    found = torch.where(step <= available[:, None], order[place.clamp(0, max(0, length - 1))], -1)
    keys = torch.empty_like(found)
    keys[order] = found
    return keys

"""A short text with the exact weights of every head, and which heads lead from one word to another."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from pandas import DataFrame


@dataclass(frozen=True, eq=False)
class Sentence:
    """A text of L tokens; `spans` are their characters in it, `weights` (layer, H, L, L) of `layers`."""

    text: str
    tokens: list[str]
    spans: list[tuple[int, int]]
    layers: list[int]
    weights: Tensor

    def pieces(self, word: str) -> list[int]:
        """Return the tokens of the first occurrence of a whole word, none if it is not there."""
        found = re.search(rf"(?<!\w){re.escape(word)}(?!\w)", self.text)
        if found is None:
            return []
        return [i for i, (begin, end) in enumerate(self.spans) if begin < found.end() and end > found.start()]


def resolve(sentence: Sentence, query: str, key: str, heads: Collection[str] | None = None) -> DataFrame:
    """Return how strongly each head leads from one word to another, the strongest first.

    The weight is summed over the pieces of the key word and averaged over those of the query word. The
    table has the columns layer, head, query, key, weight; it is empty where a word is missing, or where no
    head can look from the one to the other, as from a pronoun to what comes after it in a causal model.
    `heads` ("18.6") narrows it.
    """
    import pandas

    rows = []
    queries, keys = sentence.pieces(query), sentence.pieces(key)
    if queries and keys:
        weights = sentence.weights[:, :, queries][..., keys].sum(-1).mean(-1)  # (layer, H)
        if weights.any():
            rows = [
                (layer, head, query, key, float(weight))
                for layer, of_heads in zip(sentence.layers, weights)
                for head, weight in enumerate(of_heads)
                if heads is None or f"{layer}.{head}" in heads
            ]
    table = pandas.DataFrame(rows, columns=["layer", "head", "query", "key", "weight"])
    return table.sort_values("weight", ascending=False, kind="stable", ignore_index=True)

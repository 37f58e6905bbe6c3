"""Templates against their meaning in words, spelled out key by key in plain Python."""

from __future__ import annotations

import random

import pytest
import torch

from multihead.core.masking import Visibility
from multihead.heads import patterns
from multihead.heads.patterns import Keys, Offsets, Pairs, Request, Tokens

L, VOCABULARY = 53, 11  # few different tokens, so that there are many copies


def make_tokens(causal: bool, length: int = L, seed: int = 7, cls: bool = True) -> Tokens:
    rng = random.Random(seed)
    ids = [0 if cls else 2, *(rng.randrange(2, VOCABULARY) for _ in range(length - 2)), 1]
    strings = {0: "[CLS]", 1: "[SEP]", 2: ".", 3: " (", 4: "##,"}
    return Tokens.of(ids, [strings.get(i, f" w{i}") for i in ids], [0, 1], causal)


def visible(tokens: Tokens, p: int, window: tuple[int | None, int | None]) -> set[int]:
    left, right = window
    last = p if tokens.causal else len(tokens) - 1
    return {j for j in range(last + 1) if (left is None or j >= p - left) and (right is None or j <= p + right)}


def in_words(name: str, tokens: Tokens, p: int) -> set[int]:
    """The keys that a template expects of row p, before anything is hidden from it."""
    ids = tokens.ids.tolist()
    n = len(ids)
    return {
        "previous": lambda: {p - 1},
        "following": lambda: {p + 1},
        "itself": lambda: {p},
        "local": lambda: set(range(p - 4, p + 5)),
        "first": lambda: {0},
        "special": lambda: {j for j in range(n) if ids[j] in (0, 1)},
        "punctuation": lambda: {j for j in range(1, n) if ids[j] in (2, 3, 4)},
        "same_token": lambda: {j for j in range(n) if j != p and ids[j] == ids[p]},
        "induction": lambda: {j + 1 for j in range(p) if ids[j] == ids[p]} - {p},
    }[name]()


def spans(tokens: Tokens, window: tuple[int | None, int | None] = (None, None)):
    n = len(tokens)
    begin, end = Visibility(1, 1, n, n, 0, tokens.causal, window).bounds()
    return begin[0], end[0]


NAMES = ["previous", "following", "itself", "local", "first", "special", "punctuation", "same_token"]
NAMES += ["induction"]


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [(None, None), (13, None), (17, 5)])
@pytest.mark.parametrize("name", NAMES)
def test_rows_and_even_weights_are_those_of_the_meaning_in_words(name, causal, window):
    tokens = make_tokens(causal, cls=not causal)
    counts, even = getattr(patterns, name)(tokens).rows(*spans(tokens, window))
    for p in range(L):
        seen = visible(tokens, p, window)
        expected = in_words(name, tokens, p) & seen
        assert bool(counts[p]) == (bool(expected) and bool(seen - expected)), (name, p)
        assert even[p] == pytest.approx(len(expected) / len(seen))


@pytest.mark.parametrize("k", range(2, 9))
def test_offset_expects_the_token_k_back(k):
    assert patterns.offset(k)(make_tokens(True)) == Offsets((-k,))


def test_a_request_reads_overlapping_templates_out_of_one_pass():
    tokens = make_tokens(causal=False)
    expected = {name: getattr(patterns, name)(tokens) for name in NAMES}
    request = Request(expected)
    asked = request.statistics("lse")
    weights = torch.rand(3, L, L, generator=torch.Generator().manual_seed(3), dtype=torch.float64).softmax(-1)
    measured = {
        "class_mass": torch.stack([weights[..., asked.classes == c].sum(-1) for c in range(asked.n_classes)], -1),
        "offset_mass": torch.stack(
            [
                torch.nn.functional.pad(weights, (8, 8)).diagonal(8 + k, dim1=-2, dim2=-1)[..., :L]
                for k in asked.offsets
            ],
            -1,
        ),
        "pair_mass": torch.stack(
            [
                torch.where(keys >= 0, weights.gather(-1, keys.clamp(min=0).expand(3, -1, -1)), 0).sum(-1)
                for keys in asked.pairs
            ],
            -1,
        ),
    }
    for name in NAMES:
        brute = torch.zeros(3, L, dtype=torch.float64)
        for p in range(L):
            for j in in_words(name, tokens, p):
                if 0 <= j < L:
                    brute[:, p] += weights[:, p, j]
        assert request.weight(name, measured) == pytest.approx(brute.numpy()), name


def test_classes_are_not_asked_where_no_key_has_one():
    tokens = Tokens.of([5, 6, 7], [" a", " b", " c"], [], causal=True)
    request = Request({"special": patterns.special(tokens), "punctuation": patterns.punctuation(tokens)})
    assert request.statistics().classes is None
    assert request.weight("special", {"lse": torch.ones(2, 3)}).eq(0).all()


def test_copies_are_the_nearest_ones_and_their_number_is_bounded():
    ids = torch.tensor([4, 9, 4, 4, 9, 4])
    assert patterns.copies(ids, back=True).tolist() == [
        [-1, -1, -1], [-1, -1, -1], [0, -1, -1], [2, 0, -1], [1, -1, -1], [3, 2, 0]
    ]  # fmt: skip
    assert patterns.copies(ids, back=False, most=1).tolist() == [[2], [4], [3], [5], [-1], [-1]]
    assert patterns.copies(torch.zeros(501, dtype=torch.int64), back=True).shape == (
        501,
        patterns.NEAREST_COPIES,
    )
    assert patterns.copies(torch.tensor([3]), back=True).tolist() == [[-1]]


def test_the_token_after_a_copy_is_never_the_row_itself():
    tokens = Tokens.of([7, 7, 8], [" the", " the", " cat"], [], causal=True)
    assert patterns.induction(tokens).count(*spans(tokens)).tolist() == [0, 0, 0]


@pytest.mark.parametrize(
    ("token", "expected"),
    [
        (" (", True), ("##.", True), ("#", True), ("##", True), ("?!", True), ("=", True), (" –", True),
        (" a.", False), ("", False), ("\n", False), (" 3", False), ("\ufffd", False), ("日", False),
    ],
)  # fmt: skip
def test_is_punctuation(token, expected):
    assert patterns.is_punctuation(token) is expected


def test_a_special_token_is_no_punctuation():
    tokens = Tokens.of([1, 2], ["</s>", "!"], [1, 2], causal=True)
    assert not tokens.punctuation.any()


def test_forms_are_the_cheapest():
    tokens = make_tokens(causal=True)
    assert isinstance(patterns.local(tokens), Offsets)
    assert isinstance(patterns.first(tokens), Keys)
    assert isinstance(patterns.induction(tokens), Pairs)

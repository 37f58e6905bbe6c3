"""Scores against heads made by hand, whose roles are known, and against sums over explicit weights."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import multihead as mh
from multihead.heads import patterns, roles
from multihead.heads.patterns import Tokens
from multihead.heads.roles import REPEATED, ROLES, TEXT, Reading, Role, expect, main_roles, repeated

pytest.importorskip("pandas")

L = 31


def make_tokens(causal: bool, length: int = L) -> Tokens:
    generator = torch.Generator().manual_seed(length)
    ids = torch.randint(1, 9, (length,), generator=generator).tolist()
    return Tokens.of(ids, ["." if i == 3 else f" w{i}" for i in ids], [1], causal)


def read(weights: torch.Tensor, tokens: Tokens, on: str = TEXT) -> Reading:
    """What the core observes of weights (layer, H, L, L): their logarithms are queries, the axes are keys."""
    request = expect(tokens, on)
    n = len(tokens)
    observed = [
        mh.observe(
            layer.double().log().clamp(min=-1e4)[None],
            torch.eye(n, dtype=torch.float64).expand(1, len(layer), n, n),
            torch.zeros(1, len(layer), n, 1, dtype=torch.float64),
            causal=tokens.causal,
            scale=1.0,
            statistics=request.statistics(),
        )
        for layer in weights
    ]
    begin, end = mh.core.masking.Visibility(1, 1, n, n, 0, tokens.causal).bounds()
    names = observed[0].statistics
    statistics = {name: [layer.statistics[name][0] for layer in observed] for name in names}
    return Reading(request, statistics, [(begin[0], end[0])] * len(weights))


def score(readings: list[Reading], layers: list[int]) -> Any:
    """The table; pandas' own types do not say what indexing gives."""
    return roles.score(readings, layers)


def even(tokens: Tokens, heads: int = 1) -> torch.Tensor:
    weights = torch.ones(len(tokens), len(tokens))
    weights = weights.tril() if tokens.causal else weights
    return (weights / weights.sum(-1, keepdim=True)).expand(1, heads, -1, -1)


def hard(tokens: Tokens, keys) -> torch.Tensor:
    """A head (1, 1, L, L) with all weight of row p on the key keys(p), on itself where that is invisible."""
    n = len(tokens)
    weights = torch.zeros(1, 1, n, n)
    for p in range(n):
        j = keys(p)
        weights[0, 0, p, j if 0 <= j < (p + 1 if tokens.causal else n) else p] = 1
    return weights


def row(table, role, head=0):
    found = table[(table["role"] == role) & (table["head"] == head)]
    assert len(found) == 1, role
    return found.iloc[0]


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(
    ("role", "step"), [("previous", -1), ("self", 0), ("offset(2)", -2), ("offset(5)", -5), ("offset(8)", -8)]
)
def test_a_head_made_for_a_fixed_offset_scores_one(causal, role, step):
    tokens = make_tokens(causal)
    table = score([read(hard(tokens, lambda p: p + step), tokens)], [7])
    found = row(table, role)
    assert (found["layer"], found["score"], found["lift"]) == (7, pytest.approx(1), pytest.approx(1))
    assert found["label"]
    assert main_roles(table)[7, 0] == role


def test_a_head_made_to_look_ahead_scores_one_in_an_encoder_and_is_no_role_in_a_decoder():
    tokens = make_tokens(causal=False)
    assert row(score([read(hard(tokens, lambda p: p + 1), tokens)], [0]), "next")["score"] == pytest.approx(1)
    tokens = make_tokens(causal=True)
    assert "next" not in set(score([read(even(tokens), tokens)], [0])["role"])


def test_a_sink_scores_one_and_its_first_row_counts_nowhere():
    tokens = make_tokens(causal=True)
    found = row(score([read(hard(tokens, lambda p: 0), tokens)], [0]), "first")
    assert found["score"] == pytest.approx(1)
    assert found["baseline"] == pytest.approx(sum(1 / (p + 1) for p in range(1, L)) / (L - 1))


def test_an_induction_head_scores_one_on_random_tokens_said_twice():
    n = 23
    tokens = Tokens.of(repeated(range(5, 500), n), [" x"] * (2 * n), [], causal=True)
    reading = read(hard(tokens, lambda p: p - n + 1 if p >= n else 0), tokens, REPEATED)
    table = score([reading], [3])
    assert list(table["role"]) == ["induction (random)"]
    assert row(table, "induction (random)")["score"] == pytest.approx(1)
    assert row(table, "induction (random)")["baseline"] == pytest.approx(sum(1 / (p + 1) for p in range(n, 2 * n)) / n)


@pytest.mark.parametrize("causal", [True, False])
def test_even_attention_scores_its_own_baseline_and_lifts_nothing(causal):
    tokens = make_tokens(causal)
    table = score([read(even(tokens, heads=2), tokens)], [0])
    pointed = table[table["role"] != "broad"]
    assert len(pointed) >= 2 * 14
    assert pointed["score"].to_numpy() == pytest.approx(pointed["baseline"].to_numpy())
    assert pointed["lift"].abs().max() < 1e-9
    assert row(table, "broad")["score"] == pytest.approx(1)
    assert set(main_roles(table).values()) == {"broad"}


@pytest.mark.parametrize("causal", [True, False])
def test_scores_are_sums_over_explicit_weights(causal):
    tokens = make_tokens(causal)
    generator = torch.Generator().manual_seed(5)
    logits = torch.randn(2, 3, L, L, generator=generator, dtype=torch.float64)
    visible = torch.ones(L, L, dtype=torch.bool)
    visible = visible.tril() if causal else visible
    weights = logits.masked_fill(~visible, -math.inf).softmax(-1)
    table = score([read(weights, tokens)], [4, 9])
    ids = tokens.ids.tolist()
    expected_keys = {
        "previous": lambda p, j: j == p - 1,
        "offset(3)": lambda p, j: j == p - 3,
        "local": lambda p, j: abs(p - j) <= 4,
        "first": lambda p, j: j == 0,
        "special": lambda p, j: ids[j] == 1,
        "punctuation": lambda p, j: ids[j] == 3 and j > 0,
        "same token": lambda p, j: j != p and ids[j] == ids[p],
        "induction": lambda p, j: j != p and 0 < j <= p + 1 and ids[j - 1] == ids[p] and j - 1 < p,
    }
    for role, is_expected in expected_keys.items():
        masses, evens = [], []
        for p in range(L):
            seen = [j for j in range(L) if visible[p, j]]
            keys = [j for j in seen if is_expected(p, j)]
            if keys and len(keys) < len(seen):
                masses.append(weights[:, :, p, keys].sum(-1))
                evens.append(len(keys) / len(seen))
        brute = torch.stack(masses).mean(0)
        baseline = sum(evens) / len(evens)
        found = table[table["role"] == role]
        assert found["score"].to_numpy() == pytest.approx(brute.flatten().numpy()), role
        assert found["baseline"].to_numpy() == pytest.approx(baseline), role
        lift = (found["score"] - baseline) / (1 - baseline)
        assert found["lift"].to_numpy() == pytest.approx(lift.to_numpy()), role
    assert list(found["layer"]) == [4] * 3 + [9] * 3
    entropy = -(weights * weights.clamp(min=1e-300).log()).sum(-1)[..., 1:]
    evenness = (entropy / visible.sum(-1)[1:].log()).mean(-1)
    if not causal:
        first = -(weights[:, :, 0] * weights[:, :, 0].log()).sum(-1) / math.log(L)
        evenness = (evenness * (L - 1) + first) / L
    assert table[table["role"] == "broad"]["score"].to_numpy() == pytest.approx(evenness.flatten().numpy())


def test_each_text_counts_the_same_however_long():
    short, long = make_tokens(True, 11), make_tokens(True, 47)
    table = score([read(hard(short, lambda p: p - 1), short), read(hard(long, lambda p: p), long)], [0])
    assert row(table, "previous")["score"] == pytest.approx(0.5)


def test_a_new_role_is_one_row(monkeypatch):
    toy = Role("three back", "attends three tokens back", patterns.offset(3), min_score=0.4, min_lift=0.35)
    monkeypatch.setitem(ROLES, toy.name, toy)
    tokens = make_tokens(causal=True)
    table = score([read(hard(tokens, lambda p: p - 3), tokens)], [0])
    found = row(table, "three back")
    assert found["score"] == pytest.approx(1) and found["label"]
    assert len(roles.mark_of("three back").letter) == 1


def test_letters_are_unique():
    letters = [roles.mark_of(name).letter for name in ROLES]
    assert len(set(letters)) == len(letters)


def test_a_label_needs_the_score_and_the_lift():
    tokens = make_tokens(causal=True)
    weak = 0.25 * hard(tokens, lambda p: p - 1) + 0.75 * hard(tokens, lambda p: 0)
    strong = 0.36 * hard(tokens, lambda p: p - 1) + 0.64 * hard(tokens, lambda p: 0)
    table = score([read(torch.cat([weak, strong], 1), tokens)], [0])
    # Row 1 sees the first token as its previous one too, so that row scores 1.
    assert row(table, "previous", 0)["score"] == pytest.approx((0.25 * (L - 2) + 1) / (L - 1))
    assert not row(table, "previous", 0)["label"]
    assert row(table, "previous", 1)["label"]

    dotted = Tokens.of([2, 3] * 15, ["w", "."] * 15, [], causal=True)
    found = row(score([read(even(dotted), dotted)], [0]), "punctuation")
    assert found["score"] > ROLES["punctuation"].min_score and not found["label"]


def test_a_label_needs_enough_rows():
    # Of n tokens n - 2 rows see the token before the last and some other key.
    for rows, label in ((roles.MIN_ROWS - 1, False), (roles.MIN_ROWS, True)):
        tokens = make_tokens(causal=True, length=rows + 2)
        found = row(score([read(hard(tokens, lambda p: p - 2), tokens)], [0]), "offset(2)")
        assert found["score"] == 1 and found["label"] == label


def test_a_general_role_names_a_head_only_if_no_other_does():
    tokens = Tokens.of(range(2, L + 2), ["w"] * L, [], causal=True)
    back = hard(tokens, lambda p: p - 1)
    both = 0.45 * back + 0.55 * hard(tokens, lambda p: 0)
    table = score([read(torch.cat([both, hard(tokens, lambda p: 0)], 1), tokens)], [0])
    assert row(table, "first", 0)["label"] and row(table, "first", 0)["lift"] > row(table, "previous", 0)["lift"]
    assert main_roles(table) == {(0, 0): "previous", (0, 1): "first"}


def test_repeated_draws_the_same_different_tokens_each_time():
    drawn = repeated(range(100, 900), 64)
    assert drawn == repeated(range(100, 900), 64) and drawn[:64] == drawn[64:]
    assert len(set(drawn)) == 64 and min(drawn) >= 100
    assert drawn != repeated(range(100, 900), 64, seed=1)
    assert sorted(repeated([4, 8, 6], 64)) == [4, 4, 6, 6, 8, 8]
    assert repeated([], 64) == []

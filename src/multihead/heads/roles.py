"""The table of roles: what each expects of a head, and how a head's weights are scored against it.

Score = the weight on all expected keys, averaged over the rows that see one and that also see some other
key, then over texts, each text equal. Baseline = what even attention over the visible keys would give
there. Lift = (score - baseline) / (1 - baseline): 0 is no better than even attention, 1 is all the weight
in every such row.

A new role is one more row:

    ROLES["three back"] = Role("three back", "attends three tokens back", offset(3), min_score=0.4,
    min_lift=0.35)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from multihead.heads import patterns
from multihead.heads.patterns import Expected, Request, Tokens
from multihead.show.palette import Mark, marks

if TYPE_CHECKING:
    from pandas import DataFrame

TEXT, REPEATED = "text", "random tokens said twice"
MIN_ROWS = 8  # a label needs so many rows that count: on a text of a few tokens any pattern comes by chance


@dataclass(frozen=True)
class Role:
    """One row of the table: a habit that a head may have.

    `template` says which keys it expects, `on` which kind of text it is measured on. A head gets the label
    if its score and lift both reach the thresholds. `general` roles name a head only when no other does: a
    head that looks one back is also `local`, and nearly every head of a decoder rests on the first token
    where its own habit finds nothing to do.
    """

    name: str
    meaning: str
    template: Callable[[Tokens], Expected]
    min_score: float
    min_lift: float
    source: str = ""
    on: str = TEXT
    general: bool = False


CLARK = "Clark et al. 2019, What Does BERT Look At?"
OLSSON = "Olsson et al. 2022, In-context Learning and Induction Heads"
VOITA = "Voita et al. 2019, Analyzing Multi-Head Self-Attention"
XIAO = "Xiao et al. 2023, Efficient Streaming Language Models with Attention Sinks"


def _table(*roles: Role) -> dict[str, Role]:
    return {role.name: role for role in roles}


ROLES: dict[str, Role] = _table(
    Role("previous", "attends to the token before", patterns.previous, 0.3, 0.25, VOITA),
    Role("next", "attends to the token after", patterns.following, 0.3, 0.25, CLARK),
    Role("self", "attends to the token itself", patterns.itself, 0.3, 0.25, CLARK),
    *(Role(f"offset({k})", f"attends {k} tokens back", patterns.offset(k), 0.3, 0.25, VOITA) for k in range(2, 9)),
    Role(
        "first",
        "rests on the first token (the attention sink)",
        patterns.first,
        0.4,
        0.35,
        XIAO,
        general=True,
    ),
    Role("special", "rests on CLS, SEP, BOS and their like", patterns.special, 0.3, 0.25, CLARK, general=True),
    Role("punctuation", "attends to punctuation and symbols", patterns.punctuation, 0.4, 0.2, CLARK),
    Role("same token", "attends to other copies of this token", patterns.same_token, 0.25, 0.2, OLSSON),
    Role("induction", "attends to what followed this token before", patterns.induction, 0.25, 0.2, OLSSON),
    Role(
        "induction (random)",
        "the same on random tokens said twice, where meaning cannot help",
        patterns.induction,
        0.4,
        0.35,
        OLSSON,
        on=REPEATED,
    ),
    Role("local", "keeps within 4 tokens", patterns.local, 0.6, 0.55, VOITA, general=True),
    Role("broad", "spreads over everything", patterns.broad, 0.75, 0.75, CLARK, general=True),
)


def mark_of(role: str) -> Mark:
    """Return the letter and the colours of a role, unique among `ROLES`."""
    return marks([*ROLES, role])[role]


@dataclass(frozen=True)
class Reading:
    """One text as the watched layers saw it.

    `statistics[name]` has a tensor (H, L, ...) a layer, of `request`; `spans` has for each layer the
    half-open run of keys (L,), (L,) that each row sees there.
    """

    request: Request
    statistics: Mapping[str, Sequence[Tensor]]
    spans: Sequence[tuple[Tensor, Tensor]]


def expect(tokens: Tokens, on: str = TEXT, roles: Mapping[str, Role] | None = None) -> Request:
    """Return the request that measures every role of one kind of text on these tokens."""
    roles = ROLES if roles is None else roles
    return Request({name: role.template(tokens) for name, role in roles.items() if role.on == on})


def score(readings: Sequence[Reading], layers: Sequence[int], roles: Mapping[str, Role] | None = None) -> DataFrame:
    """Return a table with a row a (layer, head, role): score, baseline, lift, label.

    `layers` numbers the layers that the readings hold. A role whose keys no row sees (`next` in a causal
    model, `special` where there are none) has no rows in the table.
    """
    import pandas

    columns = ["layer", "head", "role", "score", "baseline", "lift", "label"]
    roles = ROLES if roles is None else roles
    rows = []
    for name, role in roles.items():
        measured = [reading for reading in readings if name in reading.request.expected]
        texts = [_score_text(name, reading, len(layers)) for reading in measured]
        if not texts:
            continue
        scores = torch.nanmean(torch.stack([s for s, _, _ in texts]), dim=0)  # (layer, H), each text equal
        baselines = torch.nanmean(torch.stack([b for _, b, _ in texts]), dim=0)  # (layer,)
        enough = torch.stack([n for _, _, n in texts]).sum(0) >= MIN_ROWS
        if baselines.isnan().all():
            continue
        lifts = (scores - baselines[:, None]) / (1 - baselines[:, None])
        labels = (scores >= role.min_score) & (lifts >= role.min_lift) & enough[:, None]
        for i, layer in enumerate(layers):
            for head in range(scores.shape[1]):
                numbers = scores[i, head].item(), baselines[i].item(), lifts[i, head].item()
                rows.append((layer, head, name, *numbers, bool(labels[i, head])))
    table = pandas.DataFrame(rows, columns=columns)
    return table.sort_values(["layer", "head"], kind="stable", ignore_index=True)


def _score_text(name: str, reading: Reading, n_layers: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return one role's score (layer, H), baseline and number of rows (layer,) on a text, NaN where no row counts."""
    expected = reading.request.expected[name]
    scores, baselines, rows = [], [], []
    for i in range(n_layers):
        counts, even = expected.rows(*reading.spans[i])
        of_layer = {key: tensors[i] for key, tensors in reading.statistics.items()}
        weight = reading.request.weight(name, of_layer)
        scores.append(weight[:, counts].double().mean(-1))
        baselines.append(even[counts].double().mean())
        rows.append(counts.sum())
    return torch.stack(scores), torch.stack(baselines), torch.stack(rows)


def main_roles(table: DataFrame, roles: Mapping[str, Role] | None = None) -> dict[tuple[int, int], str]:
    """Return the role that names each (layer, head): the labelled one of highest lift, "" if there is none.

    General roles come after all others.
    """
    roles = ROLES if roles is None else roles
    general = {name for name, role in roles.items() if role.general}
    named: dict[tuple[int, int], str] = {}
    best: dict[tuple[int, int], tuple[bool, float]] = {}
    for layer, head, role, lift, label in zip(
        table["layer"], table["head"], table["role"], table["lift"], table["label"], strict=True
    ):
        key = (int(layer), int(head))
        named.setdefault(key, "")
        rank = (role not in general, lift)
        if label and rank > best.get(key, (False, float("-inf"))):
            named[key], best[key] = role, rank
    return named


def repeated(vocabulary: Iterable[int], n: int, seed: int = 0) -> list[int]:
    """Return n different tokens of the vocabulary, drawn with a seed, said twice: 2 n ids.

    With fewer than n tokens to draw from, all of them are used.
    """
    choice = torch.tensor(sorted(set(vocabulary)), dtype=torch.int64)
    drawn = choice[torch.randperm(len(choice), generator=torch.Generator().manual_seed(seed))[:n]]
    return drawn.tolist() * 2

"""Watch induction heads form: two layers learn to copy, and the training pass itself says what their heads do.

A sequence is random tokens, the last of them said twice. To say them again, a model finds what followed the token of
now the first time, and that takes two heads, one after the other: a head of layer 0 brings to each token the one before
it, and a head of layer 1 looks for the token that came after this one (Olsson et al. 2022, "In-context Learning and
Induction Heads"). How many tokens are said twice differs, so no head can know by position where to look.

    python examples/train_copy.py                              # about a minute
    python examples/train_copy.py --length 32 --steps 400      # shorter sequences are learnt sooner

The loss is that of the tokens said again; the others are chance. The same seed gives the same figures on one machine.
The maps at the end are drawn where rich is installed.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import multihead as mh

VOCABULARY, BATCH = 64, 32
LAYERS, HEADS, D_MODEL = 2, 4, 64
LEARNING_RATE = 3e-3
LEAST = {"previous token": 0.3, "induction": 0.4}  # the scores that name a head, as in `multihead look`
SHOWN = "multihead"  # letters that all differ, said twice in the maps


class Model(nn.Module):
    """Attention and nothing else: each layer adds to what the layer before it gives."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, D_MODEL)
        self.layers = nn.ModuleList(
            mh.MultiHeadAttention(D_MODEL, HEADS, causal=True, rotary=mh.nn.Rotary()) for _ in range(LAYERS)
        )
        self.norms = nn.ModuleList(nn.RMSNorm(D_MODEL) for _ in range(LAYERS))
        self.unembedding = nn.Sequential(nn.RMSNorm(D_MODEL), nn.Linear(D_MODEL, VOCABULARY, bias=False))

    def forward(self, ids: Tensor, record: mh.nn.Record | None = None) -> Tensor:
        x = self.embedding(ids)
        for norm, layer in zip(self.norms, self.layers):
            x = x + layer(norm(x), record=record)
        return self.unembedding(x)


@dataclass
class Batch:
    """Sequences that end in tokens said twice.

    Args:
        ids: (B, L).
        again: (B, L), True where a token is said again and one more follows: the rows that can copy.
        after: (B, L, 1), the key behind the earlier copy of each such token, -1 elsewhere.
    """

    ids: Tensor
    again: Tensor
    after: Tensor

    @classmethod
    def draw(cls, length: int, generator: torch.Generator) -> Batch:
        """From a quarter to a half of the tokens are said again, as many as chance has it."""
        different = torch.rand(BATCH, VOCABULARY, generator=generator).argsort(-1)
        count = torch.randint(length // 4, length // 2 + 1, (BATCH, 1), generator=generator)
        place = torch.arange(length).expand(BATCH, -1)
        again = place >= length - count
        ids = different.gather(1, torch.where(again, place - count, place))
        again = again & (place < length - 1)
        return cls(ids, again, torch.where(again, place - count + 1, -1)[..., None])

    def record(self) -> mh.nn.Record:
        """A record that asks how much weight each head puts on the token before, and where induction would."""
        return mh.nn.Record(mh.Statistics("lse", offsets=(-1,), pairs=[self.after]))

    def loss(self, logits: Tensor) -> Tensor:
        """Cross-entropy, in nats, of the tokens said again."""
        return F.cross_entropy(logits[self.again], self.ids.roll(-1, 1)[self.again])

    def scores(self, record: mh.nn.Record) -> dict[str, Tensor]:
        """The mean of those weights over the rows that have such a key: (layer, H) each."""
        before, after = record.stacked("offset_mass")[..., 0], record.stacked("pair_mass")[..., 0]
        return {
            "previous token": before[..., 1:].mean((1, 3)),
            "induction": after.movedim(2, 3)[:, self.again].mean(1),
        }


def train(steps: int, every: int, length: int, seed: int) -> tuple[Model, Batch]:
    """Train a model, say how it goes, and return it with a batch that it has not seen."""
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    told = []
    print(f" step  {'loss':<23}{'best induction head':<27}best previous-token head")
    for step in range(steps + 1):
        batch = Batch.draw(length, generator)
        record = batch.record() if step % every == 0 else None
        loss = batch.loss(model(batch.ids, record))
        if record is not None:
            scores = batch.scores(record)
            told.append((step, loss.item(), scores["induction"].max().item()))
            columns = [f"{loss:.2f} {bar(loss.item() / 5, 16)}  "]
            columns += [f"{head} {score:.2f} {bar(score, 16)}" for head, score in map(best, reversed(scores.values()))]
            print(f"{step:>5}  {'  '.join(columns)}".rstrip(), flush=True)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    if len(told) > 1:
        start, end = max(pairwise(told), key=lambda pair: pair[1][2] - pair[0][2])
        print(
            f"\nThe steepest part: from step {start[0]} to {end[0]} the best induction head went from {start[2]:.2f} "
            f"to {end[2]:.2f},\nand the loss from {start[1]:.2f} to {end[1]:.2f}."
        )
    return model, Batch.draw(length, generator)


def best(scores: Tensor) -> tuple[str, float]:
    """The name and the score of the head that has the highest one, of (layer, H)."""
    place = int(scores.argmax())
    return f"{place // HEADS}.{place % HEADS}", scores.flatten()[place].item()


def bar(share: float, width: int) -> str:
    return ("#" * round(share * width)).ljust(width)


@torch.no_grad()
def tell_heads(model: Model, batch: Batch) -> None:
    """What each head became, and what the loss is without it."""
    record = batch.record()
    loss, scores = batch.loss(model(batch.ids, record)), batch.scores(record)
    print(f"\nOn new sequences the loss is {loss:.2f}. What each head became:\n")
    print("head  previous token  induction  loss without it  role")
    for layer, head in ((layer, head) for layer in range(LAYERS) for head in range(HEADS)):
        has = {name: of_heads[layer, head].item() for name, of_heads in scores.items()}
        roles = ", ".join(name for name, least in LEAST.items() if has[name] >= least)
        with model.layers[layer].ablate([head]):
            without = batch.loss(model(batch.ids))
        line = f" {layer}.{head}{has['previous token']:>16.2f}{has['induction']:>11.2f}{without:>17.2f}  {roles}"
        print(line.rstrip())
    if find_spec("rich"):
        draw_maps(model, [(name, best(of_heads)[0]) for name, of_heads in scores.items()])


def draw_maps(model: Model, heads: list[tuple[str, str]]) -> None:
    """The exact weights of heads (role, name) on a word said twice."""
    from rich.console import Console

    from multihead.show.text import HeadMap, HeadMaps

    word = SHOWN * 2
    record = mh.nn.Record(mh.Statistics("lse", map=len(word)))  # as many cells as tokens: nothing is pooled
    model(torch.tensor([[ord(letter) - ord("a") for letter in word]]), record)
    weights = record.stacked("map")[:, 0]  # (layer, H, L, S)
    places = [(role, name, *map(int, name.split("."))) for role, name in heads]
    maps = [HeadMap(f"{name} {role}", word, weights[layer, head].tolist()) for role, name, layer, head in places]
    print()
    Console().print(HeadMaps(maps))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=800)
    parser.add_argument("--every", type=int, default=25, help="steps from one line to the next")
    parser.add_argument("--length", type=int, default=64, help=f"of a sequence, 8 to {VOCABULARY}")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    if given.steps < 0 or given.every < 1 or not 8 <= given.length <= VOCABULARY:
        parser.error(f"expected steps >= 0, every >= 1 and 8 <= length <= {VOCABULARY}")
    torch.use_deterministic_algorithms(True)
    torch.set_num_threads(1)  # more would wait for each other most of the time: the model is small
    tell_heads(*train(given.steps, given.every, given.length, given.seed))


if __name__ == "__main__":
    main()

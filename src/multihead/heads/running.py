"""Run a model over the texts of a report, and keep only what the report is made from."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from multihead.core import tiled
from multihead.core.problem import Problem
from multihead.core.statistics import ROW_STATISTICS, Statistics
from multihead.heads.encoding import Encoded, encode, vocabulary, wrap
from multihead.heads.interface import observing
from multihead.heads.models import OpenModel
from multihead.heads.patterns import Tokens
from multihead.heads.pooling import cell_edges, pooled_max
from multihead.heads.record import Record
from multihead.heads.roles import REPEATED, TEXT, Reading, expect, repeated
from multihead.heads.sentence import Sentence
from multihead.heads.watch import watch

MOST_MAPPED = 4096  # a map takes a second pass over all L x L weights, which on longer texts outweighs the rest

LayerSeen = Callable[[Problem, Tensor], None]


@dataclass
class Runner:
    """An open model, the layers to watch, and whom to tell how far it is."""

    opened: OpenModel
    layers: list[int]
    tell: Callable[[str, float | None], None]

    def passage(self, encoded: Encoded) -> tuple[Reading, Tensor | None, list[int]]:
        """Read the passage; return the reading, the pooled map (layer, H, m, m) and its cells' edges.

        There is no map of more than `MOST_MAPPED` tokens.
        """
        tokens = encoded.tokens
        if len(tokens) > MOST_MAPPED:
            return self._read("reading the passage", tokens, TEXT, ROW_STATISTICS), None, []
        edges = cell_edges(len(tokens))
        maps: list[Tensor] = []

        def draw(problem: Problem, lse: Tensor) -> None:
            def weights(rows: slice, keys: slice) -> Tensor:
                return tiled.weights(problem, lse, rows, keys)[0]

            maps.append(pooled_max(weights, edges, tokens.causal).cpu())

        reading = self._read("reading the passage", tokens, TEXT, ROW_STATISTICS, draw)
        return reading, torch.stack(maps), edges

    def repeated(self, count: int) -> Reading | None:
        """Read `count` random tokens said twice, fewer if there is no room; None if there is none at all."""
        tokenizer, model = self.opened.tokenizer, self.opened.model
        limit = self.opened.facts.max_positions
        if limit is not None:
            count = min(count, (limit - tokenizer.num_special_tokens_to_add()) // 2)
        embedding: Any = model.get_input_embeddings()
        ids = repeated(vocabulary(tokenizer, len(embedding.weight)), count)
        if not ids:
            return None
        tokens = wrap(tokenizer, ids, self.opened.facts.causal)
        return self._read("reading random tokens said twice", tokens, REPEATED, ("lse",))

    def sentence(self, text: str) -> Sentence:
        """Read a short text and keep the exact weights of every head."""
        encoded = encode(self.opened.tokenizer, text, self.opened.facts.causal)
        with watch(self._body, Statistics("lse"), self._names, keep=("query", "key")) as record:
            self._forward(record, "reading the sentence", encoded.tokens)
        weights = torch.stack([record.weights(layer)[0] for layer in record.layers])
        return Sentence(text, encoded.tokens.strings, encoded.spans, self.layers, weights)

    def _read(
        self, stage: str, tokens: Tokens, on: str, rows: Sequence[str], layer_seen: LayerSeen | None = None
    ) -> Reading:
        request = expect(tokens, on)
        spans: list[tuple[Tensor, Tensor]] = []

        def seen(problem: Problem, lse: Tensor) -> None:
            begin, end = problem.visibility.bounds()
            spans.append((begin[0].cpu(), end[0].cpu()))
            if layer_seen is not None:
                layer_seen(problem, lse)

        with watch(self._body, request.statistics(*rows), self._names) as record:
            self._forward(record, stage, tokens, seen)
        statistics = {name: [values[0] for values in layers] for name, layers in record.statistics.items()}
        return Reading(request, statistics, spans)

    def _forward(self, record: Record, stage: str, tokens: Tokens, layer_seen: LayerSeen | None = None) -> None:
        def seen(problem: Problem, lse: Tensor) -> None:
            if layer_seen is not None:
                layer_seen(problem, lse)
            tap.count += 1
            self.tell(stage, tap.count / len(self.layers))

        body = self._body
        tap = _Tap(record, seen)
        # Neither cache nor logits are of use here; on a long text they would outweigh the model.
        options = {"use_cache": False} if "use_cache" in inspect.signature(body.forward).parameters else {}
        self.tell(stage, 0.0)
        with torch.inference_mode(), _evaluating(body), observing(tap):
            body(input_ids=tokens.ids[None].to(self.opened.model.device), **options)

    @property
    def _names(self) -> list[int] | None:
        """The layers by name; None for all, so that one that runs several times (ALBERT) is several."""
        return None if len(self.layers) == self.opened.facts.layers else self.layers

    @property
    def _body(self) -> nn.Module:
        return self.opened.model.base_model


@dataclass
class _Tap:
    """Stands behind `watch` and hands on each layer's problem while it is there, with the lse found."""

    record: Record
    seen: LayerSeen
    count: int = 0

    def attend(self, module: int, problem: Problem, key_padding: Tensor | None, in_graph: bool = False) -> None:
        layers = self.record.steps[-1].seen if self.record.steps else {}
        if len(layers) > self.count:  # else it is a layer that was not asked for
            newest = next(reversed(layers.values()))
            self.seen(problem, newest.statistics["lse"].to(problem.query.device))


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Switch dropout off; modules that were in training mode are put back."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True

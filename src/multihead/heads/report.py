"""Look at a model: what each head does, measured while it reads a passage, a sentence and random tokens."""

from __future__ import annotations

import inspect
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from multihead.core.statistics import ROW_STATISTICS
from multihead.heads import export
from multihead.heads.encoding import Encoded, cut, encode
from multihead.heads.files import write_whole
from multihead.heads.models import ModelFacts, OpenModel, facts_of, open_model
from multihead.heads.roles import MIN_ROWS, main_roles, score
from multihead.heads.running import MOST_MAPPED, Runner
from multihead.heads.sentence import Sentence, resolve

if TYPE_CHECKING:
    from pandas import DataFrame
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

SENTENCE = "The cat sat on the mat because it was tired."
REPEATED_TOKENS = 64

Progress = Callable[[str, "float | None"], None]


class ReportError(ValueError):
    """A report that cannot be made or written; the message is one clear line."""


@dataclass(frozen=True, eq=False)
class HeadReport:
    """What every head of a model does. Heads are named `layer.head`, both from 0.

    Args:
        model: the facts about the model.
        text, tokens: the passage that was read, and its tokens as a reader would see them.
        layers, heads: the layers that were watched, and the heads ("18.6") that were asked for among them.
        roles: a table with a row a (layer, head, role): layer, head, role, score, baseline, lift, label.
        statistics: each row statistic on the passage, (layer, H, L), the layers in the order of `layers`.
        sentence: a short text with the exact weights (layer, H, L, L) of all heads.
        passage_map: the largest weight in each of m x m cells of the passage, (layer, H, m, m); cell c goes
            from token passage_edges[c] to passage_edges[c + 1]. None where the passage is too long for that.
        links: how strongly each head leads from "it" to "cat" in the sentence, then from "it" to "mat",
            strongest first: layer, head, query, key, weight.
        seconds, peak_memory: what the look took, and the most memory (bytes) that this process has had.
        notes: what a reader should know, such as that the text was cut.
    """

    model: ModelFacts
    text: str
    tokens: list[str]
    layers: list[int]
    heads: set[str]
    roles: DataFrame
    statistics: Mapping[str, Tensor]
    sentence: Sentence
    passage_map: Tensor | None
    passage_edges: list[int]
    links: DataFrame
    seconds: float
    peak_memory: int
    notes: list[str]

    @cached_property
    def main_role(self) -> dict[tuple[int, int], str]:
        """The one role that names each (layer, head), "" where none does."""
        asked = sorted((int(layer), int(head)) for layer, head in (name.split(".") for name in self.heads))
        return dict.fromkeys(asked, "") | main_roles(self.roles)

    def best(self, role: str) -> DataFrame:
        """Return the rows of one role, the highest lift first."""
        rows = self.roles.loc[self.roles["role"] == role]
        return rows.sort_values("lift", ascending=False, kind="stable", ignore_index=True)

    def to_json(self, path: str | Path) -> None:
        """Write roles, links, the sentence's weights and mean statistics as JSON (`"schema": 1`)."""
        self._write(path, export.json_text)

    def to_csv(self, path: str | Path) -> None:
        """Write the table of roles as CSV, whose first column is the schema's version."""
        self._write(path, export.csv_text)

    def to_html(self, path: str | Path) -> None:
        """Write one page that needs no network: the grid of heads, and each one's maps."""
        from multihead.show import page

        self._write(path, page.render)

    def _write(self, path: str | Path, make: Callable[[HeadReport], str]) -> None:
        try:
            write_whole(path, make(self))
        except OSError as error:
            raise ReportError(f"cannot write {path}: {error.strerror or error}") from error

    def _repr_html_(self) -> str:
        return export.notebook_html(self)


def look(
    model: str | PreTrainedModel,
    text: str | None = None,
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    layers: Iterable[int] | None = None,
    heads: Iterable[str] | None = None,
    max_tokens: int | None = None,
    progress: Progress | None = None,
) -> HeadReport:
    """Find out what every head of a model does.

    Args:
        model: what `open_model` opens (an alias, a folder, a GGUF file, a hub name), or a Hugging Face
            model, which then needs its `tokenizer`.
        text: what to read; None is a passage that comes with the library.
        layers, heads: whole layers (5) and single heads ("18.6") to report on, together; None is everything.
        max_tokens: cut the text to this many tokens.
        progress: called as `progress(stage, fraction)`, where the fraction of the stage may be None.

    Raises:
        ModelError: the model cannot be opened.
        ReportError: the text is empty or longer than the model's positions, or a layer or head does not
        exist.
    """
    started = time.perf_counter()
    tell = progress or (lambda stage, fraction: None)
    _check_text(text)
    opened = _open(model, tokenizer, tell)
    facts = opened.facts
    _check_kind(opened)
    chosen_layers, chosen_heads = _select(facts, layers, heads)
    notes: list[str] = []
    passage = _encode(opened, text, max_tokens, notes)

    runner = Runner(opened, chosen_layers, tell)
    reading, passage_map, edges = runner.passage(passage)
    if passage_map is None:
        notes.append(f"no map of the passage: it is longer than {MOST_MAPPED} tokens")
    repeated = runner.repeated(REPEATED_TOKENS)
    sentence = runner.sentence(SENTENCE)
    roles = score([reading] if repeated is None else [reading, repeated], chosen_layers)
    named = roles["layer"].astype(str) + "." + roles["head"].astype(str)
    return HeadReport(
        model=facts,
        text=passage.text,
        tokens=passage.tokens.strings,
        layers=chosen_layers,
        heads=chosen_heads,
        roles=roles.loc[named.isin(list(chosen_heads))].reset_index(drop=True),
        statistics={name: torch.stack(list(reading.statistics[name])) for name in ROW_STATISTICS},
        sentence=sentence,
        passage_map=passage_map,
        passage_edges=edges,
        links=_links(sentence, chosen_heads),
        seconds=time.perf_counter() - started,
        peak_memory=peak_memory(),
        notes=notes,
    )


def peak_memory() -> int:
    """Return the most memory (bytes) that this process has had resident, 0 where the system does not say."""
    try:
        import resource
    except ImportError:  # Windows
        return 0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _open(model: str | PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, tell: Progress) -> OpenModel:
    if isinstance(model, str):
        opened = open_model(model, tell)
        return opened if tokenizer is None else OpenModel(opened.model, tokenizer, opened.facts)
    if tokenizer is None:
        raise ReportError("a model that is given as an object needs its tokenizer: look(model, text, tokenizer=...)")
    return OpenModel(model, tokenizer, facts_of(model, model.name_or_path or type(model).__name__))


def _check_kind(opened: OpenModel) -> None:
    name, model = opened.facts.name, opened.model
    if model.config.is_encoder_decoder:
        raise ReportError(f"{name} is an encoder-decoder: look cannot report on it, multihead.watch can watch it")
    if "input_ids" not in inspect.signature(model.base_model.forward).parameters:
        raise ReportError(f"{name} reads no text: look cannot report on it, multihead.watch can watch it")


def _check_text(text: str | None) -> None:
    if text is None:
        return
    if not text.strip():
        raise ReportError("the text is empty")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ReportError("the text is not valid Unicode") from error


def _select(facts: ModelFacts, layers: Iterable[int] | None, heads: Iterable[str] | None) -> tuple[list[int], set[str]]:
    """Return the layers to watch and the names of the heads to report on.

    Raises:
        ReportError: one of them does not exist.
    """
    has = f"{facts.name} has layers 0 to {facts.layers - 1} and heads 0 to {facts.n_heads - 1}"
    whole = list(range(facts.layers)) if layers is None and heads is None else list(layers or ())
    for layer in whole:
        if not 0 <= layer < facts.layers:
            raise ReportError(f"there is no layer {layer}: {has}")
    chosen = {(layer, head) for layer in whole for head in range(facts.n_heads)}
    for name in heads or ():
        layer, dot, head = str(name).partition(".")
        if not (dot and layer.isdecimal() and head.isdecimal()):
            raise ReportError(f"a head is named layer.head, as in 0.2; got {name!r}")
        if int(layer) >= facts.layers or int(head) >= facts.n_heads:
            raise ReportError(f"there is no head {name}: {has}")
        chosen.add((int(layer), int(head)))
    if not chosen:
        raise ReportError("no head was asked for: layers= and heads= are empty")
    return sorted({layer for layer, _ in chosen}), {f"{layer}.{head}" for layer, head in chosen}


def _encode(opened: OpenModel, text: str | None, max_tokens: int | None, notes: list[str]) -> Encoded:
    """Tokenise the passage, cut as asked. Only the passage that comes with the library is cut to fit unasked.

    Raises:
        ReportError: it is longer than the model's positions, or nothing is left of it.
    """
    facts, limit = opened.facts, opened.facts.max_positions
    added = opened.tokenizer.num_special_tokens_to_add()
    if max_tokens is not None and max_tokens <= added:
        raise ReportError(f"max_tokens: expected at least {added + 1} for this model, got {max_tokens}")
    whole = encode(opened.tokenizer, passage_text() if text is None else text, facts.causal)
    if text is None and limit is not None:
        max_tokens = min(max_tokens or limit, limit)
    encoded = whole if max_tokens is None else cut(whole, max_tokens)
    length = len(encoded.tokens)
    if length <= added:
        raise ReportError("the text is empty: the tokenizer makes no token of it")
    if limit is not None and length > limit:
        raise ReportError(
            f"the text has {length} tokens, {facts.name} has {limit} positions; --max-tokens {limit} cuts it"
        )
    if length < len(whole.tokens):
        notes.append(f"the text was cut to {length} of its {len(whole.tokens)} tokens")
    if length < 2 * MIN_ROWS:
        notes.append(f"{length} tokens are few to tell a habit from chance: a few hundred name roles well")
    return encoded


def passage_text() -> str:
    """Return the passage that comes with the library."""
    return (files("multihead.heads") / "texts" / "passage.txt").read_text(encoding="utf-8")


def _links(sentence: Sentence, heads: set[str]) -> DataFrame:
    import pandas

    tables = [resolve(sentence, "it", noun, heads) for noun in ("cat", "mat")]
    return pandas.concat([table for table in tables if len(table)] or tables[:1], ignore_index=True)

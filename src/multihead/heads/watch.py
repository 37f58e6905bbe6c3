"""Statistics from a running Hugging Face model, through its attention interface."""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from ..core.functional import run
from ..core.problem import Problem
from ..core.statistics import Statistics, finish
from .interface import NAME, NO_WEIGHTS, observing
from .layers import Layer, find_layers
from .masks import to_device
from .record import Apart, Record, Seen, Step
from .registration import register
from .selection import Selection
from .switch import configs_of, switch

_KEEP = ("query", "key")


@contextmanager
def watch(
    model: nn.Module,
    statistics: Statistics | None = None,
    layers: Iterable[int | str] | None = None,
    heads: Iterable[int | str] | None = None,
    keep: Collection[str] = (),
) -> Iterator[Record]:
    """Record statistics of a model's attention while it runs; the model is as before when the block ends.

    For any Hugging Face model whose attention goes through the attention interface. Nothing of size L x S is
    formed. Rows that are padding are NaN (argmax -1), keys that are padding are invisible. A block records
    the forwards that its own thread runs; blocks may nest, each records for itself.

    Args:
        model: the model; its attention implementation is "multihead" inside the block.
        statistics: which, by default every row statistic. Classes, offsets and pairs are for self-attention,
            and their shapes must fit every watched layer: choose with `layers`.
        layers: names or numbers of the layers to watch, all by default; names are those of `record.layers`.
        heads: numbers, of heads in every watched layer, or names such as "18.6"; all by default.
        keep: ("query", "key") copies to the CPU what `record.weights` needs: B * (H * L + G * S) * D numbers
            a layer.

    Raises:
        TypeError: the model is no Hugging Face model.
        ValueError: an unknown layer, head or thing to keep; or, from the forward, `output_attentions=True`,
            or classes, offsets or pairs that do not fit a layer.
        RuntimeError: from the forward, when none of its attention went through the interface.

    Example:
        with multihead.watch(model) as record:
            model(**inputs)
        record.stacked("entropy")  # (layer, B, H, L)
    """
    configs = configs_of(model)
    if not configs:
        raise TypeError(f"model: expected a Hugging Face model, with a config, got {type(model).__name__}")
    register()
    session = _Session(model, statistics or Statistics(), layers, heads, keep)
    hooks = [
        model.register_forward_pre_hook(session.before_forward, with_kwargs=True),
        model.register_forward_hook(session.after_forward, always_call=True),
    ]
    switch.hold(configs)
    try:
        with observing(session):
            yield session.record
    finally:
        switch.release(configs)
        for hook in hooks:
            hook.remove()


class _Session:
    """One watch block: takes the attention calls of its thread into its record."""

    def __init__(
        self,
        model: nn.Module,
        statistics: Statistics,
        layers: Iterable[int | str] | None,
        heads: Iterable[int | str] | None,
        keep: Collection[str],
    ) -> None:
        if isinstance(keep, str) or not set(keep) <= set(_KEEP):
            raise ValueError(f"keep: expected names among {_KEEP}, got {keep!r}")
        self.model = getattr(model, "_orig_mod", model)
        self.statistics = statistics
        self.keep = tuple(keep)
        self.paths = {id(module): path for path, module in self.model.named_modules()}
        self.layers = find_layers(self.model)
        self.selection = Selection([layer.name for layer in self.layers.values()], layers, heads)
        self.record = Record()
        self.thread = threading.get_ident()
        self.in_forward = False
        self.loose = False  # the last step began outside a forward: `generate` runs the encoder on its own
        self.in_graph = False  # the last call came from a compiled graph, whose forwards no hook sees
        self.calls = 0
        self.real_rows: Tensor | None = None  # of the last self-attention: those of its cross-attention too

    def before_forward(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        if torch.compiler.is_compiling() or threading.get_ident() != self.thread:
            return
        self.in_forward, self.calls = True, 0
        if not self.loose or self.in_graph:
            self.record.steps.append(Step())
        self.loose = False
        if kwargs.get("output_attentions") or getattr(self.model.config, "output_attentions", False):
            raise ValueError(NO_WEIGHTS)

    def after_forward(self, module: nn.Module, args: tuple, output: Any) -> None:
        if torch.compiler.is_compiling() or threading.get_ident() != self.thread:
            return
        self.in_forward = False
        if output is None:  # the forward raised: a step without its last layers would mislead
            self.record.steps.pop()
        elif self.calls == 0:
            self.record.steps.pop()
            raise RuntimeError(_why_nothing_came(self.model, bool(self.layers)))

    def attend(
        self, module: int, problem: Problem, key_padding: Tensor | None, in_graph: bool = False
    ) -> Tensor | None:
        """Observe one attention call (see `interface.Observer`)."""
        path = self.paths.get(module)
        if path is None:
            return None
        self.calls += 1
        self.in_graph = in_graph
        layer = self.layers.get(module) or Layer(path, path, False)
        step = self._step(layer.name)
        rows = self._rows(layer, problem, key_padding)
        if layer.name not in self.selection:
            return None
        self._check_fit(layer, problem)
        observation = run(problem, self.statistics)
        heads = self.selection.heads_of(layer.name, problem.H)
        found = finish(observation.statistics, rows)
        every = len(heads) == problem.H
        seen = Seen(heads, Apart({name: (x if every else x[:, heads]).detach() for name, x in found.items()}))
        if self.keep:
            self._keep(seen, problem, observation.statistics["lse"])
        repeats = sum(name.partition("@")[0] == layer.name for name in step.seen)
        step.seen[f"{layer.name}@{repeats}" if repeats else layer.name] = seen
        return observation.output

    def _step(self, layer: str) -> Step:
        """The step of a call; one outside any forward begins a step, which the next forward continues."""
        if not self.in_forward and (not self.loose or layer in self.record.steps[-1].seen):
            self.record.steps.append(Step())
            self.loose = True
        return self.record.steps[-1]

    def _rows(self, layer: Layer, problem: Problem, key_padding: Tensor | None) -> Tensor | None:
        """Rows that are real tokens, (B, L), where the problem itself does not say; None means all."""
        if layer.is_cross:
            rows = self.real_rows
            return rows if rows is not None and rows.shape == (problem.B, problem.L) else None
        self.real_rows = problem.visibility.query_mask
        if self.real_rows is None and problem.L == problem.S:
            # A bidirectional mask does not say whose rows it has; here they are the keys' tokens.
            self.real_rows = key_padding
        return self.real_rows

    def _check_fit(self, layer: Layer, problem: Problem) -> None:
        asked = self.statistics
        if asked.classes is None and not asked.offsets and not asked.pairs:
            return
        if layer.is_cross:
            raise ValueError(
                f"layer {layer.name!r} is cross-attention: classes, offsets and pairs are for self-attention; "
                "choose layers= without it"
            )
        try:
            asked.check({"B": problem.B, "L": problem.L, "S": problem.S})
        except ValueError as error:
            raise ValueError(f"layer {layer.name!r}: {error}; choose the layers= that fit") from None

    def _keep(self, seen: Seen, problem: Problem, lse: Tensor) -> None:
        seen.kept = {name: getattr(problem, name).detach().to("cpu", copy=True) for name in self.keep}
        if set(self.keep) == set(_KEEP):
            seen.problem = _on_cpu(problem, **seen.kept)
            seen.lse = lse.detach().cpu()


def _on_cpu(problem: Problem, query: Tensor, key: Tensor) -> Problem:
    """A problem that weights can be recomputed from later, on the CPU and without the values."""

    def moved(tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None else tensor.detach().cpu()

    return replace(
        problem,
        query=query,
        key=key,
        value=key[..., :0],
        visibility=to_device(problem.visibility, torch.device("cpu")),
        bias=moved(problem.bias),
        sinks=moved(problem.sinks),
        dropout_p=0.0,
    )


def _why_nothing_came(model: nn.Module, has_layers: bool) -> str:
    what = f"{type(model).__name__}: none of its attention went through Hugging Face's attention interface"
    implementation = model.config._attn_implementation  # pyright: ignore[reportAttributeAccessIssue]
    if implementation != NAME:
        return f"{what}: its attention implementation was set to {implementation!r} inside the watch block"
    if has_layers:
        return f"{what}: none of its attention layers was called"
    classes = {type(m).__name__ for m in model.modules() if "attention" in type(m).__name__.lower()}
    by = f" ({', '.join(sorted(classes)[:3])})" if classes else ""
    return f"{what}: its own classes{by} compute it, so there is nothing to observe"

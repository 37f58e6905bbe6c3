"""What a watched model leaves behind: the statistics of every layer, forward by forward."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from mmap import mmap
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..core import tiled

if TYPE_CHECKING:
    from ..core.axes import Index
    from ..core.problem import Problem

_ALIGNED = 64  # bytes


@dataclass(eq=False)
class Seen:
    """One layer in one forward: its statistics on the CPU, which heads they are of, and what weights need."""

    heads: Sequence[int]
    statistics: Mapping[str, Tensor]
    problem: Problem | None = None  # of all heads; query and key are copies, value is empty
    kept: dict[str, Tensor] = field(default_factory=dict)
    lse: Tensor | None = None


class Apart(Mapping[str, Tensor]):
    """Tensors by name, copied to pages of their own and made anew at each access, on the same numbers.

    They outlive the layer that they are of. On the heap, even the small objects that a tensor is, lying between the
    layer's activations, would keep the allocator from giving that memory to the next layer: a model's peak would grow
    by many times their size.
    """

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._places: dict[str, tuple[int, torch.dtype, tuple[int, ...]]] = {}
        end = 0
        for name, x in tensors.items():
            self._places[name] = end, x.dtype, tuple(x.shape)
            end += -(-x.nbytes // _ALIGNED) * _ALIGNED
        self._pages = mmap(-1, max(end, 1))
        for name, x in tensors.items():
            self[name].copy_(x)

    def __getitem__(self, name: str) -> Tensor:
        at, dtype, shape = self._places[name]
        if 0 in shape:
            return torch.empty(shape, dtype=dtype)
        return torch.frombuffer(self._pages, dtype=dtype, count=math.prod(shape), offset=at).view(shape)

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)

    def __reduce__(self) -> tuple[type, tuple[dict[str, Tensor]]]:
        return Apart, (dict(self),)


class Step:
    """The layers that one forward of the model went through, in the order of their calls."""

    def __init__(self) -> None:
        self.seen: dict[str, Seen] = {}

    @property
    def layers(self) -> list[str]:
        """Names of the layers, in the order of `statistics[name]`."""
        return list(self.seen)

    @property
    def heads(self) -> list[list[int]]:
        """Which heads each layer's statistics are of."""
        return [list(seen.heads) for seen in self.seen.values()]

    @property
    def statistics(self) -> dict[str, list[Tensor]]:
        """Name to one tensor a layer: (B, H, L), with C, k or N last for classes, offsets and pairs."""
        found: dict[str, list[Tensor]] = {}
        for seen in self.seen.values():
            for name, value in seen.statistics.items():
                found.setdefault(name, []).append(value)
        return found

    @property
    def kept(self) -> dict[str, list[Tensor]]:
        """What `keep=` asked for: name to one tensor a layer, all heads."""
        found: dict[str, list[Tensor]] = {}
        for seen in self.seen.values():
            for name, value in seen.kept.items():
                found.setdefault(name, []).append(value)
        return found

    @property
    def kept_bytes(self) -> int:
        """Memory that `keep=` takes in this step: the copies, and each bias that layers share once."""
        biases = {}
        for seen in self.seen.values():
            if seen.problem is not None and seen.problem.bias is not None:
                biases[seen.problem.bias.data_ptr()] = seen.problem.bias.untyped_storage().nbytes()
        copies = sum(value.nbytes for seen in self.seen.values() for value in seen.kept.values())
        return copies + sum(biases.values())

    def stacked(self, name: str) -> Tensor:
        """One statistic of all layers: (layer, B, H, L, ...).

        Raises:
            KeyError: it was not asked for.
            ValueError: the layers' shapes differ.
        """
        statistics = self.statistics
        if name not in statistics:
            raise KeyError(f"{name!r} was not observed; there are: {', '.join(statistics) or 'none'}")
        values = statistics[name]
        shapes = {tuple(value.shape) for value in values}
        if len(values) < len(self.seen) or len(shapes) > 1:
            each = ", ".join(f"{layer}: {tuple(value.shape)}" for layer, value in zip(self.layers, values))
            raise ValueError(f"{name}: the layers' shapes differ ({each}); use statistics[{name!r}], a list")
        return torch.stack(values)

    def weights(
        self, layer: int | str, head: int | None = None, rows: Index | None = None, keys: Index | None = None
    ) -> Tensor:
        """Exact attention weights of a slice, recomputed from the kept query and key.

        Args:
            layer: its name, or its number.
            head: one head; None means all.
            rows, keys: slices or 1-D integer tensors; None means all.

        Returns:
            (B, H, l, s), or (B, l, s) where one head was named.

        Raises:
            KeyError: no such layer was seen.
            RuntimeError: `keep=("query", "key")` was not given.
        """
        name = str(layer)
        if name not in self.seen:
            raise KeyError(f"layer {name!r} was not seen; there are: {', '.join(self.seen) or 'none'}")
        seen = self.seen[name]
        if seen.problem is None or seen.lse is None:
            raise RuntimeError('weights need the queries and keys: watch(model, keep=("query", "key"))')
        problem, lse = seen.problem, seen.lse
        if head is not None:
            if not 0 <= head < problem.H:
                raise KeyError(f"head {head}: layer {name!r} has heads 0 to {problem.H - 1}")
            problem, lse = one_head(problem, head), lse[:, head : head + 1]
        found = tiled.weights(
            problem, lse, slice(None) if rows is None else rows, slice(None) if keys is None else keys
        )
        return found if head is None else found[:, 0]

    def __repr__(self) -> str:
        statistics = self.statistics
        line = f"{len(self.seen)} layers of {', '.join(statistics) or 'nothing'}"
        return f"{line}; query and key kept: {self.kept_bytes / 1e6:.1f} MB" if self.kept_bytes else line


def one_head(problem: Problem, head: int) -> Problem:
    """The part of a problem that concerns one query head."""

    def of_head(tensor: Tensor | None) -> Tensor | None:
        return tensor if tensor is None or tensor.shape[1] == 1 else tensor[:, head : head + 1]

    def of_vector(tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None else tensor[head : head + 1]

    group = head // problem.group
    return replace(
        problem,
        query=problem.query[:, head : head + 1],
        key=problem.key[:, group : group + 1],
        value=problem.value[:, group : group + 1],
        visibility=replace(problem.visibility, H=1, mask=of_head(problem.visibility.mask)),
        bias=of_head(problem.bias),
        alibi_slopes=of_vector(problem.alibi_slopes),
        sinks=of_vector(problem.sinks),
    )


class Record(Step):
    """What `watch` yields: `steps` has one Step a forward, and the record reads as the last of them.

    A forward is one call of the model. `generate` calls it once for the prompt and once for each further
    token; the first step then has the prompt's layers, the encoder's too where the model has an encoder.
    """

    def __init__(self) -> None:
        self.steps: list[Step] = []

    @property
    def seen(self) -> dict[str, Seen]:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The layers of the last forward.

        Raises:
            RuntimeError: the model was not run in the block by the thread that opened it.
        """
        if not self.steps:
            raise RuntimeError(
                "nothing was recorded: the model did not run in the watch block on the thread that opened it"
            )
        return self.steps[-1].seen

    @property
    def kept_bytes(self) -> int:
        """Memory that `keep=` takes in all steps."""
        return sum(step.kept_bytes for step in self.steps)

    def __repr__(self) -> str:
        if not self.steps:
            return "Record(nothing recorded yet)"
        return f"Record({len(self.steps)} step{'s' * (len(self.steps) > 1)}, the last of {super().__repr__()})"

"""What a candidate is: a way to compute the attention of a shape."""

from __future__ import annotations

import importlib.util
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from ..inputs import Inputs
from ..shapes import Shape


@dataclass(frozen=True)
class Prepared:
    """A candidate that is ready: inputs in its own layout, compiled, buffers there.

    Args:
        run: what is timed; returns when the result is there.
        numbers: what a run returned as PyTorch's tensors: (output,), or the gradients of query, key and value.
        entropy_weight: times the sum of all rows' entropies, added to the loss whose gradients these are.
    """

    run: Callable[[], Any]
    numbers: Callable[[Any], tuple[Tensor, ...]]
    entropy_weight: float = 0.0


class Peer(ABC):
    """One way to compute attention, of another library or of this one."""

    name: ClassVar[str]
    about: ClassVar[str]

    @abstractmethod
    def available(self) -> str | None:
        """Say why it cannot run on this machine, or None when it can. Imports nothing large."""

    @abstractmethod
    def refuses(self, shape: Shape) -> str | None:
        """Say why it has no way to compute a shape, or None when it has."""

    @abstractmethod
    def prepare(self, shape: Shape, inputs: Inputs) -> Prepared:
        """Make everything ready that a user would make ready once; nothing of this is timed."""


def missing(*packages: str) -> str | None:
    """Say which of these packages is not installed, or None; none is imported."""
    for package in packages:
        if importlib.util.find_spec(package) is None:
            return f"{package} is not installed: pip install 'multihead[bench]'"
    return None


def first(output: Tensor) -> tuple[Tensor]:
    """The numbers of a run that returns the output itself."""
    return (output,)

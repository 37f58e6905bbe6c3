"""The paths that serve a problem, and which one does."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from . import backward, native, reference, tiled
from .problem import Problem
from .statistics import Observation, Statistics

Found = dict[str, Tensor]


@dataclass(frozen=True)
class Path:
    """One implementation.

    Args:
        forward: the output and the statistics asked of a problem.
        rows: what the backward pass needs of a problem without sinks, (B, H, L, ...) by name: the output, lse, the
            row statistics asked, class_mass, and `top` and `inverse`, from which a weight is exp(s - top) * inverse
            (in the path's own units). That keeps its digits at logits of 1,000, where exp(s - lse) loses them.
        gradients: from a problem, the statistics, what `rows` gave, the incoming gradients by name and which
            gradients are wanted, those of query, key, value, bias and slopes by name, in their own shapes and types.
    """

    forward: Callable[[Problem, Statistics | None], Observation]
    rows: Callable[[Problem, Statistics | None], Found] | None = None
    gradients: Callable[[Problem, Statistics | None, Found, Found, dict[str, bool]], Found] | None = None


def _native_rows(problem: Problem, statistics: Statistics | None) -> Found:
    return native.forward_saving(problem, Statistics("lse") if statistics is None else statistics)


PATHS = {
    "native": Path(native.forward, _native_rows, native.backward),
    "tiled": Path(tiled.forward, tiled.over_tiles, backward.gradients),
    "reference": Path(reference.forward),
}


def choose(problem: Problem, statistics: Statistics | None, impl: str = "auto", gradients: bool | None = None) -> str:
    """The path that serves a problem: "native" where it can, else "tiled"; "reference" only when asked.

    Args:
        gradients: whether the rows for a backward pass are wanted too; by default whether autograd will ask for them.

    Raises:
        ValueError: `impl` is unknown, or forced and cannot serve.
    """
    if impl == "auto":
        return "native" if why_not_native(problem, statistics, gradients) is None else "tiled"
    if impl not in PATHS:
        raise ValueError(f"impl: expected 'auto', 'native', 'tiled' or 'reference', got {impl!r}")
    if impl == "native" and (reason := why_not_native(problem, statistics, gradients)) is not None:
        raise ValueError(f"impl: 'native' cannot serve this call: {reason}")
    return impl


def why_not_native(problem: Problem, statistics: Statistics | None, gradients: bool | None = None) -> str | None:
    """Why the compiled core cannot serve a call, or None when it can."""
    if problem.needs_gradients if gradients is None else gradients:
        return native.can_use_backward(problem, statistics)
    return native.can_use(problem, statistics)


def forward(path: str, problem: Problem, statistics: Statistics | None) -> Observation:
    """A problem on a path, out of autograd's sight."""
    if not torch.is_autocast_enabled(problem.query.device.type):  # what costs least comes first
        return PATHS[path].forward(problem, statistics)
    with out_of_autocast(problem.query):
        return PATHS[path].forward(problem, statistics)


def row_names(statistics: Statistics | None) -> tuple[str, ...]:
    """The names of what `rows` gives, in its order."""
    if statistics is None:
        return ("output", "lse", "top", "inverse")
    return ("output", *_for_backward(statistics).asked, "top", "inverse")


def rows(path: str, problem: Problem, statistics: Statistics | None) -> dict[str, Tensor]:
    """Output and statistics as if there were no sinks, and what `gradients` needs of them, by `row_names`."""
    make = PATHS[path].rows
    assert make is not None
    plain = problem if problem.sinks is None else replace(problem, sinks=None)
    wanted = None if statistics is None else _for_backward(statistics)
    with torch.no_grad(), out_of_autocast(problem.query):
        found = make(plain, wanted)
        if wanted is not None:
            found |= tiled.gathered(plain, wanted, found["lse"])
    return {name: found[name] for name in row_names(statistics)}


def gradients(
    path: str, problem: Problem, statistics: Statistics | None, found: Found, incoming: Found, needs: dict[str, bool]
) -> Found:
    """The gradients that `needs` names, from what `rows` gave on the same path."""
    make = PATHS[path].gradients
    assert make is not None
    wanted = None if statistics is None else _for_backward(statistics)
    with torch.no_grad(), out_of_autocast(problem.query):
        return make(problem, wanted, found, incoming, needs)


def _for_backward(statistics: Statistics) -> Statistics:
    # The gradient of max_logit goes to the argmax.
    return statistics.with_names("argmax") if "max_logit" in statistics.names else statistics


def out_of_autocast(tensor: Tensor) -> AbstractContextManager:
    """Autocast has cast the inputs; inside, products stay in the type of the sums."""
    kind = tensor.device.type
    return torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else nullcontext()

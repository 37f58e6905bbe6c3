"""The matrices of a layer: one wide or one each, and a state dict of either for either.

A layer has the parts Q, K, V of H*D, G*D and G*E rows. Its modules hold them in runs: W_QKV, or W_Q and W_KV, or W_Q,
W_K and W_V. A module's name says which parts are in it, in order.
"""

from __future__ import annotations

from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

PARTS = "QKV"
_RUNS = ("QKV", "KV", "Q", "K", "V")


@dataclass(frozen=True)
class Part:
    """The rows of Q, K or V: how many, of which width, with a bias or without."""

    rows: int
    columns: int
    bias: bool


def runs_of(layout: str, has_context: bool) -> tuple[str, ...]:
    """Which parts share a matrix."""
    if layout == "separate":
        return ("Q", "K", "V")
    return ("Q", "KV") if has_context else ("QKV",)


def make(parts: Sequence[Part], dtype: torch.dtype | None, device: torch.device | str | None) -> nn.Linear:
    """One linear map of the parts' rows, in order."""
    rows, columns = sum(part.rows for part in parts), parts[0].columns
    biased = [part.bias for part in parts]
    if any(biased) and not all(biased):
        return PartlyBiased(parts, dtype, device)
    return nn.Linear(columns, rows, bias=all(biased), dtype=dtype, device=device)


class PartlyBiased(nn.Linear):
    """A linear map of several parts of which some have a bias; `bias` holds theirs alone, in order."""

    def __init__(
        self, parts: Sequence[Part], dtype: torch.dtype | None = None, device: torch.device | str | None = None
    ) -> None:
        rows = sum(part.rows for part in parts)
        super().__init__(parts[0].columns, rows, bias=False, dtype=dtype, device=device)
        biased = sum(part.rows for part in parts if part.bias)
        self.bias = nn.Parameter(torch.empty(biased, dtype=dtype, device=device))
        self.parts = tuple(parts)

    def forward(self, x: Tensor) -> Tensor:
        biases = self.bias.split([part.rows for part in self.parts if part.bias])
        given = iter(biases)
        whole = [next(given) if part.bias else self.bias.new_zeros(part.rows) for part in self.parts]
        return F.linear(x, self.weight, torch.cat(whole))

    def extra_repr(self) -> str:
        return f"{super().extra_repr()} of {len(self.bias)} rows"


def weight_rows(linear: nn.Linear, run: str, parts: dict[str, Part], part: str) -> Tensor:
    """The rows of one part, a view of the module's weight."""
    begin = sum(parts[name].rows for name in run[: run.index(part)])
    return linear.weight[begin : begin + parts[part].rows]


def bias_rows(linear: nn.Linear, run: str, parts: dict[str, Part], part: str) -> Tensor | None:
    """The bias of one part, a view of the module's bias, or None where the part has none."""
    if not parts[part].bias:
        return None
    begin = sum(parts[name].rows for name in run[: run.index(part)] if parts[name].bias)
    return linear.bias[begin : begin + parts[part].rows]


def adopt(state: MutableMapping[str, Tensor], prefix: str, runs: tuple[str, ...], parts: dict[str, Part]) -> list[str]:
    """Divide and join the matrices in a state dict, so that it has the runs that a layer has.

    A missing part is left missing, for `load_state_dict` to say so.

    Returns:
        a message for each matrix whose rows do not fit.
    """
    wrong: list[str] = []
    for kind in ("weight", "bias"):
        names = {run: f"{prefix}W_{run}.{kind}" for run in _RUNS}
        found: dict[str, Tensor] = {}
        for run, name in names.items():
            if name not in state or run in runs:
                continue
            held = [part for part in run if kind == "weight" or parts[part].bias]
            sizes = [parts[part].rows for part in held]
            if state[name].ndim and state[name].shape[0] == sum(sizes):
                found.update(zip(held, state[name].split(sizes)))
                del state[name]
            elif sizes:
                said = " + ".join(f"{part}={size}" for part, size in zip(held, sizes))
                wrong.append(f"size mismatch for {name}: expected {said} rows, got shape {tuple(state[name].shape)}")
        for run in runs:
            held = [part for part in run if kind == "weight" or parts[part].bias]
            if held and all(part in found for part in held):
                state[names[run]] = found[held[0]] if len(held) == 1 else torch.cat([found.pop(x) for x in held])
    return wrong

"""What a layer leaves behind of its calls: the statistics that were asked for."""

from __future__ import annotations

import torch
from torch import Tensor

from ..core.statistics import Statistics


class Record:
    """Filled by every layer that is called with it, one step a call.

    Args:
        statistics: which, by default every row statistic.
        gradients: keep the graph of the statistics that carry gradients, such as the entropy, for a loss made of
            them; otherwise the values are detached and on the CPU.

    Example:
        >>> layer, record = MultiHeadAttention(32, 4), Record(Statistics("entropy"))
        >>> output = layer(torch.randn(2, 7, 32), record=record)
        >>> record.statistics["entropy"].shape
        torch.Size([2, 4, 7])
    """

    def __init__(self, statistics: Statistics | None = None, *, gradients: bool = False) -> None:
        self.asked = Statistics() if statistics is None else statistics
        self.gradients = gradients
        self.steps: list[dict[str, Tensor]] = []

    @property
    def statistics(self) -> dict[str, Tensor]:
        """Name to values of the last call: (B, H, L), with C, k or N last for classes, offsets and pairs.

        Raises:
            RuntimeError: no layer was called with the record.
        """
        if not self.steps:
            raise RuntimeError("nothing was recorded: no layer was called with record= this record")
        return self.steps[-1]

    def stacked(self, name: str) -> Tensor:
        """One statistic of all calls: (call, B, H, L, ...).

        Raises:
            KeyError: it was not asked for.
            ValueError: the calls' shapes differ.
        """
        if name not in self.statistics:
            raise KeyError(f"{name!r} was not observed; there are: {', '.join(self.statistics)}")
        values = [step[name] for step in self.steps if name in step]
        if len({value.shape for value in values}) > 1 or len(values) < len(self.steps):
            each = ", ".join(str(tuple(value.shape)) for value in values)
            raise ValueError(f"{name}: the calls' shapes differ ({each}); use steps[i][{name!r}]")
        return torch.stack(values)

    def add(self, statistics: dict[str, Tensor]) -> None:
        """Take what a call observed as the next step."""
        if not self.gradients:
            statistics = {name: value.detach().cpu() for name, value in statistics.items()}
        self.steps.append(statistics)

    def __repr__(self) -> str:
        steps = f"{len(self.steps)} step{'s' * (len(self.steps) != 1)}"
        return f"Record({steps} of {', '.join(self.asked.asked)})"

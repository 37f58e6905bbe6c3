"""The compiled core's forward against PyTorch's fused attention, and what observing adds."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

import multihead as mh

# The towards-figures of the project, for the last lines of the table.
GEOMEAN_TOWARDS, LEAST_TOWARDS, OBSERVING_TOWARDS = 1.5, 1.1, 1.10


@dataclass(frozen=True)
class Case:
    """One shape: queries and keys are both L long."""

    B: int
    H: int
    G: int
    L: int
    D: int
    causal: bool = False

    def __str__(self) -> str:
        return f"({self.B},{self.H},{self.G},{self.L},{self.D}{' causal' if self.causal else ''})"

    @property
    def flops(self) -> float:
        """2 * visible cells * (D + E), by the definition of the docs."""
        cells = self.L * (self.L + 1) / 2 if self.causal else self.L**2
        return 2 * self.B * self.H * cells * 2 * self.D


CASES = [
    Case(1, 12, 12, 512, 64),
    Case(1, 12, 12, 2048, 64),
    Case(1, 12, 12, 2048, 64, causal=True),
    Case(1, 32, 8, 2048, 128, causal=True),
    Case(1, 9, 3, 4096, 64, causal=True),
    Case(8, 12, 12, 128, 32),
    Case(32, 12, 12, 64, 64),
    Case(1, 9, 3, 8192, 64, causal=True),
]


@dataclass(frozen=True)
class Result:
    case: str
    gate: float  # error over what is allowed; the row counts only under 1
    torch_ms: float
    multihead_ms: float
    observing_ms: float
    gflops: float

    @property
    def ratio(self) -> float:
        return self.torch_ms / self.multihead_ms

    @property
    def observing(self) -> float:
        return self.observing_ms / self.multihead_ms


def inputs(case: Case) -> tuple[Tensor, Tensor, Tensor]:
    random = torch.Generator().manual_seed(0)
    query = torch.randn(case.B, case.H, case.L, case.D, generator=random)
    key, value = (torch.randn(case.B, case.G, case.L, case.D, generator=random) for _ in range(2))
    return query, key, value


def gate(case: Case, output: Tensor) -> float:
    """Error against float64 over what is allowed: twice eager float32's own error plus an ulp; on some query rows."""
    query, key, value = inputs(case)
    key, value = (x.repeat_interleave(case.H // case.G, 1) for x in (key, value))
    rows = torch.linspace(0, case.L - 1, min(case.L, 61)).long()

    def eager(dtype: torch.dtype) -> Tensor:
        scores = query[:, :, rows].to(dtype) @ key.mT.to(dtype) / math.sqrt(case.D)
        if case.causal:
            scores.masked_fill_(torch.arange(case.L) > rows[:, None], -math.inf)
        return scores.softmax(-1) @ value.to(dtype)

    exact = eager(torch.float64)
    allowed = 2 * (eager(torch.float32) - exact).abs().max() + torch.finfo(torch.float32).eps * exact.abs().max()
    return float((output[:, :, rows] - exact).abs().max() / allowed)


def best_of(candidates: dict[str, Callable[[], object]], seconds: float) -> dict[str, float]:
    """Shortest time of each candidate in milliseconds; they take turns, so that a slow moment meets them all."""
    best = dict.fromkeys(candidates, math.inf)
    rounds, end = 0, time.perf_counter() + seconds
    while rounds < 5 or time.perf_counter() < end:
        for name, call in candidates.items():
            start = time.perf_counter()
            call()
            best[name] = min(best[name], 1e3 * (time.perf_counter() - start))
        rounds += 1
    return best


def measure(case: Case, seconds: float) -> Result:
    query, key, value = inputs(case)
    shared = case.G != case.H

    def fused() -> Tensor:
        return F.scaled_dot_product_attention(query, key, value, is_causal=case.causal, enable_gqa=shared)

    def blind() -> Tensor:
        return mh.attention(query, key, value, causal=case.causal, impl="native")

    def observing() -> mh.Observation:
        return mh.observe(query, key, value, causal=case.causal, impl="native")

    error = gate(case, blind())
    assert torch.equal(observing().output, blind()), "observing changed the output"
    times = best_of({"torch": fused, "multihead": blind, "observing": observing}, seconds)
    return Result(
        str(case), error, times["torch"], times["multihead"], times["observing"], case.flops / times["multihead"] / 1e6
    )


def peak_gflops() -> float:
    """What one large float32 matrix product reaches here: a floor of the machine's peak, from the same run."""
    a = torch.randn(2048, 2048)
    return 2 * 2048**3 / best_of({"product": lambda: a @ a}, 1.0)["product"] / 1e6


def run(seconds: float) -> dict[str, object]:
    """Measure every case, print the table as it grows, return it."""
    from rich.console import Console

    console = Console(highlight=False)
    peak = peak_gflops()
    console.print(f"a 2048^3 matrix product reaches {peak:.0f} GFLOP/s; every row statistic is on in 'observing'\n")
    console.print(
        f"{'(B,H,G,L,D)':<26}{'gate':>6}{'torch ms':>10}{'ours ms':>9}{'ratio':>7}{'observing':>11}{'GFLOP/s':>9}"
    )
    results = []
    for case in CASES:
        result = measure(case, seconds)
        results.append(result)
        verdict = "ok" if result.gate <= 1 else f"{result.gate:.1f}!"
        console.print(
            f"{result.case:<26}{verdict:>6}{result.torch_ms:>10.2f}{result.multihead_ms:>9.2f}"
            f"{result.ratio:>6.2f}x{result.observing:>10.2f}x{result.gflops:>9.0f}"
        )
    green = [r for r in results if r.gate <= 1]
    ratios = [r.ratio for r in green]
    geomean = math.exp(sum(map(math.log, ratios)) / len(ratios)) if ratios else 0.0
    console.print(
        f"\ngeometric mean {geomean:.2f}x (towards {GEOMEAN_TOWARDS}), least {min(ratios, default=0):.2f}x "
        f"(towards {LEAST_TOWARDS}), observing at most {max(r.observing for r in results):.2f}x "
        f"(towards {OBSERVING_TOWARDS:.2f}); gate green in {len(green)} of {len(results)}"
    )
    rows = [asdict(r) | {"ratio": r.ratio, "observing": r.observing} for r in results]
    return {"product_gflops": peak, "geomean": geomean, "cases": rows}

"""What the layer's two choices cost: one wide matrix or three, all heads at once or one after another.

    python -m benchmarks.layer

Peak memory is that of a process of its own, over what it held before the call: input and weights are not in it.
It is read from /proc, so on Linux only.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

import multihead as mh

# One layer of its size, and a prompt: B, L, d_model, H, G.
SHAPES = [(1, 1, 768, 12, 12), (8, 128, 768, 12, 12), (1, 1024, 1024, 16, 16), (1, 1024, 2048, 32, 8)]
LONG = [(1, 4096, 1024, 16, 16), (1, 4096, 1024, 16, 4), (1, 16384, 512, 8, 8)]
TOLERANCE = 2e-5  # of the largest output, in float32

# Memory that is freed goes back to the system, so that the peak is what is held at once.
_PLAIN_MALLOC = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "0"}


@dataclass(frozen=True)
class Layouts:
    shape: tuple[int, ...]
    error: float
    packed_ms: float
    separate_ms: float
    projections_packed_ms: float
    projections_separate_ms: float


@dataclass(frozen=True)
class Execution:
    shape: tuple[int, ...]
    execution: str
    seconds: float
    peak_bytes: int
    formula_bytes: int


def make(shape: tuple[int, ...], **options: Any) -> tuple[mh.MultiHeadAttention, torch.Tensor]:
    """A causal layer of a shape, the same weights for all options, and its input."""
    B, L, d_model, H, G = shape
    torch.manual_seed(0)
    layer = mh.MultiHeadAttention(d_model, H, G, causal=True, **options).eval()
    return layer, torch.randn(B, L, d_model)


def error_of(output: torch.Tensor, expected: torch.Tensor) -> float:
    """Largest difference over the largest output; what the tables show counts only under TOLERANCE."""
    error = float((output - expected).abs().max() / expected.abs().max())
    if error > TOLERANCE:
        raise RuntimeError(f"outputs differ by {error:.1e}, over {TOLERANCE:.0e}: no figure counts")
    return error


@torch.no_grad()
def layouts(shape: tuple[int, ...], seconds: float) -> Layouts:
    """Packed against separate, in turns: the whole layer, and its projections alone."""
    packed, x = make(shape, layout="packed")
    separate = packed.with_options(layout="separate")
    one: Any = packed.get_submodule("W_QKV")
    three: list[Any] = [separate.get_submodule(f"W_{part}") for part in "QKV"]
    ways = [lambda: packed(x), lambda: separate(x), lambda: one(x), lambda: [w(x) for w in three]]
    error = error_of(separate(x), packed(x))
    times: list[list[float]] = [[] for _ in ways]
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(times[0]) < 5:
        for way, taken in zip(ways, times):
            start = time.perf_counter()
            way()
            taken.append((time.perf_counter() - start) * 1e3)
    return Layouts(shape, error, *(statistics.median(taken) for taken in times))


def formula(shape: tuple[int, ...], execution: str) -> int:
    """Bytes of float32 held at once beside input and weights.

    Queries, keys, values, what heads give, and the compiled core's copy of keys and values in an order of its own; of
    one head and with the output where heads follow each other. In parallel the output comes when the rest is gone.
    """
    B, L, d_model, H, G = shape
    D = d_model // H
    return 4 * B * L * ((2 * H + 4 * G) * D if execution == "parallel" else 6 * D + d_model)


@torch.no_grad()
def one(shape: tuple[int, ...], execution: str) -> Execution:
    """One call in this process, its time and its peak of memory."""
    layer, x = make(shape, execution=execution)
    layer(x[:, :64])  # the first call sets things up
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = _status("VmRSS")
    start = time.perf_counter()
    layer(x)
    seconds = time.perf_counter() - start
    return Execution(shape, execution, seconds, _status("VmHWM") - before, formula(shape, execution))


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


@torch.no_grad()
def executions(shape: tuple[int, ...]) -> list[Execution]:
    """Parallel and sequential, each in a process of its own."""
    parallel, x = make(shape)
    error_of(parallel.with_options(execution="sequential")(x), parallel(x))
    found = []
    for execution in ("parallel", "sequential"):
        command = [sys.executable, "-m", "benchmarks.layer", json.dumps(shape), execution]
        done = subprocess.run(command, env=os.environ | _PLAIN_MALLOC, check=True, capture_output=True, text=True)
        found.append(Execution(**json.loads(done.stdout)))
    return found


def run(seconds: float = 2.0) -> dict[str, object]:
    """Measure, print both tables, return them."""
    print("one wide matrix against three, float32, in turns, medians")
    print("| (B, L, d_model, H, G) | packed ms | separate ms | projections: packed ms | separate ms | gain |")
    print("|---|---:|---:|---:|---:|---:|")
    wide = [layouts(shape, seconds) for shape in SHAPES]
    for row in wide:
        parts = (row.packed_ms, row.separate_ms, row.projections_packed_ms, row.projections_separate_ms)
        gain = row.projections_separate_ms / row.projections_packed_ms
        print(f"| {row.shape} | {' | '.join(f'{ms:.2f}' for ms in parts)} | {gain:.2f}x |")
    print("\nall heads at once against one after another: peak memory over input and weights")
    print("| (B, L, d_model, H, G) | execution | peak MB | by the formula | s |")
    print("|---|---|---:|---:|---:|")
    order = [row for shape in LONG for row in executions(shape)]
    for row in order:
        held, expected = row.peak_bytes / 1e6, row.formula_bytes / 1e6
        print(f"| {tuple(row.shape)} | {row.execution} | {held:.0f} | {expected:.0f} | {row.seconds:.2f} |")
    return {"layouts": [asdict(row) for row in wide], "executions": [asdict(row) for row in order]}


if __name__ == "__main__":
    if len(sys.argv) == 3:
        print(json.dumps(asdict(one(tuple(json.loads(sys.argv[1])), sys.argv[2]))))
    else:
        run()

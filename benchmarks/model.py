"""A whole model, SmolLM2-135M: watching every head against the fused path that sees nothing, and against eager.

Each figure is one process of its own, so that its peak memory is its own.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict, dataclass
from typing import Any

WAYS = {
    "fused": "PyTorch's fused attention, nothing seen",
    "watch": "multihead, every row statistic of every head",
    "eager": "eager, output_attentions=True",
}
# (tokens, ways): eager beside the others where its memory allows.
RUNS = [(2048, ("fused", "watch", "eager")), (4096, ("fused", "watch")), (8192, ("fused", "watch"))]


@dataclass(frozen=True)
class Run:
    tokens: int
    way: str
    seconds: float
    peak_mb: int


def one(tokens: int, way: str) -> Run:
    """Run the model once in this process: hidden states, no logits."""
    import resource
    import time

    import torch

    import multihead as mh
    from multihead.heads.models import open_model

    opened = open_model("smollm2")
    model: Any = opened.model.base_model
    random = torch.Generator().manual_seed(0)
    ids = torch.randint(100, model.config.vocab_size, (1, tokens), generator=random)
    model.set_attn_implementation("eager" if way == "eager" else "sdpa")
    with torch.no_grad():
        model(ids[:, :64])  # the first call sets things up
        start = time.perf_counter()
        if way == "watch":
            with mh.watch(model) as record:
                model(ids, use_cache=False)
            assert record.stacked("entropy").shape[-1] == tokens
        else:
            out = model(ids, output_attentions=way == "eager", use_cache=False)
            assert way != "eager" or len(out.attentions) == opened.facts.layers
        seconds = time.perf_counter() - start
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    return Run(tokens, way, seconds, peak >> 20)


def gate() -> float:
    """Largest difference of hidden states between watched and fused, on 512 tokens."""
    import torch

    import multihead as mh
    from multihead.heads.models import open_model

    model = open_model("smollm2").model.base_model
    ids = torch.randint(100, 40000, (1, 512), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        fused = model(ids).last_hidden_state
        with mh.watch(model):
            watched = model(ids).last_hidden_state
    return float((fused - watched).abs().max() / fused.abs().max())


def run(repeats: int = 2) -> dict[str, object]:
    """Measure every run in processes that take turns, print the table, return it."""
    from rich.console import Console

    console = Console(highlight=False)
    error = gate()
    console.print(f"gate: hidden states of watched and fused differ by {error:.1e} of the largest (allowed 1e-4)\n")
    assert error < 1e-4
    console.print(f"{'tokens':>7}  {'way':<48}{'seconds':>9}{'peak MB':>9}{'of fused':>10}")
    rows = []
    for tokens, ways in RUNS:
        best: dict[str, Run] = {}
        for _ in range(repeats):
            for way in ways:
                done = subprocess.run(
                    [sys.executable, "-m", "benchmarks.model", str(tokens), way],
                    capture_output=True, text=True, check=True,
                )  # fmt: skip
                found = Run(**json.loads(done.stdout.splitlines()[-1]))
                if way not in best or found.seconds < best[way].seconds:
                    best[way] = found
        for way, found in best.items():
            share = found.seconds / best["fused"].seconds
            console.print(f"{tokens:>7}  {WAYS[way]:<48}{found.seconds:>9.2f}{found.peak_mb:>9}{share:>9.2f}x")
        rows += [asdict(x) for x in best.values()]
    return {"gate": error, "runs": rows}


if __name__ == "__main__":
    print(json.dumps(asdict(one(int(sys.argv[1]), sys.argv[2]))))

"""How time and memory grow with the text, from 1K to 64K tokens.

python -m multihead.bench.growth multihead 4096 measures one point, in a process whose peak memory is its own.
"""

from __future__ import annotations

import contextlib
import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from .gate import Gate, slack_of
from .inputs import Inputs
from .peers import OURS, PEERS
from .peers.base import Peer
from .shapes import Shape

LENGTHS = tuple(1024 << i for i in range(7))
# The longest text of each: eager's scores take 9 * L * L * 4 bytes, twice.
WAYS = {"multihead": LENGTHS[-1], "torch": LENGTHS[-1], "eager": 8192}
_ENOUGH_SECONDS = 1.0
_GATE_LENGTH = 151  # memory that it frees must not be enough for what is measured
_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


@dataclass(frozen=True)
class Point:
    """One length by one way.

    Args:
        seconds: the shortest time of a call.
        bytes: the most memory that a call has over what was there before it, the output among it.
        inputs: bytes of query, key and value.
    """

    way: str
    tokens: int
    seconds: float
    bytes: int
    inputs: int


def shape_of(tokens: int) -> Shape:
    """SmolLM2-135M's heads on a causal text."""
    return Shape(1, 9, 3, tokens, 64, causal=True)


def measure(way: str, tokens: int) -> Point:
    """Measure one point in this process, after the gate.

    Raises:
        ValueError: the numbers are wrong.
    """
    shape = shape_of(tokens)
    _gated(_peer(way), shape_of(min(tokens, _GATE_LENGTH)))  # also loads and compiles what the first call does
    inputs = Inputs.of(shape)
    prepared = _peer(way).prepare(shape, inputs)
    before = _peak_from_here()
    best, spent = float("inf"), 0.0
    while spent < _ENOUGH_SECONDS:
        start = time.perf_counter()
        prepared.run()
        seconds = time.perf_counter() - start
        best, spent = min(best, seconds), spent + seconds
    tensors = (inputs.query, inputs.key, inputs.value)
    return Point(way, tokens, best, _peak() - before, sum(x.numel() * x.element_size() for x in tensors))


def sweep(lengths: Sequence[int] = LENGTHS, tell: Callable[[str], None] = lambda stage: None) -> list[Point]:
    """Measure every way at every length that it can take, each point in a process of its own."""
    points = []
    for tokens in lengths:
        for way, longest in WAYS.items():
            if tokens <= longest:
                tell(f"{way} on {tokens:,} tokens")
                command = [sys.executable, "-m", "multihead.bench.growth", way, str(tokens)]
                done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
                points.append(Point(**json.loads(done.stdout.splitlines()[-1])))
    return points


def _peer(way: str) -> Peer:
    if way not in WAYS:
        raise ValueError(f"way: expected one of {', '.join(WAYS)}, got {way!r}")
    return OURS if way == OURS.name else PEERS[way]


def _gated(peer: Peer, shape: Shape) -> None:
    inputs = Inputs.of(shape)
    prepared = peer.prepare(shape, inputs)
    error = Gate(shape, inputs).check(prepared.numbers(prepared.run()))
    if not error <= slack_of(peer):
        raise ValueError(f"{peer.name} on {shape}: the error is {error:.3g} times what is allowed")


def _peak_from_here() -> int:
    """Bytes of memory that the process holds now; where the system can, the peak begins anew here."""
    with contextlib.suppress(OSError):
        _CLEAR.write_text("5")
    return _peak()


def _peak() -> int:
    if _STATUS.exists():
        lines = _STATUS.read_text().splitlines()
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM:"))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


if __name__ == "__main__":
    print(json.dumps(asdict(measure(sys.argv[1], int(sys.argv[2])))))

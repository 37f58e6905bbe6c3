"""Time candidates that take turns, so that a slow moment of the machine meets them all."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

# Threads of OpenMP and of thread pools go on spinning for a while after a call. A pause lets the last candidate's
# threads sleep, so that they take no core from the next; the first call after it, which wakes threads and fills
# caches, is not counted where it is short enough for that to show.
_PAUSE = 0.01
_TURN = 0.02
_LONG_CALL = 0.05
_LEAST_TURNS = 3
_ENOUGH = 5.0  # seconds of a candidate after which it need not have had them


@dataclass(frozen=True)
class Timing:
    """Times of one candidate in milliseconds: the shortest, the median, and how many calls they are from."""

    best_ms: float
    median_ms: float
    calls: int


def take_turns(candidates: Mapping[str, Callable[[], object]], seconds: float) -> dict[str, Timing]:
    """Call each candidate for `seconds`, turn by turn, at least three turns each unless its calls take seconds.

    Args:
        candidates: what to call, by name.
        seconds: calling time of each candidate; one whose call is long may take more.
    """
    times: dict[str, list[float]] = {name: [] for name in candidates}
    spent = dict.fromkeys(candidates, 0.0)
    turns = 0

    def waits(name: str) -> bool:
        return spent[name] < seconds or (turns < _LEAST_TURNS and spent[name] < _ENOUGH)

    while waiting := [name for name in candidates if waits(name)]:
        for name in waiting:
            time.sleep(_PAUSE)
            spent[name] += _turn(candidates[name], times[name])
        turns += 1
    return {name: Timing(1e3 * min(x), 1e3 * statistics.median(x), len(x)) for name, x in times.items()}


def _turn(call: Callable[[], object], times: list[float]) -> float:
    """Call for a turn, add the time of each call to `times`, return the seconds that the turn took."""
    begin = time.perf_counter()
    call()
    start = time.perf_counter()
    if start - begin > _LONG_CALL:
        times.append(start - begin)
        return start - begin
    while True:
        call()
        end = time.perf_counter()
        times.append(end - start)
        if end - begin > _TURN:
            return end - begin
        start = end

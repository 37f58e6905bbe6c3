"""Run sections of the registry: gate first, then the candidates that passed it take turns."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from ..core.functional import explain
from .gate import Gate, slack_of
from .inputs import Inputs
from .machine import Machine, Peaks
from .peers import OURS, VARIANTS, Peer, Prepared
from .results import BenchReport, Outcome, Row, SectionResult
from .shapes import Section, Shape
from .turns import take_turns

_PEAK_SECONDS = 0.3

Tell = Callable[[str, float | None], None]


class Listener:
    """Hears how a run goes on; this one does nothing with it."""

    def started(self, machine: Machine) -> None:
        """The run starts here."""

    def begun(self, result: SectionResult, candidates: Sequence[str]) -> None:
        """A section starts, its peaks measured; these are compared with ours."""

    def measured(self, result: SectionResult, row: Row) -> None:
        """A shape is done; `result` has it as its last row."""

    def ended(self, result: SectionResult) -> None:
        """All shapes of a section are done."""


def run(
    sections: Sequence[Section],
    peers: Iterable[Peer],
    *,
    seconds: float = 1.0,
    tell: Tell = lambda stage, fraction: None,
    listener: Listener | None = None,
) -> BenchReport:
    """Measure every shape of these sections with this library and those of the peers that are available.

    Args:
        seconds: calling time of each candidate on each shape.
        tell: gets the stage and the fraction done.
        listener: hears of each section and shape as it is measured.

    Returns:
        what was found. A candidate whose numbers are wrong, or that raised, has no time; `BenchReport.wrong` names it.
    """
    machine, listener = Machine.here(), listener or Listener()
    listener.started(machine)
    peers = list(peers)
    absent = {peer.name: reason for peer in peers if (reason := peer.available()) is not None}
    present = [peer for peer in peers if peer.name not in absent]
    total, done, results = sum(len(section.shapes) for section in sections), 0, []
    for section in sections:
        tell(f"{section.name}: peaks", done / total)
        result = SectionResult(section, Peaks.measure(_PEAK_SECONDS), ())
        candidates = [OURS, *(VARIANTS[name] for name in section.variants), *present]
        listener.begun(result, [peer.name for peer in candidates[1:]])
        for shape in section.shapes:
            row = _measure(shape, candidates, seconds, lambda stage, at=done / total: tell(stage, at))
            result = replace(result, rows=(*result.rows, row))
            listener.measured(result, row)
            done += 1
        listener.ended(result)
        results.append(result)
    return BenchReport(machine, seconds, absent, tuple(results))


def _measure(shape: Shape, candidates: Sequence[Peer], seconds: float, tell: Callable[[str], None]) -> Row:
    inputs = Inputs.of(shape)
    gate = Gate(shape, inputs)
    outcomes: dict[str, Outcome] = {}
    ready: dict[str, Prepared] = {}
    for peer in candidates:
        tell(f"{shape}: gate of {peer.name}")
        refused = peer.refuses(shape)
        if refused is not None:
            outcomes[peer.name] = Outcome(peer.name, refused=refused)
            continue
        # Whatever another library raises is a result of the run, not its end.
        try:
            prepared = peer.prepare(shape, inputs)
            found = prepared.numbers(prepared.run())
        except Exception as error:
            lines = str(error).splitlines() or [""]
            outcomes[peer.name] = Outcome(peer.name, failed=f"{type(error).__name__}: {lines[0]}")
            continue
        outcome = Outcome(peer.name, gate.check(found, prepared.entropy_weight), slack_of(peer))
        outcomes[peer.name] = outcome
        if outcome.green:
            ready[peer.name] = prepared
    tell(f"{shape}: timing")
    timings = take_turns({name: prepared.run for name, prepared in ready.items()}, seconds)
    outcomes |= {name: replace(outcomes[name], timing=timing) for name, timing in timings.items()}
    return Row(shape, _path(shape, inputs), tuple(outcomes[peer.name] for peer in candidates))


def _path(shape: Shape, inputs: Inputs) -> str:
    """The path that our plain call takes."""
    query = inputs.query.detach().requires_grad_(shape.training)
    window = None if shape.window is None else (shape.window - 1, 0)
    told = explain(query, *inputs.stored, causal=shape.causal, window=window)
    found = re.match(r"path: (\w+)", told)
    assert found is not None, told
    return found[1]

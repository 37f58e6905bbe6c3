"""A run as text: a table that grows while it runs, and tables for the documentation."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from .machine import Machine
from .results import BenchReport, Row, SectionResult, geometric_mean
from .run import Listener

_LABEL = "(B,H,G,L[:S],D[/E])"


class Table(Listener):
    """Shows a run as a table that grows, each line by a call of `show`."""

    def __init__(self, show: Callable[[str], None]) -> None:
        self.show = show

    def started(self, machine: Machine) -> None:
        self.show(str(machine))
        if machine.busy is not None:
            self.show(machine.busy)

    def begun(self, result: SectionResult, candidates: Sequence[str]) -> None:
        names = "".join(f"{name:>{_width(name)}}" for name in candidates)
        self.show(f"\n{result.section.name}: {result.section.about}\n{result.peaks}")
        self.show(f"{_LABEL:<30}{'gate':>6}{'ours':>10}{result.section.limit.value:>9}{'peak':>6}{names}")

    def measured(self, result: SectionResult, row: Row) -> None:
        """Ours, its speed and share of the peak, then every candidate's time over ours."""
        ours, speed, share = row.ours, row.speed(result.section.limit), result.share(row)
        gate = f"{ours.gate:.2f}" if ours.gate is not None and ours.green else "WRONG"
        cells = [
            f"{row.shape!s:<30}{gate:>6}",
            f"{_duration(ours.timing.best_ms) if ours.timing is not None else '-':>10}",
            f"{'-' if speed is None else format(speed, '.1f'):>9}",
            f"{'-' if share is None else format(share, '.0%'):>6}",
        ]
        for outcome in row.outcomes[1:]:
            ratio = row.ratio(outcome.candidate)
            text = "WRONG" if outcome.wrong is not None else "-" if ratio is None else _times(ratio)
            cells.append(f"{text:>{_width(outcome.candidate)}}")
        self.show("".join(cells))

    def ended(self, result: SectionResult) -> None:
        """Means, aims, and who did not take part where."""
        for name in result.candidates:
            ratios = result.ratios(name)
            if ratios:
                self.show(
                    f"  {name} over ours: geometric mean {_times(geometric_mean(ratios))}, least {_times(min(ratios))},"
                    f" most {_times(max(ratios))}, on {len(ratios)} of {len(result.rows)} shapes"
                )
        if result.section.towards:
            self.show(f"  aim: {result.section.towards}")
        elsewhere: dict[str, list[str]] = {}
        for row in result.rows:
            if row.path != "native":
                elsewhere.setdefault(f"ours by the {row.path} path", []).append(str(row.shape))
            for outcome in row.outcomes:
                if outcome.refused is not None:
                    elsewhere.setdefault(f"no {outcome.candidate}, {outcome.refused}", []).append(str(row.shape))
        for note, shapes in elsewhere.items():
            self.show(f"  {note}: {'every shape' if len(shapes) == len(result.rows) else ' '.join(shapes)}")


def _width(name: str) -> int:
    return max(9, len(name) + 2)


def markdown(report: BenchReport) -> str:
    """The tables of the documentation: a row a shape, milliseconds of PyTorch and ours, then ratios."""
    parts = [str(report.machine)]
    for result in report.sections:
        unit, names = result.section.limit.value, result.candidates
        heads = [_LABEL, "multihead ms", unit, "of peak", *(f"{name}, times ours" for name in names)]
        parts.append(f"\n{result.section.name}: {result.section.about}. {result.peaks}.\n")
        parts.append(f"| {' | '.join(heads)} |")
        parts.append(f"|---|{'---:|' * (len(heads) - 1)}")
        for row in result.rows:
            timing = row.ours.timing if row.ours.green else None
            speed, share = row.speed(result.section.limit), result.share(row)
            ratios = [row.ratio(name) for name in names]
            cells = [
                str(row.shape),
                "-" if timing is None else f"{timing.best_ms:,.3g}" if timing.best_ms < 1 else f"{timing.best_ms:,.2f}",
                "-" if speed is None else f"{speed:.0f}" if speed >= 10 else f"{speed:.1f}",
                "-" if share is None else f"{share:.0%}",
                *("-" if ratio is None else _times(ratio) for ratio in ratios),
            ]
            parts.append(f"| {' | '.join(cells)} |")
    return "\n".join(parts) + "\n"


def _times(ratio: float) -> str:
    return f"{ratio:.2f}x" if 0.1 <= ratio < 100 else f"{ratio:.0f}x" if ratio >= 100 else f"{ratio:.2g}x"


def _duration(milliseconds: float) -> str:
    if milliseconds < 1:
        return f"{1e3 * milliseconds:.1f} us"
    return f"{milliseconds:.2f} ms" if milliseconds < 1000 else f"{milliseconds / 1e3:.2f} s"

"""What a run found, and its form as JSON."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass

from .machine import Machine, Peaks
from .shapes import Limit, Section, Shape
from .turns import Timing

SCHEMA = 1


@dataclass(frozen=True)
class Outcome:
    """What came of one candidate on one shape: a refusal, a failure, or a gate and, behind it, a timing.

    Args:
        gate: error against float64 over what the contract allows (`Gate.check`).
        slack: the gate is green up to this.
        refused: why the candidate has no way to compute the shape.
        failed: the error that preparing or calling it raised.
    """

    candidate: str
    gate: float | None = None
    slack: float = 1.0
    timing: Timing | None = None
    refused: str | None = None
    failed: str | None = None

    @property
    def green(self) -> bool:
        return self.gate is not None and self.gate <= self.slack

    @property
    def wrong(self) -> str | None:
        """What went wrong, in a clause; None where nothing did."""
        if self.failed is not None:
            return f"it raised {self.failed}"
        if self.gate is not None and not self.green:
            return f"its error is {self.gate:.3g} times what is allowed, at most {self.slack:.0f} pass"
        return None


@dataclass(frozen=True)
class Row:
    """One shape: what each candidate did, this library first."""

    shape: Shape
    path: str
    outcomes: tuple[Outcome, ...]

    @property
    def ours(self) -> Outcome:
        return self.outcomes[0]

    def ratio(self, candidate: str) -> float | None:
        """The candidate's time over ours; None where either has no time behind a green gate."""
        found = next((x.timing for x in self.outcomes if x.candidate == candidate and x.green), None)
        if found is None or self.ours.timing is None or not self.ours.green:
            return None
        return found.best_ms / self.ours.timing.best_ms

    def speed(self, limit: Limit) -> float | None:
        """GFLOP/s or GB/s of ours."""
        if self.ours.timing is None or not self.ours.green:
            return None
        work = self.shape.flops if limit is Limit.COMPUTE else self.shape.bytes_moved
        return work / self.ours.timing.best_ms / 1e6


@dataclass(frozen=True)
class SectionResult:
    section: Section
    peaks: Peaks
    rows: tuple[Row, ...]

    def ratios(self, candidate: str) -> list[float]:
        """The candidate's time over ours, on the shapes that have both."""
        return [ratio for row in self.rows if (ratio := row.ratio(candidate)) is not None]

    def share(self, row: Row) -> float | None:
        """How much of the machine's peak ours reaches."""
        peak, speed = self.peaks.of(self.section.limit), row.speed(self.section.limit)
        return None if peak is None or speed is None else speed / peak

    @property
    def candidates(self) -> list[str]:
        """Names of the candidates beside ours, in their order."""
        return [x.candidate for x in self.rows[0].outcomes[1:]] if self.rows else []


@dataclass(frozen=True)
class BenchReport:
    """A whole run."""

    machine: Machine
    seconds: float
    absent: dict[str, str]
    sections: tuple[SectionResult, ...]

    @property
    def wrong(self) -> list[str]:
        """A line for every gate that is not green and every candidate that raised."""
        return [
            f"{outcome.candidate} on {row.shape} in {result.section.name}: {outcome.wrong}"
            for result in self.sections
            for row in result.rows
            for outcome in row.outcomes
            if outcome.wrong is not None
        ]

    def as_json(self) -> str:
        """The run as JSON; docs/files.md describes the fields."""
        found = {
            "schema": SCHEMA,
            "machine": {"line": str(self.machine), **asdict(self.machine)},
            "seconds": self.seconds,
            "absent": self.absent,
            "sections": [_section(result) for result in self.sections],
            "wrong": self.wrong,
        }
        return json.dumps(found, indent=1, allow_nan=False) + "\n"


def geometric_mean(ratios: list[float]) -> float:
    return math.exp(sum(map(math.log, ratios)) / len(ratios))


def _section(result: SectionResult) -> dict[str, object]:
    section = result.section
    summary = {
        name: {"geomean": geometric_mean(ratios), "least": min(ratios), "shapes": len(ratios)}
        for name in result.candidates
        if (ratios := result.ratios(name))
    }
    return {
        "name": section.name,
        "about": section.about,
        "unit": section.limit.value,
        "towards": section.towards,
        "peaks": asdict(result.peaks),
        "rows": [_row(result, row) for row in result.rows],
        "summary": summary,
    }


def _row(result: SectionResult, row: Row) -> dict[str, object]:
    return {
        "shape": {"label": str(row.shape), **asdict(row.shape)},
        "path": row.path,
        "visible_cells": row.shape.visible_cells,
        "flops": row.shape.flops,
        "bytes": row.shape.bytes_moved,
        "speed": row.speed(result.section.limit),
        "share": result.share(row),
        "candidates": [
            {
                "name": x.candidate,
                "gate": x.gate if x.gate is None or math.isfinite(x.gate) else None,
                "slack": x.slack,
                "green": x.green,
                "refused": x.refused,
                "failed": x.failed,
                **(asdict(x.timing) if x.timing is not None and x.green else {}),
                "ratio": row.ratio(x.candidate),
            }
            for x in row.outcomes
        ],
    }

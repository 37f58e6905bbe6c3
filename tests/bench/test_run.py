"""A run: who is timed, what is told, and what happens to numbers that are wrong. No test looks at a time."""

import json
import math
import time
from dataclasses import replace

import pytest
from typer.testing import CliRunner

from multihead.bench import growth, shapes
from multihead.bench import peers as registry
from multihead.bench.machine import Machine, Peaks
from multihead.bench.peers import PEERS
from multihead.bench.peers.torch_sdpa import TorchSdpa
from multihead.bench.results import Outcome, Row, SectionResult, geometric_mean
from multihead.bench.run import run
from multihead.bench.shapes import Limit, Section, Shape
from multihead.bench.table import Table, markdown
from multihead.bench.turns import Timing, take_turns
from multihead.cli import app
from multihead.core import native

CAUSAL, DECODE = Shape(1, 6, 2, 37, 8, causal=True), Shape(2, 6, 2, 1, 8, S=67)
TINY = Section("tiny", "shapes of a test", Limit.COMPUTE, (CAUSAL, DECODE), "nothing", ("observing",))


class Late(TorchSdpa):
    """Wrong on purpose: its causal mask lets every query see every key."""

    name = "late"

    def prepare(self, shape, inputs):
        return super().prepare(replace(shape, causal=False), inputs)


class Raising(TorchSdpa):
    name = "raising"

    def prepare(self, shape, inputs):
        raise RuntimeError("out of paper\nand more")


class Absent(TorchSdpa):
    name = "absent"

    def available(self):
        return "it is not installed"

    def prepare(self, shape, inputs):
        raise AssertionError("an absent peer was run")


class Refusing(TorchSdpa):
    name = "refusing"

    def refuses(self, shape):
        return "it decodes only" if shape.L > 1 else None


@pytest.fixture(autouse=True)
def short_peaks(monkeypatch):
    monkeypatch.setattr(Peaks, "measure", lambda seconds: Peaks(100.0, 10.0))


@pytest.fixture
def report():
    return run([TINY], [TorchSdpa(), Late(), Raising(), Absent(), Refusing()], seconds=0)


def test_who_is_right_has_a_ratio_and_nobody_else(report):
    (result,) = report.sections
    causal, decode = result.rows
    assert result.candidates == ["observing", "torch", "late", "raising", "refusing"]
    assert [causal.ratio(name) is not None for name in result.candidates] == [True, True, False, False, False]
    assert [decode.ratio(name) is not None for name in result.candidates] == [True, True, True, False, True]
    assert report.absent == {"absent": "it is not installed"}


def test_what_is_wrong_is_said(report):
    late, *raised = report.wrong
    assert late.startswith(f"late on {CAUSAL} in tiny: its error is ") and "times what is allowed" in late
    assert raised == [f"raising on {shape} in tiny: it raised RuntimeError: out of paper" for shape in (CAUSAL, DECODE)]


def test_who_fails_the_gate_is_never_timed(report):
    late = next(x for x in report.sections[0].rows[0].outcomes if x.candidate == "late")
    assert late.timing is None and late.gate > late.slack


def test_no_ratio_stands_on_wrong_numbers_of_ours():
    timing, good = Timing(2.0, 2.0, 3), Outcome("torch", gate=0.5, timing=Timing(3.0, 3.0, 3))
    assert Row(CAUSAL, "native", (Outcome("multihead", gate=0.9, timing=timing), good)).ratio("torch") == 1.5
    for gate in (1.1, math.inf, math.nan, None):
        row = Row(CAUSAL, "native", (Outcome("multihead", gate=gate, timing=timing), good))
        assert row.ratio("torch") is None and row.speed(Limit.COMPUTE) is None


def test_speed_and_share_are_work_over_time_over_peak():
    row = Row(CAUSAL, "native", (Outcome("multihead", gate=0.5, timing=Timing(0.5, 0.6, 3)),))
    compute = SectionResult(TINY, Peaks(0.1, 10.0), (row,))
    assert row.speed(Limit.COMPUTE) == pytest.approx(6 * (37 * 38 / 2) * 2 * 16 / 0.5e-3 / 1e9)
    assert compute.share(row) == pytest.approx(row.speed(Limit.COMPUTE) / 0.1)
    memory = SectionResult(replace(TINY, limit=Limit.MEMORY), Peaks(0.1, 10.0), (row,))
    assert memory.share(row) == pytest.approx(4 * (2 * 6 * 37 * 8 + 2 * 2 * 37 * 8) / 0.5e-3 / 1e9 / 10.0)
    assert SectionResult(TINY, Peaks(), (row,)).share(row) is None


def test_geometric_mean():
    assert geometric_mean([1.0, 4.0]) == pytest.approx(2.0)


def test_candidates_take_turns():
    called = []
    found = take_turns({name: lambda name=name: called.append(name) for name in "abc"}, 0)
    changes = [a for a, b in zip(called, [*called[1:], None], strict=True) if a != b]
    assert changes == 3 * ["a", "b", "c"]
    # The first call of each turn is not counted.
    assert {name: x.calls for name, x in found.items()} == {name: called.count(name) - 3 for name in "abc"}
    assert all(0 < x.best_ms <= x.median_ms for x in found.values())


def test_a_long_call_is_not_made_three_times(monkeypatch):
    monkeypatch.setattr("multihead.bench.turns._ENOUGH", 0.01)
    monkeypatch.setattr("multihead.bench.turns._LONG_CALL", 0.02)
    called = {"long": 0, "short": 0}

    def call(name, seconds):
        called[name] += 1
        time.sleep(seconds)

    found = take_turns({"long": lambda: call("long", 0.05), "short": lambda: call("short", 0.0)}, 0)
    assert called["long"] == found["long"].calls == 1 and called["short"] > 1


def test_json_has_everything(report):
    found = json.loads(report.as_json())
    assert found["schema"] == 1 and found["seconds"] == 0 and found["absent"] == {"absent": "it is not installed"}
    assert {"line", "processor", "cores", "threads", "level", "versions", "load"} == found["machine"].keys()
    assert {"python", "torch", "multihead"} <= found["machine"]["versions"].keys()
    (section,) = found["sections"]
    assert (section["name"], section["unit"], section["peaks"]) == ("tiny", "GFLOP/s", {"gflops": 100.0, "gbs": 10.0})
    assert section["summary"].keys() == {"observing", "torch", "late", "refusing"}
    row = section["rows"][0]
    assert row["shape"]["label"] == str(CAUSAL) and (row["shape"]["H"], row["shape"]["G"]) == (6, 2)
    assert row["flops"] == CAUSAL.flops and row["path"] == ("native" if native.core else "tiled")
    assert row["share"] == pytest.approx(row["speed"] / 100)
    ours, observing, torch_, late, raising, refusing = row["candidates"]
    assert ours["green"] and ours["ratio"] == 1 and ours["calls"] > 0 and ours["best_ms"] <= ours["median_ms"]
    assert observing["green"] and torch_["ratio"] == pytest.approx(torch_["best_ms"] / ours["best_ms"])
    assert not late["green"] and late["ratio"] is None and "best_ms" not in late
    assert raising["failed"] == "RuntimeError: out of paper" and refusing["refused"] == "it decodes only"
    assert found["wrong"] == report.wrong


def test_progress_goes_from_start_to_end():
    told = []
    run([TINY], [TorchSdpa()], seconds=0, tell=lambda stage, fraction: told.append((stage, fraction)))
    fractions = [fraction for _, fraction in told]
    assert fractions == sorted(fractions) and fractions[0] == 0 and fractions[-1] == 0.5
    assert any(stage == f"{DECODE}: gate of torch" for stage, _ in told)


def test_table_and_markdown(report):
    lines = []
    run([TINY], [TorchSdpa(), Late(), Refusing()], seconds=0, listener=Table(lines.append))
    text = "\n".join(lines)
    row = next(line for line in lines if line.startswith(str(CAUSAL)))
    assert row.split()[-1] == "-" and row.split()[-2] == "WRONG"
    assert "peaks now: 100 GFLOP/s of float32 multiply-adds, 10.0 GB/s of reads" in text
    assert f"no refusing, it decodes only: {CAUSAL}" in text and "aim: nothing" in text
    table = [line for line in markdown(report).splitlines() if line.startswith("|")]
    assert len(table) == 4 and len({line.count("|") for line in table}) == 1
    assert table[2].startswith(f"| {CAUSAL} | ") and table[2].endswith("| - | - | - |")


def test_a_busy_machine_is_said():
    here = replace(Machine.here(), cores=2, load=9.37)
    assert here.busy == "the machine is busy (load 9.4 on 2 cores): the figures say little"
    assert replace(here, load=0.1).busy is None and replace(here, load=None).busy is None


@pytest.fixture
def bench(tmp_path, monkeypatch):
    """Run `multihead bench` on tiny shapes in an empty folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(shapes, "SECTIONS", (TINY,))

    def bench(*arguments, peers):
        monkeypatch.setattr(registry, "PEERS", {peer.name: peer for peer in peers})
        return CliRunner().invoke(app, ["bench", "--seconds", "0", *arguments])

    return bench


def test_command_prints_ratios_and_writes_json(bench, tmp_path):
    result = bench("--json", "found.json", peers=[TorchSdpa(), Absent()])
    assert result.exit_code == 0, result.output
    assert result.stderr == ""
    row = next(line for line in result.stdout.splitlines() if line.startswith(str(CAUSAL)))
    assert row.split()[-1].endswith("x")
    assert result.stdout.splitlines()[-2:] == ["without absent: it is not installed", "found.json"]
    assert json.loads((tmp_path / "found.json").read_text())["sections"][0]["name"] == "tiny"


def test_command_ends_with_1_where_a_gate_fails(bench, tmp_path):
    result = bench("--json", "found.json", peers=[TorchSdpa(), Late()])
    assert result.exit_code == 1
    (line,) = result.stderr.splitlines()
    assert line.startswith(f"multihead: late on {CAUSAL} in tiny: its error is")
    row = next(line for line in result.stdout.splitlines() if line.startswith(str(CAUSAL)))
    assert row.split()[-1] == "WRONG" and row.split()[-2].endswith("x")
    assert json.loads((tmp_path / "found.json").read_text())["wrong"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--only", "tiny,huge"], "no section is called 'huge': there are tiny"),
        (["--peers", "torch,numpy"], "no peer is called 'numpy': there are torch"),
        (["--json", "no/such/folder.json"], "cannot write no/such/folder.json"),
    ],
)
def test_command_refuses_what_it_cannot_use(bench, arguments, words):
    result = bench(*arguments, peers=[TorchSdpa()])
    assert result.exit_code == 2 and result.stdout == ""
    (line,) = result.stderr.splitlines()
    assert words in line


def test_peaks_are_measured(monkeypatch):
    monkeypatch.undo()
    if native.core is None:
        assert Peaks.measure(0.01) == Peaks()
        pytest.skip("the compiled core is not built")
    peaks = Peaks.measure(0.01)
    assert 0 < peaks.gflops < math.inf and 0 < peaks.gbs < math.inf


def test_growth_measures_memory_beside_what_was_there(monkeypatch):
    monkeypatch.setattr(growth, "_ENOUGH_SECONDS", 1e-9)
    tokens = 1024
    eager, ours = growth.measure("eager", tokens), growth.measure("multihead", tokens)
    scores = 9 * tokens * tokens * 4
    assert scores < eager.bytes < 4 * scores
    assert ours.bytes < scores  # memory that was freed before may serve it
    assert eager.inputs == ours.inputs == (9 + 3 + 3) * tokens * 64 * 4
    with pytest.raises(ValueError, match="way: expected one of multihead, torch, eager, got 'numpy'"):
        growth.measure("numpy", tokens)


def test_growth_has_no_point_behind_a_red_gate(monkeypatch):
    monkeypatch.setitem(PEERS, "torch", Late())
    with pytest.raises(ValueError, match=r"late on .* the error is"):
        growth.measure("torch", 64)


@pytest.mark.slow
def test_growth_sweeps_in_processes_of_their_own():
    points = growth.sweep((64, 128))
    assert [(p.way, p.tokens) for p in points] == [(way, n) for n in (64, 128) for way in growth.WAYS]


def test_growth_is_drawn(tmp_path):
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    from multihead.show.plot import draw_growth

    points = [
        growth.Point(way, n, 1e-9 * n * n, 1000 * n, 8 * n) for way in ("multihead", "torch") for n in (512, 1024, 2048)
    ]
    draw_growth(points, tmp_path / "growth.svg")
    drawn = (tmp_path / "growth.svg").read_text()
    assert all(word in drawn for word in ("multihead", "torch", "grows as L * S", "grows as L + S", "512", "2K"))

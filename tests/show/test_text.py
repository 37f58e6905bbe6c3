"""The report in a terminal: right numbers, aligned axes, nothing lost without colour, harmless tokens."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from rich.cells import cell_len
from rich.console import Console

from multihead.show import text
from multihead.show.palette import marks
from multihead.show.tokens import visible


def printed(renderable, width=100, **options) -> list[str]:
    console = Console(width=width, no_color=True, color_system=None, record=False, **options)
    with console.capture() as capture:
        console.print(renderable)
    return capture.get().splitlines()


def test_model_line_says_how_the_heads_share_keys(fake_report):
    (line,) = printed(text.model_line(fake_report.model), width=200)
    assert line.startswith("tiny <model> · 6 layers · 7 query heads, 1 key/value head (MQA) · d_head 11 · causal")
    assert "134.5M" in line
    mha: Any = SimpleNamespace(**vars(fake_report.model) | {"n_kv_heads": 7, "kind": "MHA", "causal": False})
    assert "7 heads (MHA) · d_head 11 · bidirectional" in printed(text.model_line(mha), width=200)[0]


def test_grid_has_each_heads_letter_under_its_layer(fake_report):
    header, *rows = printed(text.role_grid(fake_report))
    letters = {role: mark.letter for role, mark in text.role_marks(fake_report).items()} | {"": "·"}
    for layer in fake_report.layers:
        column = header.index(str(layer))
        for head in range(7):
            expected = letters[fake_report.main_role[layer, head]] if (layer, head) != (5, 6) else " "
            assert rows[head].ljust(column + 1)[column] == expected


@pytest.mark.parametrize("width", [24, 41, 80, 131])
def test_a_deep_grid_fits_every_width_and_shows_every_head_once(width):
    layers, heads = list(range(37)), 5
    role_marks = marks(["previous"])
    named = {(layer, head): "previous" for layer in layers for head in range(heads)}
    lines = printed(text.RoleGrid(layers, heads, named, role_marks, set(named)), width=width)
    assert max(map(cell_len, lines)) <= width
    assert sum(line.count("P") for line in lines) == 37 * heads


def test_map_shades_are_at_the_right_cell_also_beside_wide_characters(fake_report):
    weights = fake_report.sentence.weights[1, 3]
    head_map = text.HeadMap("2.3", fake_report.sentence.tokens, weights.tolist())
    lines = printed(head_map)
    rows = lines[-len(weights) :]
    assert len({cell_len(row) for row in rows}) == 1
    margin = cell_len(rows[0]) - 2 * len(weights)
    for row, values in zip(rows, weights):
        shades = row[-2 * len(values) :]  # the shades are one cell a character
        assert cell_len(row[: -2 * len(values)]) == margin
        assert shades[::2] == shades[1::2]
        steps = np.searchsorted([0.05, 0.2, 0.5, 0.75], values, side="right")
        assert shades[::2] == "".join(" ░▒▓█"[step] for step in steps)
    for line in lines[1 : -len(weights)]:
        assert cell_len(line) == margin + 2 * len(weights)


@pytest.mark.parametrize("width", [18, 40, 79])
def test_map_never_overflows(fake_report, width):
    head_map = text.HeadMap("2.3 a long title", fake_report.sentence.tokens, np.eye(11).tolist())
    lines = printed(head_map, width=width)
    assert max(map(cell_len, lines)) <= width


@pytest.mark.parametrize("width", [40, 80, 120])
def test_summary_fits_and_holds_no_control_characters(fake_report, width):
    lines = printed(text.summary(fake_report), width=width)
    assert max(map(cell_len, lines)) <= width
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f\u202a-\u202e]", "\n".join(lines))
    assert "<31>" in " ".join(lines)


def test_weights_that_are_no_numbers_show():
    rows = printed(text.HeadMap("0.0", ["a", "b"], [[1.0, 0.0], [float("nan"), 1.0]]))
    assert rows[-1] == "b ! ██"


def test_clearest_heads_are_those_with_the_label_in_order_of_lift(fake_report):
    lines = printed(text.clearest_heads(fake_report), width=120)
    (line,) = [line for line in lines if "previous" in line]
    assert " ".join(line.split()) == "P previous 4 0.0 0.90 0.10 0.89 0.5 (0.90), 2.4 (0.85), 5.3 (0.80)"


def test_links_show_both_nouns(fake_report):
    lines = [line.split() for line in printed(text.link_table(fake_report))]
    assert lines[0][:7] == ["head", "it", "→", "cat", "it", "→", "mat"]
    assert lines[2][:3] == ["2.3", "0.61", "0.23"]


def test_no_colour_code_is_written_without_colour(fake_report):
    assert "\x1b" not in "".join(printed(text.summary(fake_report)))


@pytest.mark.parametrize(
    ("token", "shown"),
    [
        ("\x1b[31m", "␛[31m"),
        ("a\nb", "a⏎b"),
        ("\u202eb", "⟨202E⟩b"),
        ("\ud800", "⟨D800⟩"),
        ("  ", "␣␣"),
        (" cat", " cat"),
        ("👩‍🚀", "👩‍🚀"),
        ("👩\u200d", "👩⟨200D⟩"),
    ],
)
def test_visible(token, shown):
    assert visible(token) == shown


def test_fit_never_exceeds_its_width():
    for token in ["日本語日本語", "cat", "👩‍🚀👩‍🚀👩‍🚀👩‍🚀👩‍🚀", "e\u0301" * 20]:
        for width in range(1, 9):
            assert cell_len(text.fit(token, width)) <= width


def test_marks_are_unique_and_stable():
    roles = ["previous", *(f"offset({k})" for k in range(2, 9)), "induction", "induction (random)"]
    roles += ["x", "xx", "12", ""]
    given = marks(roles)
    assert list(given) == roles
    assert len({mark.letter for mark in given.values()}) == len(roles)
    assert given["previous"].letter == "P" and given["offset(3)"].letter == "3"

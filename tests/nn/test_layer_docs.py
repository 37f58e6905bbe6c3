"""The layer's page and its docstrings: the code is run, the table of options is that of the constructor."""

from __future__ import annotations

import doctest
import inspect
import re
from importlib import import_module
from pathlib import Path

import pytest

import multihead as mh
from tests.test_docs import blocks_by_section, run

PAGE = (Path(__file__).parents[2] / "docs" / "layer.md").read_text(encoding="utf-8")


def test_the_page_prints_what_it_says():
    names = {}
    sections = blocks_by_section(PAGE)
    assert len(sections) == 4
    for section, blocks in sections.items():
        run(blocks, names, f"layer.md: {section}")


def test_the_options_of_the_page_are_those_of_the_constructor():
    table = PAGE.partition("## Options")[2].partition("\n## ")[0]
    named = [
        name for cell in re.findall(r"^\| (`.*?) \|", table, re.MULTILINE) for name in re.findall(r"`(\w+)`", cell)
    ]
    parameters = list(inspect.signature(mh.MultiHeadAttention).parameters)
    assert named == [name for name in parameters if name not in ("d_model", "n_heads", "dtype", "device")]


def test_the_page_has_the_formula_of_the_benchmark():
    from benchmarks.layer import LONG, formula

    for shape in LONG:
        row = next(line for line in PAGE.splitlines() if line.startswith(f"| {shape} |") and "MB" in line)
        both = [round(formula(shape, execution) / 1e6) for execution in ("parallel", "sequential")]
        assert row.endswith(f"| {both[0]} and {both[1]} MB |")


@pytest.mark.parametrize("name", ["alibi", "kv_cache", "module", "record", "rotary"])
def test_examples_in_docstrings(name):
    module = import_module(f"multihead.nn.{name}")
    names = {"mh": mh, "torch": import_module("torch"), **{x: getattr(mh.nn, x) for x in mh.nn.__all__}}
    result = doctest.testmod(module, extraglobs={**names, "Statistics": mh.Statistics})
    assert result.attempted and not result.failed

"""The page on weights and the docstrings of its functions: the code is run, the table is that of the code."""

from __future__ import annotations

import doctest
import re
from importlib import import_module
from pathlib import Path

import pytest

import multihead as mh
from multihead.nn.published import ARCHITECTURES
from tests.test_docs import blocks_by_section, run

PAGE = (Path(__file__).parents[2] / "docs" / "convert.md").read_text(encoding="utf-8")


def test_the_page_prints_what_it_says():
    pytest.importorskip("transformers", reason="transformers is not installed")
    names = {}
    sections = blocks_by_section(PAGE)
    assert len(sections) == 5
    for section, blocks in sections.items():
        run(blocks, names, f"convert.md: {section}")


def test_the_table_of_models_is_that_of_the_code():
    table = PAGE.partition("## The models that are known")[2].partition("\n## ")[0]
    rows = {
        row[0]: re.findall(r"`(\w+)`", row[1]) for row in re.findall(r"^\| ([^|]+) \| ([^|]+) \|", table, re.MULTILINE)
    }
    rows = {name: classes for name, classes in rows.items() if classes}
    known = {architecture.name: list(architecture.classes) for architecture in ARCHITECTURES}
    assert rows == {"PyTorch": ["MultiheadAttention"], **known}


@pytest.mark.parametrize("name", ["convert", "design", "torch_adapter"])
def test_examples_in_docstrings(name):
    module = import_module(f"multihead.nn.{name}")
    result = doctest.testmod(module, extraglobs={"mh": mh})
    assert result.attempted and not result.failed
